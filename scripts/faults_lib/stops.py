"""Signals: at random moments, and at every system call that changes a file."""

from __future__ import annotations

import random
import re
import signal
import time
from collections import Counter

from .lab import SIGNAL_EXITS, Fault, Lab, Rules, Run, tree

CHANGING = (
    "mkdir,mkdirat,write,pwrite64,copy_file_range,sendfile,fsync,fdatasync,ftruncate,fallocate,"
    "rename,renameat,renameat2,unlink,unlinkat,rmdir,chmod,fchmod,fchmodat,symlink,link,linkat"
)
"""System calls that change a file or make a change durable."""

POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def rules_of(number: signal.Signals, **changes: object) -> Rules:
    """After a polite signal all is tidy; after SIGKILL the next run tidies up."""
    if number == signal.SIGKILL:
        return Rules(codes=(0, -signal.SIGKILL), clean=False, **changes)  # type: ignore[arg-type]
    return Rules(codes=(0, SIGNAL_EXITS[number]), names=("signal",), **changes)  # type: ignore[arg-type]


def _stopped(lab: Lab, number: signal.Signals, *, chance: random.Random, twice: bool) -> Run:
    """Start a run and stop it: at any moment, or, every other time, shortly after it said that it copies."""
    process = lab.start("fuse", lab.source, lab.out)
    what = f"{number.name}{' twice' if twice else ''}"
    if chance.random() < 0.5:
        moment = chance.uniform(0, lab.seconds * 1.05)
        what += f" after {moment:.3f} s"
        time.sleep(moment)
    else:
        if process.stderr is not None:
            process.stderr.readline()
        moment = chance.uniform(0, 0.1)
        what += f" {moment:.3f} s after the first line"
        time.sleep(moment)
    process.send_signal(number)
    if twice:
        time.sleep(chance.uniform(0, 0.01))
        process.send_signal(number)
    return lab.ended(process, what)


def _outside_main(lab: Lab, run: Run, number: signal.Signals) -> bool:
    """While Python itself still starts, and after all is done, a signal does to fusecheck what it does to any program."""
    if run.code != -number or lab.left():
        return False
    if lab.out.exists():
        return lab.is_complete() and "error: " not in run.err
    told = f"error: stopped by {signal.Signals(number).name} (signal {int(number)})\n" in run.err
    starting = number == signal.SIGINT and "\nKeyboardInterrupt" in run.err and "fusecheck/operations" not in run.err
    return not run.err.strip() or told or starting


def random_moments(lab: Lab, *, twice: bool = False) -> None:
    """Each signal in turn."""
    chance = random.Random(1)  # noqa: S311 - the same moments every time
    kinds = [signal.SIGINT, signal.SIGTERM] if twice else [signal.SIGKILL, *POLITE]
    for turn in range(lab.some(4, 16 if twice else 60)):
        number = kinds[turn % len(kinds)]
        lab.fresh()
        run = _stopped(lab, number, chance=chance, twice=twice)
        rules = rules_of(number, rerun=number == signal.SIGKILL or turn % 5 == 0)
        if number != signal.SIGKILL and _outside_main(lab, run, number):
            run = Run(run.what, SIGNAL_EXITS[number], run.out, "error: signal")
        lab.judge(run, rules)


def _twice(lab: Lab) -> None:
    random_moments(lab, twice=True)


def _moments(lab: Lab, options: list[str]) -> list[tuple[str, int]]:
    """(system call, n) for every file-changing call of a run. strace counts each call by itself, and per thread."""
    _prepare(lab, options)
    log = lab.work / "calls.log"
    run = lab.fuse(
        "-q", "--threads", "1", *options, before=["strace", "-f", "-qq", "-o", log, "-e", f"trace={CHANGING}"]
    )
    lab.expect("every call", run.code == 0, f"exit {run.code} under strace")
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for thread, name in re.findall(r"^(\d+) +(\w+)\(", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
        counts[thread, name] += 1
        found.append((name, counts[thread, name]))
    return sorted(set(found))


def _prepare(lab: Lab, options: list[str]) -> None:
    lab.fresh()
    if options:
        lab.out.mkdir()
        (lab.out / "old").write_text("old", encoding="utf-8")


def _hit(lab: Lab, number: signal.Signals, call: str, at: int, options: list[str]) -> Run:
    """A run in which the signal comes on entry to that call."""
    _prepare(lab, options)
    trace = lab.traced(f"{call}:signal={number.name}:when={at}")
    run = lab.fuse("-q", "--threads", "1", *options, before=trace)
    return Run(f"{number.name} at {call} {at}", run.code, run.out, run.err)


def every_call(lab: Lab) -> None:
    """SIGKILL and SIGTERM everywhere; the others, which take the same way, at every third call."""
    moments = _moments(lab, [])
    lab.expect("every call", len(moments) > 40, f"only {len(moments)} calls were seen")
    for number in (signal.SIGKILL, *POLITE):
        step = lab.some(17, 1 if number in {signal.SIGKILL, signal.SIGTERM} else 3)
        for turn, (call, at) in enumerate(moments[::step]):
            lab.judge(_hit(lab, number, call, at, []), rules_of(number, rerun=turn % 7 == 1 or call == "rename"))


def every_call_force(lab: Lab) -> None:
    """--force: OUT is the old one or the new one at every moment."""
    moments = _moments(lab, ["--force"])
    for number in (signal.SIGKILL, signal.SIGTERM):
        for turn, (call, at) in enumerate(moments[:: lab.some(17, 1)]):
            run = _hit(lab, number, call, at, ["--force"])
            lab.judge(run, rules_of(number, rerun=turn % 7 == 1 or call == "renameat2", old=_old(lab)))


def _old(lab: Lab) -> dict[str, tuple[int, str]]:
    """The tree of an OUT that holds the one file of `_prepare`."""
    place = lab.work / "old"
    if not place.exists():
        place.mkdir()
        (place / "old").write_text("old", encoding="utf-8")
    return dict(tree(place))


FAULTS = (
    Fault("signals-random", random_moments),
    Fault("signals-twice", _twice),
    Fault("signals-every-call", every_call, ("strace",)),
    Fault("force-every-call", every_call_force, ("strace",)),
)
