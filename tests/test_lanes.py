"""Streams of planned files: the bytes and digests of `execute`, and each byte of the source read once for a whole lane."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import Spec, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryPublisher, MemorySource

from fusecheck import gather
from fusecheck.checkpoint import open_checkpoint
from fusecheck.errors import SystemFailure
from fusecheck.execute import execute
from fusecheck.job import Options, decide
from fusecheck.lanes import Lane, lane_reads, lanes_of, send
from fusecheck.plan import Block, Constant, PlannedFile
from fusecheck.stores import Windows

DATA = bytes(range(256)) * 64


def ignore(_: int) -> None:
    pass


def columns(of: int, rows: int, width: int) -> Lane:
    """A matrix at offset 3 cut into `of` files by columns, then one cut by rows, then padding of ones own."""
    files = []
    for rank in range(of):
        by_column = (Block("in", 3 + rank * width, rows, width, width * of),)
        by_row = (Block("in", 3 + rank * rows * width, rows * width, 1, 1),)
        files.append(PlannedFile(f"rank-{rank}", b"head%d" % rank, (by_column, Constant(b"\0" * rank), by_row)))
    return tuple(files)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 9), st.integers(1, 200))
def test_a_lane_is_what_execute_writes(
    tmp_path_factory: pytest.TempPathFactory, of: int, rows: int, width: int, block: int
) -> None:
    lane, source, target = columns(of, rows, width), MemorySource({"in": DATA}), MemoryPublisher()
    folder = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "BLOCK_BYTES", block)
        sent = send(lane, source, target, ignore, sha256=True)
        written = execute(lane, MemorySource({"in": DATA}), folder, threads=1, on_bytes=ignore)
        reads = list(lane_reads(lane))
    assert {item.file.path: item.written for item in sent} == {
        file.path: digests for file, digests in zip(lane, written, strict=True)
    }
    assert target.contents == {file.path: (folder / file.path).read_bytes() for file in lane}
    total = sum(size for _, _, size in source.seen)
    assert sum(size for _, _, size in reads) == total, "what is announced is what is read"
    assert set(reads) >= {read for read in source.seen if read[2] == rows * width}


def test_every_byte_of_the_source_is_fetched_once_for_all_files_of_a_lane() -> None:
    lane = columns(4, 64, 16)
    source, target = MemorySource({"in": DATA}), MemoryPublisher()
    with Windows(source, lane_reads(lane)) as windows:
        send(lane, windows, target, ignore)
    assert windows.bytes_fetched <= 2 * 4 * 64 * 16, "the columns once, the rows once: they are two strips"
    alone = MemoryPublisher()
    for file in lane:
        send((file,), MemorySource({"in": DATA}), alone, ignore)
    assert target.contents == alone.contents


def test_the_ranks_of_one_part_are_a_lane() -> None:
    names = [*(f"model-rank-{rank}-part-{part}.safetensors" for rank in (0, 1, 10) for part in (0, 1)), "config.json"]
    lanes = lanes_of(PlannedFile(name, b"", ()) for name in names)
    assert [[file.path for file in lane] for lane in lanes] == [names[0:6:2], names[1:6:2], ["config.json"]]


@pytest.mark.parametrize("of", [1, 3])
def test_a_put_that_fails_fails_the_lane_and_nothing_hangs(of: int) -> None:
    lane = columns(of, 600, 8)
    target = MemoryPublisher(fail="rank-0")
    with pytest.raises(SystemFailure, match="the store is gone"):
        send(lane, MemorySource({"in": DATA * 10}), target, ignore)
    assert "rank-0" not in target.contents


@pytest.mark.parametrize("of", [1, 3])
def test_a_source_that_fails_fails_every_put_of_the_lane(of: int) -> None:
    target = MemoryPublisher()
    with pytest.raises(SystemFailure, match="beyond its end"):
        send(columns(of, 600, 8), MemorySource({"in": DATA[:4000]}), target, ignore)
    assert not target.contents


def test_a_checkpoint_streams_to_the_very_bytes_of_fuse(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", Spec(files=3))
    with open_checkpoint(tmp_path / "in") as checkpoint:
        job = decide(checkpoint, Options())
        target = MemoryPublisher()
        done: list[int] = []
        for lane in lanes_of(job.files):
            send(lane, checkpoint.files, target, done.append)
        execute(job.files, checkpoint.files, tmp_path, threads=2, on_bytes=ignore)
    assert target.contents == {file.path: (tmp_path / file.path).read_bytes() for file in job.files}
    assert sum(done) == job.size
