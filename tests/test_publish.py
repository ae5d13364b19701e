"""The publish protocol: OUT is absent or complete, and nothing else is left."""
# ruff: noqa: PT012  # a run is a `with` block, and what it raises comes out of all of it

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusecheck import durable, publish, signals, temporary
from fusecheck.durable import replace_file, write_file
from fusecheck.errors import FusecheckError, Interrupted, SystemFailure, UsageError
from fusecheck.publish import TargetTaken, staging_folder
from fusecheck.signals import signals_as_exceptions
from fusecheck.target import Target, TargetOccupied, check_target, free_space, place_of, require_space

if TYPE_CHECKING:
    from types import FrameType

    from _typeshed import TraceFunction

ORPHAN = ".fusecheck-0123456789abcdef-89abcdef"
ROOT = os.geteuid() == 0
HOME = Path(publish.__file__).parents[1]

CHILD = """
import os, signal, sys, time
from pathlib import Path
from fusecheck.errors import FusecheckError, Interrupted
from fusecheck.durable import write_file
from fusecheck.publish import staging_folder
from fusecheck.signals import signals_as_exceptions
from fusecheck.target import check_target

def work(out, mode):
    with signals_as_exceptions(), staging_folder(check_target(out, None, force=mode == "force")) as staging:
        print(staging.path, flush=True)
        if mode == "sleep":
            time.sleep(60)
        if mode == "race":
            sys.stdin.readline()
        for name in ("a", "b/c"):
            (staging.path / name).parent.mkdir(exist_ok=True)
            write_file(staging.path / name, name.encode() * 10000)
        staging.commit()

try:
    work(Path(sys.argv[1]), sys.argv[2])
except (FusecheckError, Interrupted) as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    return folder


@pytest.fixture
def top(tmp_path: Path) -> Path:
    folder = tmp_path / "top"
    folder.mkdir()
    return folder


@pytest.fixture
def children() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts runs in processes of their own; those that still run at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(out: Path, mode: str = "plain", *, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [*before, sys.executable, "-c", CHILD, str(out), mode]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=HOME)
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


def fill(folder: Path) -> None:
    write_file(folder / "model.safetensors", b"weights")
    (folder / "1_Pooling" / "deep").mkdir(parents=True)
    write_file(folder / "1_Pooling" / "deep" / "config.json", b"{}")


def run(out: Path, *, force: bool = False) -> list[str]:
    with staging_folder(check_target(out, None, force=force)) as staging:
        fill(staging.path)
        staging.commit()
    return staging.warnings


def assert_complete(out: Path) -> None:
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == [
        "1_Pooling/deep/config.json",
        "model.safetensors",
    ]
    assert (out / "model.safetensors").read_bytes() == b"weights"


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))  # noqa: PTH208  # plain names


def wait_for_folder(child: subprocess.Popen[str]) -> Path:
    assert child.stdout is not None
    return Path(child.stdout.readline().strip())


def failing(
    real: Callable[..., object], code: int, when: Callable[..., bool] = lambda *_: True
) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        if when(*args):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return call


def is_folder(handle: int) -> bool:
    return stat.S_ISDIR(os.fstat(handle).st_mode)


# --- check_target ---


def test_a_fresh_out_is_judged_and_nothing_is_created(top: Path, source: Path) -> None:
    target = check_target(top / "a" / "b" / "out", source, force=False)
    assert target == Target(
        path=Path(os.path.realpath(top)) / "a" / "b" / "out",
        shown=str(top / "a" / "b" / "out"),
        replaces=False,
        missing=(Path(os.path.realpath(top)) / "a", Path(os.path.realpath(top)) / "a" / "b"),
    )
    assert names(top) == []


@pytest.mark.parametrize("spelling", ["out/", "x/../out", "./out", "../top/out", "out/."])
def test_spellings_of_one_out(top: Path, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    monkeypatch.chdir(top)
    assert check_target(Path(spelling), None, force=False).path == Path(os.path.realpath(top)) / "out"
    (top / "out").mkdir()
    assert check_target(Path(spelling), None, force=False).path == Path(os.path.realpath(top)) / "out"


def test_dots_follow_links_as_the_kernel_does(top: Path) -> None:
    (top / "far" / "sub").mkdir(parents=True)
    (top / "link").symlink_to("far/sub")
    assert check_target(top / "link" / ".." / "out", None, force=False).path == Path(os.path.realpath(top)) / "far/out"


def test_a_parent_may_be_a_link(top: Path) -> None:
    (top / "far").mkdir()
    (top / "link").symlink_to("far")
    run(top / "link" / "out")
    assert_complete(top / "far" / "out")


@pytest.mark.parametrize("spelling", ["", ".", "./"])
def test_the_empty_path_is_refused(top: Path, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    monkeypatch.chdir(top)
    with pytest.raises(UsageError, match="empty or the current folder"):
        check_target(Path(spelling), None, force=False)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("to", ["folder", "file", "nowhere", "link"])
def test_out_is_never_a_link(top: Path, to: str, *, force: bool) -> None:
    (top / "folder").mkdir()
    (top / "file").touch()
    (top / "link").symlink_to(to)
    for spelling in ("link", "link/"):
        with pytest.raises(UsageError, match="symbolic link"):
            check_target(Path(f"{top}/{spelling}"), None, force=force)


@pytest.mark.parametrize("force", [False, True])
def test_out_is_never_a_file(top: Path, *, force: bool) -> None:
    (top / "file").touch()
    os.mkfifo(top / "fifo")
    for name in ("file", "fifo"):
        with pytest.raises(UsageError, match="not a folder"):
            check_target(top / name, None, force=force)


def test_a_parent_that_is_no_folder(top: Path) -> None:
    (top / "file").touch()
    (top / "loop").symlink_to("loop")
    (top / "gone").symlink_to("nowhere")
    for out in ("file/out", "file/a/out", "loop/out", "gone/out", "gone/a/out"):
        with pytest.raises(UsageError) as caught:
            check_target(top / out, None, force=False)
        assert caught.value.exit_code == 2
    assert names(top) == ["file", "gone", "loop"]


def test_an_occupied_folder_needs_force(top: Path) -> None:
    (top / "out").mkdir()
    assert not check_target(top / "out", None, force=True).replaces
    (top / "out" / ".hidden").touch()
    with pytest.raises(TargetOccupied, match="--force to replace it") as caught:
        check_target(top / "out", None, force=False)
    assert caught.value.exit_code == 2
    assert check_target(top / "out", None, force=True).replaces


@pytest.mark.parametrize("out", ["src", "src/", "src/out", "src/a/b", "link", "link/out", "top/../src/x", "Src"])
def test_out_is_not_inside_the_source(top: Path, source: Path, out: str) -> None:
    (top.parent / "link").symlink_to(source if out == "link/out" else "src")
    if out == "Src":
        (top.parent / "Src").symlink_to("src/a")
    with pytest.raises(UsageError):
        check_target(Path(f"{top.parent}/{out}"), source, force=True)


def test_the_source_may_be_named_by_a_link(top: Path, source: Path) -> None:
    (top / "link").symlink_to(source)
    with pytest.raises(UsageError, match="inside it"):
        check_target(source / "out", top / "link", force=False)
    check_target(top / "out", top / "link", force=False)
    with pytest.raises(UsageError, match="lies inside OUT"):
        check_target(source.parent, source, force=True)


def test_what_the_source_links_to_is_not_replaced(top: Path, source: Path) -> None:
    (top / "blobs").mkdir()
    (top / "blobs" / "1").touch()
    (source / "model.safetensors").symlink_to(top / "blobs" / "1")
    with pytest.raises(UsageError, match="links to"):
        check_target(top / "blobs", source, force=True)
    check_target(top / "snapshot", source, force=True)


def test_the_current_folder_is_not_replaced(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (top / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(top / "a" / "b")
    for out in (top / "a", top / "a" / "b", Path("../b")):
        with pytest.raises(UsageError, match="current folder"):
            check_target(out, None, force=True)


def test_a_name_of_250_characters_works_and_300_is_refused(top: Path) -> None:
    run(top / ("n" * 250))
    assert_complete(top / ("n" * 250))
    run(top / ("é" * 125))
    for out in (top / ("n" * 300), top / "a" / ("n" * 300), top / ("n" * 300) / "a", top / ("a/" * 2100), Path("a\0b")):
        with pytest.raises(UsageError, match="name"):
            check_target(out, None, force=False)
    with pytest.raises(UsageError):
        check_target(top / "\ud800", None, force=False)
    assert len(names(top)) == 2


def test_a_mount_point_is_refused(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (top / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "out")
    with pytest.raises(UsageError, match=r"use a folder below it, such as .*/out/model"):
        check_target(top / "out", None, force=False)
    check_target(top / "out" / "model", None, force=False)


@contextmanager
def mounted(*arguments: str) -> Iterator[None]:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", arguments[-1]], check=True)


@pytest.mark.skipif(not ROOT, reason="only root can mount")
def test_real_mounts(top: Path, source: Path) -> None:
    for name in ("out dir", "back", "alias", "held"):
        (top / name).mkdir()
    (source / "sub").mkdir()
    (top / "held" / "sub").mkdir()
    with mounted("-t", "tmpfs", "-o", "size=1m", "none", str(top / "out dir")):
        with pytest.raises(UsageError, match="mount point"):
            check_target(top / "out dir", source, force=True)
        run(top / "out dir" / "model")
        target = check_target(top / "out dir" / "a" / "b", source, force=True)
        with staging_folder(target), pytest.raises(SystemFailure, match=r"found .*, wanted 2\.0 MB"):
            require_space(target.path, 2_000_000, target.shown)
        subprocess.run(["mount", "-o", "remount,ro", str(top / "out dir")], check=True)
        with pytest.raises(SystemFailure, match="read-only"):
            check_target(top / "out dir" / "other", source, force=True)
    with mounted("--bind", str(top / "held"), str(top / "out dir")), pytest.raises(UsageError, match="mount point"):
        check_target(top / "out dir", source, force=True)
    with mounted("--bind", str(source), str(top / "back")), pytest.raises(UsageError, match="inside it"):
        check_target(top / "back" / "out", source, force=True)
    with mounted("--bind", str(source / "sub"), str(top / "back")), pytest.raises(UsageError, match="inside it"):
        check_target(top / "back" / "out", source, force=True)
    with mounted("--bind", str(top / "held" / "sub"), str(top / "alias")):
        (top / "alias" / "model").mkdir()
        with pytest.raises(UsageError, match="inside OUT"):
            check_target(top / "held", top / "alias" / "model", force=True)


@pytest.mark.skipif(not ROOT, reason="only root can mount")
def test_a_full_disk_leaves_nothing(top: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=1m", "none", str(top)):
        with (
            pytest.raises(SystemFailure, match="No space left on device; free some"),
            staging_folder(check_target(top / "a" / "out", None, force=False)) as staging,
        ):
            write_file(staging.path / "big", bytes(2_000_000))
        assert names(top) == []


def test_a_parent_that_may_not_be_written(top: Path, children: Callable[..., subprocess.Popen[str]]) -> None:
    closed = top / "closed"
    closed.mkdir(mode=0o555)
    (top / "secret").mkdir(mode=0o000)
    powerless: tuple[str, ...] = ()
    if ROOT:
        if not shutil.which("setpriv"):
            pytest.skip("needs setpriv to give up root's powers")
        powerless = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner")
    for out in (closed / "out", closed / "a" / "out", top / "secret" / "out", top / "secret" / "a" / "out"):
        child = children(out, before=powerless)
        _, said = child.communicate(timeout=20)
        assert child.returncode == 4, said
        assert str(out) in said
    (top / "secret").chmod(0o700)
    assert names(closed) == []


@pytest.mark.skipif(not ROOT, reason="only root can become another user")
def test_sticky_parents_let_only_owners_rename(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top.chmod(0o1777)
    (top / "out").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SystemFailure, match="only owners"):
        check_target(top / "out", None, force=False)
    check_target(top / "other", None, force=False)


# --- staging and commit ---


def test_a_run_leaves_out_and_nothing_else(top: Path) -> None:
    assert run(top / "a" / "b" / "out") == []
    assert_complete(top / "a" / "b" / "out")
    assert names(top) == ["a"]
    assert names(top / "a" / "b") == ["out"]


def test_an_empty_out_is_replaced(top: Path) -> None:
    (top / "out").mkdir()
    run(top / "out")
    assert_complete(top / "out")
    assert names(top) == ["out"]


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022, 0o002])
def test_modes_follow_the_umask(top: Path, umask: int) -> None:
    former = os.umask(umask)
    try:
        run(top / "a" / "out")
        replace_file(top / "report", b"")
    finally:
        os.umask(former)
    out = top / "a" / "out"
    for folder in (out.parent, out, out / "1_Pooling"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask
    for file in (top / "report", out / "model.safetensors"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def test_the_temp_name_says_nothing_and_matches_the_pattern(top: Path) -> None:
    with staging_folder(check_target(top / "out", None, force=False)) as staging:
        assert temporary.TEMP_NAME.fullmatch(staging.path.name)
        assert staging.path.parent == Path(os.path.realpath(top))
    assert names(top) == []


def test_an_error_removes_the_temp_folder_and_the_parents(top: Path) -> None:
    with pytest.raises(ZeroDivisionError), staging_folder(check_target(top / "a/b/out", None, force=False)) as staging:
        fill(staging.path)
        raise ZeroDivisionError
    assert names(top) == []


def test_parents_that_others_use_stay(top: Path) -> None:
    with pytest.raises(ZeroDivisionError), staging_folder(check_target(top / "a/b/out", None, force=False)):
        (top / "a" / "other").touch()
        raise ZeroDivisionError
    assert names(top) == ["a"]
    assert names(top / "a") == ["other"]


def test_leaving_without_commit_publishes_nothing(top: Path) -> None:
    with staging_folder(check_target(top / "a" / "out", None, force=False)) as staging:
        fill(staging.path)
    assert names(top) == []


def test_cleaning_up_never_hides_the_error(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError), staging_folder(check_target(top / "out", None, force=False)) as staging:
        fill(staging.path)
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
        raise ZeroDivisionError
    assert staging.warnings == [f"{staging.path}: this temporary folder cannot be removed"]


def test_another_run_was_faster(top: Path) -> None:
    with (
        pytest.raises(TargetTaken) as caught,
        staging_folder(check_target(top / "a/out", None, force=False)) as staging,
    ):
        write_file(staging.path / "mine", b"")
        run(top / "a" / "out")
        staging.commit()
    assert caught.value.exit_code == 4
    assert_complete(top / "a" / "out")
    assert names(top / "a") == ["out"]


@pytest.mark.parametrize("made", ["file", "link"])
def test_what_appears_at_out_is_kept(top: Path, made: str) -> None:
    with pytest.raises(TargetTaken), staging_folder(check_target(top / "out", None, force=False)) as staging:
        (top / "out").touch() if made == "file" else (top / "out").symlink_to("nowhere")
        staging.commit()
    assert names(top) == ["out"]


def test_the_order_on_the_way_to_the_disk(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(handle: int) -> None:
        seen.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink()}")
        real_fsync(handle)

    def rename(one: Path, other: Path) -> None:
        seen.append(f"rename {one} {other}")
        real_rename(one, other)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with staging_folder(check_target(top / "a" / "b" / "out", None, force=False)) as staging:
        fill(staging.path)
        staging.commit()
    top, tmp = Path(os.path.realpath(top)), staging.path
    assert seen == [
        f"fsync {tmp}/model.safetensors",
        f"fsync {tmp}/1_Pooling/deep/config.json",
        f"fsync {tmp}/1_Pooling/deep",
        f"fsync {tmp}/1_Pooling",
        f"fsync {tmp}",
        f"rename {tmp} {top}/a/b/out",
        f"fsync {top}/a/b",
        f"fsync {top}",
        f"fsync {top}/a",
    ]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failing_fsync_of_a_folder_is_fatal(top: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync, code, is_folder))
        with pytest.raises(SystemFailure, match=os.strerror(code)) as caught:
            run(top / "a" / "out")
    assert str(top / "a" / "out") in str(caught.value)
    assert names(top) == []
    run(top / "a" / "out")


@pytest.mark.parametrize("force", [False, True])
def test_an_out_that_may_not_be_durable_stays_but_fails(
    top: Path, monkeypatch: pytest.MonkeyPatch, *, force: bool
) -> None:
    out = top / "out"
    if force:
        out.mkdir()
        (out / "old").touch()
    parent = top.stat()
    when = lambda handle: os.path.samestat(os.fstat(handle), parent)  # noqa: E731
    monkeypatch.setattr(os, "fsync", failing(os.fsync, errno.EIO, when))
    with pytest.raises(SystemFailure, match=r"out: complete, but .* power cut: cannot fsync .*Input/output error"):
        run(out, force=force)
    assert_complete(out)
    assert names(top) == ["out"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_fsync_of_folders(top: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "fsync", failing(os.fsync, code, is_folder))
    assert run(top / "a" / "out") == [f"{top}/a/out: this file system cannot fsync a folder ({os.strerror(code)})"]
    assert_complete(top / "a" / "out")


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EBUSY, errno.EIO, errno.ENOSPC])
def test_a_failing_rename_names_out(top: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "rename", failing(os.rename, code))
    with pytest.raises(SystemFailure, match=os.strerror(code)) as caught:
        run(top / "out")
    assert caught.value.file == str(top / "out")
    assert not isinstance(caught.value, TargetTaken)
    assert names(top) == []


def test_no_folder_can_be_made(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def when(path: Path, *_: object) -> bool:
        return ".fusecheck" in str(path)

    monkeypatch.setattr(os, "mkdir", failing(os.mkdir, errno.ENOSPC, when))
    with pytest.raises(SystemFailure, match="No space left"):
        run(top / "a" / "b" / "out")
    assert names(top) == []


def test_no_handle_is_left_for_the_temp_folder(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", failing(os.open, errno.EMFILE, lambda path, *_: ".fusecheck" in str(path)))
    with pytest.raises(SystemFailure, match="Too many open files"):
        run(top / "a" / "out")
    monkeypatch.undo()
    assert names(top) == []


def test_no_handle_leaks(top: Path) -> None:
    (top / ORPHAN).mkdir()
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    run(top / "out")
    run(top / "out", force=True)
    replace_file(top / "report", b"")
    with pytest.raises(ZeroDivisionError), staging_folder(check_target(top / "other", None, force=False)):
        raise ZeroDivisionError
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


# --- force ---


def test_force_exchanges_and_removes_the_old_content(top: Path) -> None:
    old = top / "out"
    (old / "sub").mkdir(parents=True)
    (old / "sub" / "file").write_bytes(b"old")
    (old / "sub" / "link").symlink_to("..")
    (old / "sub").chmod(0o500)
    before = old.stat().st_ino
    assert run(old, force=True) == []
    assert_complete(old)
    assert old.stat().st_ino != before
    assert names(top) == ["out"]


def test_force_on_an_error_keeps_the_old_out(top: Path) -> None:
    (top / "out").mkdir()
    (top / "out" / "file").touch()
    with pytest.raises(ZeroDivisionError), staging_folder(check_target(top / "out", None, force=True)) as staging:
        fill(staging.path)
        assert "one" not in names(staging.path)
        raise ZeroDivisionError
    assert names(top) == ["out"]
    assert names(top / "out") == ["file"]


def test_force_when_out_has_gone_meanwhile(top: Path) -> None:
    (top / "out").mkdir()
    (top / "out" / "file").touch()
    with staging_folder(check_target(top / "out", None, force=True)) as staging:
        fill(staging.path)
        shutil.rmtree(top / "out")
        staging.commit()
    assert_complete(top / "out")


def test_no_exchange_is_found_out_before_the_copy(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (top / "out").mkdir()
    (top / "out" / "file").touch()
    monkeypatch.setattr(publish, "exchange", failing(durable.exchange, errno.EINVAL))
    with (
        pytest.raises(SystemFailure, match="cannot exchange"),
        staging_folder(check_target(top / "out", None, force=True)),
    ):
        pytest.fail("nothing may be copied")
    assert names(top) == ["out"]
    assert names(top / "out") == ["file"]


def test_exchange_errors_carry_their_number(top: Path) -> None:
    with pytest.raises(FileNotFoundError):
        durable.exchange(top / "absent", top)


# --- orphans ---


def test_orphans_of_any_out_are_swept_and_nothing_else(top: Path) -> None:
    (top / ORPHAN / "sub").mkdir(parents=True)
    (top / ORPHAN / "sub" / "file").touch()
    (top / ORPHAN / "sub").chmod(0o000)
    kept = [f"{ORPHAN}0", ORPHAN.upper(), ORPHAN[1:], ".fusecheck-x", f"{ORPHAN}\n"]
    for name in kept:
        (top / name).mkdir()
    (top / ORPHAN.replace("0", "1")).touch()
    (top / ORPHAN.replace("0", "2")).symlink_to(top / kept[0])
    assert run(top / "out") == []
    kept += [ORPHAN.replace("0", "1"), ORPHAN.replace("0", "2"), "out"]
    assert names(top) == sorted(kept)


def test_an_orphan_that_stays_is_a_warning(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (top / ORPHAN).mkdir()
    monkeypatch.setattr(publish, "remove_tree", lambda path: path.name != ORPHAN)
    assert run(top / "out") == [
        f"{Path(os.path.realpath(top)) / ORPHAN}: left by a run that died, and cannot be removed"
    ]


def test_a_live_run_is_not_swept_and_a_killed_one_is(top: Path, children: Callable[..., subprocess.Popen[str]]) -> None:
    child = children(top / "slow", "sleep")
    folder = wait_for_folder(child)
    run(top / "out")
    assert folder.is_dir()
    child.kill()
    child.wait()
    assert folder.is_dir()
    run(top / "other")
    assert names(top) == ["other", "out"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF])
def test_without_locks_nothing_is_swept(top: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    (top / ORPHAN).mkdir()
    monkeypatch.setattr(fcntl, "flock", failing(fcntl.flock, code))
    (warning,) = run(top / "out")
    assert "no locks here" in warning
    assert names(top) == [ORPHAN, "out"]
    assert_complete(top / "out")


def test_on_shared_file_systems_nothing_is_swept(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (top / ORPHAN).mkdir()
    place = place_of(top)
    assert place
    monkeypatch.setattr(publish, "place_of", lambda _: place._replace(kind="fuse.s3"))
    (warning,) = run(top / "out")
    assert "another machine" in warning
    assert names(top) == [ORPHAN, "out"]
    (top / ORPHAN).rmdir()
    assert run(top / "other") == []


@pytest.mark.parametrize("moment", ["locked", "removed", "locked and removed"])
def test_a_sweep_that_meets_a_folder_just_made(top: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Another run's sweep strikes between mkdir and flock; the folder is given up and a new one made."""
    real = fcntl.flock
    struck: list[Path] = []
    held: list[int] = []

    def flock(handle: int, how: int) -> None:
        if not struck:
            path = Path(f"/proc/self/fd/{handle}").readlink()
            struck.append(path)
            if "locked" in moment:
                held.append(os.open(path, os.O_RDONLY))
                real(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            if "removed" in moment:
                path.rmdir()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with staging_folder(check_target(top / "out", None, force=False)) as staging:
        assert staging.path != struck[0]
        fill(staging.path)
        staging.commit()
    for handle in held:
        os.close(handle)
    assert_complete(top / "out")


def test_four_runs_to_one_out(top: Path, children: Callable[..., subprocess.Popen[str]]) -> None:
    runs = [children(top / "a" / "out", "race") for _ in range(4)]
    for child in runs:
        wait_for_folder(child)
    for child in runs:
        assert child.stdin
        child.stdin.write("\n")
        child.stdin.flush()
    for child in runs:
        child.communicate(timeout=20)
    assert sorted(child.returncode for child in runs) == [0, 4, 4, 4]
    assert names(top / "a") == ["out"]
    assert names(top / "a" / "out") == ["a", "b"]


def test_many_threads_sweep_and_create_at_once(top: Path) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                (top / f".fusecheck-0123456789abcdef-{number:04x}{turn:04x}").mkdir()
                run(top / f"out{number}-{turn}")
        except BaseException as error:  # noqa: BLE001  # told by the main thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    run(top / "last")
    assert names(top) == sorted(["last", *(f"out{number}-{turn}" for number in range(4) for turn in range(10))])


# --- signals ---


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_becomes_an_exception_once(top: Path, signum: int) -> None:
    went_on: list[str] = []
    former = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with (
        pytest.raises(Interrupted) as caught,
        signals_as_exceptions(),
        staging_folder(check_target(top / "a" / "out", None, force=False)) as staging,
    ):
        fill(staging.path)
        try:
            signal.raise_signal(signum)
        finally:
            signal.raise_signal(signum)
            signal.raise_signal(signal.SIGTERM)
            went_on.append("through both")
    assert went_on
    assert caught.value.exit_code == 128 + signum
    assert names(top) == []
    assert former == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_a_finaliser_comes_again(signum: int) -> None:
    """Python drops what a finaliser raises, and with it the exception of a handler that runs in one."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signum)

    former = sys.unraisablehook
    with pytest.raises(Interrupted) as caught, signals_as_exceptions():
        Dying()
        for _ in range(1000):
            time.sleep(0.01)
    assert caught.value.exit_code == 128 + signum
    assert sys.unraisablehook is former


def test_an_ignored_hangup_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_exceptions():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_outside_the_main_thread_signals_are_left_alone(top: Path) -> None:
    done: list[object] = []

    def work() -> None:
        with signals_as_exceptions():
            done.append(signal.getsignal(signal.SIGTERM))
            run(top / "out")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGTERM)]
    assert_complete(top / "out")


def test_a_signal_after_the_rename_keeps_out(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def rename(one: Path, other: Path) -> None:
        real(one, other)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(Interrupted), signals_as_exceptions():
        run(top / "a" / "out")
    assert_complete(top / "a" / "out")
    assert names(top / "a") == ["out"]


def test_a_user_who_presses_ctrl_c_twice(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.rmtree

    def rmtree(path: Path, *, ignore_errors: bool) -> None:
        signal.raise_signal(signal.SIGINT)
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(KeyboardInterrupt), staging_folder(check_target(top / "a" / "out", None, force=False)):
        raise KeyboardInterrupt
    assert names(top) == []


@pytest.mark.parametrize("force", [False, True])
def test_a_signal_at_every_line(top: Path, monkeypatch: pytest.MonkeyPatch, *, force: bool) -> None:
    """SIGTERM at the first, second, third ... line of the module that a run executes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # some 800 runs, and nobody cuts the power
    out = top / "a" / "out"
    stopped = 0
    for number in range(0, 1000, 2 if force else 1):
        if force:
            out.mkdir(parents=True)
            (out / "old").touch()
        finished = _run_with_a_signal(out, number, force=force)
        stopped += not finished
        assert names(top / "a" if (top / "a").exists() else top) == (["out"] if out.exists() else []), number
        if out.exists() and names(out) != ["old"]:
            assert_complete(out)
        else:
            assert not finished, number
        shutil.rmtree(top / "a", ignore_errors=True)
        if finished and number > stopped + 20:
            break
    assert stopped > 50


def _run_with_a_signal(out: Path, number: int, *, force: bool) -> bool:
    """Whether the run went through. Python looks for signals where a frame starts, hence not in the block's own one."""
    count = -1
    ours = {module.__file__ for module in (publish, durable, temporary, signals)}
    skipped = {"__exit__", "place_of", "<lambda>"}  # the latter two only read, and are long

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal count
        if frame.f_code.co_filename not in ours or frame.f_code.co_name in skipped:
            return None
        if event == "line":
            count += 1
            if count == number:
                signal.raise_signal(signal.SIGTERM)
        return trace

    target = check_target(out, None, force=force)
    former = sys.gettrace()
    try:
        with signals_as_exceptions():
            sys.settrace(trace)
            try:
                with staging_folder(target) as staging:
                    fill(staging.path)
                    staging.commit()
            finally:
                sys.settrace(former)
    except Interrupted:
        return False
    return True


def test_sigterm_at_random_moments(top: Path, children: Callable[..., subprocess.Popen[str]]) -> None:
    chance = random.Random(1)  # noqa: S311  # no secret
    for number in range(12):
        out = top / f"{number}" / "out"
        child = children(out)
        if number % 2:
            wait_for_folder(child)
            time.sleep(chance.random() * 0.004)
        else:
            time.sleep(chance.random() * 0.15)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=20)
        assert child.returncode in {0, 143, -signal.SIGTERM}  # the last: before Python came to our code
        assert names(top) == ([f"{number}"] if out.exists() else [])
        if out.exists():
            assert names(out) == ["a", "b"]
            assert names(out.parent) == ["out"]
        shutil.rmtree(out.parent, ignore_errors=True)


