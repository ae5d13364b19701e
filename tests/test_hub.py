"""Hub ids: what is downloaded, what the manifest says of it, and every way in which that fails.

The hub's library reads its environment when it is imported, so everything that needs it runs in a child process.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from unittest.mock import ANY

import pytest
from checkpoints import Spec, write_checkpoint
from hub_server import HubServer, Ills, wait_until

from fusecheck.errors import SystemFailure, UsageError
from fusecheck.hub import Source, cached, check_shard_size, resolve, shard_groups
from fusecheck.provenance import Provenance

SPEC = Spec(files=3, side_files=("tokenizer.json", "LICENSE", "1_Pooling/config.json"), left_out=("onnx.onnx",))
SMALL = Spec(num_hidden_layers=1, side_files=("tokenizer.json",))
TOKEN = "hf_" + "secret" * 5

DRIVER = """
import json, resource, sys, time
from pathlib import Path
from fusecheck.errors import FusecheckError
from fusecheck.hub import cached, resolve
from fusecheck.provenance import Provenance

time.sleep = lambda seconds: None
for line in sys.stdin:
    verb, name, revision, limit = json.loads(line)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    seen = []
    try:
        if verb == "cached":
            answer = {"folder": str(cached(Provenance(repo_id=name, commit=revision)))}
        else:
            found = resolve(name, revision=revision, on_progress=lambda done, total: seen.append([done, total]))
            answer = {"folder": str(found.folder), "repo_id": found.repo_id, "revision": found.revision}
            answer |= {"commit": found.commit, "seen": seen[-1:]}
    except FusecheckError as error:
        answer = {"code": error.exit_code, "message": str(error)}
    print(json.dumps({"code": 0, "message": "", **answer}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to: exit code and message, or a source."""

    code: int
    message: str
    folder: str = ""
    repo_id: str | None = None
    revision: str | None = None
    commit: str | None = None
    seen: Sequence[Sequence[int]] = ()


class Client:
    """A child process with its own cache that resolves names; it never waits between retries."""

    def __init__(self, home: Path, endpoint: str, **more: str) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.errors = home / "stderr"
        with self.errors.open("w") as errors:
            self._child = subprocess.Popen(
                [sys.executable, "-c", DRIVER],
                env=environment(home, endpoint, **more),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.communicate(timeout=20)
        assert self.errors.read_text() == ""  # neither bars nor warnings, and no traceback

    def __call__(self, name: str, revision: str | None = None, *, verb: str = "resolve", limit: int = -1) -> Answer:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([verb, name, revision, limit]) + "\n")
        self._child.stdin.flush()
        return Answer(**json.loads(self._child.stdout.readline()))

    def snapshot(self, repo_id: str, commit: str) -> Path:
        return self.home / "hub" / f"models--{repo_id.replace('/', '--')}" / "snapshots" / commit


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    waits = {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
    return {**own, **waits, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1,localhost", **more}


def command(*arguments: str | Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fusecheck.cli", *map(str, arguments)],
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str | Path, env: Mapping[str, str]) -> tuple[int, str]:
    child = command(*arguments, env=env)
    _, errors = child.communicate(timeout=60)
    return child.returncode, errors


def tree(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest's provenance."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    manifest = json.loads(files["fusecheck.json"])
    del manifest["provenance"]
    return {**files, "fusecheck.json": json.dumps(manifest).encode()}


def provenance(out: Path) -> dict[str, str | None]:
    found: dict[str, str | None] = json.loads((out / "fusecheck.json").read_text())["provenance"]
    return {key: value for key, value in found.items() if value is not None}


def put(folder: Path, name: str, data: bytes = b"x") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def client(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(tmp_path_factory.mktemp("cache"), hub.endpoint) as child:
        yield child


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "small", SMALL)
    return tmp_path / "small"


# what is fetched, and what the manifest says


def test_a_hub_id_gives_what_its_folder_gives(hub: HubServer, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", SPEC)
    for name in ("pytorch_model.bin", "model-q4.gguf", "tf_model.h5", "onnx/model.onnx"):
        put(tmp_path / "in", name)
    commit = hub.publish("test/whole", tmp_path / "in")
    env = environment(tmp_path / "home", hub.endpoint)
    assert run("fuse", tmp_path / "in", tmp_path / "by-folder", env=env)[0] == 0
    code, errors = run("fuse", "test/whole", tmp_path / "by-id", env=env)
    assert code == 0, errors
    assert not [word for word in ("Fetching", "%|", "Warning", "http") if word in errors]
    assert tree(tmp_path / "by-id") == tree(tmp_path / "by-folder")
    assert provenance(tmp_path / "by-id") == {"repo_id": "test/whole", "commit": commit}
    asked = {path.rpartition("/")[2] for path in hub.paths() if path.startswith("/test/whole/")}
    assert "model-00001-of-00003.safetensors" in asked
    assert not {name for name in asked if name.endswith((".bin", ".gguf", ".h5", ".onnx"))}

    # by the path of the snapshot, without the network, into another place: the same manifest, and a re-run is done
    snapshot = tmp_path / "home/hub/models--test--whole/snapshots" / commit
    (tmp_path / "else/where").mkdir(parents=True)
    offline = {**env, "HF_HUB_OFFLINE": "1"}
    assert run("fuse", snapshot, tmp_path / "else/where/out", env={**env, "HF_ENDPOINT": "http://127.0.0.1:1"})[0] == 0
    manifests = [(out / "fusecheck.json").read_bytes() for out in (tmp_path / "by-id", tmp_path / "else/where/out")]
    assert manifests[0] == manifests[1]
    requests = len(hub.seen)
    assert run("fuse", "test/whole", tmp_path / "by-id", env=offline)[0] == 0
    assert len(hub.seen) == requests


def test_a_revision_is_a_branch_or_a_commit(hub: HubServer, client: Client, small: Path) -> None:
    first = hub.publish("test/two", small)
    put(small, "LICENSE", b"another")
    second = hub.publish("test/two", small, branch="refs/pr/1")
    assert client("test/two").commit == first
    by_branch, by_commit = client("test/two", "refs/pr/1"), client("test/two", first)
    assert (by_branch.repo_id, by_branch.revision, by_branch.commit) == ("test/two", "refs/pr/1", second)
    assert (by_commit.repo_id, by_commit.revision, by_commit.commit) == ("test/two", first, first)
    assert (Path(by_branch.folder) / "LICENSE").read_bytes() == b"another"
    assert not (Path(by_commit.folder) / "LICENSE").exists()


def test_progress_counts_bytes(hub: HubServer, client: Client, small: Path, tmp_path: Path) -> None:
    hub.publish("test/progress", small)
    total = sum(path.stat().st_size for path in small.iterdir())
    assert client("test/progress").seen == [[total, total]]
    assert client("test/progress").seen == []
    with Client(tmp_path / "home", hub.endpoint, HF_HUB_DISABLE_PROGRESS_BARS="1") as silent:
        assert silent("test/progress") == Answer(0, "", ANY, "test/progress", None, ANY, [])


def test_second_copies_are_fetched_only_where_they_may_be_needed(hub: HubServer, client: Client, small: Path) -> None:
    for name in ("consolidated.safetensors", "original/model.safetensors", "1_Dense/model.safetensors"):
        put(small, name)
    hub.publish("test/copies", small)
    found = Path(client("test/copies").folder)
    assert sorted(path.parent.name for path in found.rglob("*.safetensors")) == sorted([found.name, "1_Dense"])
    put(small, "modules.json", b'[{"path": "original"}]')
    hub.publish("test/copies", small)
    assert len(list(Path(client("test/copies").folder).rglob("*.safetensors"))) == 4
    (small / "modules.json").unlink()
    put(small, "model.safetensors.index.json", b'{"weight_map": {"a": "consolidated.safetensors"}}')
    hub.publish("test/copies", small)
    assert (Path(client("test/copies").folder) / "consolidated.safetensors").exists()


def test_a_snapshot_is_found_for_verify_without_the_network(hub: HubServer, client: Client, small: Path) -> None:
    commit = hub.publish("test/cached", small)
    assert client("test/cached", commit, verb="cached").folder == "None"
    folder = client("test/cached").folder
    requests = len(hub.seen)
    assert client("test/cached", commit, verb="cached").folder == folder
    (Path(folder) / "tokenizer.json").unlink()
    assert client("test/cached", commit, verb="cached").folder == "None"
    assert len(hub.seen) == requests


@pytest.mark.parametrize(
    "recorded",
    [
        Provenance(folder="../in"),
        Provenance(repo_id="a/b"),
        Provenance(repo_id="a/b", commit="main"),
        Provenance(repo_id="../b", commit="0" * 40),
        Provenance(repo_id="/etc", commit="0" * 40),
    ],
)
def test_a_manifest_cannot_point_beside_the_cache(recorded: Provenance) -> None:
    assert cached(recorded) is None


# what the hub refuses: exit 2


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("test/typo", None, "check the spelling"),
        ("test/typo", "v1", "check the spelling"),
        ("test/there", "v9", "found v9"),
        ("test/there", "f" * 40, "found ffff"),
        ("test/gated", None, "accept its licence"),
        ("test/disabled", None, "disabled"),
        ("test/private", None, "HF_TOKEN"),
        ("test/a--b", None, "no possible name"),
        ("test/a..b", None, "no possible name"),
        ("test/there.git", None, "no possible name"),
        ("a" * 97 + "/b", None, "folder here"),
    ],
)
def test_the_hub_refuses(
    hub: HubServer, client: Client, small: Path, name: str, revision: str | None, says: str
) -> None:
    for repo in ("there", "gated", "disabled", "private"):
        hub.publish(f"test/{repo}", small)
    hub.repositories["test/gated"].gated = True
    hub.repositories["test/disabled"].disabled = True
    hub.repositories["test/private"].token = TOKEN
    answer = client(name, revision)
    assert answer.code == 2
    assert answer.message.startswith(f"{name}: ")
    assert says in answer.message
    assert "://" not in answer.message
    assert answer.message.isprintable()


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_the_hub_refuses_without_a_reason(hub: HubServer, client: Client, status: int) -> None:
    with hub.ill(Ills(hub_status=status)):
        answer = client("test/whatever")
    assert (answer.code, str(status) in answer.message, "://" in answer.message) == (2, True, False)


# what fails: exit 4


@pytest.mark.parametrize(
    ("ills", "says"),
    [
        (Ills(hub_status=500), "answered 500"),
        (Ills(hub_status=503), "answered 503"),
        (Ills(hub_status=429), "answered 429"),
        (Ills(silent=True), "Timeout"),
        (Ills(nonsense=True), "check the network"),
        (Ills(store_status=503), "the store behind 127.0.0.1"),
        (Ills(store_status=403), "the store behind 127.0.0.1"),
        (Ills(cut=1000), "127.0.0.1"),
    ],
    ids=["500", "503", "429", "silent", "nonsense", "store-503", "store-403", "cut"],
)
def test_the_network_fails(hub: HubServer, client: Client, small: Path, ills: Ills, says: str) -> None:
    name = f"test/ill{len(hub.repositories)}"
    hub.publish(name, small)
    with hub.ill(ills):
        answer = client(name)
    assert answer.code == 4
    assert answer.message.startswith(f"{name}: ")
    assert says in answer.message
    assert "://" not in answer.message
    assert "Signature" not in answer.message
    assert client(name).code == 0  # and a re-run is all it takes


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://user:{TOKEN}@127.0.0.1:{server.getsockname()[1]}"
    with Client(tmp_path / "home", endpoint) as client:
        answer = client("test/tiny")
    assert answer.code == 4
    assert "is no folder here" in answer.message
    assert TOKEN not in answer.message


@pytest.mark.parametrize("endpoint", ["nowhere", "ftp://127.0.0.1", "http://[", "http://127.0.0.1:99999"])
def test_the_endpoint_is_nonsense(tmp_path: Path, endpoint: str) -> None:
    with Client(tmp_path / "home", endpoint) as client:
        assert client("test/tiny").code == 4


def test_a_cut_body_is_continued(hub: HubServer, client: Client, small: Path) -> None:
    hub.publish("test/cut", small)
    with hub.ill(Ills(cut=2)):
        folder = Path(client("test/cut").folder)
    assert (folder / "model.safetensors").read_bytes() == (small / "model.safetensors").read_bytes()


def test_the_disk_is_full(hub: HubServer, client: Client, small: Path) -> None:
    hub.publish("test/full", small)
    answer = client("test/full", limit=1000)
    assert answer.code == 4
    assert "cannot write to the hub cache" in answer.message
    assert client("test/full").code == 0


def test_the_cache_is_no_folder(hub: HubServer, small: Path, tmp_path: Path) -> None:
    hub.publish("test/nowhere", small)
    put(tmp_path, "file")
    with Client(tmp_path / "home", hub.endpoint, HF_HUB_CACHE=str(tmp_path / "file")) as client:
        answer = client("test/nowhere")
    assert (answer.code, "cannot write to the hub cache" in answer.message) == (4, True)


def test_the_environment_is_nonsense(hub: HubServer, tmp_path: Path) -> None:
    with Client(tmp_path / "home", hub.endpoint, HF_HUB_ETAG_TIMEOUT="soon") as client:
        answer = client("test/tiny")
    assert (answer.code, "check the HF_ variables" in answer.message) == (4, True)


def test_the_command_leaves_with_these_codes(hub: HubServer, small: Path, tmp_path: Path) -> None:
    env = environment(tmp_path / "home", hub.endpoint)
    offline = {**env, "HF_HUB_OFFLINE": "1"}
    runs: tuple[tuple[int, str | Path, list[str], dict[str, str]], ...] = (
        (2, "test/typo", [], env),
        (2, small, ["--revision", "main"], env),
        (4, "test/never", [], offline),
    )
    for code, source, more, environ in runs:
        found, errors = run("fuse", source, tmp_path / "out", *more, env=environ)
        assert found == code
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


# the cache alone


def test_offline(hub: HubServer, client: Client, small: Path) -> None:
    commit = hub.publish("test/offline", small)
    put(small, "pytorch_model.bin")
    online = client("test/offline")
    requests = len(hub.seen)
    with Client(client.home, hub.endpoint, HF_HUB_OFFLINE="1") as offline:
        assert offline("test/offline") == Answer(0, "", online.folder, "test/offline", None, commit, [])
        assert offline("test/offline", commit).folder == online.folder
        for absent, revision in (("test/never", None), ("test/offline", "v2"), ("test/offline", "e" * 40)):
            answer = offline(absent, revision)
            assert answer.code == 4
            assert "is no folder here" in answer.message
            assert "HF_HUB_OFFLINE" in answer.message
    assert len(hub.seen) == requests


@pytest.mark.parametrize("missing", ["model-00002-of-00003.safetensors", "tokenizer.json"])
def test_offline_with_a_file_missing(hub: HubServer, client: Client, tmp_path: Path, missing: str) -> None:
    write_checkpoint(tmp_path / "in", SPEC)
    name = f"test/part-{missing[:5]}"
    hub.publish(name, tmp_path / "in")
    (Path(client(name).folder) / missing).unlink()
    with Client(client.home, hub.endpoint, HF_HUB_OFFLINE="1") as offline:
        answer = offline(name)
    assert answer.code == 3
    assert answer.message.startswith(f"{name}: the cached snapshot lacks {missing}")


def test_offline_without_a_listing_the_ordinary_checks_decide(hub: HubServer, client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", SPEC)
    hub.publish("test/unlisted", tmp_path / "in")
    folder = Path(client("test/unlisted").folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    shutil.rmtree(folder.parent.parent / "trees")
    env = environment(client.home, hub.endpoint, HF_HUB_OFFLINE="1")
    code, errors = run("fuse", "test/unlisted", tmp_path / "out", env=env)
    assert code == 3
    assert "model-00002-of-00003.safetensors" in errors
    assert not (tmp_path / "out").exists()


# secrets, signals


def test_the_token_goes_to_the_hub_alone(hub: HubServer, small: Path, tmp_path: Path) -> None:
    hub.publish("test/secret", small)
    hub.repositories["test/secret"].token = TOKEN
    start = len(hub.seen)
    with Client(tmp_path / "home", hub.endpoint, HF_TOKEN=TOKEN) as client:
        assert client("test/secret").code == 0
        with hub.ill(Ills(hub_status=401)):
            refused = client("test/other")
    seen = hub.seen[start:]
    asked = [request for request in seen if "/test/" in request.path]
    assert {request.host for request in asked} == {"hub"}
    assert {request.authorization for request in asked} == {f"Bearer {TOKEN}"}
    assert {request.authorization for request in seen if request.host == "store"} == {None}
    assert TOKEN not in refused.message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_download(hub: HubServer, tmp_path: Path, number: signal.Signals) -> None:
    write_checkpoint(tmp_path / "in", SMALL)
    put(tmp_path / "in", "large.json", bytes(12_000_000))
    hub.publish("test/slow", tmp_path / "in")
    store = len(hub.paths("store"))
    with hub.ill(Ills(bytes_per_second=1_000_000)):
        child = command("fuse", "test/slow", tmp_path / "out", env=environment(tmp_path / "home", hub.endpoint))
        assert wait_until(lambda: len(hub.paths("store")) > store + 1)
        child.send_signal(number)
        _, errors = child.communicate(timeout=8)  # the whole takes twelve seconds
    assert child.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "home").rglob("*.incomplete"))


# folders


@pytest.mark.parametrize(
    "source", ["./x/y", "/x/y", "../x/y", "a/b/c", "a/b/", "a", "a/.b", "~/a", "hf://a/b", "a /b", "a//b"]
)
def test_what_can_only_be_a_path(source: str) -> None:
    with pytest.raises(UsageError, match=r"SRC does not exist; name a folder, or a repository .* owner/name") as caught:
        resolve(source)
    assert caught.value.file == source


def test_a_closed_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: bool) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(SystemFailure, match="closed/in: cannot look at: Permission denied"):
        resolve("closed/in")


def test_what_is_no_folder(tmp_path: Path) -> None:
    put(tmp_path, "file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    for name, says in (("file", "no folder"), ("loop", "followed"), ("dangling", "followed"), ("x" * 300, "followed")):
        with pytest.raises(UsageError, match=says):
            resolve(str(tmp_path / name))
    for text in ("", "a\0b"):
        with pytest.raises(UsageError):
            resolve(text)


@pytest.mark.parametrize("revision", ["", "a b", "../../x", "-x", "/x", "x/", "a\nb", "a~1", "a:b"])
def test_what_is_no_revision(revision: str) -> None:
    with pytest.raises(UsageError, match="--revision is no branch"):
        resolve("test/tiny", revision=revision)


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--revision is for a hub id"):
        resolve(str(tmp_path), revision="main")


def test_an_existing_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Source(Path("owner/name"))


@pytest.mark.parametrize(
    ("path", "repo_id"),
    [
        (f"models--a--b.c/snapshots/{'a' * 40}", "a/b.c"),
        (f"models--a--b-c/snapshots/{'a' * 40}", "a/b-c"),
        (f"models--a--b/snapshots/{'a' * 40}/sub", None),
        (f"models--a--b/snapshots/{'g' * 40}", None),
        (f"models--a--b--c/snapshots/{'a' * 40}", None),
        (f"models--a/snapshots/{'a' * 40}", None),
        (f"datasets--a--b/snapshots/{'a' * 40}", None),
    ],
)
def test_a_snapshot_by_its_path(tmp_path: Path, path: str, repo_id: str | None) -> None:
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / "link").symlink_to(path)
    commit = "a" * 40 if repo_id else None
    for source in (tmp_path / path, tmp_path / "link"):
        assert resolve(str(source)) == Source(source, repo_id, None, commit)


def test_downloads_of_other_tools_are_folders(tmp_path: Path, hub: HubServer) -> None:
    """ModelScope's, and `hf download --local-dir`: their marks stay behind, and huggingface_hub is never loaded."""
    write_checkpoint(tmp_path / "in", SMALL)
    for name in (
        ".msc",
        ".mv",
        ".mdl",
        ".cache/huggingface/download/config.json.metadata",
        "._____temp/model.safetensors",
    ):
        put(tmp_path / "in", name)
    put(tmp_path / "in", "configuration.json", b'{"framework": "pytorch"}')
    env = environment(tmp_path / "home", hub.endpoint, PYTHONPROFILEIMPORTTIME="1")
    code, errors = run("fuse", tmp_path / "in", tmp_path / "out", env=env)
    assert code == 0, errors
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "configuration.json", "fusecheck.json", "model.safetensors", "tokenizer.json"}
    assert provenance(tmp_path / "out") == {"folder": "../in"}
    assert "fusecheck.hub" in errors
    assert "huggingface_hub" not in errors


# shards


def test_shards_are_those_of_the_hub() -> None:
    gigabyte = 10**9
    sizes = {name: size * gigabyte for name, size in {"a": 6, "b": 6, "c": 2, "d": 6, "e": 2, "f": 2}.items()}
    assert shard_groups(sizes, "10GB") == [["a"], ["b", "c"], ["d", "e", "f"]]
    assert shard_groups(sizes, 10 * gigabyte) == shard_groups(sizes, "10 gb") == shard_groups(sizes, "0.01TB")
    assert shard_groups(sizes, "1TB") == [list("abcdef")]
    assert shard_groups({"a": 1, "z": 9, "b": 1}, 5) == [["z"], ["a", "b"]]
    assert shard_groups({}, "5GB") == []


def test_shards_need_no_torch() -> None:
    code = "import sys; from fusecheck.hub import shard_groups; shard_groups({'a': 1}, '5GB'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


@pytest.mark.parametrize(
    "size",
    [
        *("", "5", "GB", "5GiB", "5G", "-5GB", "0GB", "0.0MB", "nanGB", "infGB", "1e3GB", "5 0GB", "\u096bGB"),
        0,
        -1,
        True,
    ],
)
def test_what_is_no_shard_size(size: str | int) -> None:
    for function in (check_shard_size, lambda size: shard_groups({"a": 1}, size)):
        with pytest.raises(UsageError, match="--max-shard-size is no size"):
            function(size)
