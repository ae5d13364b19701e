"""The parts of a plan, each carried out by any process, on any node, in any order, as often as anybody likes.

Nobody coordinates, and any process may die at any moment: what counts is what stands at OUT, by name, size and identity,
beside a record of the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fusecheck.errors import UsageError
from fusecheck.lanes import OnBytes, lanes_of, send
from fusecheck.ledger import Record, Standing, add_record, begin, check_mark, find_records, is_committed, judge
from fusecheck.planned import Plan
from fusecheck.reader import Progress, Publisher, StoredFile
from fusecheck.shards import lane_name
from fusecheck.sidefiles import MANIFEST
from fusecheck.stores import Target, is_remote, open_publisher, open_source
from fusecheck.target import require_space
from fusecheck.work import Work, reader_of

_SMALL = 32 << 20
"""Bytes of a file of OUT that are held at once to be compared."""


@contextmanager
def opened_target(out: str, digest: str = "", *, allow_unconditional: bool) -> Iterator[Target]:
    """Where objects go; `digest` is the plan's."""
    target = open_publisher(out, allow_unconditional=allow_unconditional, plan_digest=digest)
    try:
        yield target
    finally:
        target.close()


def shares_of(plan: Plan, parts: int) -> list[tuple[int, ...]]:
    """Part -> numbers of its objects, for those of `parts` that have any: the largest first, each to whoever has least.

    What is cut out of the same tensors stays together.
    """
    lanes: dict[str, list[int]] = {}
    for number, item in enumerate(plan.objects):
        lanes.setdefault(lane_name(item.name), []).append(number)
    sized = [(sum(plan.objects[number].size for number in lane), lane) for lane in lanes.values()]
    load = [0] * min(parts, len(sized))  # whoever comes later gets nothing, however many they are
    shares: list[list[int]] = [[] for _ in load]
    for size, lane in sorted(sized, key=lambda pair: (-pair[0], pair[1])):
        least = load.index(min(load))
        load[least] += size
        shares[least] += lane
    return [tuple(sorted(share)) for share in shares]


def part_of(plan: Plan, part: int, parts: int) -> tuple[int, ...]:
    """Numbers of the objects of part `part` (from 0) of `parts`."""
    shares = shares_of(plan, parts)
    return shares[part] if part < len(shares) else ()


class Committed(Exception):
    """The same plan was committed meanwhile: there is nothing left to write."""


@dataclass(frozen=True, slots=True)
class LastLook:
    """A target where a file appears only if, once all of it has been read, the source is unchanged and OUT still waits.

    A run may be slow, its twin long done, OUT committed and the source gone or written anew: what was read of that must
    never replace what stands.
    """

    target: Target
    work: Work

    def have(self, name: str) -> StoredFile | None:
        """What stands there under a name, or None."""
        return self.target.have(name)

    def put(self, name: str, blocks: Iterator[memoryview], size: int) -> StoredFile:
        """As the target's; SystemFailure, UsageError or Committed instead of its end."""
        return self.target.put(name, self._then_look(blocks), size)

    def commit(self, manifest: bytes) -> bool:
        """As the target's; UsageError where OUT has become another plan's."""
        check_mark(self.target, self.work.plan)
        return self.target.commit(manifest)

    def _then_look(self, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        yield from blocks
        self.work.job.checkpoint.files.check_unchanged()
        check_mark(self.target, self.work.plan)
        if is_committed(self.target):
            raise Committed


@dataclass(frozen=True, slots=True)
class Complete:
    """A committed target: to put a file there is to see that it stands there, byte for byte, and nothing is written.

    Its records may not fit it and yet it is what it was: it was copied, or a run died before it wrote down what it did.
    """

    target: Target
    work: Work

    def have(self, name: str) -> StoredFile | None:
        """What stands there under a name, or None."""
        return self.target.have(name)

    def put(self, name: str, blocks: Iterator[memoryview], size: int) -> StoredFile:
        """UsageError where it is not there, or another one."""
        here = self.have(name)
        if here is None or here.size != size:
            raise self._spoilt(name)
        with self._standing(name, size) as read:
            at = 0
            for block in blocks:
                if read(at, len(block)) != block:
                    self.work.job.checkpoint.files.check_unchanged()
                    raise self._spoilt(name)
                at += len(block)
        return here

    def commit(self, manifest: bytes) -> bool:
        """False, or UsageError where another manifest stands."""
        self.put(MANIFEST, iter([memoryview(manifest)]), len(manifest))
        return False

    @contextmanager
    def _standing(self, name: str, size: int) -> Iterator[Callable[[int, int], bytearray | memoryview]]:
        """(offset, bytes) -> what stands there. A small file comes in one request, which needs no listing of all others."""
        if size <= _SMALL:
            data = memoryview(self.target.read(name))
            yield lambda at, count: data[at : at + count]
            return
        with closing(open_source(self.work.plan.out)) as source:

            def read(at: int, count: int) -> bytearray:
                buffer = bytearray(count)
                source.read_into(name, at, memoryview(buffer))
                return buffer

            yield read

    def _spoilt(self, name: str) -> UsageError:
        what = "OUT was committed, and is no longer what was"
        return UsageError(what, file=self.work.plan.out, found=name, remedy="choose a fresh OUT")


def place_of(work: Work, target: Target, standing: Standing) -> Publisher:
    """Where the files of a plan go."""
    return Complete(target, work) if standing.committed else LastLook(target, work)


@dataclass(frozen=True, slots=True)
class PartDone:
    """What became of a part: names of objects written now, and of those that stood there."""

    written: tuple[str, ...]
    stood: tuple[str, ...]


def run_objects(work: Work, target: Target, part: tuple[int, int], on_progress: Progress | None) -> PartDone:
    """Write the objects of a part that do not stand there yet, a record after each. Once committed: compare them instead."""
    plan = work.plan
    numbers = part_of(plan, *part)
    standing = judge(target, plan)
    begin(target, plan, standing)
    good, _ = find_records(target, plan, numbers, standing.names)
    left = [number for number in numbers if number not in good]
    if not standing.committed and not is_remote(plan.out):  # parts may share it, and then the write itself fails
        require_space(Path(plan.out), sum(plan.objects[number].size for number in left), plan.out)
    try:
        _write(work, target, left, standing, part, on_progress)
    except Committed:
        return run_objects(work, target, part, on_progress)
    names = [plan.objects[number].name for number in numbers]
    written = set() if standing.committed else {plan.objects[number].name for number in left}
    return PartDone(
        tuple(name for name in names if name in written), tuple(name for name in names if name not in written)
    )


def _write(
    work: Work,
    target: Target,
    left: Sequence[int],
    standing: Standing,
    part: tuple[int, int],
    on_progress: Progress | None,
) -> None:
    plan, job = work.plan, work.job
    files = {job.shards[number].file.path: number for number in left}
    planned = [job.shards[number].file for number in left]
    tell = counter(sum(file.size for file in planned), on_progress)
    place = place_of(work, target, standing)
    with reader_of(work.origin, planned, plan.out) as reader:
        for lane in lanes_of(planned):
            for item in send(lane, reader, place, tell, sha256=job.options.checksums):
                record = Record(plan.digest, item.file.path, item.stored, item.written, item.sha256, part)
                add_record(target, files[item.file.path], record)


def counter(total: int, on_progress: Progress | None) -> OnBytes:
    """Bytes since the last call -> bytes so far, and in total."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if on_progress is not None:
            on_progress(done, total)

    return count
