"""Slices of OUT against the bytes of its source, and against their digests, in one pass and bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

from fusecheck import digest
from fusecheck.exact import Finding, Slice
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.reader import Progress, Reader

BLOCK_BYTES = 1 << 20
"""Two blocks and what is hashed stay in a core's cache; half or twice as much was no faster."""

THREADS = 2
"""Reads and hashes release the interpreter, comparing does not: a third thread gains nothing."""


@contextmanager
def comparers() -> Iterator[Executor]:
    """Who compares. Entered before the readers are: those then close first, and free whoever waits for a store."""
    pool = ThreadPoolExecutor(THREADS)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def compare_all(
    pool: Executor, slices: Sequence[Slice], out: Reader, source: Reader | None, on_progress: Progress | None
) -> list[Finding]:
    """Every byte of every slice. The first difference of each is a finding, and a digest that is not the manifest's."""
    total = sum(part.nbytes for part in slices)
    lock, done = threading.Lock(), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if on_progress is not None:
                on_progress(done, total)

    found = list(pool.map(lambda part: _compare(part, out, source, on_bytes), slices))
    return [finding for findings in found for finding in findings]


def out_reads(slices: Sequence[Slice]) -> Iterator[tuple[str, int, int]]:
    """(file, offset, size) of all that `compare_all` reads of OUT."""
    return (read for part in slices for read in _reads(part, part.out.shard, part.start, part.stride))


def source_reads(slices: Sequence[Slice]) -> Iterator[tuple[str, int, int]]:
    """And of the source."""
    for part in slices:
        tensor = part.source
        if tensor is not None and part.wanted is None:
            yield from _reads(part, tensor.shard, tensor.start + part.source_start, _stride_there(part))


def _reads(part: Slice, shard: str, start: int, stride: int) -> Iterator[tuple[str, int, int]]:
    if part.rows == 1 or stride == part.row_bytes:
        yield shard, start, part.nbytes
        return
    for row, count in _batches(part):
        yield shard, start + row * stride, (count - 1) * stride + part.row_bytes


def _stride_there(part: Slice) -> int:
    return part.row_bytes if part.source_stride is None else part.source_stride


def _batches(part: Slice) -> Iterator[tuple[int, int]]:
    """(first run, runs) of each block."""
    batch = max(1, BLOCK_BYTES // max(1, part.stride, part.source_stride or 0))
    for row in range(0, part.rows, batch):
        yield row, min(batch, part.rows - row)


def _compare(part: Slice, out: Reader, source: Reader | None, on_bytes: Callable[[int], None]) -> list[Finding]:
    state = digest.hasher() if part.digest is not None else None
    findings: list[Finding] = []
    theirs = bytearray()
    at = 0
    origin = _original(part, part.source, source) if part.source is not None and source is not None else None
    for ours in _blocks(out, part.out.shard, part.start, part, part.stride):
        if not findings:
            if part.wanted is not None:
                theirs = bytearray(part.wanted[at : at + len(ours)])
            elif origin is not None:
                theirs = next(origin)
            if (part.wanted is not None or part.source is not None) and ours != theirs:
                findings.append(_difference(part, at + _first_difference(ours, theirs)))
        if state is not None:
            state.update(ours)
        elif findings:
            break
        at += len(ours)
        on_bytes(len(ours))
    if state is not None and state.hexdigest() != part.digest:
        findings.append(Finding("differs from the manifest's digest", part.out.shard, part.out.name, part.part))
    return findings


def _original(part: Slice, tensor: TensorInfo, source: Reader) -> Iterator[bytearray]:
    """The bytes that a slice has to equal, in blocks of the same sizes."""
    return _blocks(source, tensor.shard, tensor.start + part.source_start, part, _stride_there(part))


def _blocks(reader: Reader, shard: str, start: int, part: Slice, stride: int) -> Iterator[bytearray]:
    """The bytes of a slice's runs, `stride` apart on this side, in one buffer of about a MiB; gaps are read along."""
    block, gathered = bytearray(), bytearray()
    if part.rows == 1:
        for at in range(0, part.row_bytes, BLOCK_BYTES):
            _fill(block, min(BLOCK_BYTES, part.row_bytes - at), reader, shard, start + at)
            yield block
        return
    for row, count in _batches(part):
        length = (count - 1) * stride + part.row_bytes
        _fill(block, length, reader, shard, start + row * stride)
        if stride == part.row_bytes:
            yield block
            continue
        gathered.clear()
        for begin in range(0, length, stride or 1):
            gathered += block[begin : begin + part.row_bytes]
        yield gathered


def _fill(block: bytearray, size: int, reader: Reader, shard: str, offset: int) -> None:
    """Read into a buffer that is used again: blocks have one size, the last may be smaller."""
    del block[size:]
    block.extend(bytes(size - len(block)))
    reader.read_into(shard, offset, memoryview(block))


def _first_difference(ours: bytearray, theirs: bytearray) -> int:
    low, high = 0, len(ours)
    while high - low > 1:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _difference(part: Slice, offset: int) -> Finding:
    """Name the first differing byte by tensor, part and row; `offset` counts in the part's own bytes."""
    tensor = part.out
    row_bytes = part.row_bytes if part.rows > 1 else tensor_bytes(tensor.dtype, tensor.shape[1:][-1:])
    row = offset // row_bytes if row_bytes and tensor.shape else None
    within = offset if part.rows == 1 or row is None else row * part.stride + offset % part.row_bytes
    name = part.source.name if part.source is not None and part.part is None else tensor.name
    return Finding(
        "differs from the source" if part.wanted is None else "is not what it has to be",
        tensor.shard,
        name,
        part.part,
        part.first_row + row if row is not None else None,
        part.part_first_row + row if row is not None and part.part is not None else None,
        part.start - tensor.start + within,
    )
