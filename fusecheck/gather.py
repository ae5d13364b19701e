"""The inner loop of every copy: rows of blocks -> pieces of output, bytes and digests together. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fusecheck.digest import Hasher
from fusecheck.plan import Block
from fusecheck.reader import Reader

BLOCK_BYTES = 1 << 20
"""One buffer; it stays in the cache between read, hash and write, which larger ones do not."""


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
    if len(blocks) == 1 and blocks[0].stride == blocks[0].row_bytes:
        yield blocks[0].file, blocks[0].offset, blocks[0].nbytes
        return
    for row, count in _batches(blocks):
        for block in blocks:
            yield block.file, block.offset + row * block.stride, (count - 1) * block.stride + block.row_bytes


def _batches(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each piece."""
    width = sum(block.row_bytes for block in blocks)
    batch = max(1, BLOCK_BYTES // max(width, *(block.stride for block in blocks)))
    for row in range(0, blocks[0].rows, batch):
        yield row, min(batch, blocks[0].rows - row)


def pieces(blocks: Sequence[Block], reader: Reader, buffers: Buffers, states: Sequence[Hasher]) -> Iterator[memoryview]:
    """Some rows at a time: read each block's, put them side by side. Reads are batched, whatever the stride.

    `states` take the bytes of each block in its own order, so that a digest is that of the source's tensor.
    """
    width = sum(block.row_bytes for block in blocks)
    for row, count in _batches(blocks):
        out = buffers.out(count * width)
        column = 0
        for block, state in zip(blocks, states, strict=True):
            _gather(block, reader, (row, count), out[column:], width, state, buffers)
            column += block.row_bytes
        yield out


def _gather(
    block: Block,
    reader: Reader,
    rows: tuple[int, int],
    out: memoryview,
    width: int,
    state: Hasher,
    buffers: Buffers,
) -> None:
    """Read rows (first, count) of one block to where they belong in `out`, whose rows are `width` bytes apart; digest."""
    row, count = rows
    start, size = block.offset + row * block.stride, block.row_bytes
    if block.stride == size == width:
        reader.read_into(block.file, start, out)
        state.update(out)
        return
    span = buffers.span((count - 1) * block.stride + size)
    reader.read_into(block.file, start, span)
    for number in range(count):
        out[number * width : number * width + size] = span[number * block.stride : number * block.stride + size]
    if block.stride == size:
        state.update(span)
    else:
        for number in range(count):
            state.update(span[number * block.stride : number * block.stride + size])
