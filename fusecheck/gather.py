"""The inner loop of every copy: rows of blocks -> pieces of output, bytes and digests together. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import Protocol

from fusecheck.digest import Hasher
from fusecheck.plan import Block
from fusecheck.reader import Reader

BLOCK_BYTES = 1 << 20
"""One buffer; it stays in the cache between read, hash and write, which larger ones do not."""


MAX_ROWS = 4096
"""Rows that are taken apart at once, where they do not follow one another."""


class Buffers(Protocol):
    """Where pieces are put together, and where rows that lie apart are read to."""

    def out(self, size: int) -> memoryview:
        """Where rows are put together before they are written."""

    def span(self, size: int) -> memoryview:
        """Where a block's rows are read to."""


class ReusedBuffers:
    """The two buffers of one worker; they grow for a row that is longer than a block, and are used again."""

    def __init__(self) -> None:
        self._out = self._span = bytearray()

    def out(self, size: int) -> memoryview:
        """The same memory each time: a piece is gone when the next is made."""
        if len(self._out) < size:
            self._out = bytearray(max(size, BLOCK_BYTES))
        return memoryview(self._out)[:size]

    def span(self, size: int) -> memoryview:
        """The same memory each time."""
        if len(self._span) < size:
            self._span = bytearray(max(size, BLOCK_BYTES))
        return memoryview(self._span)[:size]


class FreshBuffers(ReusedBuffers):
    """New memory for every piece, for one that waits in a queue."""

    def out(self, size: int) -> memoryview:
        """Memory of its own."""
        return memoryview(bytearray(size))


def reads(blocks: Sequence[Block]) -> Iterator[tuple[str, int, int]]:
    """(file, offset, size) of everything that `pieces` reads, in its order; a plain range of bytes is one."""
    if _is_range(blocks):
        yield blocks[0].file, blocks[0].offset, blocks[0].nbytes
        return
    for row, count in _batches(blocks):
        for block in blocks:
            yield block.file, block.offset + row * block.stride, (count - 1) * block.stride + block.row_bytes


def _batches(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each piece."""
    width = sum(block.row_bytes for block in blocks)
    batch = max(1, BLOCK_BYTES // max(width, *(block.stride for block in blocks)))
    batch = batch if _is_range(blocks) else min(batch, MAX_ROWS)
    for row in range(0, blocks[0].rows, batch):
        yield row, min(batch, blocks[0].rows - row)


def _is_range(blocks: Sequence[Block]) -> bool:
    return len(blocks) == 1 and blocks[0].stride == blocks[0].row_bytes


def pieces(blocks: Sequence[Block], reader: Reader, buffers: Buffers, states: Sequence[Hasher]) -> Iterator[memoryview]:
    """Some rows at a time: read each block's, put them side by side. Reads are batched, whatever the stride.

    `states` take the bytes of each block in its own order, so that a digest is that of the source's tensor.
    """
    for row, count in _batches(blocks):
        if _is_range(blocks):
            (block,) = blocks
            out = buffers.out(count * block.row_bytes)
            reader.read_into(block.file, block.offset + row * block.stride, out)
            states[0].update(out)
            yield out
        else:
            yield _side_by_side(blocks, row, count, reader, buffers, states)


def _side_by_side(
    blocks: Sequence[Block], row: int, count: int, reader: Reader, buffers: Buffers, states: Sequence[Hasher]
) -> memoryview:
    """`count` rows of every block; digest each block's."""
    columns: list[tuple[bytes, ...]] = []
    for block, state in zip(blocks, states, strict=True):
        span = buffers.span((count - 1) * block.stride + block.row_bytes)
        reader.read_into(block.file, block.offset + row * block.stride, span)
        columns.append(_rows(block.row_bytes, block.stride - block.row_bytes, count).unpack(span))
        joined = b"".join(columns[-1])
        state.update(joined)
    return memoryview(joined if len(blocks) == 1 else b"".join(chain.from_iterable(zip(*columns, strict=True))))


@lru_cache(maxsize=8)
def _rows(size: int, gap: int, count: int) -> Struct:
    """Takes rows apart in one call: a slice for each would cost more than its bytes."""
    return Struct(f"{size}s{gap}x" * (count - 1) + f"{size}s")
