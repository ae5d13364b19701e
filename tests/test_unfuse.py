"""unfuse: the split checkpoint comes back, tensor for tensor and file for file, or nothing does."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
from checkpoints import (
    INDEX,
    LEFT_OUT,
    ONE_PER_FILE,
    PREFIXES,
    SIDE_FILES,
    Spec,
    Tensor,
    Tensors,
    canonical_order,
    config,
    fused,
    hub_folder,
    read_checkpoint,
    read_header,
    read_safetensors,
    serialized,
    specs,
    tensors,
    write_checkpoint,
    write_safetensors,
)
from hypothesis import given
from hypothesis import strategies as st
from quantised import BLOCK, FAMILIES, KINDS, checkpoint

from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UsageError
from fusecheck.files import Files
from fusecheck.header import encode_header, metadata_orders
from fusecheck.operations.fuse import fuse
from fusecheck.operations.unfuse import UnfuseReport, unfuse

SINGLE = "model.safetensors"
MANIFEST = "fusecheck.json"
AT = "model.layers.0.self_attn."
CANONICAL: dict[str, object] = {
    "data_order": "safetensors",
    "header_order": "data",
    "header_style": "compact",
    "padding": "8",
}
"""The form in which safetensors itself writes a file."""
KEPT = ("pt", "none", "empty", "odd", "differs", "no_format")
"""`__metadata__` that a canonical file may have; null is another spelling of none."""


# ------------------------------------------------------------------------------------------------------------- tools


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """fsync costs 20 ms a file on some disks; who calls it when is asked elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@contextmanager
def source_of(spec: Spec) -> Iterator[Path]:
    """The checkpoint of a spec, its index as the hub's writers give it, with room beside it."""
    with tempfile.TemporaryDirectory() as place:
        folder = hub_folder(Path(place)) if spec.hub_cache else Path(place) / "src"
        write_checkpoint(folder, spec)
        if (folder / INDEX).exists():
            sort_index(folder)
        yield folder


def sort_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def originals(folder: Path) -> dict[str, bytes]:
    """The files that fuse takes along, in the form in which unfuse has to give them back."""
    return {name: data for name, data in files_of(folder).items() if name not in LEFT_OUT}


def shards_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def there_and_back(source: Path, **options: Any) -> UnfuseReport:  # noqa: ANN401 - fuse's own
    fuse(source, source.parent / "fused", **options)
    return unfuse(source.parent / "fused", source.parent / "back")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a fused folder."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def place_of(path: Path, name: str) -> tuple[int, int]:
    """Where the data of a tensor lies in its file."""
    header = read_header(path)
    base = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    start, stop = header[name]["data_offsets"]
    return base + start, base + stop


