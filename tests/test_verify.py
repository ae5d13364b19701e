"""What verify says: of good outputs, of sources that are gone, changed or others, of manifests that lie."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    INDEX,
    NUMBERED,
    Spec,
    Tensor,
    Tensors,
    config,
    fused,
    read_checkpoint,
    serialized,
    specs,
    tensors,
    write_checkpoint,
    write_safetensors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusecheck.cli import main
from fusecheck.errors import CheckpointError, SystemFailure, UsageError
from fusecheck.operations.fuse import fuse
from fusecheck.operations.verify import MAX_FINDINGS, VerifyReport, verify

MANIFEST = "fusecheck.json"
EXAMPLES = int(os.environ.get("FUSECHECK_EXAMPLES", "100"))
SMALL = Spec(num_hidden_layers=3, side_files=("tokenizer.json", "LICENSE"))
SHARDED = replace(SMALL, files=3, layout="random", index_metadata="more", bias=True, num_hidden_layers=1, lm_head="own")
"""Of every kind of statement that a manifest makes."""
many = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def made(root: Path, spec: Spec = SMALL) -> tuple[Path, Path]:
    """A source and its good output."""
    write_checkpoint(root / "source", spec)
    fuse(root / "source", root / "out")
    return root / "source", root / "out"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return made(tmp_path)


def exact(out: Path, source: Path | None = None) -> VerifyReport:
    return verify(out, source=source, exact_only=True)


def assert_equal(report: VerifyReport, *, against: str = "source bytes") -> None:
    assert report.exact.findings == ()
    assert (report.verdict, report.proved, report.exact.against) == ("equal", ("exact",), against)


def problems(report: VerifyReport) -> str:
    assert report.verdict == "not_equal"
    return "\n".join(f"{f.file} {f.tensor} {f.problem}" for f in report.exact.findings)


# ---------------------------------------------------------------------------------------------------- no false alarms


def foreign(out: Path, content: Tensors, rng: random.Random) -> None:
    """OUT as another writer would have it: other order, grouping, padding and metadata, no manifest, more side files."""
    for path in [*out.glob("*.safetensors"), out / INDEX, out / MANIFEST]:
        path.unlink(missing_ok=True)
    names = list(content)
    rng.shuffle(names)
    count = rng.randint(1, min(4, len(names)))
    shards = {NUMBERED.format(i + 1, count): names[i::count] for i in range(count)}
    if count == 1:
        shards = {"model.safetensors": names}
    for shard, group in shards.items():
        header_order = rng.sample(group, len(group))
        write_safetensors(
            out / shard,
            {name: content[name] for name in group},
            metadata=rng.choice((None, "null", {"format": "pt"}, {"author": "me"})),
            order=group,
            header_order=header_order,
            pad=rng.choice(("8", "none", "page", "lead")),
            style=rng.choice(("compact", "spaced", "escaped", "mlx")),
        )
    if count > 1 and rng.random() < 0.8:
        index = {
            "metadata": {"total_size": 1},
            "weight_map": {n: shard for shard, group in shards.items() for n in group},
        }
        (out / INDEX).write_text(json.dumps(index), encoding="utf-8")
    (out / "NOTICE").write_bytes(b"extra")
    (out / "deep").mkdir(exist_ok=True)
    (out / "deep" / "er.txt").write_bytes(b"extra")


@many
@given(specs(), st.randoms(use_true_random=False))
def test_no_good_output_is_called_bad(spec: Spec, rng: random.Random) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source, out = made(root, spec)
        assert_equal(exact(out))
        assert_equal(exact(out, source))
        (root / "elsewhere").mkdir()
        gone = shutil.copytree(out, root / "elsewhere" / "gone" / "out")
        report = exact(gone)
        assert_equal(report, against="manifest digests")
        assert len(report.warnings) == 1
        foreign(out, fused(tensors(spec)), rng)
        report = exact(out, source)
        assert_equal(report)
        assert any("NOTICE" in note for note in report.notes)


@many
@given(specs(left_out=()), st.randoms(use_true_random=False))
def test_partly_and_already_fused_sources_and_outputs_are_good(spec: Spec, rng: random.Random) -> None:
    split, whole = tensors(spec), fused(tensors(spec))
    layers = {layer for layer in range(spec.num_hidden_layers) if rng.random() < 0.5}
    some = {name: rng.random() < 0.5 for name in ("qkv_proj", "gate_up_proj")}

    def keeps(name: str) -> bool:
        """Whether a fused tensor of this layer and kind stays in its fused form."""
        piece = name.rsplit("layers.", maxsplit=1)[-1].split(".")
        return piece[0].isdecimal() and int(piece[0]) in layers and some.get(piece[2], False)

    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    mixed: Tensors = {}
    for name, tensor in whole.items():
        kind = name.split(".")[-2] if "." in name else ""
        if kind not in parts or keeps(name):
            mixed[name] = tensor
        else:
            mixed |= {name.replace(kind, part): split[name.replace(kind, part)] for part in parts[kind]}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source, out = made(root, spec)
        partly = shutil.copytree(source, root / "partly")
        for path in [*partly.glob("*.safetensors"), partly / INDEX]:
            path.unlink(missing_ok=True)
        (partly / "model.safetensors").write_bytes(serialized(mixed))
        fuse(partly, root / "again")
        assert_equal(exact(root / "again"))
        assert_equal(exact(root / "again", source))  # the manifest knows whole tensors where this source has parts
        assert_equal(exact(out, partly))  # and the other way round
        assert_equal(exact(out, root / "again"))
        report = exact(partly, source)  # an output of another writer that fuses some
        if mixed.keys() & (whole.keys() - split.keys()):
            assert_equal(report)
            assert ("left split" in " ".join(report.notes)) == (mixed.keys() != whole.keys())
        else:
            assert "no group is fused" in problems(report)


def test_options_leave_their_traces_and_no_alarm(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_checkpoint(source, replace(SHARDED, lm_head="equal", num_hidden_layers=3))
    fuse(source, tmp_path / "out", drop_tied_lm_head=True, checksums=True, max_shard_size="5KB")
    report = exact(tmp_path / "out")
    assert_equal(report)
    assert any("sha256sum -c" in note for note in report.notes)
    assert_equal(exact(shutil.copytree(tmp_path / "out", tmp_path / "a" / "b")), against="manifest digests")
    (tmp_path / "out" / MANIFEST).unlink()
    assert "lm_head.weight is missing from OUT" in problems(exact(tmp_path / "out", source))


def test_a_dropped_head_has_to_be_the_embedding(tmp_path: Path) -> None:
    source = tmp_path / "source"
    spec = replace(SMALL, lm_head="equal")
    content = write_checkpoint(source, spec)
    fuse(source, tmp_path / "out", drop_tied_lm_head=True)
    dtype, shape, data = content["lm_head.weight"]
    content["lm_head.weight"] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))
    write_safetensors(source / "model.safetensors", content, metadata={"format": "pt"})
    report = exact(tmp_path / "out", source)
    assert "lm_head.weight differs from the source" in problems(report)
    assert report.exact.findings[0].offset == len(data) - 1


def unlike(root: Path, *, all_layers: bool) -> Path:
    """A source of which some groups have parts of two dtypes."""
    content = write_checkpoint(root / "source", SMALL)
    for name, (dtype, shape, data) in content.items():
        if name.endswith(("k_proj.weight", "up_proj.weight")) and (all_layers or ".0." in name):
            content[name] = ("F16" if dtype == "BF16" else "BF16", shape, data)
    write_safetensors(root / "source" / "model.safetensors", content, metadata={"format": "pt"})
    return root / "source"


@pytest.mark.parametrize("all_layers", [False, True])
def test_groups_that_the_manifest_lists_as_left_split_are_a_note(tmp_path: Path, *, all_layers: bool) -> None:
    source = unlike(tmp_path, all_layers=all_layers)
    fuse(source, tmp_path / "out", keep_split=True)
    report = exact(tmp_path / "out")
    assert_equal(report)
    assert any("groups are left split" in note for note in report.notes)
    assert_equal(exact(shutil.copytree(tmp_path / "out", tmp_path / "a" / "b")), against="manifest digests")
    with edited(tmp_path / "out" / MANIFEST) as manifest:
        manifest["left_split"].popitem()
    assert "disagree on whether it is left split" in problems(exact(tmp_path / "out"))
    (tmp_path / "out" / MANIFEST).unlink()
    report = exact(tmp_path / "out", source)
    if all_layers:
        assert "no group is fused" in problems(report)
    else:
        assert_equal(report)


# -------------------------------------------------------------------------------------------------------- quantised


def quantised(kind: str, spec: Spec) -> tuple[Tensors, dict[str, object]]:
    """Every Linear of the layers in a quantised form, and what config.json says of it."""
    rng = random.Random(spec.seed)  # noqa: S311
    content: Tensors = {}
    for name, tensor in tensors(spec).items():
        if "_proj." not in name:
            content[name] = tensor
            continue
        rows, columns = tensor[1]
        base = name.removesuffix("weight")
        content |= {f"{base}{suffix}": form for suffix, form in _stored(kind, rows, columns, rng).items()}
    group = {"weights": {"num_bits": 4, "group_size": 8}, "targets": ["Linear"]}
    declared: dict[str, dict[str, object]] = {
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"},
        "fp8": {"quant_method": "fp8", "weight_block_size": [8, 8]},
        "packed": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    }
    return content, {**config(spec), "quantization_config": declared[kind]}


def _stored(kind: str, rows: int, columns: int, rng: random.Random) -> Tensors:
    def drawn(dtype: str, *shape: int) -> Tensor:
        width = {"I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F32": 4}[dtype]
        return dtype, shape, rng.randbytes(width * int(np.prod(shape)))

    if kind == "fp8":
        return {
            "weight": drawn("F8_E4M3", rows, columns),
            "weight_scale_inv": drawn("F32", -(-rows // 8), -(-columns // 8)),
        }
    if kind == "packed":
        shape = struct.pack("<2q", rows, columns)
        return {
            "weight_packed": drawn("I32", rows, columns // 8),
            "weight_scale": drawn("BF16", rows, columns // 8),
            "weight_shape": ("I64", (2,), shape),
        }
    stored = {"qzeros": drawn("I32", columns // 8, rows // 8), "scales": drawn("F16", columns // 8, rows)}
    if kind == "awq":
        return {"qweight": drawn("I32", columns, rows // 8), **stored}
    g_idx = struct.pack(f"<{columns}i", *(i // 8 for i in range(columns)))
    return {"qweight": drawn("I32", columns // 8, rows), **stored, "g_idx": ("I32", (columns,), g_idx)}


@pytest.fixture(params=["gptq", "awq", "fp8", "packed"])
def quantised_pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    content, settings_ = quantised(request.param, Spec(num_hidden_layers=2))
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    write_safetensors(source / "model.safetensors", content, metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(settings_, indent=2), encoding="utf-8")
    fuse(source, out)
    return source, out


def test_joined_columns_single_copies_and_new_shapes_are_equal(
    quantised_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    _, out = quantised_pair
    assert_equal(exact(out))
    assert_equal(exact(shutil.copytree(out, tmp_path / "a" / "b")), against="manifest digests")


@pytest.mark.parametrize("mode", ["source", "digests"])
def test_a_byte_of_a_quantised_tensor_is_found_and_named(
    quantised_pair: tuple[Path, Path], mode: str, tmp_path: Path
) -> None:
    _, out = quantised_pair
    content = read_checkpoint(out)
    data = (out / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    rng = random.Random(0)  # noqa: S311
    target = tmp_path / "spoilt" if mode == "source" else tmp_path / "a" / "spoilt"
    for name in (name for name in content if "qkv_proj" in name or "gate_up_proj" in name):
        begin, stop = entries[name]["data_offsets"]
        at = rng.randrange(begin, stop)
        spoilt = bytearray(data)
        spoilt[end + at] ^= 1 << rng.randrange(8)
        shutil.copytree(out, target)
        (target / "model.safetensors").write_bytes(spoilt)
        report = exact(target)
        assert report.verdict == "not_equal"
        assert {finding.tensor for finding in report.exact.findings} == {name}
        if mode == "source":
            assert at - begin in {finding.offset for finding in report.exact.findings}
        shutil.rmtree(target)


def test_a_column_of_k_is_named_by_part_row_and_offset(tmp_path: Path) -> None:
    content, settings_ = quantised("awq", Spec(num_hidden_layers=1))
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    write_safetensors(source / "model.safetensors", content)
    (source / "config.json").write_text(json.dumps(settings_), encoding="utf-8")
    fuse(source, out)
    name = "model.layers.0.self_attn.k_proj.qweight"  # [16, 2] words; q has 4, so k begins at byte 16 of each row of 32
    dtype, shape, data = content[name]
    content[name] = (dtype, shape, data[:43] + bytes([data[43] ^ 1]) + data[44:])
    write_safetensors(source / "model.safetensors", content)
    finding = exact(out, source).exact.findings[0]
    assert (finding.part, finding.row, finding.part_row, finding.offset) == (name, 5, 5, 5 * 32 + 16 + 3)


# ---------------------------------------------------------------------------------------------------- which source


def test_the_source_is_the_one_that_the_manifest_names(pair: tuple[Path, Path]) -> None:
    source, out = pair
    report = exact(out)
    assert_equal(report)
    assert report.source is not None
    assert Path(report.source).samefile(source)
    assert report.exact.digests_checked
    assert (report.exact.tensors, report.exact.fused) == (len(read_checkpoint(out)), 6)
    assert report.exact.bytes == sum(len(data) for _, _, data in read_checkpoint(out).values())


def test_a_source_that_is_gone_leaves_the_digests_with_a_warning(pair: tuple[Path, Path]) -> None:
    source, out = pair
    shutil.rmtree(source)
    report = exact(out)
    assert_equal(report, against="manifest digests")
    assert report.source is None
    assert "is not there" in report.warnings[0]


def test_a_place_that_holds_another_source_now_leaves_the_digests_with_a_warning(pair: tuple[Path, Path]) -> None:
    source, out = pair
    shutil.rmtree(source)
    write_checkpoint(source, replace(SMALL, num_hidden_layers=2))
    report = exact(out)
    assert_equal(report, against="manifest digests")
    assert "not the recorded source" in report.warnings[0]


def test_a_recorded_source_that_is_malformed_now_is_a_warning(pair: tuple[Path, Path]) -> None:
    source, out = pair
    (source / "config.json").write_bytes(b"{")
    report = exact(out)
    assert_equal(report, against="manifest digests")
    assert "cannot be read" in report.warnings[0]


def test_a_named_source_is_compared_by_bytes_whatever_the_manifest_recorded(pair: tuple[Path, Path]) -> None:
    source, out = pair
    content = read_checkpoint(source)
    write_safetensors(source / "model.safetensors", content, pad="page")  # another header, the same tensors
    report = exact(out, source)
    assert_equal(report)
    assert "another source" in report.notes[0]
    name = "model.layers.1.mlp.up_proj.weight"
    dtype, shape, data = content[name]
    content[name] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])
    write_safetensors(source / "model.safetensors", content, pad="page")
    finding = exact(out, source).exact.findings[0]
    assert (finding.tensor, finding.part) == ("model.layers.1.mlp.gate_up_proj.weight", name)
    assert (finding.row, finding.part_row, finding.offset) == (24, 0, 24 * 32)
    assert exact(out).verdict == "equal"  # by digests: the recorded headers are gone


def test_without_manifest_and_source_there_is_nothing_to_verify(pair: tuple[Path, Path]) -> None:
    _, out = pair
    (out / MANIFEST).unlink()
    with pytest.raises(UsageError, match="--source"):
        exact(out)


def test_a_folder_does_not_prove_itself(pair: tuple[Path, Path]) -> None:
    _, out = pair
    report = exact(out, out / ".." / "out")
    assert report.verdict == "not_equal"
    assert any("OUT itself" in finding.problem for finding in report.exact.findings)
    with edited(out / MANIFEST) as manifest:
        manifest["provenance"]["folder"] = "."
    report = exact(out)
    assert_equal(report, against="manifest digests")
    assert "is not there" in report.warnings[0]


@pytest.mark.parametrize("out", ["", "nowhere", "file"])
def test_out_has_to_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(UsageError):
        exact(Path(out) if out else Path("nowhere"))


def test_a_malformed_source_is_an_error_and_a_malformed_output_a_verdict(pair: tuple[Path, Path]) -> None:
    source, out = pair
    for folder in (source, out):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as raised:
        exact(out, source)
    assert raised.value.exit_code == 3
    shutil.rmtree(source)
    made_again = write_checkpoint(source, SMALL)
    assert made_again
    report = exact(out, source)
    assert "truncated" in problems(report)
    assert any("no tensor was compared" in note for note in report.notes)


def test_a_source_that_is_no_whole_model_is_an_error(pair: tuple[Path, Path]) -> None:
    source, out = pair
    content = read_checkpoint(source)
    del content["model.layers.0.mlp.up_proj.weight"]
    write_safetensors(source / "model.safetensors", content)
    with pytest.raises(CheckpointError, match="up_proj"):
        exact(out, source)


def test_all_is_said_of_an_output_that_does_not_open(tmp_path: Path) -> None:
    source, out = made(tmp_path, SHARDED)
    first, second, _ = sorted(out.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes() + b"\0")
    (out / "LICENSE").write_bytes(b"another")
    (out / "tokenizer.json").unlink()
    (out / "config.json").write_bytes(b"{}")
    found = problems(exact(out, source))
    for wanted in (first.name, second.name, "LICENSE", "tokenizer.json", "config.json"):
        assert f"{wanted} " in found


def test_tensors_are_compared_even_where_config_is_malformed(pair: tuple[Path, Path]) -> None:
    source, out = pair
    (out / "config.json").write_bytes(b"{")
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    for report in (exact(out, source), exact(out)):
        found = problems(report)
        assert "config.json" in found
        assert "differs from the source" in found
    shutil.rmtree(source)
    assert "differs from the manifest's digest" in problems(exact(out))


# ---------------------------------------------------------------------------------------------- blake3, torch, layers


def test_without_blake3_the_bytes_are_compared(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = pair
    monkeypatch.setattr("fusecheck.digest.blake3", None)
    report = exact(out)
    assert_equal(report)
    assert not report.exact.digests_checked
    assert "digests not checked" in " ".join(report.notes)
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    assert "differs from the source" in problems(exact(out))
    shutil.rmtree(source)
    with pytest.raises(SystemFailure, match="blake3"):
        exact(out)


def test_without_torch_exact_is_proved_and_no_more(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, out = pair
    monkeypatch.setitem(sys.modules, "torch", None)
    report = verify(out)
    assert_equal(report)
    assert report.layers == (0, 1, 2)
    assert "torch is not installed" in report.warnings[0]
    for device in ("cpu", "cuda"):
        with pytest.raises(SystemFailure, match="torch"):
            verify(out, device=device)


@pytest.mark.parametrize("layers", [(3,), (0, 3), (-1,)])
def test_a_layer_beyond_the_model_is_refused(pair: tuple[Path, Path], layers: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="--layer"):
        verify(pair[1], layers=layers)


def test_all_three_verdicts_and_the_report_is_json(pair: tuple[Path, Path]) -> None:
    _, out = pair
    calls: list[tuple[int, int]] = []
    report = verify(out, layers=(2, 0, 2), device="cpu", on_progress=lambda done, total: calls.append((done, total)))
    assert (report.verdict, report.proved) == ("equal", ("exact", "probe", "numeric"))
    assert report.layers == (0, 2)
    assert [check.layer for check in report.projections] == [0, 0, 2, 2]
    assert {check.built for check in report.projections} == {"pass"}
    assert calls[-1] == (report.exact.bytes, report.exact.bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert json.loads(json.dumps(asdict(report)))["exact"]["verdict"] == "pass"


def test_without_the_source_the_weights_are_cut_at_the_offsets_of_the_manifest(pair: tuple[Path, Path]) -> None:
    source, out = pair
    shutil.rmtree(source)
    report = verify(out, device="cpu")
    assert report.proved == ("exact", "probe", "numeric")
    assert "cut out of OUT" in " ".join(report.notes)
    with edited(out / MANIFEST) as manifest:
        manifest["tensors"]["model.layers.0.self_attn.qkv_proj.weight"]["parts"][0]["shard_size"] = 10**30
    report = verify(out, device="cpu")
    assert (report.verdict, report.projections) == ("not_equal", ())
    assert "probe and numeric not run" in " ".join(report.notes)


def test_a_layer_that_was_not_asked_for_is_compared_too(pair: tuple[Path, Path]) -> None:
    source, out = pair
    content = read_checkpoint(source)
    name = "model.layers.2.self_attn.v_proj.weight"
    dtype, shape, data = content[name]
    content[name] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 0x80]))
    write_safetensors(source / "model.safetensors", content, metadata={"format": "pt"})
    report = verify(out, source=source, layers=(0,), device="cpu")
    assert report.verdict == "not_equal"
    assert report.proved == ("probe", "numeric")
    assert report.exact.findings[0].part == name


def test_a_source_of_other_names_leaves_the_projections_without_a_verdict(pair: tuple[Path, Path]) -> None:
    source, out = pair
    shutil.rmtree(source)
    write_checkpoint(source, replace(SMALL, prefix="model.language_model."))
    report = verify(out, source=source, device="cpu")
    assert report.verdict == "not_equal"
    assert {check.probe.verdict for check in report.projections} == {"not run"}
    assert "the source lacks a part" in report.projections[0].probe.reason


def test_a_file_that_safetensors_refuses_is_a_failure(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, out = pair
    from safetensors import SafetensorError  # noqa: PLC0415

    def refuse(*_: object, **__: object) -> None:
        raise SafetensorError("no")

    monkeypatch.setattr("fusecheck.tensors.safe_open", refuse)
    report = verify(out, device="cpu")
    assert report.verdict == "not_equal"
    assert report.proved == ()
    assert "safetensors does not: no" in report.projections[0].probe.reason


# ---------------------------------------------------------------------------------------------------- many findings, I/O


def test_many_findings_are_cut_and_counted(tmp_path: Path) -> None:
    spec = replace(SMALL, num_hidden_layers=11)
    _, out = made(tmp_path, spec)
    write_checkpoint(tmp_path / "other", replace(spec, seed=1))
    report = exact(out, tmp_path / "other")
    assert report.exact.finding_count > MAX_FINDINGS
    assert len(report.exact.findings) == MAX_FINDINGS


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_changes_meanwhile_is_a_system_failure(pair: tuple[Path, Path], which: int) -> None:
    path = pair[which] / "model.safetensors"
    with pytest.raises(SystemFailure, match="changed") as raised:
        verify(pair[1], exact_only=True, on_progress=lambda *_: os.utime(path, ns=(0, 0)))
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("reads", [0, 4, 12, 30])
def test_a_disk_that_fails_is_a_system_failure(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    left = iter(range(reads))
    true_preadv = os.preadv

    def preadv(*arguments: Any) -> int:  # noqa: ANN401
        if next(left, None) is None:
            raise OSError(errno.EIO, "Input/output error")
        return true_preadv(*arguments)

    monkeypatch.setattr("os.preadv", preadv)
    with pytest.raises(SystemFailure, match="Input/output error") as raised:
        exact(pair[1], pair[0])
    assert raised.value.exit_code == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MANIFEST, "."])
def test_an_output_that_may_not_be_read_is_a_system_failure(pair: tuple[Path, Path], name: str) -> None:
    path = pair[1] / name
    path.chmod(0)
    try:
        with pytest.raises(SystemFailure):
            exact(pair[1], pair[0])
    finally:
        path.chmod(0o700)


def test_the_command_line_says_which(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = pair
    monkeypatch.setitem(sys.modules, "torch", None)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["fusecheck", "verify", *arguments, "--json", "--no-progress"])
        with pytest.raises(SystemExit) as raised:
            main()
        printed = capsys.readouterr().out
        return int(raised.value.code or 0), json.loads(printed)

    assert run(str(out))[0] == 0
    assert run(str(out), "--layer", "9")[0] == 2
    assert run(str(out), "--device", "cpu")[0] == 4
    with edited(out / MANIFEST) as manifest:
        manifest["side_files"]["\x1b[31m\u202e\ud800"] = {"size": 1, "digest": "0" * 64}
    code, document = run(str(out))
    assert (code, document["verdict"]) == (1, "not_equal")
    (out / MANIFEST).unlink()
    assert run(str(out))[0] == 2
    (source / "config.json").unlink()
    assert run(str(out), "--source", str(source))[0] == 3


# -------------------------------------------------------------------------------------------------- hostile manifests


class edited:  # noqa: N801 - reads as a verb
    """A JSON file, to be changed in place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value: Any = json.loads(path.read_bytes())

    def __enter__(self) -> Any:  # noqa: ANN401
        return self.value

    def __exit__(self, *_: object) -> None:
        self.path.write_text(json.dumps(self.value), encoding="utf-8")


