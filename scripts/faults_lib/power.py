"""Power cuts: ext4 on a loop image, shut down without a flush of its journal, mounted again."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import time

from .lab import TEMPORARY, Fault, Lab, Run, call, tree

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN."""
NO_LOG_FLUSH = struct.pack("I", 2)


def power_faults(cuts: int) -> tuple[Fault, ...]:
    """The two of them, for so many cuts."""
    needs = ("mount", "strace", "mkfs.ext4", "e2fsck")
    return (
        Fault("power", lambda lab: power(lab, cuts), needs),
        Fault("power-teeth", lambda lab: teeth(lab, max(cuts, 16)), needs),
    )


def power(lab: Lab, cuts: int) -> None:
    """OUT is absent or complete after the cut, and there if the run had said that it is done."""
    chance = random.Random(2)  # noqa: S311 - the same moments every time
    done = 0
    for number in range(cuts):
        wait = None if number % 3 == 0 else chance.uniform(lab.seconds * 0.3, lab.seconds * 1.1)
        run, wrong = cut(lab, wait, injections=())
        done += run.code == 0
        for why in wrong:
            lab.complain(f"cut {number}, run {'done' if run.code == 0 else 'under way'}", why)
    lab.expect("power", done >= cuts // 3, f"only {done} runs were done before the cut")


def teeth(lab: Lab, most: int) -> None:
    """With fsync switched off the same check must find something bad; else it proves nothing."""
    for _ in range(most):
        _, wrong = cut(lab, None, injections=("fsync,fdatasync:retval=0",), rerun=False)
        if wrong:
            return
    lab.complain("power-teeth", f"{most} cuts without any fsync, and nothing was found: the test has no teeth")


def cut(lab: Lab, wait: float | None, injections: tuple[str, ...], *, rerun: bool = True) -> tuple[Run, list[str]]:
    """Run, cut after so many seconds, or once the run is over; what is wrong once the disk is mounted again."""
    image = lab.work / "power.img"
    with image.open("wb") as file:
        file.truncate(48 << 20)
    call("mkfs.ext4", "-q", "-F", "-m", "0", image)
    with lab.mounted("-o", "loop", image):
        process = lab.start("fuse", lab.source, lab.out, before=lab.traced(*injections) if injections else ())
        if wait is None:
            process.wait()
        else:
            time.sleep(wait)
        code = process.poll()
        handle = os.open(lab.box, os.O_RDONLY)
        fcntl.ioctl(handle, SHUTDOWN, NO_LOG_FLUSH)
        os.close(handle)
        process.kill()
        ended = lab.ended(process, "power cut")
    run = Run(ended.what, -9 if code is None else code, ended.out, ended.err)
    with lab.mounted_again("-o", "loop", image):
        wrong = list(_state_after(lab, run))
        if rerun:
            before = len(lab.bad)
            lab.again("re-run after a power cut")
            wrong += lab.bad[before:]
            del lab.bad[before:]
    check = subprocess.run(["e2fsck", "-fn", image], capture_output=True, check=False)
    return run, [*wrong, *(["e2fsck complains"] if check.returncode else [])]


def _state_after(lab: Lab, run: Run) -> list[str]:
    stands = os.path.lexists(lab.out)
    wrong = []
    if stands and not lab.is_complete():
        wrong.append(f"OUT is incomplete: {sorted(tree(lab.out))}")
    if run.code == 0 and not stands:
        wrong.append("exit 0 before the cut, but OUT is gone")
    if any(not TEMPORARY.fullmatch(name) for name in lab.left()):
        wrong.append(f"left {lab.left()}")
    if run.code not in {0, -9, 4}:
        wrong.append(f"exit {run.code}")
    return wrong