def nothing_at(out: Path) -> None:
    """OUT is absent, and no temporary folder lies beside it."""
    assert not os.path.lexists(out)
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".fusecheck")] == []


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A fused folder of two layers, its source beside it."""
    write_checkpoint(tmp_path / "src", Spec(files=2, side_files=SIDE_FILES[:2]))
    fuse(tmp_path / "src", tmp_path / "fused")
    return tmp_path / "fused"


# ------------------------------------------------------------------------------------------------------------ the laws


@given(spec=specs())
def test_every_tensor_comes_back(spec: Spec) -> None:
    with source_of(spec) as source:
        report = there_and_back(source)
        back = source.parent / "back"
        assert read_checkpoint(back) == tensors(spec)
        assert (report.verdict, report.by_manifest) == ("unfused", True)
        assert {*report.identical, *report.reordered} == {*report.shards} == {*shards_in(source)}
        assert all((back / name).read_bytes() == (source / name).read_bytes() for name in report.identical)
        assert all((back / name).read_bytes() != (source / name).read_bytes() for name in report.reordered)
        assert report.source_tensors == len(fused(tensors(spec)))
        assert report.output_tensors == len(tensors(spec))
        assert report.output_bytes == sum(map(len, files_of(back).values()))
        assert read_metadata(back) == read_metadata(source)


def read_metadata(folder: Path) -> dict[str, object]:
    return {shard: read_header(folder / shard).get("__metadata__") for shard in shards_in(folder)}


@given(
    spec=st.sampled_from(KEPT).flatmap(lambda kind: specs(**CANONICAL, metadata=kind)),
    limit=st.sampled_from((None, None, "1KB", "20KB", "1GB")),
)
def test_canonical_files_come_back_byte_for_byte(spec: Spec, limit: str | None) -> None:
    spec = replace(spec, index_metadata="right" if spec.index_metadata == "none" else spec.index_metadata)
    with source_of(spec) as source:
        report = there_and_back(source, max_shard_size=limit)
        assert files_of(source.parent / "back") == originals(source)
        assert report.reordered == ()
        assert report.side_files == tuple(sorted(spec.side_files))
        assert report.warnings == tuple(w for w in report.warnings if "lm_head" in w or "embed_tokens" in w)


@given(spec=specs(**CANONICAL, metadata="pt", tied=True, lm_head="equal"))
def test_a_dropped_head_comes_back(spec: Spec) -> None:
    with source_of(replace(spec, index_metadata="right")) as source:
        report = there_and_back(source, drop_tied_lm_head=True)
        assert report.restored == (spec.lm_head_name,)
        assert files_of(source.parent / "back") == originals(source)


@given(spec=specs(**CANONICAL, metadata="pt", index_metadata="right"), data=st.data())
def test_groups_that_were_left_split_come_back(spec: Spec, data: st.DataObject) -> None:
    with source_of(replace(spec, hub_cache=False)) as source:
        part = f"{spec.prefix}layers.{data.draw(st.integers(0, spec.num_hidden_layers - 1))}.mlp.up_proj.weight"
        shard = next(name for name in shards_in(source) if part in read_safetensors(source / name))
        content = read_safetensors(source / shard)
        _, shape, _ = content[part]
        content[part] = ("F8_E4M3", shape, bytes(math.prod(shape)))
        write_safetensors(source / shard, content, metadata={"format": "pt"})
        there_and_back(source, keep_split=True)
        assert files_of(source.parent / "back") == originals(source)


@given(spec=specs())
def test_without_a_manifest_names_and_config_are_enough(spec: Spec) -> None:
    with source_of(spec) as source:
        out, back = source.parent / "fused", source.parent / "back"
        fuse(source, out)
        (out / MANIFEST).unlink()
        report = unfuse(out, back)
        assert read_checkpoint(back) == tensors(spec)
        assert (report.verdict, report.by_manifest, report.reordered) == ("unfused", False, ())
        assert shards_in(back) == shards_in(out)
        assert all("fusecheck" not in (read_header(back / name)["__metadata__"]) for name in shards_in(back))
        if (back / INDEX).exists():
            size = sum(len(data) for _, _, data in tensors(spec).values())
            assert json.loads((back / INDEX).read_text())["metadata"]["total_size"] == size
        assert (back / INDEX).exists() == (len(report.shards) > 1)


@given(spec=specs(hub_cache=False))
def test_what_another_writer_fused_is_split(spec: Spec) -> None:
    """Phi-3's names, no manifest, no key of ours, safetensors' own order."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "src"
        write_checkpoint(folder, replace(spec, files=1))
        (folder / INDEX).unlink(missing_ok=True)
        write_safetensors(folder / SINGLE, fused(tensors(spec)))
        unfuse(folder, Path(place) / "back")
        assert read_safetensors(Path(place) / "back" / SINGLE) == tensors(spec)
        assert "__metadata__" not in read_header(Path(place) / "back" / SINGLE)


@given(spec=st.sampled_from((1, 2, 7)).flatmap(lambda files: specs(**CANONICAL, metadata="pt", files=files)))
def test_fuse_of_unfuse_is_the_fused_checkpoint(spec: Spec) -> None:
    with source_of(spec) as source:
        there_and_back(source)
        fuse(source.parent / "back", source.parent / "again")
        again, first = files_of(source.parent / "again"), files_of(source.parent / "fused")
        del again[MANIFEST], first[MANIFEST]  # they name their sources
        assert again == first


@given(spec=specs())
def test_what_is_not_fused_is_copied_byte_for_byte(spec: Spec) -> None:
    with source_of(spec) as source:
        back = source.parent / "back"
        report = unfuse(source, back)
        assert (report.verdict, report.split) == ("copied", 0)
        made = files_of(back)
        if not (source / INDEX).exists():
            assert (INDEX in made) == (len(report.shards) > 1)
            made.pop(INDEX, None)
        assert made == originals(source)


@given(spec=st.sampled_from((1, 2, 7)).flatmap(lambda files: specs(files=files)), threads=st.sampled_from((1, 2, 4)))
def test_two_runs_give_the_same_bytes_and_the_second_is_done_already(spec: Spec, threads: int) -> None:
    with source_of(spec) as source:
        there_and_back(source)
        before = files_of(source.parent / "back")
        assert unfuse(source.parent / "fused", source.parent / "back").verdict == "already_done"
        unfuse(source.parent / "fused", source.parent / "other", threads=threads)
        assert files_of(source.parent / "other") == before


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("files", [1, 3, ONE_PER_FILE])
def test_prefixes_biases_straddling_shards_and_hub_links(tmp_path: Path, prefix: str, files: int) -> None:
    spec = Spec(
        prefix=prefix, files=files, bias=True, o_bias=True, layout="round-robin", hub_cache=True, left_out=LEFT_OUT
    )
    write_checkpoint(hub_folder(tmp_path), spec)
    fuse(hub_folder(tmp_path), tmp_path / "fused")
    report = unfuse(tmp_path / "fused", tmp_path / "back")
    assert read_checkpoint(tmp_path / "back") == tensors(spec)
    assert report.reordered == ()
    assert not any(path.is_symlink() for path in (tmp_path / "back").rglob("*"))


