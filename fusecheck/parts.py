"""The parts of a plan, each carried out by any process, on any node, in any order, as often as anybody likes.

Nobody coordinates, and any process may die at any moment: what counts is what stands at OUT, by name, size and identity,
beside a record of the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fusecheck.errors import UsageError
from fusecheck.lanes import OnBytes, lanes_of, send
from fusecheck.ledger import Record, add_record, begin, check_mark, find_records, judge
from fusecheck.planned import Plan
from fusecheck.reader import Progress
from fusecheck.stores import Target, open_publisher
from fusecheck.work import Work, reader_of


@contextmanager
def opened_target(out: str, digest: str = "", *, allow_unconditional: bool) -> Iterator[Target]:
    """Where objects go; `digest` is the plan's."""
    target = open_publisher(out, allow_unconditional=allow_unconditional, plan_digest=digest)
    try:
        yield target
    finally:
        target.close()


def part_of(plan: Plan, part: int, parts: int) -> tuple[int, ...]:
    """Numbers of the objects of part `part` (from 0) of `parts`: the largest first, each to whoever has least so far."""
    load = [0] * parts
    mine = []
    order = sorted(range(len(plan.objects)), key=lambda number: (-plan.objects[number].size, number))
    for number in order:
        least = load.index(min(load))
        load[least] += plan.objects[number].size
        if least == part:
            mine.append(number)
    return tuple(sorted(mine))


@dataclass(frozen=True, slots=True)
class PartDone:
    """What became of a part: names of objects written now, and of those that stood there."""

    written: tuple[str, ...]
    stood: tuple[str, ...]


def run_objects(work: Work, target: Target, part: tuple[int, int], on_progress: Progress | None) -> PartDone:
    """Write the objects of a part that do not stand there yet, a record after each."""
    plan, job = work.plan, work.job
    numbers = part_of(plan, *part)
    standing = judge(target, plan)
    begin(target, plan, standing)
    good, _ = find_records(target, plan, numbers, standing.names)
    left = [number for number in numbers if number not in good]
    if left and standing.committed:
        raise spoilt(plan, plan.objects[left[0]].name)
    lanes = lanes_of([job.shards[number].file for number in left])
    tell = counter(sum(file.size for lane in lanes for file in lane), on_progress)
    with reader_of(work.origin, (file for lane in lanes for file in lane)) as reader:
        for number, lane in zip(left, lanes, strict=True):
            check_mark(target, plan)
            sent = send(lane, reader, target, tell, sha256=job.options.checksums)
            job.checkpoint.files.check_unchanged()
            for item in sent:
                record = Record(plan.digest, item.file.path, item.stored, item.written, item.sha256, part)
                add_record(target, number, record)
    names = [plan.objects[number].name for number in numbers]
    written = {plan.objects[number].name for number in left}
    return PartDone(
        tuple(name for name in names if name in written), tuple(name for name in names if name not in written)
    )


def counter(total: int, on_progress: Progress | None) -> OnBytes:
    """Bytes since the last call -> bytes so far, and in total."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if on_progress is not None:
            on_progress(done, total)

    return count


def spoilt(plan: Plan, name: str) -> UsageError:
    """A result that was complete once."""
    return UsageError(
        "OUT was committed, and is no longer what was", file=plan.out, found=name, remedy="choose a fresh OUT"
    )
