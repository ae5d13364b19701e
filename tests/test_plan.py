"""Plan, execute and manifest as values: what is decided is data, and carrying it out decides nothing."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from blake3 import blake3
from checkpoints import NUMBERED, ONE_PER_FILE, Spec, canonical_order, config, fused, grouping, specs, tensors
from hypothesis import example, given
from hypothesis import strategies as st

from fusecheck.config import parse_config
from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UsageError
from fusecheck.execute import Written, execute
from fusecheck.header import TensorInfo, parse_header
from fusecheck.manifest import (
    DroppedTensor,
    FileEntry,
    Manifest,
    OutputFile,
    PartEntry,
    RanksEntry,
    SourceShard,
    TensorEntry,
    from_text,
    to_text,
)
from fusecheck.mapping import LAYOUT
from fusecheck.model import Model, survey
from fusecheck.plan import (
    Block,
    Constant,
    OutputTensor,
    PlannedFile,
    PlannedShard,
    Strip,
    by_source_shard,
    contiguous,
    index_text,
    merge_metadata,
    output_tensors,
    plan_shards,
    shard_name,
    strip_bytes,
)
from fusecheck.provenance import Provenance

METADATA = {"format": "pt", "k": "\u03ba"}


def laid_out(spec: Spec) -> tuple[dict[str, TensorInfo], Model]:
    """The tensors of a spec as a checkpoint would give them, without a file, and what they are."""
    content, found = tensors(spec), dict[str, TensorInfo]()
    for shard, names in grouping(list(content), spec, random.Random(spec.seed + 1)).items():  # noqa: S311 - test data
        at = 1000
        for name in names:
            dtype, shape, data = content[name]
            found[name] = TensorInfo(name, dtype, shape, shard, at, at + len(data))
            at += len(data)
    return found, survey(found, parse_config(json.dumps(config(spec)).encode()), lambda tensor: content[tensor.name][2])


def sources_of(output: OutputTensor) -> tuple[TensorInfo, ...]:
    return tuple(part.tensor for part in output.group.parts) if output.group else (output.source,)


def planned(spec: Spec) -> tuple[dict[str, TensorInfo], list[OutputTensor], tuple[PlannedShard, ...]]:
    found, model = laid_out(spec)
    outputs = output_tensors(found, model)
    return found, outputs, plan_shards(by_source_shard(outputs), METADATA)


# -------------------------------------------------------------------------------------------------------------- plan


@given(spec=specs())
def test_every_source_tensor_is_used_once(spec: Spec) -> None:
    found, outputs, shards = planned(spec)
    used = [source for output in outputs for source in sources_of(output)]
    assert sorted(used, key=lambda source: source.name) == sorted(found.values(), key=lambda source: source.name)
    content = fused(tensors(spec))
    assert {o.name: (o.dtype, o.shape, o.nbytes) for o in outputs} == {
        name: (dtype, shape, len(data)) for name, (dtype, shape, data) in content.items()
    }
    assert sorted(o.name for shard in shards for o in shard.tensors) == sorted(content)


@given(spec=specs())
def test_parts_stand_in_the_order_of_the_weight_loader_and_the_fused_tensor_at_its_first(spec: Spec) -> None:
    found, outputs, _ = planned(spec)
    firsts = [output.source.name for output in outputs]
    assert firsts == [name for name in found if name in set(firsts)]
    for output in outputs:
        if output.group is None:
            assert output.source.name == output.name
        else:
            assert output.source == output.group.parts[0].tensor
            ends = [(part.rows.shard_offset, part.rows.shard_size) for part in output.group.parts]
            assert ends[0][0] == 0
            assert all(start + size == after for (start, size), (after, _) in pairwise(ends))
            assert sum(ends[-1]) == output.shape[0]
            assert all(part.tensor.shape[0] == part.rows.shard_size for part in output.group.parts)


@given(spec=specs())
def test_a_planned_shard_is_a_valid_file(spec: Spec) -> None:
    _, _, shards = planned(spec)
    for shard in shards:
        head, size = shard.file.head, shard.file.size
        assert struct.unpack("<Q", head[:8])[0] == len(head) - 8
        assert len(head) % 8 == 0
        header = parse_header(head[8:], shard=shard.file.path, data_bytes=size - len(head))  # tiles the data, or raises
        assert dict(header.metadata or {}) == METADATA
        assert sorted((t.name, t.dtype, t.shape) for t in header.tensors) == sorted(
            (o.name, o.dtype, o.shape) for o in shard.tensors
        )
        names = [o.name for o in shard.tensors]
        assert names == canonical_order({o.name: (o.dtype, o.shape, b"") for o in shard.tensors})
        assert list(json.loads(head[8:])) == ["__metadata__", *names]
        sources = [source for output in shard.tensors for source in sources_of(output)]
        assert shard.file.strips == tuple((Block(s.shard, s.start, s.nbytes, 1, 1),) for s in sources)
        assert shard.file.strips == tuple((contiguous(source),) for source in sources)
        assert size == len(head) + sum(output.nbytes for output in shard.tensors)


@given(spec=specs(extra=()))
def test_planning_is_pure(spec: Spec) -> None:
    found, model = laid_out(spec)
    kept = copy.deepcopy((found, model))
    shards = plan_shards(by_source_shard(output_tensors(found, model)), METADATA)
    backwards = dict(reversed(METADATA.items()))
    assert plan_shards(by_source_shard(output_tensors(found, model)), backwards) == shards
    assert (found, model) == kept


@given(spec=specs(files=ONE_PER_FILE))
def test_empty_shards_are_dropped_and_the_rest_numbered(spec: Spec) -> None:
    _, outputs, shards = planned(spec)
    assert [shard.file.path for shard in shards] == [NUMBERED.format(i + 1, len(shards)) for i in range(len(shards))]
    assert [[o.name for o in shard.tensors] for shard in shards] == [[output.name] for output in outputs]


def test_shard_names() -> None:
    assert shard_name(1, 1) == "model.safetensors"
    assert shard_name(2, 3) == "model-00002-of-00003.safetensors"
    assert shard_name(100000, 100000) == "model-100000-of-100000.safetensors"


@pytest.mark.parametrize(
    ("sources", "kept", "dropped"),
    [
        ([None], {"format": "pt"}, ()),
        ([{}], {"format": "pt"}, ()),
        ([{"format": "mlx"}], {"format": "mlx"}, ()),
        ([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}], {"format": "pt", "a": "1", "b": "2"}, ()),
        ([{"a": "1", "b": "2"}, {"b": "3"}], {"format": "pt"}, ("a", "b")),
        ([{"a": "1"}, None], {"format": "pt"}, ("a",)),
        ([{"format": "pt"}, {"format": "mlx"}], {"format": "pt"}, ("format",)),
        ([{"fusecheck": "x"}, {}], {"format": "pt"}, ()),
    ],
)
def test_metadata_of_several_shards(
    sources: list[Mapping[str, str] | None], kept: dict[str, str], dropped: tuple[str, ...]
) -> None:
    merged, lost = merge_metadata(sources, "1.2.3")
    own = json.loads(merged.pop("fusecheck"))
    assert (merged, lost, own) == (kept, dropped, {"layout": LAYOUT, "version": "1.2.3"})


@given(spec=specs(files=3), note=st.dictionaries(st.text(), st.none() | st.text() | st.integers()))
@example(spec=Spec(files=3), note={"total_parameters": None, "total_size": "?"})
def test_the_index_is_the_same_for_the_same_shards(spec: Spec, note: dict[str, object]) -> None:
    _, outputs, shards = planned(spec)
    text = index_text(shards, note)
    assert text == index_text(shards, dict(reversed(note.items())))
    index = json.loads(text)
    assert text.decode() == json.dumps(index, indent=2, sort_keys=True) + "\n"
    assert index["metadata"]["total_size"] == sum(output.nbytes for output in outputs)
    assert ("total_parameters" in index["metadata"]) == ("total_parameters" in note)
    assert index["weight_map"] == {o.name: shard.file.path for shard in shards for o in shard.tensors}


# ----------------------------------------------------------------------------------------------------------- execute


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Memory:
    """A reader of bytes that are at hand."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.files[file][offset : offset + len(buffer)]


