"""Reads, writes and fsyncs that fail, are short or are interrupted; full disks, quotas and streams."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from .lab import Fault, Lab, Rules, Run, SkippedError, build_shim, call

FULL = "No space left on device"
MOST = 64 << 20


def small_disk(lab: Lab) -> None:
    """A tmpfs of every size from far too small to large enough; then the same command in the same place."""
    size, step = 256 << 10, lab.some(768 << 10, 96 << 10)
    while size < MOST:
        with lab.mounted("-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
            run = lab.fuse()
            rules = Rules(codes=(0, 4), names=(FULL, "not enough free space"), rerun=False)
            lab.judge(Run(f"{run.what} on {size} bytes", run.code, run.out, run.err), rules)
            if run.code == 0:
                return
            call("mount", "-o", f"remount,size={MOST}", lab.box)
            if size % (step * 4) == 0 or lab.quick:
                lab.again(f"a disk of {size} bytes, grown")
        size += step
    lab.complain("small-disk", "no size is enough")


def no_inodes(lab: Lab) -> None:
    """A tmpfs with room for n files and folders."""
    for inodes in range(2, 64, lab.some(4, 1)):
        with lab.mounted("-t", "tmpfs", "-o", f"size=64m,nr_inodes={inodes}", "tmpfs"):
            run = lab.fuse()
            rules = Rules(codes=(0, 4), names=(FULL,), rerun=False)
            lab.judge(Run(f"{run.what} with {inodes} inodes", run.code, run.out, run.err), rules)
            if run.code == 0:
                return
    lab.complain("no-inodes", "no number is enough")


def disk_fills(lab: Lab) -> None:
    """Enough space at first; another program takes it while we copy. tmpfs says so at write, ext4 perhaps later."""
    shim = build_shim(lab)
    image = lab.work / "fills.img"
    for kind in ("tmpfs", "ext4"):
        with image.open("wb") as file:
            file.truncate(16 << 20)
        if kind == "ext4":
            call("mkfs.ext4", "-q", "-F", "-m", "0", image)
        options = ("-t", "tmpfs", "-o", "size=16m", "tmpfs") if kind == "tmpfs" else ("-o", "loop", image)
        with lab.mounted(*options):
            process = stopped_at_read(lab, shim, 20)
            fill(lab.box / "lost+found")
            os.kill(process.pid, signal.SIGCONT)
            run = lab.ended(process, f"{kind} fills up")
            (lab.box / "lost+found").unlink(missing_ok=True) if kind == "tmpfs" else (lab.box / "lost+found/x").unlink()
            lab.judge(run, Rules(codes=(4,), names=(FULL,)))


def fill(place: Path) -> None:
    """Take every byte that is left."""
    block = b"\0" * (1 << 20)
    path = place / "x" if place.is_dir() else place
    with path.open("wb", buffering=0) as file:
        while block:
            try:
                file.write(block)
                os.fsync(file.fileno())
            except OSError:
                block = block[: len(block) // 2]


def stopped_at_read(lab: Lab, shim: Path, number: int, *options: object) -> subprocess.Popen[str]:
    """A run that stands still before its n-th read of the source."""
    env = {"LD_PRELOAD": str(shim), "FAULT_PATH": str(lab.source), "FAULT_STOP": str(number)}
    process = lab.start("fuse", lab.source, lab.out, *options, env=env)
    status = Path(f"/proc/{process.pid}/stat")
    for _ in range(6000):
        if process.poll() is not None:
            return process
        if status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt":
            return process
        time.sleep(0.01)
    raise SkippedError("the run does not stop where it should")


def file_limit(lab: Lab) -> None:
    """By ulimit -f, in KiB, from nothing to enough; SIGXFSZ must not kill."""
    for limit in range(0, 4096, lab.some(600, 100)):
        lab.fresh()
        run = lab.fuse(before=["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash"])
        lab.judge(run, Rules(codes=(0, 4), names=("File too large",), rerun=limit == 0))
        if run.code == 0:
            return
    lab.complain("file-limit", "no limit is enough")


def failing_calls(lab: Lab) -> None:
    """One call after another answers with an error; of `write`, it is the manifest's."""
    cases = [
        *((f"pwrite64:error={error}:when={at}", words) for error, words in ERRORS for at in lab_moments(lab)),
        *((f"write:error={error}:when=1", words) for error, words in ERRORS),
        *((f"mkdir:error={error}:when=1", words) for error, words in ERRORS),
        *(
            (f"rename:error={error}", words)
            for error, words in (ERRORS[2], ("EXDEV", "cross-device"), ("EACCES", "denied"))
        ),
    ]
    for injection, words in cases[:: lab.some(4, 1)]:
        lab.fresh()
        run = lab.fuse("-q", "--threads", "1", before=lab.traced(injection))
        lab.judge(run, Rules(codes=(4,), names=(words,), rerun=injection.endswith("=1")))


ERRORS = (("EDQUOT", "Disk quota exceeded"), ("ENOSPC", FULL), ("EIO", "Input/output error"), ("EROFS", "Read-only"))


def lab_moments(lab: Lab) -> tuple[int, ...]:
    """Some of the writes of data."""
    return (1, 30) if lab.quick else (1, 2, 15, 30, 33)