def test_a_partly_fused_checkpoint_is_split_where_it_is_fused(tmp_path: Path) -> None:
    spec = Spec(num_hidden_layers=2)
    mixed = half_fused(spec)
    write_checkpoint(tmp_path / "src", spec)
    write_safetensors(tmp_path / "src" / SINGLE, mixed, metadata={"format": "pt"})
    report = unfuse(tmp_path / "src", tmp_path / "back")
    assert (report.verdict, report.split) == ("unfused", 2)
    assert read_checkpoint(tmp_path / "back") == tensors(spec)
    fuse(tmp_path / "src", tmp_path / "fused")
    report = unfuse(tmp_path / "fused", tmp_path / "exact")
    assert files_of(tmp_path / "exact") == files_of(tmp_path / "src")
    assert any("2 tensors were fused already" in warning for warning in report.warnings)
    assert unfuse(tmp_path / "exact", tmp_path / "split").verdict == "unfused"
    assert read_checkpoint(tmp_path / "split") == tensors(spec)


def half_fused(spec: Spec) -> Tensors:
    """Layer 0 fused, layer 1 split."""
    content = tensors(spec)
    first = {name: tensor for name, tensor in content.items() if ".layers.0." in name}
    return {**fused(first), **{name: tensor for name, tensor in content.items() if name not in first}}


def test_experts_are_split_and_stacked_ones_left_alone(tmp_path: Path) -> None:
    """Layer 0 has an expert of its own each, layer 1 has all in one tensor."""
    spec = Spec()
    content = {name: tensor for name, tensor in tensors(spec).items() if ".mlp." not in name}
    at, hidden, ffn = "model.layers.{}.mlp.", spec.hidden_size, spec.intermediate_size
    for expert in range(2):
        for number, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            shape = (hidden, ffn) if name == "down_proj" else (ffn, hidden)
            content[f"{at.format(0)}experts.{expert}.{name}.weight"] = filled("BF16", shape, 3 * expert + number)
    content[f"{at.format(1)}experts.gate_up_proj"] = filled("BF16", (2, 2 * ffn, hidden), 7)
    content[f"{at.format(1)}experts.down_proj"] = filled("BF16", (2, hidden, ffn), 8)
    for layer in range(2):
        content[f"{at.format(layer)}gate.weight"] = filled("BF16", (2, hidden), 9)
    sizes = {"num_experts": 2, "moe_intermediate_size": ffn, "model_type": "qwen3_moe", "architectures": None}
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "config.json").write_text(json.dumps({**config(spec), **sizes}))
    write_safetensors(tmp_path / "src" / SINGLE, content)
    report = there_and_back(tmp_path / "src")
    assert report.split == 4
    assert files_of(tmp_path / "back") == files_of(tmp_path / "src")
    assert f"{at.format(0)}experts.1.gate_up_proj.weight" in read_header(tmp_path / "fused" / SINGLE)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_fused_download_in_the_hub_cache_is_read_through_its_links(tmp_path: Path, *, with_manifest: bool) -> None:
    spec = Spec(files=2, side_files=SIDE_FILES)
    write_checkpoint(tmp_path / "src", spec)
    fuse(tmp_path / "src", tmp_path / "fused")
    snapshot = hub_folder(tmp_path)
    for number, (name, data) in enumerate(files_of(tmp_path / "fused").items()):
        blob = snapshot.parent.parent / "blobs" / f"{number:040x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        if with_manifest or name != MANIFEST:
            (snapshot / name).symlink_to(blob)
    report = unfuse(snapshot, tmp_path / "back")
    assert report.by_manifest == with_manifest
    assert read_checkpoint(tmp_path / "back") == tensors(spec)


