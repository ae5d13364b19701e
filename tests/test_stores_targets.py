"""What holds for every target alike: a bucket, and a folder of a shared volume."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from s3_server import BUCKET, S3Server

from fusecheck.errors import FusecheckError, SystemFailure, UsageError
from fusecheck.stores import Target, open_publisher, open_source

pytestmark = pytest.mark.filterwarnings("default:::moto", "default:::botocore", "default:::flask")

MAKE = Callable[[], Target]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["bucket", "folder"])
def where(request: pytest.FixtureRequest, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    server.reset()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/out/model" if request.param == "bucket" else str(tmp_path / "out" / "model")


@pytest.fixture
def target(where: str) -> Iterator[Target]:
    target = open_publisher(where, plan_digest="plan")
    yield target
    target.close()


def blocks(*parts: bytes) -> Iterator[memoryview]:
    return (memoryview(part) for part in parts)


def test_files_come_back_as_they_were_put(where: str, target: Target) -> None:
    assert target.list() == {}
    target.check()
    assert target.list() == {}
    data = {
        "model.safetensors": b"abc" * 1000,
        "1_Pooling/config.json": b"{}",
        "empty": b"",
        ".fusecheck/000.json": b"1",
    }
    put = {name: target.put(name, blocks(text[:100], b"", text[100:]), len(text)) for name, text in data.items()}
    assert target.list() == dict(sorted(put.items()))
    assert {name: target.read(name) for name in data} == data
    assert {name: target.have(name) for name in data} == put
    assert {name: file.size for name, file in open_source(where).files().items()} == {
        n: len(d) for n, d in data.items()
    }
    again = target.put("empty", blocks(b"now", b"full"), 7)
    assert again != put["empty"]
    assert target.read("empty") == b"nowfull"
    target.delete("empty")
    target.delete("empty")
    assert target.have("empty") is None
    with pytest.raises(SystemFailure):
        target.read("empty")


@pytest.mark.parametrize("error", [SystemFailure("source gone"), KeyboardInterrupt(), RuntimeError("bug")])
def test_a_put_that_fails_leaves_what_was_there(target: Target, error: BaseException) -> None:
    def failing() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise error

    before = target.put("model.safetensors", blocks(b"old"), 3)
    with pytest.raises(type(error)):
        target.put("model.safetensors", failing(), 8)
    with pytest.raises(FusecheckError, match="another size"):
        target.put("model.safetensors", blocks(b"half"), 8)
    assert target.list() == {"model.safetensors": before}
    assert target.read("model.safetensors") == b"old"


def test_a_commit_is_once(target: Target) -> None:
    assert target.commit(b"manifest")
    assert not target.commit(b"manifest")
    with pytest.raises(UsageError, match="another committed result"):
        target.commit(b"another")
    assert target.read("fusecheck.json") == b"manifest"
    assert list(target.list()) == ["fusecheck.json"]


@pytest.mark.parametrize("same", [True, False])
def test_of_commits_at_one_time_exactly_one_wins(where: str, same: bool) -> None:  # noqa: FBT001
    barrier = Barrier(4)

    def one(number: int) -> str:
        target = open_publisher(where)
        target.check()
        barrier.wait()
        try:
            return str(target.commit(b"manifest" if same else b"manifest %d" % number))
        except UsageError:
            return "refused"
        finally:
            target.close()

    with ThreadPoolExecutor(4) as pool:
        found = sorted(pool.map(one, range(4)))
    assert found == sorted(["True", *["False" if same else "refused"] * 3])


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/../b", ".", "", "a\nb", "a/"])
def test_names_stay_below_the_target(target: Target, name: str) -> None:
    for verb in (target.have, target.read, target.delete, lambda name: target.put(name, blocks(), 0)):
        with pytest.raises(FusecheckError, match="is no name"):
            verb(name)


def test_a_folder_s_foreign_entries_are_listed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    (out / "link").symlink_to("nowhere")
    (out / "sub" / "loop").symlink_to(out)
    os.mkfifo(out / "fifo")
    assert list(open_publisher(str(out)).list()) == ["fifo", "link", "notes.txt", "sub/loop"]
    with pytest.raises(UsageError, match="no folder"):
        open_publisher(str(out / "notes.txt"))
    assert list(open_source(str(out)).files()) == ["notes.txt"]


def test_what_dead_runs_left_goes_and_what_lives_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    target = open_publisher(str(out), plan_digest="plan")

    def look() -> Iterator[memoryview]:
        yield memoryview(b"1")
        found.append(sorted((out / ".fusecheck").iterdir()))

    found: list[list[Path]] = []
    target.put("a", look(), 1)
    (own,) = found.pop()
    dead, live = (own.with_name(own.name[:-1] + digit) for digit in "xy")
    dead.write_bytes(b"half")
    with live.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        target.put("a", look(), 1)
        assert dead not in found[0]
        assert live in found[0]
        assert list(target.list()) == ["a"]
    target.commit(b"{}")
    assert list((out / ".fusecheck").iterdir()) == []


def test_a_file_system_without_hard_links_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(_: Path, __: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    out = str(tmp_path / "out")
    for verb in (open_publisher(out).check, lambda: open_publisher(out).commit(b"{}")):
        with pytest.raises(SystemFailure, match=r"no hard links.*--allow-unconditional"):
            verb()
    assert open_publisher(out).list() == {}
    allowed = open_publisher(out, allow_unconditional=True)
    allowed.check()
    assert [allowed.commit(b"{}"), allowed.commit(b"{}")] == [True, False]
    with pytest.raises(UsageError, match="another committed result"):
        allowed.commit(b"[]")
    assert list(allowed.list()) == ["fusecheck.json"]
    assert list((tmp_path / "out" / ".fusecheck").iterdir()) == []


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_disk_that_fails_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = open_publisher(str(tmp_path / "out"))
    target.put("a", blocks(b"old"), 3)
    owner, name = (Path, call) if call == "replace" else (os, call)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(SystemFailure, match="/out/a: cannot write: No space left"):
        target.put("a", blocks(b"new"), 3)
    monkeypatch.undo()
    assert target.read("a") == b"old"
    assert list((tmp_path / "out").rglob("tmp-*")) == []


def test_a_disk_may_take_less_than_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data)[:3]))
    target = open_publisher(str(tmp_path / "out"))
    target.put("a", blocks(b"0123456789", b"abcd"), 14)
    target.commit(b'{"long": "enough"}')
    assert target.read("a") == b"0123456789abcd"
    assert target.read("fusecheck.json") == b'{"long": "enough"}'


def test_a_folder_that_changes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0123456789")
    source = open_source(str(tmp_path))
    frozen = source.files()
    buffer = memoryview(bytearray(4))
    source.read_into("model.safetensors", 3, buffer)
    assert bytes(buffer) == b"3456"
    (tmp_path / "model.safetensors").write_bytes(b"9876543210")
    for reader in (source, lambda: open_source(str(tmp_path), frozen=frozen)):
        with pytest.raises(SystemFailure, match="changed"):
            (reader() if callable(reader) else reader).read_into("model.safetensors", 0, buffer)
    source.close()
    with pytest.raises(UsageError, match="no folder"):
        open_source(str(tmp_path / "none"))


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        target = open_publisher(str(tmp_path / "out"))
        target.put("a/b", blocks(b"1"), 1)
        target.commit(b"{}")
    finally:
        os.umask(before)
    for name, mode in (("a", 0o750), ("a/b", 0o640), ("fusecheck.json", 0o640)):
        assert (tmp_path / "out" / name).stat().st_mode & 0o777 == mode
