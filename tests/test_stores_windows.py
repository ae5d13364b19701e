"""One pass in large requests: what is read is what the source holds, in few requests and bounded memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecheck.errors import SystemFailure
from fusecheck.stores import Windows
from fusecheck.stores.schedule import OPEN, schedule

Range = tuple[str, int, int]

SIZE = 4096
FILES = {name: random.Random(name).randbytes(SIZE) for name in "abc"}  # noqa: S311
LARGEST, GAP = 256, 16
HELD = 2 * OPEN * LARGEST


class Memory:
    """A source that counts, may fail at one place, and may wait until so many requests are in flight."""

    def __init__(self, fail_at: tuple[str, int] | None = None, together: int = 0) -> None:
        self.asked: list[Range] = []
        self.fail_at = fail_at
        self.barrier = threading.Barrier(together) if together else None
        self._lock = threading.Lock()

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self.asked.append((file, offset, len(buffer)))
        if self.barrier is not None:
            self.barrier.wait(10)
        if self.fail_at and file == self.fail_at[0] and offset <= self.fail_at[1] < offset + len(buffer):
            raise SystemFailure("the network is gone", file=file)
        buffer[:] = FILES[file][offset : offset + len(buffer)]


def windows(source: Memory, ranges: Iterable[Range], held: int = HELD) -> Windows:
    return Windows(source, ranges, held=held, largest=LARGEST, gap=GAP, in_flight=3)


def take(reader: Windows, file: str, offset: int, size: int) -> None:
    """Read one range and compare."""
    buffer = bytearray(size)
    reader.read_into(file, offset, memoryview(buffer))
    assert bytes(buffer) == FILES[file][offset : offset + size]


def least(ranges: Iterable[Range]) -> int:
    """Requests that any pass needs which reads no gap above GAP and nothing above LARGEST at once."""
    count, last, start, stop = 0, "", 0, 0
    for file, offset, size in sorted(ranges):
        if not size:
            continue
        if file != last or offset > stop + GAP:
            count += -(-(stop - start) // LARGEST)
            last, start, stop = file, offset, offset
        stop = max(stop, offset + size)
    return count + -(-(stop - start) // LARGEST)


@st.composite
def range_lists(draw: st.DrawFn) -> list[Range]:
    """Ranges in any order."""
    one = st.tuples(st.sampled_from(sorted(FILES)), st.integers(0, SIZE), st.integers(0, 700))
    return [(file, at, min(size, SIZE - at)) for file, at, size in draw(st.lists(one, max_size=40))]


@given(range_lists(), st.integers(30, 300))
def test_any_sequence_reads_what_is_there_in_any_pieces(ranges: list[Range], piece: int) -> None:
    source = Memory()
    with windows(source, ranges) as reader:
        for file, offset, size in ranges:
            for at in range(offset, offset + size, piece):
                take(reader, file, at, min(piece, offset + size - at))
        assert reader.requests == reader.planned == len(source.asked)  # nothing fetched twice, nothing beside the plan
        assert reader.peak <= HELD
        assert reader.bytes_fetched == sum(size for *_, size in source.asked)
        assert reader.held == 0
    assert all(size <= LARGEST for *_, size in source.asked)


@given(range_lists())
def test_a_pass_in_file_order_takes_the_fewest_requests(ranges: list[Range]) -> None:
    ranges = sorted(ranges)
    assert len(schedule(ranges, largest=LARGEST, gap=GAP)) <= least(ranges)


@given(st.integers(1, 5), st.integers(1, LARGEST // 2), st.integers(1, 2))
def test_files_read_in_turns_take_no_more_requests(copies: int, block: int, ahead: int) -> None:
    """T outputs in lockstep cut columns out of the same tensors: each byte is fetched once, in the fewest requests."""
    ranges = [
        (file, at, min(block, SIZE - at))
        for base in range(0, SIZE, block * ahead)
        for file in FILES
        for _ in range(copies)
        for at in range(base, min(SIZE, base + block * ahead), block)
    ]
    found = schedule(ranges, largest=LARGEST, gap=GAP)
    assert sum(window.size for window in found) == len(FILES) * SIZE
    assert len(found) == len(FILES) * SIZE // LARGEST


@given(range_lists(), st.randoms(use_true_random=False))
def test_threads_slightly_out_of_order_get_their_bytes(ranges: list[Range], draw: random.Random) -> None:
    source = Memory()
    order = [item for _, item in sorted((place + draw.uniform(0, 6), item) for place, item in enumerate(ranges))]
    with windows(source, ranges) as reader, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda item: take(reader, *item), order))
        assert reader.peak <= HELD


@given(range_lists())
def test_too_little_memory_costs_requests_not_bytes(ranges: list[Range]) -> None:
    with windows(Memory(), ranges, held=64) as reader:
        for item in reversed(ranges):
            take(reader, *item)
        assert reader.peak <= 64


def test_what_was_not_announced_is_read_all_the_same() -> None:
    source = Memory()
    with windows(source, [("a", 100, 50), ("a", 600, 50)]) as reader:
        take(reader, "a", 50, 700)
        take(reader, "a", 100, 50)
        take(reader, "b", 0, 10)
    assert reader.requests == len(source.asked)


def test_a_failure_ahead_is_raised_where_its_bytes_are_needed() -> None:
    ranges = [("a", at, 100) for at in range(0, SIZE - 100, 100)]
    with windows(Memory(fail_at=("a", 1000)), ranges) as reader:
        failed = []
        for item in ranges:
            try:
                take(reader, *item)
            except SystemFailure as error:
                failed.append((item[1], str(error)))
    window = 1000 // LARGEST * LARGEST
    assert [at for at, _ in failed] == [at for at in range(0, SIZE, 100) if window - 100 < at < window + LARGEST]
    assert {words for _, words in failed} == {"a: the network is gone"}


def test_requests_are_in_flight_together() -> None:
    """Each request waits until three are under way."""
    ranges = [("a", at, LARGEST) for at in range(0, 6 * LARGEST, LARGEST)]
    with windows(Memory(together=3), ranges) as reader:
        for item in ranges:
            take(reader, *item)


def test_closing_ends_who_waits() -> None:
    source = Memory(together=4)  # never so many
    reader = windows(source, [("a", 0, 10)])
    threading.Timer(0.1, reader.close).start()
    with pytest.raises(SystemFailure, match="has ended"):
        take(reader, "a", 0, 10)
    with pytest.raises(SystemFailure, match="has ended"):
        take(reader, "a", 0, 10)
    assert source.barrier is not None
    source.barrier.abort()


def test_a_model_s_size_is_planned_at_once() -> None:
    """Qwen3-235B: 118 files of 4 GB, some 310 tensors each."""
    size = 13 << 20
    ranges: Sequence[Range] = [(f"{file}", at * size, size) for file in range(118) for at in range(310)]
    found = schedule(ranges)
    assert len(found) == 118 * -(-310 * size // (32 << 20))
    assert all(window.size <= 32 << 20 for window in found)
