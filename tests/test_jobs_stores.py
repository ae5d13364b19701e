"""From store to store: the bytes of a local fuse, whatever it is read from and wherever it goes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import SIDE_FILES, Spec, hub_folder, write_checkpoint
from huggingface_hub import constants
from memory_store import folder_files
from range_hub import RangeHub, RangeIlls
from s3_server import BUCKET, S3Server

import fusecheck
from fusecheck.errors import SystemFailure, UsageError

pytestmark = pytest.mark.filterwarnings("default:::moto", "default:::botocore", "default:::flask")

Call = Callable[..., tuple[int, str, str]]
SPEC = Spec(files=5, num_hidden_layers=3, hidden_size=32, side_files=SIDE_FILES, left_out=(".gitattributes",))
REPO = "test/tiny"
SRC, OUT = f"s3://{BUCKET}/in", f"s3://{BUCKET}/deep/out"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    server.reset()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "in", SPEC)
    return tmp_path / "in"


@pytest.fixture
def bucket(s3: S3Server, source: Path) -> str:
    for name, data in folder_files(source).items():
        s3.put(f"in/{name}", data)
    return SRC


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, source: Path) -> Iterator[RangeHub]:
    with RangeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub.add(REPO, folder_files(source))
        yield hub


@pytest.fixture
def wanted(source: Path, tmp_path: Path) -> dict[str, bytes]:
    fusecheck.fuse(source, tmp_path / "reference")
    return folder_files(tmp_path / "reference")


def objects(s3: S3Server, prefix: str = "deep/out/") -> dict[str, bytes]:
    found = {key.removeprefix(prefix): data for key, data in s3.objects().items() if key.startswith(prefix)}
    return {name: data for name, data in found.items() if not name.startswith(".fusecheck/")}


def same(made: dict[str, bytes], wanted: dict[str, bytes]) -> dict[str, object]:
    """All but the manifest's provenance, which is returned, is byte for byte the same."""
    values = [json.loads(files["fusecheck.json"]) for files in (made, wanted)]
    assert {**made, "fusecheck.json": b""} == {**wanted, "fusecheck.json": b""}
    provenance: dict[str, object] = values[0].pop("provenance")
    values[1].pop("provenance")
    assert json.dumps(values[0]) == json.dumps(values[1])
    return provenance


def test_hub_to_folder_in_one_pass(hub: RangeHub, wanted: dict[str, bytes], tmp_path: Path) -> None:
    report = fusecheck.fuse(f"hf://{REPO}", tmp_path / "out")
    assert (report.verdict, report.source) == ("fused", f"hf://{REPO}")
    assert report.traffic is not None
    assert report.traffic.requests < 50
    commit = hub.repositories[REPO].refs["main"]
    assert same(folder_files(tmp_path / "out"), wanted) == {
        "repo_id": REPO,
        "revision": None,
        "commit": commit,
        "folder": None,
    }
    assert not (tmp_path / "out" / ".fusecheck").exists()
    assert fusecheck.fuse(f"hf://{REPO}@{commit}", tmp_path / "out").verdict == "already_done"
    moved = {**hub.repositories[REPO].commits[commit]}
    hub.add(REPO, {name: file.data for name, file in moved.items()} | {"LICENSE": b"another"})
    with pytest.raises(UsageError, match="not empty"):
        fusecheck.fuse(f"hf://{REPO}", tmp_path / "out")


def test_a_snapshot_and_the_hub_by_range_give_the_very_same(hub: RangeHub, tmp_path: Path) -> None:
    del hub
    fusecheck.fuse(f"hf://{REPO}", tmp_path / "by-range")
    made = folder_files(tmp_path / "by-range")
    assert json.loads(made["fusecheck.json"])["provenance"]["repo_id"] == REPO


def test_the_hub_may_stumble(hub: RangeHub, wanted: dict[str, bytes], tmp_path: Path) -> None:
    with hub.range_ill(RangeIlls(cut_every=7, uses=3)):
        fusecheck.fuse(f"hf://{REPO}", tmp_path / "out")
    same(folder_files(tmp_path / "out"), wanted)


def test_bucket_to_bucket(s3: S3Server, bucket: str, wanted: dict[str, bytes]) -> None:
    report = fusecheck.fuse(bucket, OUT)
    assert report.verdict == "fused"
    provenance = same(objects(s3), wanted)
    assert provenance["url"] == SRC
    assert set(provenance["identities"]["config.json"]) == {"etag"}  # type: ignore[index]
    assert fusecheck.fuse(bucket, OUT).verdict == "already_done"
    assert fusecheck.fuse(bucket, OUT, dry_run=True).verdict == "already_done"
    gets = [seen.path for seen in s3.asked("GET", "/in/model-")]
    assert len(gets) == 3 * 5 + 5, "each header in one request each time, the data once"
    assert s3.open_multiparts() == 0