Path_ = tuple[str | int, ...]


def leaves(value: Any, path: Path_ = ()) -> Iterator[Path_]:  # noqa: ANN401
    """Paths of every number and text."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    elif value is not None:
        yield path


def nodes(value: Any, path: Path_ = ()) -> Iterator[Path_]:  # noqa: ANN401
    """Paths of everything."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(item, (*path, key))


def put(value: Any, path: Path_, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """The value with one place of it changed."""
    if not path:
        return change(value)
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], change)
    return copy


def other(value: Any) -> Any:  # noqa: ANN401
    """Another value of the same kind; of a digest another digest."""
    if isinstance(value, int):
        return value + 1
    return value[:-1] + ("1" if value[-1] == "0" else "0") if len(value) == 64 else f"{value}0"


def provenance_only(path: Path_, *, source_is_there: bool) -> bool:
    """Statements about where OUT comes from, which no file of OUT can bear out."""
    if path[0] in {"provenance", "options"} or (path[0] == "source_shards" and path[-1] == "header_digest"):
        return True
    numbers = path in {("source_index", "total_size"), ("source_index", "total_parameters")}
    return not source_is_there and (numbers or path[0] == "source_shards")


@pytest.mark.parametrize("source_is_there", [True, False])
def test_every_statement_of_a_manifest_is_checked(tmp_path: Path, *, source_is_there: bool) -> None:
    """Each number and text of a manifest changed alone is found, but for what names the source."""
    source, out = made(tmp_path, SHARDED)
    if not source_is_there:
        shutil.rmtree(source)
    good = json.loads((out / MANIFEST).read_bytes())
    paths = list(leaves(good))
    assert len(paths) > 100
    unseen = []
    for path in paths:
        (out / MANIFEST).write_text(json.dumps(put(good, path, other)), encoding="utf-8")
        if exact(out).verdict == "equal":
            unseen.append(path)
    assert [path for path in unseen if not provenance_only(path, source_is_there=source_is_there)] == []


HOSTILE: tuple[object, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1.5,
        10**30,
        10**4000,
        "",
        "x",
        "../../etc/passwd",
        "\0",
        "\x1b[2J",
        "\ud800",
        "\u202e",
    ),
    *("a" * 100_000, [], {}, [[]], {"": {}}, {"\ud800": 1}, ["q"], "0" * 64, "zz" * 32),
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    _, out = made(tmp_path_factory.mktemp("hostile"), SHARDED)
    return out, json.loads((out / MANIFEST).read_bytes())


@many
@given(st.data())
def test_a_hostile_manifest_is_judged_and_never_crashes(sharded: tuple[Path, Any], data: st.DataObject) -> None:
    out, good = sharded
    value = good
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([path for path in nodes(value) if path]))
        hostile = data.draw(st.sampled_from(HOSTILE))
        value = put(value, path, lambda _, instead=hostile: instead)  # type: ignore[misc]
    (out / MANIFEST).write_text(json.dumps(value), encoding="utf-8")
    report = exact(out)
    json.dumps(asdict(report))
    assert (report.verdict == "equal") == (not report.exact.findings)
