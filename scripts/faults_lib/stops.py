"""Signals: at random moments, and at every system call that changes a file."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

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
        assert process.stderr is not None
        process.stderr.readline()
        moment = chance.uniform(0, 0.1)
        what += f" {moment:.3f} s after the first line"
        time.sleep(moment)
    process.send_signal(number)
    if twice:
        time.sleep(chance.uniform(0, 0.01))
        process.send_signal(number)
    return lab.ended(process, what)


def _died_before_it_began(lab: Lab, run: Run, number: signal.Signals) -> bool:
    """While Python itself still starts, and after all is done, a signal does what it does to any process."""
    return run.code == -number and not run.err.strip() and not lab.left() and (lab.is_complete() or not lab.out.exists())


def random_moments(lab: Lab, *, twice: bool = False) -> None:
    """Each signal in turn."""
    chance = random.Random(1)  # noqa: S311 - the same moments every time
    kinds = [signal.SIGINT, signal.SIGTERM] if twice else [signal.SIGKILL, *POLITE]
    for turn in range(lab.some(4, 16 if twice else 60)):
        number = kinds[turn % len(kinds)]
        lab.fresh()
        run = _stopped(lab, number, chance=chance, twice=twice)
        rules = rules_of(number, rerun=not lab.quick or number == signal.SIGKILL)
        if number != signal.SIGKILL and _died_before_it_began(lab, run, number):
            run = Run(run.what, SIGNAL_EXITS[number], run.out, "error: signal")
        lab.judge(run, rules)


def _twice(lab: Lab) -> None:
    random_moments(lab, twice=True)


def _calls(lab: Lab, number: signal.Signals, options: list[str]) -> Iterator[tuple[int, Run]]:
    """One run per file-changing call, in which the signal comes on entry to that call; ends when a run is not hit."""
    at, step = 1, lab.some(9, 1)
    while True:
        lab.fresh()
        if options:
            lab.out.mkdir()
            (lab.out / "old").write_text("old", encoding="utf-8")
        trace = lab.traced(f"{CHANGING}:signal={number.name}:when={at}")
        run = lab.fuse("-q", *options, before=trace)
        if run.code == 0:
            return
        yield at, Run(f"{number.name} at call {at}", run.code, run.out, run.err)
        at += step


def every_call(lab: Lab) -> None:
    """SIGKILL and SIGTERM everywhere; the others, which take the same way, at every third call."""
    for number in (signal.SIGKILL, signal.SIGTERM):
        last = 0
        for at, run in _calls(lab, number, []):
            lab.judge(run, rules_of(number, rerun=at % 7 == 1))
            last = at
        lab.expect(number.name, last > 30, f"only {last} calls were hit")


def every_call_force(lab: Lab) -> None:
    """--force: OUT is the old one or the new one at every moment."""
    for number in (signal.SIGKILL, signal.SIGTERM):
        for at, run in _calls(lab, number, ["--force"]):
            lab.judge(run, rules_of(number, rerun=at % 7 == 1, old=_old(lab)))


def _old(lab: Lab) -> dict[str, tuple[int, str]]:
    """The tree of an OUT that holds the one file of `_calls`."""
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