def failing_fsync(lab: Lab) -> None:
    """EIO from the n-th fsync: never exit 0, for the kernel has dropped what it could not write."""
    kept = 0
    for at in range(1, 100, lab.some(4, 1)):
        lab.fresh()
        run = lab.fuse("-q", "--threads", "1", before=lab.traced(f"fsync,fdatasync:error=EIO:when={at}"))
        if run.code == 0:
            lab.expect("failing-fsync", at > 5, f"only {at} calls of one thread")
            return
        kept += lab.out.exists()
        lab.judge(run, Rules(codes=(4,), names=("Input/output error",), rerun=not lab.out.exists() and at % 3 == 1))
        lab.expect(run.what, kept <= 1, "OUT stands although an fsync before the rename failed")
    lab.complain("failing-fsync", "no end")


def failing_reads(lab: Lab) -> None:
    """EIO from the n-th read of each kind of source file."""
    names = [lab.shards()[0], lab.source / "config.json", lab.source / "tokenizer.json", lab.shards()[1]]
    for path in names[: lab.some(2, 4)]:
        for at in (1, 2, 9) if path in lab.shards() else (1,):
            lab.fresh()
            reads = f"read,pread64,preadv,preadv2:error=EIO:when={at}"
            run = lab.fuse(before=lab.traced(reads, paths=[path]))
            lab.judge(run, Rules(codes=(4,), names=(path.name,), rerun=False))
            lab.expect(run.what, "Input/output error" in run.err, f"the cause is not named: {run.err!r}")


def bad_disk(lab: Lab) -> None:
    """A source on a disk of which the rear part is gone; a reader by mmap would die of SIGBUS."""
    image, place = lab.work / "bad.img", lab.work / "bad"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    call("mkfs.ext4", "-q", "-F", image)
    with lab.mounted("-o", "loop", image, at=place):
        call("cp", "-r", lab.source, place / "src")
        call("dd", "if=/dev/urandom", f"of={place}/pad", "bs=1M", "count=8")
        call("sync")
    with lab.mounted("-o", "loop,ro", image, at=place):
        os.truncate(image, 9 << 20)
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
        for arguments in (["fuse", place / "src", lab.out], ["inspect", place / "src"]):
            lab.fresh()
            run = lab.fusecheck(*arguments)
            rules = Rules(codes=(0, 3, 4), names=("Input/output error",))
            for why in lab.wrong_words(run, rules):
                lab.complain(run.what, why)
            lab.expect(run.what, not lab.left(), "left something")
            if arguments[0] == "fuse" and run.code == 0:
                lab.expect(run.what, lab.fusecheck("verify", lab.out, "--source", lab.source).code == 0, "not equal")


def short_transfers(lab: Lab) -> None:
    """No call moves more than a few bytes; every other one is interrupted; both."""
    shim = build_shim(lab)
    for limits in ({"FAULT_MAX": "4099"}, {"FAULT_EINTR": "1"}, {"FAULT_MAX": "509", "FAULT_EINTR": "1"}):
        lab.fresh()
        env = {"LD_PRELOAD": str(shim), "FAULT_PATH": str(lab.work), **limits}
        run = lab.fuse(env=env)
        lab.judge(Run(f"{run.what} {limits}", run.code, run.out, run.err), Rules(rerun=False))
        proof = lab.fusecheck("verify", lab.out, "--source", lab.source, env=env)
        lab.expect(f"verify {limits}", proof.code == 0, f"exit {proof.code}: {proof.err[-200:]!r}")


def full_streams(lab: Lab) -> None:
    """/dev/full as stdout: a result that nobody could read is no success. OUT itself is complete by then."""
    lab.fresh()
    lab.fuse()
    cases = [["verify", lab.out], ["verify", lab.out, "--json"], ["inspect", lab.out], ["inspect", lab.out, "--json"]]
    cases += [["fuse", lab.source, lab.out], ["fuse", lab.source, lab.out, "--json"], ["--version"], ["--help"]]
    for arguments in cases[:: lab.some(3, 1)]:
        run = lab.fusecheck(*arguments, before=["sh", "-c", 'exec "$@" > /dev/full', "sh"])
        for why in lab.wrong_words(run, Rules(codes=(4,), names=(FULL,))):
            lab.complain(f"{run.what} > /dev/full", why)
    for options in ([], ["--json"]):
        lab.fresh()
        run = lab.fuse(*options, before=["sh", "-c", 'exec "$@" > /dev/full', "sh"])
        lab.judge(run, Rules(codes=(4,), names=("stdout",), rerun=False))
        lab.expect(run.what, lab.is_complete(), "OUT is not complete")


FAULTS = (
    Fault("small-disk", small_disk, ("mount",)),
    Fault("no-inodes", no_inodes, ("mount",)),
    Fault("disk-fills", disk_fills, ("mount", "cc", "mkfs.ext4")),
    Fault("file-limit", file_limit, ("bash",)),
    Fault("failing-calls", failing_calls, ("strace",)),
    Fault("failing-fsync", failing_fsync, ("strace",)),
    Fault("failing-reads", failing_reads, ("strace",)),
    Fault("bad-disk", bad_disk, ("mount", "mkfs.ext4")),
    Fault("short-transfers", short_transfers, ("cc",)),
    Fault("full-streams", full_streams),
)
