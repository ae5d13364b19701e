"""A checkpoint in a store is read as one in a folder: the same tensors, side files and refusals, in few requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import LEFT_OUT, SIDE_FILES, Spec, specs, write_checkpoint
from hypothesis import given
from memory_store import MemorySource, folder_files

from fusecheck.checkpoint import Checkpoint, open_checkpoint, open_stored
from fusecheck.errors import CheckpointError, FusecheckError, UsageError

Change = Callable[[Path], None]


def seen(checkpoint: Checkpoint) -> tuple[object, ...]:
    with checkpoint:
        config = checkpoint.config
        return (
            checkpoint.shards,
            dict(checkpoint.tensors),
            checkpoint.index_metadata,
            checkpoint.config_text,
            config,
            checkpoint.side_files,
            checkpoint.left_out,
            checkpoint.warnings,
        )


def outcome(opening: Callable[[], Checkpoint]) -> tuple[object, ...]:
    try:
        return seen(opening())
    except FusecheckError as error:
        return type(error), str(error)


def both(folder: Path) -> tuple[tuple[object, ...], tuple[object, ...]]:
    source = MemorySource(folder_files(folder))
    return outcome(lambda: open_checkpoint(folder)), outcome(lambda: open_stored(source, "s3://b/p"))


@given(specs())
def test_a_store_reads_as_a_folder(tmp_path_factory: pytest.TempPathFactory, spec: Spec) -> None:
    folder = tmp_path_factory.mktemp("in")
    write_checkpoint(folder, spec)
    here, there = both(folder)
    assert here == there


def write(name: str, data: bytes = b"x") -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return change


CHANGES: dict[str, Change] = {
    **{f"side file {name}": write(name) for name in (*SIDE_FILES, *LEFT_OUT)},
    "hidden folder": write(".git/config"),
    "deep": write("a/b/c/d/e.txt"),
    "weights below": write("onnx/model.onnx"),
    "named like weights": write("x.bin/readme.txt"),
    "module weights": lambda folder: (
        write("modules.json", json.dumps([{"path": "2_Dense"}]).encode())(folder),
        write("2_Dense/model.safetensors")(folder),
    )[0],
    "stray shard": write("stale.safetensors"),
    "forgotten shard": write("model-00009-of-00003.safetensors"),
    "both forms": write("model.safetensors"),
    "adapter": lambda folder: (
        write("adapter_model.safetensors")(folder),
        write("adapter_config.json", b"{}")(folder),
    )[0],
    "control character": write("a\x07b.txt"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no shard": lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(),
    "no index": lambda folder: (folder / "model.safetensors.index.json").unlink(),
    "pointer": write("model-00001-of-00003.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "empty shard": write("model-00001-of-00003.safetensors", b""),
    "cut shard": lambda folder: write(
        "model-00001-of-00003.safetensors", (folder / "model-00001-of-00003.safetensors").read_bytes()[:-1]
    )(folder),
    "pickle": write("model-00001-of-00003.safetensors", b"\x80\x02}q\x00." + b"\0" * 20),
    "bad index": write("model.safetensors.index.json", b"[]"),
    "bad config": write("config.json", b'{"model_type": "gpt2"}'),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_store_is_refused_as_a_folder_is(tmp_path: Path, change: Change) -> None:
    write_checkpoint(tmp_path / "in", Spec(files=3))
    change(tmp_path / "in")
    here, there = both(tmp_path / "in")
    assert here == there


def test_what_no_folder_can_hold_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Spec())
    source = MemorySource({**folder_files(tmp_path), "a": b"1", "a/b": b"2"})
    with pytest.raises(CheckpointError, match="a file and a folder at once"):
        open_stored(source, "s3://b/p")
    assert source.closed


def test_names_that_no_path_has_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Spec())
    source = MemorySource({**folder_files(tmp_path), "a//b": b"1", "marker/": b""})
    with open_stored(source, "s3://b/p") as found:
        assert [item.path for item in found.left_out] == ["a/"]


def test_nothing_is_no_checkpoint() -> None:
    with pytest.raises(UsageError, match="nothing is there"):
        open_stored(MemorySource({}), "s3://b/p")


def test_a_header_takes_one_request_and_no_data_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Spec(files=20))
    source = MemorySource.of(tmp_path)
    with open_stored(source, "s3://b/p") as found:
        shards = [shard.name for shard in found.shards]
        assert sorted(file for file, _, _ in source.seen) == sorted(
            [*shards, "config.json", "model.safetensors.index.json"]
        )
