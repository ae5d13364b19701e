"""A source that changes while it is read, and one that may only be read."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from .lab import Fault, Lab, Rules, build_shim, call
from .transfers import stopped_at_read


def truncate(path: Path) -> None:
    """Cut the rear half off."""
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    """One byte more."""
    with path.open("ab") as file:
        file.write(b"\0")


def overwrite(path: Path) -> None:
    """Another last byte, at the same size."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def replace(path: Path) -> None:
    """Another file of the same bytes under the same name."""
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def remove(path: Path) -> None:
    """Gone."""
    path.unlink()


def touch(path: Path) -> None:
    """The same file with another time."""
    os.utime(path)


def link(path: Path) -> None:
    """One more name, outside the source: the change time tells, and a retry helps."""
    os.link(path, path.parent.parent / "hard-link")
    (path.parent.parent / "hard-link").unlink()


CHANGES: tuple[Callable[[Path], None], ...] = (truncate, append, overwrite, replace, remove, touch, link)


def changes(lab: Lab) -> None:
    """Each change to each kind of file, while the copy stands still at its 10th, 25th or 40th read."""
    shim = build_shim(lab)
    paths = [lab.shards()[1], lab.shards()[0], lab.source / "config.json", lab.source / "tokenizer.json"]
    moments = (10, 25, 40)
    for number, change in enumerate(CHANGES):
        for path in paths[: lab.some(1, 4)]:
            moment = moments[number % len(moments)]
            lab.fresh()
            lab.renew_source()
            process = stopped_at_read(lab, shim, moment)
            lab.expect(change.__name__, process.poll() is None, "the run was over before")
            change(path)
            os.kill(process.pid, signal.SIGCONT)
            run = lab.ended(process, f"{change.__name__} {path.name} at read {moment}")
            lab.judge(run, Rules(codes=(4,), names=(path.name,), rerun=False, source=False))
            lab.expect(run.what, not lab.out.exists(), "OUT was made of a source that changed")
    lab.renew_source()
    lab.fresh()
    lab.again("a source that is quiet again")


def read_only(lab: Lab) -> None:
    """A source on a read-only mount is as good as any."""
    place = lab.work / "ro"
    with lab.mounted("--bind", lab.source, at=place):
        call("mount", "-o", "remount,bind,ro", place)
        lab.fresh()
        run = lab.fusecheck("fuse", place, lab.out)
        for why in lab.wrong_words(run, Rules()):
            lab.complain(run.what, why)
        proof = lab.fusecheck("verify", lab.out, "--source", lab.source)
        lab.expect(run.what, proof.code == 0 and not lab.left(), f"verify exits {proof.code}, left {lab.left()}")


FAULTS = (Fault("source-changes", changes, ("cc",)), Fault("source-read-only", read_only, ("mount",)))