@pytest.mark.parametrize("fused_first", [True, False])
def test_a_numbered_shard_that_holds_nothing(tmp_path: Path, *, fused_first: bool) -> None:
    spec = Spec(files=2, index="never")
    write_checkpoint(tmp_path / "src", spec)
    content = fused(tensors(spec)) if fused_first else tensors(spec)
    write_safetensors(tmp_path / "src" / "model-00001-of-00002.safetensors", content)
    write_safetensors(tmp_path / "src" / "model-00002-of-00002.safetensors", {})
    unfuse(tmp_path / "src", tmp_path / "by_names")
    assert read_checkpoint(tmp_path / "by_names") == tensors(spec)
    there_and_back(tmp_path / "src")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "src")


@given(
    metadata=st.none()
    | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), st.text(max_size=3), max_size=4),
    names=st.lists(st.sampled_from(("a", "b", "{}", '"')), unique=True),
)
def test_a_head_in_each_order_that_the_library_writes(metadata: dict[str, str] | None, names: list[str]) -> None:
    head = encode_header(((name, "U8", (1,), 1) for name in names), metadata)
    heads = list(metadata_orders(head, metadata or {}))
    assert heads[0] == head
    assert len(set(heads)) == len(heads) == math.factorial(len(metadata or {}))
    orders = []
    for each in heads:
        entries = json.loads(each[8:])
        assert ("__metadata__" in entries) == (metadata is not None)
        assert entries.get("__metadata__") == metadata
        content = dict.fromkeys(names, ("U8", (1,), b"x"))
        whole = serialized(content, metadata=entries.get("__metadata__"), order=names)
        assert whole.startswith(each)
        orders.append(tuple(entries.get("__metadata__") or ()))
    assert len(set(orders)) == len(orders)


# ----------------------------------------------------------------------------------------------------------- quantised


def filled(dtype: str, shape: tuple[int, ...], salt: int) -> Tensor:
    size = math.prod(shape) * {"I32": 4, "F16": 2, "F8_E4M3": 1, "F32": 4, "I64": 8, "BF16": 2}[dtype]
    return dtype, shape, bytes((salt * 37 + i * 7) % 251 for i in range(size))


QUANTISED = [(kind, "qwen3") for kind in KINDS] + [
    (kind, family) for kind in ("plain", "awq", "ct-int4-zero", "fp8-block") for family in FAMILIES if family != "qwen3"
]


def write_quantised(folder: Path, kind: str, family: str = "qwen3") -> Tensors:
    """Two shards over which groups straddle, in canonical form."""
    source = checkpoint(kind, family)
    source.write(folder)
    sort_index(folder)
    return source.tensors


@pytest.mark.parametrize(("kind", "family"), QUANTISED)
def test_quantised_checkpoints_come_back(tmp_path: Path, kind: str, family: str) -> None:
    content = write_quantised(tmp_path / "src", kind, family)
    report = there_and_back(tmp_path / "src")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "src")
    assert (report.verdict, report.reordered) == ("unfused", ())
    (tmp_path / "fused" / MANIFEST).unlink()
    unfuse(tmp_path / "fused", tmp_path / "by_names")
    assert read_checkpoint(tmp_path / "by_names") == content
    assert unfuse(tmp_path / "fused", tmp_path / "by_names").verdict == "already_done"


@pytest.mark.parametrize("kind", ["awq", "gptq-4-act-order", "ct-int4", "fp8-tensor"])
def test_a_wrong_bit_of_a_quantised_output_is_no_finished_one(tmp_path: Path, kind: str) -> None:
    write_quantised(tmp_path / "src", kind)
    there_and_back(tmp_path / "src")
    fused_folder, back = tmp_path / "fused", tmp_path / "back"
    assert unfuse(fused_folder, back).verdict == "already_done"
    for shard in shards_in(back):
        for suffix in {name.rpartition(".")[2] for name in read_header(back / shard) if "v_proj" in name}:
            name = next(name for name in read_header(back / shard) if name.endswith(f"v_proj.{suffix}"))
            _, stop = place_of(back / shard, name)
            flip(back / shard, stop - 1)
            with pytest.raises(UsageError, match="not empty"):
                unfuse(fused_folder, back)
            flip(back / shard, stop - 1)


def test_gptqs_list_of_modules_goes_again(tmp_path: Path) -> None:
    write_quantised(tmp_path / "src", "gptq-4")
    there_and_back(tmp_path / "src")
    assert "modules_in_block_to_quantize" in (tmp_path / "fused" / "config.json").read_text()
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "src" / "config.json").read_bytes()


def test_a_config_that_was_edited_beside_gptqs_list_is_refused(tmp_path: Path) -> None:
    write_quantised(tmp_path / "src", "gptq-4")
    fuse(tmp_path / "src", tmp_path / "fused")
    edited = json.loads((tmp_path / "fused" / "config.json").read_text()) | {"rope_theta": 5}
    (tmp_path / "fused" / "config.json").write_text(json.dumps(edited))
    with pytest.raises(CheckpointError, match="was edited after it was fused"):
        unfuse(tmp_path / "fused", tmp_path / "back")
    nothing_at(tmp_path / "back")