def test_folder_to_bucket_to_folder(s3: S3Server, source: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    assert fusecheck.fuse(source, OUT, dry_run=True).verdict == "would_fuse"
    assert not s3.objects()
    assert fusecheck.fuse(source, OUT).verdict == "fused"
    assert not any(same(objects(s3), wanted).values()), "a path of this machine says nothing in a bucket"
    fusecheck.fuse(OUT, tmp_path / "copied")
    made = {name: data for name, data in folder_files(tmp_path / "copied").items() if name.startswith("model")}
    assert made == {name: data for name, data in wanted.items() if name.startswith("model")}


def test_another_download_of_the_same_commit_is_the_same_source(s3: S3Server, tmp_path: Path) -> None:
    """As a pod that starts again with an empty cache has it."""
    del s3
    for number, verdict in enumerate(("fused", "already_done")):
        snapshot = hub_folder(tmp_path / f"cache-{number}", REPO)
        write_checkpoint(snapshot, replace(SPEC, hub_cache=True))
        for path in snapshot.iterdir():
            os.utime(path, (number, number))
        assert fusecheck.fuse(snapshot, OUT).verdict == verdict


def test_parts_from_hub_to_bucket_by_processes(
    hub: RangeHub, s3: S3Server, wanted: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    text = fusecheck.make_plan(f"hf://{REPO}@main", OUT, checksums=True).text
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    hub.add(REPO, {"config.json": b"main has moved on"})
    runs = [(n, subprocess.Popen([sys.executable, "-m", "fusecheck", "run", plan, "--part", f"{n}/3"])) for n in (2, 0)]
    assert all(process.wait(timeout=120) == 0 for _, process in runs)
    with pytest.raises(SystemFailure, match="--part 1/3"):
        fusecheck.finalize(plan)
    assert fusecheck.run_part(plan, part=1, parts=3).traffic.requests > 0
    assert fusecheck.finalize(plan).verdict == "committed"
    assert fusecheck.finalize(plan).verdict == "already_done"
    made = objects(s3)
    sums = made.pop("SHA256SUMS").decode()
    assert len(sums.splitlines()) == len(made)
    manifest = json.loads(made["fusecheck.json"])
    assert manifest["options"] == {"checksums": True}
    manifest["options"] = {}
    made["fusecheck.json"] = json.dumps(manifest).encode()
    assert same(made, wanted)["revision"] == "main"
    assert "X-Amz" not in text
    assert "sign" not in text


def test_racing_finalizes_in_a_bucket(s3: S3Server, bucket: str, tmp_path: Path, wanted: dict[str, bytes]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(fusecheck.make_plan(bucket, OUT).text)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: fusecheck.run_part(plan, part=n % 2, parts=2), range(4)))
        verdicts = sorted(done.verdict for done in pool.map(lambda _: fusecheck.finalize(plan), range(4)))
    assert verdicts == ["already_done"] * 3 + ["committed"]
    same(objects(s3), wanted)


def test_an_object_that_changed_after_the_plan(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(fusecheck.make_plan(bucket, OUT).text)
    s3.put("in/config.json", s3.objects()["in/config.json"] + b"\n")
    for act in (lambda: fusecheck.run_part(plan), lambda: fusecheck.finalize(plan)):
        with pytest.raises(SystemFailure, match=r"config\.json"):
            act()
    assert not objects(s3)


def test_a_foreign_prefix_is_refused(s3: S3Server, bucket: str, call: Call) -> None:
    s3.put("deep/out/notes.txt", b"mine")
    for arguments in (("fuse", bucket, OUT), ("plan", bucket, OUT), ("fuse", bucket, OUT, "--dry-run")):
        code, _, complaint = call(*arguments)
        assert (code, "not empty" in complaint) == (2, True), complaint
    assert call("fuse", bucket, f"{OUT}2", "--force")[0] == 2
    for nested in (bucket, f"{bucket}/below", f"s3://{BUCKET}"):
        s3.seen.clear()
        assert call("fuse", bucket, nested)[0] == 2
        assert not [seen for seen in s3.seen if seen.method != "GET"], "not even a probe goes into SRC"
    assert call("fuse", bucket, f"hf://{REPO}")[0] == 2
    assert objects(s3) == {"notes.txt": b"mine"}


def test_a_store_that_cannot_refuse_to_overwrite(s3: S3Server, bucket: str, wanted: dict[str, bytes]) -> None:
    s3.faults.ignore_if_none_match = True
    with pytest.raises(SystemFailure, match="--allow-unconditional"):
        fusecheck.fuse(bucket, OUT)
    assert not objects(s3)
    fusecheck.fuse(bucket, OUT, allow_unconditional=True)
    same(objects(s3), wanted)


def test_verify_in_a_bucket(s3: S3Server, bucket: str, source: Path, call: Call, tmp_path: Path) -> None:
    fusecheck.fuse(bucket, OUT)
    report = fusecheck.verify(OUT, exact_only=True)
    assert (report.verdict, report.exact.against, report.exact.digests_checked) == ("equal", "manifest digests", True)
    assert report.notes == ()
    assert report.warnings == (
        f"the source {SRC} is read only where --source names it; OUT is checked against its manifest's digests alone",
    )
    for against in (bucket, source):
        report = fusecheck.verify(OUT, source=against, exact_only=True)
        assert (report.verdict, report.exact.against) == ("equal", "source bytes")
    fusecheck.fuse(source, tmp_path / "local")
    assert fusecheck.verify(tmp_path / "local", source=bucket).proved == ("exact", "probe", "numeric")
    key = "deep/out/model-00002-of-00005.safetensors"
    s3.put(key, s3.objects()[key][:-1] + bytes([s3.objects()[key][-1] ^ 1]))
    code, told, _ = call("verify", OUT, "--source", bucket, "--json")
    assert code == 1
    problems = {finding["problem"] for finding in json.loads(told)["exact"]["findings"]}
    assert problems == {"differs from the source", "differs from the manifest's digest"}
    assert fusecheck.verify(OUT, exact_only=True).verdict == "not_equal"
    assert call("verify", f"{OUT}/nothing-here")[0] == 2


def test_the_proof_on_a_device_reads_from_the_store(s3: S3Server, bucket: str) -> None:
    del s3
    fusecheck.fuse(bucket, OUT)
    report = fusecheck.verify(OUT, source=bucket, device="cpu", layers=(1,))
    assert (report.verdict, report.proved) == ("equal", ("exact", "probe", "numeric"))


def test_whole_source_files_against_the_hubs_sha256(hub: RangeHub, source: Path, tmp_path: Path, call: Call) -> None:
    fusecheck.fuse(source, tmp_path / "out")
    code, _, told = call("verify", tmp_path / "out", "--source", f"hf://{REPO}", "--check-source")
    assert code == 0
    assert "5 files of the source have the SHA-256" in told
    assert "is not known" in told, "small files have none"
    code, _, told = call("verify", tmp_path / "out", "--source", source, "--check-source")
    assert (code, "is not known" in told) == (0, True)
    del hub


def test_inspect_reads_headers_only(hub: RangeHub, bucket: str, call: Call) -> None:
    for place in (f"hf://{REPO}", bucket):
        code, told, _ = call("inspect", place, "--json")
        report = json.loads(told)
        assert (code, report["verdict"], report["would_fuse"], report["path"]) == (0, "sound", True, place)
    assert len(hub.ranges) == 5


def test_a_plan_says_what_it_takes(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    report = fusecheck.make_plan(bucket, OUT)
    plan.write_text(report.text)
    s3.seen.clear()
    fusecheck.run_part(plan)
    fusecheck.finalize(plan)
    objects_got = sum(len(s3.asked(method, "/in/")) for method in ("GET", "HEAD"))
    made = s3.asked("PUT", "/deep/out/") + s3.asked("POST", "/deep/out/")
    assert report.estimate.bytes_written == sum(len(data) for data in objects(s3).values()) - len(
        objects(s3)["fusecheck.json"]
    )
    assert objects_got <= report.estimate.requests <= 3 * (objects_got + len(made))


def test_a_signal_ends_a_run_and_leaves_no_upload(s3: S3Server, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "large", Spec(hidden_size=512, vocab_size=32768))
    plan = tmp_path / "plan.json"
    plan.write_text(fusecheck.make_plan(tmp_path / "large", OUT).text)
    process = subprocess.Popen([sys.executable, "-m", "fusecheck", "run", plan], stderr=subprocess.PIPE, text=True)
    for _ in range(2000):
        if s3.open_multiparts():
            break
        time.sleep(0.005)
    process.terminate()
    _, told = process.communicate(timeout=30)
    assert process.returncode in {143, 0}, told
    assert s3.open_multiparts() == 0
    assert fusecheck.run_part(plan).verdict == ("written" if process.returncode else "already_done")


@pytest.mark.parametrize("seed", range(int(os.environ.get("FUSECHECK_KILLS", "3"))))
def test_death_at_any_moment_on_the_way_to_a_bucket(
    s3: S3Server, bucket: str, tmp_path: Path, wanted: dict[str, bytes], seed: int
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(fusecheck.make_plan(bucket, OUT).text)
    choice = random.Random(seed)  # noqa: S311

    def killed(*words: object) -> None:
        """A process that dies at some moment; what it leaves is whole, or counts for nothing."""
        process = subprocess.Popen([sys.executable, "-m", "fusecheck", *map(str, words)], stderr=subprocess.DEVNULL)
        time.sleep(choice.uniform(0.3, 2.0))
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        if "fusecheck.json" in objects(s3):
            same(objects(s3), wanted)

    for part in range(2):
        killed("run", plan, "--part", f"{part}/2")
    killed("finalize", plan)
    for part in range(2):
        fusecheck.run_part(plan, part=part, parts=2)
    killed("finalize", plan)
    fusecheck.finalize(plan)
    same(objects(s3), wanted)
