"""Folders: a good checkpoint, bent in one way at a time, and the file, tensor, found and wanted of its refusal."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    INDEX,
    NUMBERED,
    ONE_PER_FILE,
    Spec,
    Tensor,
    Tensors,
    config,
    serialized,
    specs,
    tensors,
    write_checkpoint,
    write_safetensors,
)
from hypothesis import given
from hypothesis import strategies as st

from fusecheck.checkpoint import Checkpoint, open_checkpoint, read_shard
from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UsageError, printable
from fusecheck.files import MAX_OPEN, Files
from fusecheck.model import Model, survey
from fusecheck.shards import natural_key

ONE, TWO = NUMBERED.format(1, 2), NUMBERED.format(2, 2)
SINGLE = "model.safetensors"
LAYER = "model.layers.1."
TINY = Spec(hidden_size=4, head_dim=2, intermediate_size=3, vocab_size=2)
"""head counts 4 and 2, so q has 8 rows, k and v 4; 2 layers."""
SHARDED = Spec(hidden_size=4, head_dim=2, intermediate_size=3, vocab_size=2, files=2)
STRAY: dict[str, Tensor] = {"stray": ("U8", (1,), b"\0")}


def read(folder: Path, *, follow_links: bool = False) -> tuple[Checkpoint, Model]:
    """All that is checked before a byte is written; the checkpoint is closed again."""
    with open_checkpoint(folder, follow_links=follow_links) as checkpoint:
        return checkpoint, survey(checkpoint.tensors, checkpoint.config, checkpoint.peek)


def refusal(folder: Path) -> FusecheckError:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - iterdir would hold one more
    with pytest.raises(FusecheckError) as caught:
        read(folder)
    error = caught.value
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert printable(str(error)) == str(error)
    assert "\n" not in str(error)
    return error


# ----------------------------------------------------------------------------------------------------------- accepted


@given(specs())
def test_every_good_checkpoint_is_read_with_every_tensor(spec: Spec) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "in"
        source = write_checkpoint(folder, spec)
        with open_checkpoint(folder) as checkpoint:
            model = survey(checkpoint.tensors, checkpoint.config, checkpoint.peek)
            for tensor in checkpoint.tensors.values():
                data = bytearray(tensor.nbytes)
                checkpoint.files.read_into(tensor.shard, tensor.start, memoryview(data))
                assert (tensor.dtype, tensor.shape, bytes(data)) == source[tensor.name]
            checkpoint.files.check_unchanged()
        assert checkpoint.tensors.keys() == source.keys()
        assert model.prefix == spec.prefix
        assert len(model.split) == spec.num_hidden_layers * (3 if spec.bias else 2)
        assert {file.path for file in checkpoint.side_files} == set(spec.side_files)
        assert {item.path for item in checkpoint.left_out} == set(spec.left_out)


@given(specs(num_hidden_layers=2))
def test_groups_are_parts_in_row_order(spec: Spec) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name) / "in", spec)
        _, model = read(Path(name) / "in")
    for group in model.split:
        ends = [part.tensor.name.split(".")[-2] for part in group.parts]
        assert ends == (["q_proj", "k_proj", "v_proj"] if "qkv" in group.fused else ["gate_proj", "up_proj"])
        offset = 0
        for part, end in zip(group.parts, ends, strict=True):
            assert (part.rows.shard_offset, part.rows.shard_size) == (offset, spec.rows[end]), group.fused
            offset += part.rows.shard_size
        assert group.shape[0] == offset


@given(st.permutations(range(1, 130)))
def test_shards_are_ordered_as_people_count(numbers: list[int]) -> None:
    names = [f"m{number}_x.safetensors" for number in numbers]
    assert sorted(names, key=natural_key) == [f"m{number}_x.safetensors" for number in range(1, 130)]


def test_more_shards_than_are_held_open_at_once(tmp_path: Path) -> None:
    spec = Spec(num_hidden_layers=26, hidden_size=2, head_dim=2, intermediate_size=2, vocab_size=2, files=ONE_PER_FILE)
    source = write_checkpoint(tmp_path, spec)
    assert len(source) > MAX_OPEN
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(os.listdir("/proc/self/fd")) - before <= MAX_OPEN  # noqa: PTH208
        assert len(checkpoint.shards) == len(source)
        assert [shard.name for shard in checkpoint.shards] == [t.shard for t in checkpoint.tensors.values()]
        last = checkpoint.tensors[[*checkpoint.tensors][-1]]
        buffer = bytearray(last.nbytes)
        checkpoint.files.read_into(last.shard, last.start, memoryview(buffer))
        assert bytes(buffer) == source[last.name][2]
        checkpoint.files.check_unchanged()
        (tmp_path / last.shard).write_bytes(b"other")
        with pytest.raises(SystemFailure, match="changed while it was read"):
            checkpoint.files.read_into(last.shard, last.start, memoryview(buffer))
        (tmp_path / last.shard).unlink()
        with pytest.raises(SystemFailure, match="changed while it was read"):
            checkpoint.files.read_into(last.shard, last.start, memoryview(buffer))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_source_that_shrinks_while_it_is_read_is_no_crash(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / SINGLE, 100)
        tensor = [*checkpoint.tensors.values()][-1]
        with pytest.raises(SystemFailure, match="became shorter"):
            checkpoint.files.read_into(SINGLE, tensor.start, memoryview(bytearray(tensor.nbytes)))
        with pytest.raises(SystemFailure, match="changed while it was read"):
            checkpoint.files.check_unchanged()


# -------------------------------------------------------------------------------------------------- bends of a folder

Bend = Callable[[Path], object]


def unlink(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def put(name: str, data: bytes = b"") -> Bend:
    return lambda folder: (folder / name).write_bytes(data)


def replaced(name: str, how: Callable[[Path], object]) -> Bend:
    def bend(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        how(folder / name)

    return bend


def remove(*names: str) -> Bend:
    return lambda folder: unlink(folder, *names)


def index(change: Callable[[dict[str, Any]], object]) -> Bend:
    def bend(folder: Path) -> None:
        value = json.loads((folder / INDEX).read_bytes())
        change(value)
        (folder / INDEX).write_text(json.dumps(value), encoding="utf-8")

    return bend


def listed(**shards: str) -> Bend:
    return index(lambda value: value["weight_map"].update(shards))


def cut(name: str, size: int) -> Bend:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size + size if size < 0 else size)


def stray(name: str) -> Bend:
    return lambda folder: write_safetensors(folder / name, STRAY)


def many(*bends: Bend) -> Bend:
    return lambda folder: [bend(folder) for bend in bends]


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


NORM = "model.norm.weight"
SHARDED_BENDS: dict[str, tuple[Bend, str, str]] = {  # bend, file, words
    "a listed shard is missing": (remove(TWO), INDEX, f"missing: {TWO}"),
    "a listed shard is a folder": (replaced(TWO, Path.mkdir), TWO, "a folder"),
    "a listed shard dangles": (replaced(TWO, lambda p: p.symlink_to("nowhere")), TWO, "dangling link"),
    "a listed shard links to itself": (replaced(TWO, lambda p: p.symlink_to(p.name)), TWO, "leads to itself"),
    "a shard of the set is not listed": (
        stray(NUMBERED.format(3, 2)),
        NUMBERED.format(3, 2),
        "belongs to the numbered set",
    ),
    "the single file beside an index": (stray(SINGLE), SINGLE, "two readers would load two models"),
    "the single file beside shards": (many(stray(SINGLE), remove(INDEX)), SINGLE, "two readers would load two models"),
    "no index, an incomplete set": (remove(INDEX, ONE), "model-*-of-00002.safetensors", "shard 1 of 2 is missing"),
    "no index, two sets": (many(remove(INDEX), stray(NUMBERED.format(1, 3))), ONE, "several numbered sets"),
    "no index, a number twice": (
        many(remove(INDEX), stray("model-1-of-00002.safetensors")),
        "model-*-of-00002.safetensors",
        "repeat",
    ),
    "no index, a number too high": (
        many(remove(INDEX), stray(NUMBERED.format(3, 2))),
        "model-*-of-00002.safetensors",
        "pass the total",
    ),
    "no index, a tensor twice": (
        many(remove(INDEX), lambda f: shutil.copy(f / ONE, f / TWO)),
        TWO,
        "two shards",
    ),
    "index names an unknown tensor": (listed(ghost=ONE), INDEX, "a tensor that its shard lacks"),
    "index forgets a tensor": (
        index(lambda v: v["weight_map"].pop(NORM)),
        TWO,
        f"{NORM}: holds a tensor that {INDEX} does not name",
    ),
    "index names another shard": (listed(**{NORM: ONE}), INDEX, f"{NORM}: the index names another shard"),
    "index is empty": (put(INDEX), INDEX, "not valid JSON"),
    "index is a list": (put(INDEX, b"[]"), INDEX, "no weight_map"),
    "index has no map": (put(INDEX, b"{}"), INDEX, "no weight_map"),
    "index maps nothing": (put(INDEX, b'{"weight_map":{}}'), INDEX, "no weight_map"),
    "index has a mark": (put(INDEX, b'\xef\xbb\xbf{"weight_map":{"a":"a.safetensors"}}'), INDEX, "byte order mark"),
    "index repeats a key": (
        put(INDEX, b'{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}'),
        INDEX,
        "a: the same key stands twice",
    ),
    "index holds NaN": (put(INDEX, b'{"metadata":{"x":NaN},"weight_map":{"a":"a.safetensors"}}'), INDEX, "not finite"),
    "index metadata is a list": (index(lambda v: v.update(metadata=[])), INDEX, "metadata is no object"),
    "index maps to a number": (put(INDEX, b'{"weight_map":{"a":1}}'), INDEX, "no plain safetensors file name"),
    "index is a FIFO": (replaced(INDEX, os.mkfifo), INDEX, "a FIFO"),
    "index is a folder": (replaced(INDEX, Path.mkdir), INDEX, "a folder"),
    "index dangles": (replaced(INDEX, lambda p: p.symlink_to("nowhere")), INDEX, "dangling link"),
    "index is too large": (lambda f: os.truncate(f / INDEX, (64 << 20) + 1), INDEX, "too large"),
    **{
        f"index leads to {name!r}": (listed(**{NORM: name}), INDEX, "no plain safetensors file name")
        for name in (
            "../x.safetensors",
            "/x.safetensors",
            "a/x.safetensors",
            ".x.safetensors",
            "x.bin",
            "",
            "a\n.safetensors",
            "x.safetensors\n",
            "x.safetensors/",
            "-x.safetensors",
            "\u00e9.safetensors",
            "x\x00.safetensors",
            "x.SAFETENSORS",
        )
    },
}
FILE_BENDS: dict[str, tuple[Bend, str, str]] = {
    "no folder": (shutil.rmtree, "", "is no folder"),
    "nothing": (remove(SINGLE), SINGLE, "no weights"),
    "no config": (remove("config.json"), "config.json", "is missing"),
    "config is a FIFO": (replaced("config.json", os.mkfifo), "config.json", "a FIFO"),
    "config is a folder": (replaced("config.json", Path.mkdir), "config.json", "a folder"),
    "config is a list": (put("config.json", b"[]"), "config.json", "not a JSON object"),
    "config is too large": (lambda f: os.truncate(f / "config.json", (64 << 20) + 1), "config.json", "too large"),
    "only .bin": (many(remove(SINGLE), put("pytorch_model.bin")), "pytorch_model.bin", "convert the checkpoint"),
    "only a checkpoint": (many(remove(SINGLE), put("model.ckpt")), "model.ckpt", "convert the checkpoint"),
    "only an adapter": (
        many(remove(SINGLE), stray("adapter_model.safetensors")),
        "adapter_model.safetensors",
        "merge it",
    ),
    "another name": (
        lambda f: (f / SINGLE).rename(f / "weights.safetensors"),
        "weights.safetensors",
        f"rename it to {SINGLE}",
    ),
    "two of other names": (
        many(remove(SINGLE), stray("b.safetensors"), stray("a.safetensors")),
        "a.safetensors, b.safetensors",
        "rename",
    ),
    "a folder": (replaced(SINGLE, Path.mkdir), SINGLE, "a folder"),
    "a FIFO": (replaced(SINGLE, os.mkfifo), SINGLE, "a FIFO"),
    "a socket": (replaced(SINGLE, a_socket), SINGLE, "a socket"),
    "a device": (replaced(SINGLE, lambda p: p.symlink_to("/dev/zero")), SINGLE, "a device"),
    "a dangling link": (replaced(SINGLE, lambda p: p.symlink_to("nowhere")), SINGLE, "dangling link"),
    "a link to itself": (replaced(SINGLE, lambda p: p.symlink_to(SINGLE)), SINGLE, "leads to itself"),
    "empty": (put(SINGLE), SINGLE, "is empty"),
    "seven bytes": (put(SINGLE, b"\2" + bytes(6)), SINGLE, "too short"),
    "no header": (put(SINGLE, b"\2" + bytes(7)), SINGLE, "reaches beyond the file"),
    "cut in the header": (cut(SINGLE, 100), SINGLE, "wanted at least 8 + "),
    "cut in the data": (cut(SINGLE, -1), SINGLE, "truncated (an incomplete download?): found "),
    "trailing bytes": (
        lambda f: put(SINGLE, (f / SINGLE).read_bytes() + b"\0")(f),
        SINGLE,
        "bytes follow the last tensor",
    ),
    "a header too large": (
        many(put(SINGLE, b"\1\0\0\1" + bytes(4)), lambda f: os.truncate(f / SINGLE, 1 << 25)),
        SINGLE,
        "--max-header-size",
    ),
    "a Git LFS pointer": (
        put(SINGLE, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        SINGLE,
        "git lfs pull",
    ),
    "a pickle": (put(SINGLE, b"\x80\x02}q\x00." + bytes(99)), SINGLE, "never unpickles"),
    "a zip": (put(SINGLE, b"PK\x03\x04" + bytes(99)), SINGLE, "zip archive"),
    "GGUF": (put(SINGLE, b"GGUF" + bytes(99)), SINGLE, "GGUF"),
    "gzip": (put(SINGLE, b"\x1f\x8b\x08" + bytes(99)), SINGLE, "gunzip"),
    "a web page": (put(SINGLE, b"<!DOCTYPE html>"), SINGLE, "HTML"),
    "no tensor": (put(SINGLE, b"\2" + bytes(7) + b"{}"), SINGLE, "holds no tensor"),
    "a side link out": (lambda f: (f / "README.md").symlink_to("/etc/hostname"), "README.md", "--follow-links"),
    "a folder link out": (lambda f: (f / "docs").symlink_to("/etc"), "docs", "--follow-links"),
    "a side link to nothing": (lambda f: (f / "README.md").symlink_to("nowhere"), "README.md", "dangling link"),
    "a side link to itself": (lambda f: (f / "README.md").symlink_to("README.md"), "README.md", "cannot be followed"),
}


@pytest.mark.parametrize(("bend", "file", "words"), SHARDED_BENDS.values(), ids=SHARDED_BENDS.keys())
def test_a_sharded_folder_is_refused(tmp_path: Path, bend: Bend, file: str, words: str) -> None:
    write_checkpoint(tmp_path, SHARDED)
    bend(tmp_path)
    error = refusal(tmp_path)
    assert isinstance(error, CheckpointError)
    assert error.file == file
    assert words in str(error)


@pytest.mark.parametrize(("bend", "file", "words"), FILE_BENDS.values(), ids=FILE_BENDS.keys())
def test_a_folder_is_refused(tmp_path: Path, bend: Bend, file: str, words: str) -> None:
    folder = tmp_path / "in"
    write_checkpoint(folder, TINY)
    bend(folder)
    error = refusal(folder)
    assert error.exit_code == (3 if file else 2)
    assert isinstance(error, UsageError if not file else CheckpointError)
    assert file in str(error.file)
    assert words in str(error)


def test_a_truncated_file_has_both_sizes_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    size = (tmp_path / SINGLE).stat().st_size
    cut(SINGLE, -5)(tmp_path)
    error = refusal(tmp_path)
    assert (error.found, error.wanted) == (f"{size - 5} bytes", f"{size} bytes")


def test_a_length_that_looks_like_a_pickle_is_read(tmp_path: Path) -> None:
    header = b'{"__metadata__":{"x":"' + b"y" * (0x280 - 25) + b'"}}'
    assert len(header).to_bytes(2, "little") == b"\x80\x02"
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with Files(tmp_path) as files:
        assert read_shard(files, "x.safetensors")[1].tensors == ()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with Files(tmp_path) as files, pytest.raises(CheckpointError, match="bytes follow the last tensor"):
        read_shard(files, "x.safetensors")


def test_a_header_is_never_read_beyond_what_the_library_reads(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(tmp_path / "x.safetensors", 100_000_100)
    with Files(tmp_path) as files, pytest.raises(CheckpointError, match=r"wanted <= 100000000\Z"):
        read_shard(files, "x.safetensors", 10**12)


def test_a_larger_header_is_read_when_asked_for(tmp_path: Path) -> None:
    blob = b"{}" + b" " * (17 << 20)
    (tmp_path / "x.safetensors").write_bytes(len(blob).to_bytes(8, "little") + blob)
    with Files(tmp_path) as files, pytest.raises(CheckpointError, match="raise --max-header-size"):
        read_shard(files, "x.safetensors")
    with Files(tmp_path) as files:
        assert read_shard(files, "x.safetensors", 18 << 20)[1].tensors == ()


# ------------------------------------------------------------------------------------------- beside the model's own files


def beside(tmp_path: Path, bend: Bend, spec: Spec = TINY, *, follow_links: bool = False) -> Checkpoint:
    """The checkpoint, read after a bend that must change no tensor of it."""
    folder = tmp_path / "in"
    source = write_checkpoint(folder, spec)
    bend(folder)
    checkpoint, _ = read(folder, follow_links=follow_links)
    assert checkpoint.tensors.keys() == source.keys()
    return checkpoint


def said(checkpoint: Checkpoint) -> str:
    return " ".join(checkpoint.warnings)


def reason(checkpoint: Checkpoint, path: str) -> str:
    return next(item.reason for item in checkpoint.left_out if item.path == path)


STRANGERS = ("consolidated.safetensors", "model.fp16.safetensors", "model-1-of-x.safetensors")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        *((TINY, n) for n in STRANGERS),
        *((SHARDED, n) for n in (*STRANGERS, NUMBERED.format(1, 7), "x-1-of-2.safetensors")),
    ],
)
def test_other_weight_files_are_ignored_and_reported(tmp_path: Path, spec: Spec, name: str) -> None:
    checkpoint = beside(tmp_path, stray(name), spec)
    assert name in said(checkpoint)
    assert reason(checkpoint, name) == "a weight file that is not read"


def test_a_complete_set_without_an_index_is_read_and_said_so(tmp_path: Path) -> None:
    checkpoint = beside(tmp_path, remove(INDEX), SHARDED)
    assert "an index is made" in said(checkpoint)
    assert checkpoint.index_metadata is None
    assert [shard.name for shard in checkpoint.shards] == [ONE, TWO]


def test_an_adapter_beside_the_model_is_left_out_with_a_warning(tmp_path: Path) -> None:
    checkpoint = beside(tmp_path, many(stray("adapter_model.safetensors"), put("adapter_config.json", b"{}")))
    assert "the adapter is left out" in said(checkpoint)
    assert [item.path for item in checkpoint.left_out] == ["adapter_config.json", "adapter_model.safetensors"]
    assert checkpoint.side_files == ()


def test_a_folder_named_like_a_weight_file_is_left_out(tmp_path: Path) -> None:
    def bend(folder: Path) -> None:
        (folder / "model-00001-of-00002.safetensors").mkdir()
        (folder / "x.bin").mkdir()
        (folder / "x.bin" / "README.md").touch()

    checkpoint = beside(tmp_path, bend)
    assert [item.path for item in checkpoint.left_out] == ["model-00001-of-00002.safetensors", "x.bin"]
    assert checkpoint.side_files == ()


def test_side_files_go_three_folders_deep_and_hidden_ones_not_at_all(tmp_path: Path) -> None:
    def bend(folder: Path) -> None:
        for path in ("a/b/c/d/deep.txt", "a/b/c/three.txt", ".git/config", "a/.hidden", ".env", "a/x.pt"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text("x", encoding="utf-8")

    checkpoint = beside(tmp_path, bend)
    assert [(file.path, file.size) for file in checkpoint.side_files] == [("a/b/c/three.txt", 1)]
    assert reason(checkpoint, "a/b/c/d") == "deeper than 3 folders"
    assert {i.path for i in checkpoint.left_out} == {"a/b/c/d", ".git", "a/.hidden", ".env", "a/x.pt"}


def test_weights_in_folders_only_where_modules_json_names_them(tmp_path: Path) -> None:
    def bend(folder: Path) -> None:
        modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}, 3, {"path": 4}]
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        for name in ("2_Dense", "3_Other"):
            (folder / name).mkdir()
            write_safetensors(folder / name / SINGLE, STRAY)
            (folder / name / "config.json").write_text("{}", encoding="utf-8")

    checkpoint = beside(tmp_path, bend)
    paths = [file.path for file in checkpoint.side_files]
    assert paths == [f"2_Dense/{'config.json'}", f"2_Dense/{SINGLE}", "3_Other/config.json", "modules.json"]
    assert reason(checkpoint, f"3_Other/{SINGLE}") == "a weight file that is not read"


@pytest.mark.parametrize("name", ["a\n.json", "\x1b[31m.txt", "\u202egnp.exe", "a\u200b.md", os.fsdecode(b"\xff.json")])
def test_hostile_names_are_left_out_and_printable(tmp_path: Path, name: str) -> None:
    checkpoint = beside(tmp_path, put(name, b"x"))
    assert reason(checkpoint, name) == "its name holds control, invisible or undecodable characters"


def test_what_is_no_regular_file_is_left_out(tmp_path: Path) -> None:
    checkpoint = beside(tmp_path, many(lambda f: os.mkfifo(f / "pipe.txt"), lambda f: a_socket(f / "sock.json")))
    assert [item.reason for item in checkpoint.left_out] == ["no regular file", "no regular file"]


def test_descriptions_of_the_source_are_made_anew(tmp_path: Path) -> None:
    checkpoint = beside(
        tmp_path, many(put("fusecheck.json", b"{}"), put("SHA256SUMS", b"x"), put("x.index.json", b"{}"))
    )
    assert checkpoint.side_files == ()
    assert len(checkpoint.left_out) == 3


def test_links_inside_the_folder_and_to_a_hub_cache_are_followed(tmp_path: Path) -> None:
    def bend(folder: Path) -> None:
        blobs = tmp_path / "models--a--b" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / "0").write_bytes(b"xyz")
        (folder / "LICENSE").symlink_to(blobs / "0")
        (folder / "merges.txt").symlink_to("LICENSE")

    checkpoint = beside(tmp_path, bend)
    assert [(file.path, file.size) for file in checkpoint.side_files] == [("LICENSE", 3), ("merges.txt", 3)]


def test_other_links_are_followed_when_asked_for(tmp_path: Path) -> None:
    def bend(folder: Path) -> None:
        (tmp_path / "far").mkdir()
        (tmp_path / "far" / "notes.txt").write_text("x", encoding="utf-8")
        (folder / "docs").symlink_to(tmp_path / "far")

    assert [file.path for file in beside(tmp_path, bend, follow_links=True).side_files] == ["docs/notes.txt"]


def test_weights_index_and_config_may_be_links_to_anywhere(tmp_path: Path) -> None:
    def bend(folder: Path) -> None:
        for name in (ONE, TWO, INDEX, "config.json"):
            (folder / name).rename(tmp_path / name)
            (folder / name).symlink_to(tmp_path / name)

    assert len(beside(tmp_path, bend, SHARDED).shards) == 2


# -------------------------------------------------------------------------------------------------- bends of the tensors

Change = Callable[[Tensors], object]


def bent(
    folder: Path, change: Change, spec: Spec = TINY, keys: Mapping[str, object] | None = None
) -> tuple[Checkpoint, Model]:
    content = tensors(spec)
    change(content)
    (folder / "config.json").write_text(json.dumps({**config(spec), **(keys or {})}), encoding="utf-8")
    (folder / SINGLE).write_bytes(serialized(content))
    return read(folder)


def shaped(name: str, *shape: int, dtype: str = "BF16") -> Change:
    size = 2 if dtype in {"BF16", "F16", "I16"} else 1
    for dimension in shape:
        size *= dimension
    return lambda content: content.update({name: (dtype, shape, bytes(size))})


def drop(*names: str) -> Change:
    return lambda content: [content.pop(name) for name in names]


def both(*changes: Change) -> Change:
    return lambda content: [change(content) for change in changes]


def prefixed(prefix: str) -> Change:
    def change(content: Tensors) -> None:
        for name in list(content):
            content[f"{prefix}{name}"] = content.pop(name)

    return change


def renamed(old: str, new: str) -> Change:
    return lambda content: content.update({new: content.pop(old)})


Q, K, V = (f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv")
GATE, UP = f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"
TENSOR_BENDS: dict[str, tuple[Change, str, str]] = {  # change, tensor, words
    **{f"without {name[15:]}": (drop(name), name, "layer 1 is incomplete: a part of") for name in (Q, K, V, GATE, UP)},
    "without q, k and v": (drop(Q, K, V), Q, "no part at all"),
    "without a layer": (lambda c: [c.pop(name) for name in list(c) if name.startswith(LAYER)], Q, "incomplete"),
    "a layer more": (
        shaped("model.layers.2.mlp.up_proj.weight", 3, 4),
        "model.layers.2.mlp.up_proj.weight",
        "num_hidden_layers 2",
    ),
    "a layer with a leading zero": (
        renamed(Q, Q.replace(".1.", ".01.")),
        Q.replace(".1.", ".01."),
        "no plain layer number",
    ),
    "a layer of other digits": (
        renamed(Q, Q.replace(".1.", ".\u0661.")),
        Q.replace(".1.", ".\u0661."),
        "no plain layer number",
    ),
    "a layer without a number": (renamed(Q, Q.replace(".1.", "..")), Q.replace(".1.", ".."), "no plain layer number"),
    "Cyrillic a": (renamed(Q, Q.replace("attn", "\u0430ttn")), Q, "incomplete"),
    "q has too many rows": (shaped(Q, 9, 4), Q, "found [9, 4], wanted [8, 4] (weight_loader rows for shard_id 'q')"),
    "k has the rows of q": (shaped(K, 8, 4), K, "found [8, 4], wanted [4, 4]"),
    "v has other in_features": (shaped(V, 4, 5), V, "found [4, 5], wanted [4, 4]"),
    "v is transposed": (shaped(GATE, 4, 3), GATE, "found [4, 3], wanted [3, 4]"),
    "up is flat": (shaped(UP, 12), UP, "found [12], wanted [3, 4]"),
    "k has another dtype": (shaped(K, 4, 4, dtype="F16"), K, "wanted BF16, as "),
    "up has another dtype": (shaped(UP, 3, 4, dtype="F8_E4M3"), UP, "--keep-split"),
    "q alone is an integer": (shaped(Q, 8, 4, dtype="I8"), "", "dtype"),
    "gate and up are integers": (both(shaped(GATE, 3, 4, dtype="I8"), shaped(UP, 3, 4, dtype="I8")), GATE, "I8"),
    "a bias on q alone": (
        shaped(Q.replace("weight", "bias"), 8),
        Q.replace("weight", "bias"),
        "attention_bias",
    ),
    "a bias on gate": (shaped(GATE.replace("weight", "bias"), 3), GATE.replace("weight", "bias"), "mlp_bias"),
    "scales on q alone": (shaped(Q.replace("weight", "weight_scale"), 1), "weight_scale", "qkv_proj is missing"),
    "scales that the config does not declare": (
        both(*(shaped(name.replace("weight", "weight_scale"), 3, 1) for name in (GATE, UP))),
        "gate_proj.weight_scale",
        "does not explain",
    ),
    "GPTQ on q alone": (shaped(Q.replace("weight", "qweight"), 1, dtype="I8"), "qweight", "qkv_proj is missing"),
    "both forms": (
        shaped(f"{LAYER}self_attn.qkv_proj.weight", 16, 4),
        f"{LAYER}self_attn.qkv_proj.weight",
        "both forms",
    ),
    "two prefixes": (
        shaped("layers.0.mlp.up_proj.weight", 3, 4),
        "layers.0.",
        "two prefixes at once",
    ),
    "compiled": (prefixed("_orig_mod."), "_orig_mod.", "torch.compile"),
    "DataParallel": (prefixed("module."), "module.", "DataParallel"),
    "peft": (prefixed("base_model.model."), "base_model.model.", "merge_and_unload"),
    "LoRA": (shaped(Q.replace("weight", "lora_A.default.weight"), 1, 4), "lora_A", "merge_and_unload"),
    "a base layer": (renamed(Q, Q.replace("weight", "base_layer.weight")), "base_layer", "unmerged LoRA"),
    "an unknown prefix": (prefixed("transformer."), "", "found transformer."),
    "no norm": (drop(NORM), NORM, "missing: wanted shape [4]"),
    "a norm of another size": (shaped(NORM, 5), NORM, "found [5], wanted [4]"),
    "no q_norm": (drop(f"{LAYER}self_attn.q_norm.weight"), f"{LAYER}self_attn.q_norm.weight", "wanted shape [2]"),
    "no o_proj": (drop(f"{LAYER}self_attn.o_proj.weight"), f"{LAYER}self_attn.o_proj.weight", "wanted shape [4, 8]"),
    "no down_proj": (drop(f"{LAYER}mlp.down_proj.weight"), f"{LAYER}mlp.down_proj.weight", "wanted shape [4, 3]"),
    "no input norm": (drop(f"{LAYER}input_layernorm.weight"), f"{LAYER}input_layernorm.weight", "missing"),
    "no embedding": (drop("model.embed_tokens.weight"), "model.embed_tokens.weight", "wanted shape [2, 4]"),
    "a short embedding": (shaped("model.embed_tokens.weight", 1, 4), "model.embed_tokens.weight", "found [1, 4]"),
    "a wrong head": (shaped("lm_head.weight", 3, 4), "lm_head.weight", "found [3, 4], wanted [2, 4]"),
    "a wrong o_proj bias": (shaped(f"{LAYER}self_attn.o_proj.bias", 3), f"{LAYER}self_attn.o_proj.bias", "found [3]"),
}


@pytest.mark.parametrize(("change", "tensor", "words"), TENSOR_BENDS.values(), ids=TENSOR_BENDS.keys())
def test_tensors_that_make_no_model(tmp_path: Path, change: Change, tensor: str, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        bent(tmp_path, change)
    error = caught.value
    assert tensor in str(error.tensor)
    assert error.file in {SINGLE, "config.json"}
    assert words in str(error)
    assert printable(str(error)) == str(error)


BIAS = Spec(hidden_size=4, head_dim=2, intermediate_size=3, vocab_size=2, bias=True)


@pytest.mark.parametrize(
    ("gone", "words"),
    [("q", "some parts"), ("k", "some parts"), ("v", "some parts"), ("qkv", "no bias on self_attn.qkv_proj")],
)
def test_a_bias_on_some_parts_or_in_some_layers_only(tmp_path: Path, gone: str, words: str) -> None:
    names = [f"{LAYER}self_attn.{part}_proj.bias" for part in gone]
    with pytest.raises(CheckpointError) as caught:
        bent(tmp_path, drop(*names), BIAS)
    assert caught.value.tensor == names[0]
    assert words in str(caught.value)


def test_the_rows_of_a_bias_are_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"found \[8\], wanted \[4\]"):
        bent(tmp_path, shaped(f"{LAYER}self_attn.k_proj.bias", 8), BIAS)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_hidden_layers": 3}, "layer 2 is incomplete"),
        ({"num_hidden_layers": 1}, "num_hidden_layers 1, so layers 0 to 0"),
        ({"num_attention_heads": 2}, "found [8, 4], wanted [4, 4]"),
        ({"num_key_value_heads": 4}, "found [4, 4], wanted [8, 4]"),
        ({"num_key_value_heads": None}, "found [4, 4], wanted [8, 4]"),
        ({"head_dim": 4}, "found [8, 4], wanted [16, 4]"),
        ({"head_dim": None}, "wanted [4, 4]"),
        ({"hidden_size": 5}, "wanted [8, 5]"),
        ({"intermediate_size": 4}, "found [3, 4], wanted [4, 4]"),
        ({"vocab_size": 3}, "found [2, 4], wanted [3, 4]"),
        ({"attention_bias": True}, "no bias on self_attn.qkv_proj"),
        ({"num_hidden_layers": 2**31 - 1}, "layer 2 is incomplete"),
    ],
)
def test_a_config_that_contradicts_the_tensors(tmp_path: Path, keys: Mapping[str, object], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        bent(tmp_path, lambda _: None, keys=keys)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("model.v_projector.up_proj_norm.weight", "visual.layers.01.self_attn.q_proj.weight", "mtp.layers.0.x"),
        *(
            "model.layers.1.mlp.gate.weight",
            f"{LAYER}self_attn.k_proj.k_scale",
            f"{LAYER}self_attn.rotary_emb.inv_freq",
        ),
        *("q_proj.weight", "module", "x.module.y", "model.layersx.0.y"),
    ],
)
def test_strangers_are_kept_and_change_nothing(tmp_path: Path, name: str) -> None:
    checkpoint, model = bent(tmp_path, shaped(name, 1))
    assert name in checkpoint.tensors
    assert len(model.split) == 4
    assert name not in {part.tensor.name for group in model.split for part in group.parts}


def test_an_untied_model_without_a_head_is_warned_about(tmp_path: Path) -> None:
    _, model = bent(tmp_path, lambda _: None, keys={"tie_word_embeddings": False})
    assert "lm_head.weight is absent" in " ".join(model.warnings)
    assert model.head is None


def test_code_in_the_config_is_warned_about(tmp_path: Path) -> None:
    checkpoint, model = bent(tmp_path, lambda _: None, keys={"auto_map": {"AutoModel": "x.Y"}})
    assert "never run" in " ".join((*checkpoint.warnings, *model.warnings))