def test_an_original_config_of_another_model_is_refused(tmp_path: Path) -> None:
    write_quantised(tmp_path / "src", "gptq-4")
    fuse(tmp_path / "src", tmp_path / "fused")
    edit(tmp_path / "fused", lambda manifest: manifest.update(config_original="{}"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        unfuse(tmp_path / "fused", tmp_path / "back")


@pytest.mark.parametrize("ffn", [12, 24])
def test_scales_that_two_parts_share_cannot_be_split(tmp_path: Path, ffn: int) -> None:
    """Blocks of 16 rows that were made after fusing. Of 12 + 12 rows each part has as many blocks as it would have alone."""
    source = checkpoint("fp8-block", layers=1)
    source.config["intermediate_size"] = ffn
    at = "model.layers.0.mlp."
    content = {name: one for name, one in source.tensors.items() if not name.startswith(at)}
    content[f"{at}gate_up_proj.weight"] = filled("F8_E4M3", (2 * ffn, 64), 1)
    content[f"{at}gate_up_proj.weight_scale_inv"] = filled("F32", (-(-2 * ffn // BLOCK[0]), 3), 2)
    content[f"{at}down_proj.weight"] = filled("F8_E4M3", (64, ffn), 3)
    content[f"{at}down_proj.weight_scale_inv"] = filled("F32", (4, 1), 4)
    source.tensors.clear()
    source.tensors.update(content)
    source.write(tmp_path / "src")
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.weight_scale_inv: cannot be split") as caught:
        unfuse(tmp_path / "src", tmp_path / "back")
    assert caught.value.exit_code == 3
    nothing_at(tmp_path / "back")


@pytest.mark.parametrize("kind", ["awq", "gptq-4", "ct-int4", "fp8-block", "fp8-tensor"])
def test_a_damaged_quantised_file_is_refused(tmp_path: Path, kind: str) -> None:
    write_quantised(tmp_path / "src", kind)
    fuse(tmp_path / "src", tmp_path / "fused")
    for path in sorted((tmp_path / "fused").glob("*.safetensors")):
        for name in [name for name in read_header(path) if "layers.0.self_attn.qkv_proj" in name]:
            _, stop = place_of(path, name)
            flip(path, stop - 1)
            with pytest.raises(CheckpointError) as caught:
                unfuse(tmp_path / "fused", tmp_path / "back")
            assert caught.value.tensor == name
            nothing_at(tmp_path / "back")
            flip(path, stop - 1)


# ---------------------------------------------------------------------------------------------------- damage and doubt


@given(spec=specs(index="auto", shard_name="model-{:05d}-of-{:05d}.safetensors"), data=st.data())
def test_one_wrong_bit_is_named_by_tensor_and_part(spec: Spec, data: st.DataObject) -> None:
    with source_of(spec) as source:
        out = source.parent / "fused"
        fuse(source, out)
        path = out / data.draw(st.sampled_from(shards_in(out)))
        sizes = {n: t for n, t in read_safetensors(path).items() if t[2]}
        name = data.draw(st.sampled_from(canonical_order(sizes)))
        start, stop = place_of(path, name)
        flip(path, data.draw(st.integers(start, stop - 1)))
        with pytest.raises(CheckpointError) as caught:
            unfuse(out, source.parent / "back")
        assert (caught.value.file, caught.value.tensor) == (path.name, name)
        assert ("part" in str(caught.value)) == ("qkv_proj" in name or "gate_up_proj" in name)
        nothing_at(source.parent / "back")


def test_the_part_that_holds_the_wrong_bit_is_named(made: Path, tmp_path: Path) -> None:
    name = f"{AT}qkv_proj.weight"
    path = next(made / shard for shard in shards_in(made) if name in read_header(made / shard))
    start, stop = place_of(path, name)
    row = (stop - start) // 64  # q 32, k 16, v 16 rows
    for part, at in (("q", start), ("q", start + 32 * row - 1), ("k", start + 32 * row), ("v", stop - 1)):
        flip(path, at)
        with pytest.raises(CheckpointError, match=rf"its part {AT}{part}_proj\.weight is not what"):
            unfuse(made, tmp_path / "back")
        flip(path, at)
    assert unfuse(made, tmp_path / "back").verdict == "unfused"


def test_another_dtype_in_the_header_is_refused(made: Path, tmp_path: Path) -> None:
    path = made / shards_in(made)[0]
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" ', 1))
    with pytest.raises(CheckpointError, match=r"not the file that fusecheck\.json describes"):
        unfuse(made, tmp_path / "back", dry_run=True)


def test_another_layout_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", Spec())
    own = json.dumps({"layout": "qkv per rank tp=2", "version": "9"})
    write_safetensors(tmp_path / "src" / SINGLE, fused(tensors(Spec())), metadata={"fusecheck": own})
    with pytest.raises(CheckpointError, match="declares another layout"):
        unfuse(tmp_path / "src", tmp_path / "back")


def test_what_was_edited_beside_the_tensors_is_kept_and_said(made: Path, tmp_path: Path) -> None:
    (made / SIDE_FILES[0]).write_text("{}")
    (made / SIDE_FILES[1]).unlink()
    (made / "new.txt").write_text("new")
    edited = json.loads((made / "config.json").read_text()) | {"rope_theta": 5}
    (made / "config.json").write_text(json.dumps(edited))
    report = unfuse(made, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == edited
    assert (tmp_path / "back" / SIDE_FILES[0]).read_text() == "{}"
    assert (tmp_path / "back" / "new.txt").read_text() == "new"
    for word in (
        f"edited after fusing are copied as they are: {SIDE_FILES[0]}",
        "new.txt",
        SIDE_FILES[1],
        "config.json",
    ):
        assert any(word in warning for warning in report.warnings)


def test_a_source_that_changes_meanwhile_is_exit_4(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = Files.read_into

    def slow(self: Files, file: str, offset: int, buffer: memoryview) -> None:
        read_into(self, file, offset, buffer)
        if file.endswith(".safetensors") and offset > 8:
            os.utime(made / file, (0, 0))

    monkeypatch.setattr(Files, "read_into", slow)
    with pytest.raises(SystemFailure, match="changed while it was read"):
        unfuse(made, tmp_path / "back")
    nothing_at(tmp_path / "back")


def test_a_full_disk_is_exit_4(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusecheck.target.free_space", lambda _: 10)
    with pytest.raises(SystemFailure, match="not enough free space"):
        unfuse(made, tmp_path / "back")
    nothing_at(tmp_path / "back")


# ------------------------------------------------------------------------------------------------------ what stands there


def test_anything_else_in_out_is_refused_and_replaced_by_force(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "back"
    unfuse(made, out)
    good = files_of(out)
    for name in good:
        if not good[name]:
            continue
        flip(out / name, len(good[name]) - 1)
        with pytest.raises(UsageError, match="not empty"):
            unfuse(made, out)
        (out / name).write_bytes(good[name])
    assert unfuse(made, out).verdict == "already_done"
    (out / "more").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        unfuse(made, out)
    assert unfuse(made, out, force=True).verdict == "unfused"
    assert files_of(out) == good


def test_a_dry_run_writes_nothing(made: Path, tmp_path: Path) -> None:
    report = unfuse(made, tmp_path / "a" / "back", dry_run=True)
    assert (report.verdict, report.split) == ("would_unfuse", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fused", "src"]


@pytest.mark.parametrize("out", ["fused", "fused/in", "."])
def test_out_on_the_source_is_refused(made: Path, out: str) -> None:
    with pytest.raises(UsageError):
        unfuse(made, made.parent / out, force=True)


# -------------------------------------------------------------------------------------------------- hostile manifests

Change = Callable[[dict[str, Any]], object]


def parts_of(manifest: dict[str, Any], name: str = f"{AT}qkv_proj.weight") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = manifest["tensors"][name]["parts"]
    return found


def rename_shard(to: str) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        old = min(manifest["source_shards"])
        manifest["source_shards"][to] = manifest["source_shards"].pop(old)
        for entry in manifest["tensors"].values():
            for row in (entry, *entry.get("parts", ())):
                if row.get("shard") == old:
                    row["shard"] = to

    return change


HOSTILE: dict[str, Change] = {
    "layout": lambda m: m.update(layout="tp=2"),
    "no tensors": lambda m: m["tensors"].clear(),
    "no files": lambda m: m["files"].clear(),
    "no source shards": lambda m: m["source_shards"].clear(),
    "a file too many": lambda m: m["files"].update({"../x.safetensors": next(iter(m["files"].values()))}),
    "a tensor too many": lambda m: m["tensors"].update(x=m["tensors"]["model.norm.weight"]),
    "a tensor missing": lambda m: m["tensors"].pop("model.norm.weight"),
    "a shard outside": rename_shard("../x.safetensors"),
    "an absolute shard": rename_shard("/tmp/x.safetensors"),  # noqa: S108 - must not be written
    "a shard that is the config": rename_shard("config.json"),
    "a shard that is the index": rename_shard(INDEX),
    "a hidden shard": rename_shard(".x.safetensors"),
    "an empty name": rename_shard(""),
    "a shard with a nul": rename_shard("a\0.safetensors"),
    "a long name": rename_shard("a" * 300 + ".safetensors"),
    "a shard of no source": lambda m: parts_of(m)[0].update(shard="other.safetensors"),
    "a name that collides": lambda m: parts_of(m)[0].update(name="model.norm.weight"),
    "a name that is a path": lambda m: parts_of(m)[0].update(name="../../x"),
    "one part twice": lambda m: parts_of(m)[1].update(parts_of(m)[0]),
    "parts in another order": lambda m: parts_of(m).reverse(),
    "a part missing": lambda m: parts_of(m).pop(),
    "overlapping parts": lambda m: parts_of(m)[1].update(shard_offset=0),
    "a part beyond the end": lambda m: parts_of(m)[2].update(shard_size=10**6),
    "a huge offset": lambda m: parts_of(m)[2].update(shard_offset=2**80),
    "a negative offset": lambda m: parts_of(m)[2].update(shard_offset=-1),
    "a true offset": lambda m: parts_of(m)[0].update(shard_offset=True),
    "an offset in text": lambda m: parts_of(m)[0].update(shard_offset="0"),
    "another join": lambda m: m["tensors"][f"{AT}qkv_proj.weight"].update(join="once"),
    "an unknown join": lambda m: m["tensors"][f"{AT}qkv_proj.weight"].update(join="sum"),
    "parts of what is whole": lambda m: m["tensors"]["model.norm.weight"].update(parts=parts_of(m), join="rows"),
    "a wrong digest": lambda m: parts_of(m)[1].update(digest="00" * 32),
    "a digest that is none": lambda m: parts_of(m)[1].update(digest="zz"),
    "a whole with a wrong digest": lambda m: m["tensors"]["model.norm.weight"].update(digest="00" * 32),
    "a dropped tensor": lambda m: m["dropped"].update({"model.norm.bias": drop(m)}),
    "a dropped tensor that is there": lambda m: m["dropped"].update({"model.norm.weight": drop(m)}),
    "a head from elsewhere": lambda m: m["dropped"].update({"lm_head.weight": drop(m, same_as="model.norm.weight")}),
    "a head from nowhere": lambda m: m["dropped"].update({"lm_head.weight": drop(m, same_as="x")}),
    "a head in no shard": lambda m: m["dropped"].update({"lm_head.weight": drop(m, shard="x")}),
    "an original config": lambda m: m.update(config_original='{"model_type": "gpt2"}'),
    "a config that is a list": lambda m: m.update(config=[]),
    "side files that are text": lambda m: m.update(side_files="x"),
    "an index that is a list": lambda m: m.update(source_index=[]),
    "metadata that is a number": lambda m: m["source_shards"][min(m["source_shards"])].update(metadata={"a": 1}),
    "several shards of any name and no index": lambda m: (
        rename_shard("a.safetensors")(m),
        m.update(source_index=None),
    ),
    "a shard that holds nothing": lambda m: m["source_shards"].update({"a.safetensors": some_shard(m)}),
    "another schema": lambda m: m.update(schema_version=2),
    "no schema": lambda m: m.pop("schema_version"),
}


def some_shard(manifest: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["source_shards"][min(manifest["source_shards"])]
    return found


def drop(manifest: Mapping[str, Any], same_as: str = "model.embed_tokens.weight", shard: str = "") -> dict[str, str]:
    return {"shard": shard or min(manifest["source_shards"]), "same_as": same_as}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_refused(made: Path, tmp_path: Path, kind: str) -> None:
    before = set(tmp_path.rglob("*"))
    edit(made, HOSTILE[kind])
    with pytest.raises(CheckpointError):
        unfuse(made, tmp_path / "back")
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"schema_version": 1}', "[" * 5000, '{"a": 1, "a": 2}'])
def test_a_manifest_that_is_none_is_refused(made: Path, tmp_path: Path, text: str) -> None:
    (made / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=MANIFEST):
        unfuse(made, tmp_path / "back")


def test_a_manifest_that_is_no_file_is_refused(made: Path, tmp_path: Path) -> None:
    (made / MANIFEST).unlink()
    (made / MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match="no regular file"):
        unfuse(made, tmp_path / "back")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8) | st.just("../x.safetensors"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(data=st.data(), value=JSON)
def test_any_value_anywhere_in_a_manifest_never_crashes(data: st.DataObject, value: object) -> None:
    """The tensors come back right, or a CheckpointError does; nothing is written elsewhere."""
    spec = Spec(num_hidden_layers=1, files=2, lm_head="equal")
    with source_of(spec) as source:
        out, back = source.parent / "fused", source.parent / "back"
        fuse(source, out, drop_tied_lm_head=True)
        edit(out, lambda manifest: put(manifest, data, value))
        before = files_of(source.parent)
        try:
            unfuse(out, back)
        except CheckpointError:
            nothing_at(back)
        else:
            found = read_checkpoint(back)
            wanted = tensors(spec)
            if "lm_head.weight" not in found:  # the one entry that says that there was one
                del wanted["lm_head.weight"]
            assert found == wanted
            shutil.rmtree(back)
        assert files_of(source.parent) == before


def put(node: Any, data: st.DataObject, value: object) -> None:  # noqa: ANN401 - JSON
    """Replace one value, wherever the draw ends."""
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.integers(0, 5)) == 0:
            node[key] = value
            return
        node = node[key]


# ------------------------------------------------------------------------------------------------------ the command line


Call = Callable[..., tuple[int, str, str]]


def test_0_with_a_summary_and_a_document(call: Call, made: Path, tmp_path: Path) -> None:
    code, out, err = call("unfuse", made, tmp_path / "back", "--no-progress")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"unfused {made} -> {tmp_path / 'back'}"
    assert "18 tensors in, 24 out (4 split by its manifest)" in out
    assert "the original's byte for byte: 2 of 2" in out
    code, out, err = call("unfuse", made, tmp_path / "back", "--json")
    document = json.loads(out)
    assert (code, document["verdict"], document["split"], document["schema_version"]) == (0, "already_done", 4, 1)
    code, out, _ = call("unfuse", made, tmp_path / "back", "-q")
    assert (code, out) == (0, "")
    code, out, _ = call("unfuse", tmp_path / "src", tmp_path / "copy", "--json", "--threads", 1)
    assert (code, json.loads(out)["verdict"]) == (0, "copied")
    code, out, _ = call("unfuse", made, tmp_path / "dry", "--dry-run", "--json", "-v", "--max-header-size", "1MiB")
    assert (code, json.loads(out)["verdict"]) == (0, "would_unfuse")
    nothing_at(tmp_path / "dry")


def test_a_reordered_original_is_said(call: Call, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src", Spec(data_order="random"))
    fuse(tmp_path / "src", tmp_path / "fused")
    code, out, _ = call("unfuse", tmp_path / "fused", tmp_path / "back", "--no-progress")
    assert code == 0
    assert "byte for byte: 0 of 1" in out
    assert f"same tensors, but the original was not in canonical form: {SINGLE}" in out


def test_2_and_3_with_one_error_line(call: Call, made: Path, tmp_path: Path) -> None:
    code, out, err = call("unfuse", tmp_path / "nowhere", tmp_path / "back")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, _, err = call("unfuse", made, tmp_path / "src")
    assert code == 2
    assert "not empty" in err
    assert call("unfuse", made, tmp_path / "back", "--threads", 0)[0] == 2
    path = made / shards_in(made)[0]
    flip(path, path.stat().st_size - 1)
    code, out, err = call("unfuse", made, tmp_path / "back", "--json", "--no-progress")
    document = json.loads(out)
    assert (code, document["verdict"], document["exit_code"], document["file"]) == (3, "error", 3, path.name)
    assert document["tensor"]
    assert err.startswith(f"error: {path.name}: {document['tensor']}: ")
    nothing_at(tmp_path / "back")
    (made / MANIFEST).write_text("{}")
    code, out, _ = call("unfuse", made, tmp_path / "back", "--json", "--dry-run")
    assert (code, json.loads(out)["verdict"]) == (3, "would_refuse")


def test_a_hostile_name_in_a_manifest_cannot_drive_a_terminal(call: Call, made: Path, tmp_path: Path) -> None:
    edit(made, rename_shard("\x1b[31m\u202e.safetensors"))
    code, _, err = call("unfuse", made, tmp_path / "back")
    assert code == 3
    assert "\x1b" not in err
    assert "\u202e" not in err


def test_the_library_reads_what_is_written(made: Path, tmp_path: Path) -> None:
    unfuse(made, tmp_path / "back")
    for shard in shards_in(tmp_path / "back"):
        with safetensors.safe_open(tmp_path / "back" / shard, "np") as opened:
            assert sorted(opened.keys()) == sorted(read_safetensors(tmp_path / "src" / shard))


def test_errors_are_ours(made: Path, tmp_path: Path) -> None:
    with pytest.raises(FusecheckError, match="threads"):
        unfuse(made, tmp_path / "back", threads=0)
    nothing_at(tmp_path / "back")