# --- files and space ---


def test_write_file_survives_short_writes(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:3]))
    write_file(top / "file", b"0123456789")
    assert (top / "file").read_bytes() == b"0123456789"


@pytest.mark.parametrize("call", ["write", "fsync", "open", "close"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_write_errors_name_the_file(top: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    real = getattr(os, call)
    with monkeypatch.context() as patch, pytest.raises(SystemFailure, match=os.strerror(code)) as caught:
        patch.setattr(os, call, failing(real, code))
        write_file(top / "file", b"0123456789")
    assert caught.value.file == str(top / "file")


def test_write_file_never_overwrites(top: Path) -> None:
    write_file(top / "file", b"1")
    with pytest.raises(SystemFailure, match="File exists"):
        write_file(top / "file", b"2")


def test_a_report_replaces_a_file_and_keeps_a_link(top: Path) -> None:
    replace_file(top / "report", b"1")
    replace_file(top / "report", b"2")
    (top / "link").symlink_to("report")
    replace_file(top / "link", b"3")
    assert (top / "link").is_symlink()
    assert (top / "report").read_bytes() == b"3"
    assert names(top) == ["link", "report"]


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "replace"])
def test_a_failing_report_keeps_the_old_one(top: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    replace_file(top / "report", b"old")
    with monkeypatch.context() as patch, pytest.raises(SystemFailure, match="No space left") as caught:
        patch.setattr(os, call, failing(getattr(os, call), errno.ENOSPC))
        replace_file(top / "report", b"new")
    assert caught.value.file == str(top / "report")
    assert (top / "report").read_bytes() == b"old"
    assert names(top) == ["report"]


def test_a_report_into_what_is_no_file(top: Path) -> None:
    with pytest.raises(SystemFailure, match="No space left"):
        replace_file(Path("/dev/full"), b"1")
    replace_file(Path("/dev/null"), b"1")
    with pytest.raises(UsageError, match="is a folder"):
        replace_file(top, b"1")
    with pytest.raises(SystemFailure, match="No such file"):
        replace_file(top / "absent" / "report", b"1")
    os.mkfifo(top / "fifo")
    reader = os.open(top / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    replace_file(top / "fifo", b"1")
    assert os.read(reader, 9) == b"1"
    os.close(reader)
    assert names(top) == ["fifo"]


def test_a_report_into_stdout(top: Path) -> None:
    code = "from fusecheck.durable import *; replace_file(Path('/dev/stdout'), b'report'); print('end', end='')"
    for_pipe = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=HOME)
    assert for_pipe.stdout == b"reportend"
    with (top / "log").open("wb") as log:
        log.write(b"begin")
        log.flush()
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True, cwd=HOME)
    assert (top / "log").read_bytes() == b"beginreportend"


def test_a_name_that_engines_cannot_open_is_refused(top: Path) -> None:
    with pytest.raises(UsageError, match="not UTF-8"):
        check_target(top / os.fsdecode(b"\xff"), None, force=True)


def test_free_space(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = free_space(top / "absent" / "deeper")
    assert found
    assert found > 0
    target = check_target(top / "out", None, force=False)
    require_space(target.path, 1, target.shown)
    with pytest.raises(SystemFailure, match=r"top/out: not enough free space: found [\d.]+ .B, wanted 4611\.7 PB"):
        require_space(target.path, 1 << 62, target.shown)
    monkeypatch.setattr(os, "statvfs", failing(os.statvfs, errno.ENOSYS))
    assert free_space(top) is None
    require_space(target.path, 1 << 62, target.shown)


def test_every_failure_has_an_exit_code() -> None:
    for kind, code in ((TargetOccupied, 2), (TargetTaken, 4)):
        assert issubclass(kind, FusecheckError)
        assert kind("x").exit_code == code
