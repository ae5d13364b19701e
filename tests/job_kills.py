"""plan, run and finalize into a folder, several at once, dying by SIGKILL at any moment; what stands is right or nothing.

    python tests/job_kills.py 50 [SEED]

Each process is forked, and counts what it does to the file system (audit events that name a path in OUT): it kills itself
at the event that the draw says, so that a failing seed repeats, as far as those that run at once take the same turns.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from checkpoints import Spec, write_checkpoint
from memory_store import folder_files

import fusecheck
from fusecheck.errors import FusecheckError

PARTS = 3
EVENTS = 40
"""A death is drawn among so many events; beyond the last one the process lives."""
_WATCHED = {"open", "os.rename", "os.link", "os.remove", "os.mkdir"}


def forked(works: Sequence[tuple[str, int]], plan: Path, out: Path, dies_at: Sequence[int]) -> list[int]:
    """A process for each ("run", part) or ("finalize", 0), all at once. Their exit codes, or -9."""
    children = [_start(work, plan, out, dies) for work, dies in zip(works, dies_at, strict=True)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _start(work: tuple[str, int], plan: Path, out: Path, dies_at: int) -> int:
    child = os.fork()
    if child:
        return child
    left = dies_at

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in _WATCHED and any(str(out) in str(argument) for argument in arguments[:2]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    code = 70
    try:
        if work[0] == "run":
            fusecheck.run_part(plan, part=work[1], parts=PARTS)
        else:
            fusecheck.finalize(plan)
        code = 0
    except FusecheckError as error:
        code = error.exit_code
    finally:
        os._exit(code)


def trial(folder: Path, seed: int) -> Counter[str]:
    """One output, made by processes that die; counts what happened. AssertionError where something is half-written."""
    choice = random.Random(seed)  # noqa: S311
    spec = Spec(files=choice.randint(1, 6), num_hidden_layers=2, seed=seed)
    write_checkpoint(folder / "in", spec)
    fusecheck.fuse(folder / "in", folder / "reference")
    wanted = folder_files(folder / "reference")
    out, plan = folder / "out", folder / "plan.json"
    plan.write_text(fusecheck.make_plan(folder / "in", out).text)
    seen: Counter[str] = Counter()
    while True:
        count = choice.choice([1, 1, 2, 4])
        works = [("finalize", 0) if choice.random() < 0.4 else ("run", choice.randrange(PARTS)) for _ in range(count)]
        codes = forked(works, plan, out, [choice.randint(1, EVENTS) for _ in works])
        for work, code in zip(works, codes, strict=True):
            seen[f"{work[0]} {code}"] += 1
            assert code in {0, 4, -9}, (seed, work, code)
        committed = (out / "fusecheck.json").exists()
        if committed:
            break
        assert ("finalize", 0) not in zip((verb for verb, _ in works), codes, strict=True), (
            seed,
            "nothing is committed",
        )
    for verb in (("finalize", 0), ("run", 0)):
        assert forked([verb], plan, out, [0]) == [0], (seed, verb)
    assert folder_files(out) == wanted, seed
    assert fusecheck.verify(out, exact_only=True).verdict == "equal"
    left = [path.name for path in (out / ".fusecheck").iterdir() if path.name.startswith("tmp-")]
    seen["temporaries left"] += len(left)
    return seen


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    total: Counter[str] = Counter()
    for number in range(seed, seed + count):
        with tempfile.TemporaryDirectory() as folder:
            total += trial(Path(folder), number)
    sys.stdout.write(f"{count} outputs, all right at last: {dict(sorted(total.items()))}\n")


if __name__ == "__main__":
    main()