@st.composite
def strips(draw: st.DrawFn, sources: Mapping[str, bytes]) -> Strip:
    """A constant, a range of bytes, or blocks of equal height side by side, anywhere in the sources."""
    if draw(st.integers(0, 4)) == 0:
        return Constant(draw(st.binary(max_size=20)))
    width = st.integers(1, 5)
    shapes = draw(st.lists(st.tuples(width, width), min_size=1, max_size=3))  # bytes of a row, and of the gap after it
    if draw(st.booleans()):
        shapes = [(size, 0) for size, _ in shapes]
    name = draw(st.sampled_from(sorted(sources)))
    room = len(sources[name])
    rows = draw(st.integers(0, min(room // (size + gap) for size, gap in shapes)))
    return tuple(
        Block(name, draw(st.integers(0, room - rows * (size + gap))), rows, size, size + gap) for size, gap in shapes
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, bytes], list[PlannedFile]]:
    sources = draw(st.dictionaries(st.sampled_from("abc"), st.binary(min_size=1, max_size=60), min_size=1))
    files = [
        PlannedFile(
            f"{'sub/' * (number % 3)}{number}",
            draw(st.binary(max_size=20)),
            tuple(draw(st.lists(strips(sources), max_size=4))),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    return sources, files


def rows_of(block: Block, source: bytes) -> list[bytes]:
    starts = [block.offset + row * block.stride for row in range(block.rows)]
    return [source[start : start + block.row_bytes] for start in starts]


def content_of(strip: Strip, sources: Mapping[str, bytes]) -> tuple[bytes, tuple[str, ...]]:
    """A strip's bytes and the digests of its blocks, row by row."""
    if isinstance(strip, Constant):
        return strip.data, (blake3(strip.data).hexdigest(),)
    blocks = [rows_of(block, sources[block.file]) for block in strip]
    data = b"".join(b"".join(row) for row in zip(*blocks, strict=True))
    return data, tuple(blake3(b"".join(rows)).hexdigest() for rows in blocks)


@given(job=jobs(), threads=st.integers(1, 4), block=st.sampled_from((1, 7, 1 << 20)))
def test_files_and_digests_are_what_the_plan_says(
    job: tuple[dict[str, bytes], list[PlannedFile]], threads: int, block: int
) -> None:
    sources, files = job
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr("fusecheck.gather.BLOCK_BYTES", block)
        written = execute(files, Memory(sources), Path(place), threads=threads, on_bytes=told.append)
        for file, digests in zip(files, written, strict=True):
            wanted = [content_of(strip, sources) for strip in file.strips]
            assert [len(data) for data, _ in wanted] == [strip_bytes(strip) for strip in file.strips]
            content = (Path(place) / file.path).read_bytes()
            assert content == file.head + b"".join(data for data, _ in wanted)
            assert len(content) == file.size
            assert digests == Written(blake3(file.head).hexdigest(), tuple(found for _, found in wanted))
    assert sum(told) == sum(file.size for file in files)


class Broken:
    """A reader that fails at its first call and takes its time afterwards."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0
        self.lock = threading.Lock()

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:  # noqa: ARG002 - the protocol's names
        with self.lock:
            self.calls += 1
            first = self.calls == 1
        time.sleep(0.001 if first else 0.005)
        if first:
            raise self.error


MANY = [PlannedFile(f"{number}", b"", ((Block("a", 0, 10, 1, 1),),)) for number in range(500)]
LONG = [PlannedFile(f"{number}", b"", ((Block("a", 0, 1 << 26, 1, 1),),)) for number in range(4)]


@pytest.mark.parametrize("files", [MANY, LONG])
@pytest.mark.parametrize("error", [SystemFailure("read"), MemoryError(), KeyError("a bug")])
def test_the_first_failure_stops_all_workers(tmp_path: Path, files: list[PlannedFile], error: Exception) -> None:
    reader, descriptors = Broken(error), open_files()
    with pytest.raises(type(error)) as caught:
        execute(files, reader, tmp_path, threads=4, on_bytes=lambda _: None)
    assert caught.value is error
    assert reader.calls < 20
    assert threading.active_count() == 1
    assert open_files() == descriptors


def test_an_interrupted_wait_stops_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join = threading.Thread.join
    calls = iter([True])

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if next(calls, False):
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(LONG, Broken(SystemFailure("later")), tmp_path, threads=2, on_bytes=lambda _: None)
    assert threading.active_count() == 1


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"mine")
    with pytest.raises(SystemFailure, match="0: cannot create: File exists"):
        execute(MANY[:1], Memory({"a": bytes(10)}), tmp_path, threads=1, on_bytes=lambda _: None)
    assert (tmp_path / "0").read_bytes() == b"mine"


def test_nobody_would_do_the_work_of_no_thread(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="threads"):
        execute(MANY, Memory({"a": bytes(10)}), tmp_path, threads=0, on_bytes=lambda _: None)


# ---------------------------------------------------------------------------------------------------------- manifest

TEXTS = st.text(max_size=8)
DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
COUNTS = st.integers(0, 2**64)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TABLES = st.dictionaries(TEXTS, VALUES, max_size=3)
SHARD_IDS = st.sampled_from(["q", "k", "v", 0, 1])
PARTS = st.builds(PartEntry, TEXTS, TEXTS, SHARD_IDS, COUNTS, COUNTS, DIGESTS, st.none() | st.binary().map(bytes.hex))
JOINS = st.sampled_from(["rows", "columns", "once", "shape"])


def named(values: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(TEXTS, values, max_size=3)


FIELDS: dict[str, st.SearchStrategy[object]] = {
    "fusecheck_version": TEXTS,
    "layout": TEXTS,
    "provenance": st.builds(Provenance, *[st.none() | TEXTS] * 4),
    "options": TABLES,
    "source_shards": named(st.builds(SourceShard, COUNTS, DIGESTS, st.none() | st.dictionaries(TEXTS, TEXTS))),
    "source_index": st.none() | TABLES,
    "files": named(st.builds(OutputFile, COUNTS, DIGESTS, DIGESTS)),
    "tensors": named(
        st.builds(TensorEntry, DIGESTS, TEXTS)
        | st.builds(TensorEntry, DIGESTS, st.none(), st.lists(PARTS, min_size=1, max_size=3).map(tuple), JOINS)
    ),
    "dropped": named(st.builds(DroppedTensor, TEXTS, TEXTS)),
    "left_split": st.dictionaries(TEXTS, TEXTS),
    "config": st.builds(FileEntry, COUNTS, DIGESTS),
    "side_files": named(st.builds(FileEntry, COUNTS, DIGESTS)),
    "metadata": st.dictionaries(TEXTS, TEXTS),
    "config_original": st.none() | TEXTS,
    "ranks": st.none()
    | st.builds(
        RanksEntry,
        TEXTS,
        TEXTS,
        st.integers(9, 1024),
        st.lists(st.integers(0, 8), max_size=3).map(tuple),
        st.dictionaries(TEXTS, TEXTS),
        named(named(st.lists(DIGESTS, min_size=1, max_size=3).map(tuple))),
        st.dictionaries(TEXTS, TEXTS),
    ),
}
MANIFESTS = st.builds(Manifest, **{field.name: FIELDS[field.name] for field in fields(Manifest)})
SMALL = Manifest(
    fusecheck_version="1",
    layout=LAYOUT,
    provenance=Provenance(folder="../src"),
    options={},
    source_shards={"a.safetensors": SourceShard(1, "0" * 64, {"format": "pt"})},
    source_index=None,
    files={"model.safetensors": OutputFile(1, "0" * 64, "0" * 64)},
    tensors={
        "fused": TensorEntry("0" * 64, None, (PartEntry("n", "a.safetensors", 0, 0, 1, "0" * 64),)),
        "copied": TensorEntry("0" * 64, "a.safetensors"),
    },
    dropped={"head": DroppedTensor("a.safetensors", "copied")},
    left_split={"group": "why"},
    config=FileEntry(1, "0" * 64),
    side_files={"LICENSE": FileEntry(0, "0" * 64)},
    metadata={"format": "pt"},
)


@given(manifest=MANIFESTS)
@example(manifest=SMALL)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    text = to_text(manifest)
    assert from_text(text) == manifest
    assert to_text(from_text(text)) == text
    assert text.isascii()
    assert text.endswith(b"}\n")


@given(manifest=MANIFESTS)
def test_equal_manifests_are_equal_texts(manifest: Manifest) -> None:
    files, entries = dict(reversed(list(manifest.files.items()))), dict(reversed(list(manifest.tensors.items())))
    turned = replace(manifest, files=files, tensors=entries)
    assert to_text(turned) == to_text(manifest)


SPOILT = [
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"schema_version": 1}',
        b'{"schema_version": 2}',
        b'{"schema_version": true}',
    ),
    *(b"\xef\xbb\xbf{}", b"\xff", b'{"a": 1, "a": 2}', b"[" * 10000, b'{"schema_version": NaN}', b"1" * 5000),
]


@pytest.mark.parametrize("blob", SPOILT)
def test_what_is_no_manifest_is_refused(blob: bytes) -> None:
    with pytest.raises(CheckpointError) as caught:
        from_text(blob)
    assert caught.value.file == "fusecheck.json"


def _paths(value: object, at: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, child in children for path in _paths(child, (*at, key)))]


PATHS = [path for path in _paths(json.loads(to_text(SMALL))) if path]


Change = Callable[[dict[object, object], object], object]


def _put(value: object) -> Change:
    return lambda place, key: place.__setitem__(key, value)


def _spoilt(path: tuple[object, ...], change: Change) -> bytes:
    whole = json.loads(to_text(SMALL))
    place = whole
    for key in path[:-1]:
        place = place[key]
    change(place, path[-1])
    return json.dumps(whole).encode()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_a_manifest_with_anything_amiss_raises_one_kind_of_error(path: tuple[object, ...]) -> None:
    values: tuple[object, ...] = (None, True, -1, 1.5, "x", "\0" * 64, [], [[]], {}, {"a": 1})
    texts = [_spoilt(path, _put(value)) for value in values]
    texts.append(_spoilt(path, lambda place, key: place.pop(key)))
    for text in texts:
        try:
            back = from_text(text)
        except CheckpointError as error:
            assert error.file == "fusecheck.json"  # noqa: PT017 - either outcome is right
        else:
            assert from_text(to_text(back)) == back


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), True),
        (("schema_version",), 1.0),
        (("layout",), None),
        (("provenance", "folder"), 1),
        (("provenance", "user"), "x"),
        (("source_shards", "a.safetensors", "size"), True),
        (("source_shards", "a.safetensors", "size"), -1),
        (("source_shards", "a.safetensors", "metadata"), {"format": 1}),
        (("source_shards", "a.safetensors", "metadata"), "pt"),
        (("source_shards", "a.safetensors", "header_digest"), "00"),
        (("files", "model.safetensors", "digest"), "g" * 64),
        (("tensors", "fused", "parts"), []),
        (("tensors", "fused", "parts", 0, "shard_id"), True),
        (("tensors", "fused", "parts", 0, "shard_id"), "x"),
        (("tensors", "fused", "parts", 0, "shard_id"), [0]),
        (("tensors", "copied", "shard"), None),
        (("dropped", "head", "same_as"), 1),
        (("left_split", "group"), []),
        (("metadata", "format"), None),
        (("side_files",), []),
        (("options",), None),
    ],
)
def test_a_manifest_of_the_wrong_types_is_refused(path: tuple[object, ...], value: object) -> None:
    with pytest.raises(CheckpointError):
        from_text(_spoilt(path, _put(value)))


@given(blob=st.binary(max_size=40) | MANIFESTS.map(to_text), cut=st.integers(0, 2000), byte=st.binary(max_size=2))
def test_any_bytes_give_a_manifest_or_a_checkpoint_error(blob: bytes, cut: int, byte: bytes) -> None:
    for text in (blob[:cut] + byte + blob[cut + 1 :], blob[:cut]):
        try:
            assert isinstance(from_text(text), Manifest)
        except FusecheckError as error:
            assert type(error) is CheckpointError  # noqa: PT017 - either outcome is right
