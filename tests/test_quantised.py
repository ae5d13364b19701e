"""Quantised and sparse checkpoints, from fuse to verify: every method, every family, what is refused, what is caught."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import Tensor, read_checkpoint, read_header
from quantised import BLOCK, EXPERTS, HIDDEN, KINDS, Quantised, checkpoint, tensor

from fusecheck.cli import main
from fusecheck.errors import CheckpointError, NoFusedForm
from fusecheck.manifest import read_manifest
from fusecheck.operations.fuse import fuse
from fusecheck.operations.verify import VerifyReport, verify
from fusecheck.verdicts import ProjectionCheck

QKV = "model.layers.0.self_attn."
MLP = "model.layers.0.mlp."
CASES = [(kind, "qwen3") for kind in KINDS] + [
    (kind, family)
    for family in ("qwen3_moe", "qwen2", "llama", "mistral", "qwen3_vl")
    for kind in ("plain", "fp8-block", "awq", "gptq-4", "ct-int4-zero", "ct-nvfp4", "modelopt-nvfp4")
]


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """No fsync, and one thread: the matrices are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
    torch.set_num_threads(threads)


def fused(source: Quantised, place: Path, *, keep_split: bool = False) -> Path:
    fuse(source.write(place / "in"), place / "out", keep_split=keep_split)
    return place / "out"


def refused(source: Quantised, place: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        fused(source, place)
    assert not (place / "out").exists()
    return caught.value


def of_layer(report: VerifyReport, layer: int) -> dict[str, ProjectionCheck]:
    return {check.tensor: check for check in report.projections if check.layer == layer}


def row(kind: str, family: str, report: VerifyReport) -> str:
    """One line of the table that `pytest -s` shows."""
    seen = {
        name: Counter(getattr(check, name).verdict if name != "built" else check.built for check in report.projections)
        for name in ("built", "probe", "numeric")
    }
    counts = "  ".join(f"{name} {', '.join(f'{n} {v}' for v, n in found.items())}" for name, found in seen.items())
    weights = ", ".join(dict.fromkeys(check.weights for check in report.projections))
    return f"{kind:18} {family:10} {report.verdict}: exact {report.exact.verdict}  {counts}  on {weights}\n"


# ------------------------------------------------------------------------------------------------------- every method


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_fused_bytes_are_those_of_whole_arrays_and_verify_proves_them(kind: str, family: str, tmp_path: Path) -> None:
    source = checkpoint(kind, family)
    out = fused(source, tmp_path)
    assert read_checkpoint(out) == source.fused()
    report = verify(out, device="cpu")
    sys.stdout.write(row(kind, family, report))
    assert report.verdict == "equal"
    assert report.proved == ("exact", "probe", "numeric")
    by_rows = "gptq" not in kind and kind != "awq"
    for check in report.projections:
        assert (check.probe.verdict, check.numeric.verdict) == ("pass", "pass"), check
        assert check.probe.compared == check.output_size * HIDDEN
        assert check.built == ("pass" if by_rows else "not run")
        assert bool(check.built_reason) != by_rows
        assert (check.weights == "stored") == (kind == "plain")
        assert kind == "plain" or check.weights.startswith("dequantised to float32 (")
        assert kind == "plain" or any("dequantised to float32" in note for note in check.numeric.notes)
    assert kind == "plain" or any("dequantised to float32" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["fp8-block", "gptq-4-act-order", "ct-int4-zero", "awq", "ct-nvfp4"])
def test_without_the_source_the_parts_are_cut_out_of_the_fused_tensors(kind: str, tmp_path: Path) -> None:
    out = fused(checkpoint(kind, "qwen3_moe"), tmp_path)
    shutil.rmtree(tmp_path / "in")
    report = verify(out, device="cpu")
    assert report.proved == ("exact", "probe", "numeric")
    assert {check.probe.verdict for check in report.projections} == {"pass"}


def test_a_fused_source_is_cut_where_its_config_says(tmp_path: Path) -> None:
    once = fused(checkpoint("awq"), tmp_path)
    fuse(once, tmp_path / "again")
    report = verify(tmp_path / "again", source=once, device="cpu")
    assert report.verdict == "equal"
    assert {check.probe.verdict for check in report.projections} == {"pass"}


# ------------------------------------------------------------------------------------------------------- experts


def test_routers_and_gates_stay_and_each_expert_is_fused(tmp_path: Path) -> None:
    source = checkpoint("fp8-block", "qwen3_moe")
    found = read_checkpoint(fused(source, tmp_path))
    for name in (f"{MLP}gate.weight", f"{MLP}shared_expert_gate.weight"):
        assert found[name] == source.tensors[name]
    assert {name for name in found if name.startswith(f"{MLP}experts.") and "gate_up" in name} == {
        f"{MLP}experts.{number}.gate_up_proj.{suffix}"
        for number in range(EXPERTS)
        for suffix in ("weight", "weight_scale_inv")
    }
    assert f"{MLP}shared_expert.gate_up_proj.weight" in found


def test_a_sample_of_the_experts_is_checked_and_said(tmp_path: Path) -> None:
    out = fused(checkpoint("fp8-block", "qwen3_moe"), tmp_path)
    by_seed = set()
    for seed in range(6):
        report = verify(out, device="cpu", layers=(1,), seed=seed)
        numbers = [int(found[1]) for name in of_layer(report, 1) if (found := re.search(r"experts\.(\d+)\.", name))]
        assert {0, 3, 5} < set(numbers)
        assert len(numbers) == 4
        assert sum(", ".join(map(str, numbers)) in note and f"seed {seed}" in note for note in report.notes) == 1
        by_seed.update(numbers)
    assert by_seed > {0, 3, 5}
    whole = verify(out, device="cpu", layers=(1,), all_experts=True)
    assert len(whole.projections) == 1 + EXPERTS + 1
    assert not any("experts" in note for note in whole.notes)


def test_all_experts_is_an_option_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = fused(checkpoint("gptq-4", "qwen3_moe", layers=1), tmp_path)
    monkeypatch.setattr(sys, "argv", ["fusecheck", "verify", str(out), "--device", "cpu", "--all-experts", "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["projections"]) == 1 + EXPERTS + 1
    assert {check["weights"] for check in report["projections"]} == {"dequantised to float32 (gptq)"}


# ------------------------------------------------------------------------------------------------------- refused


def _declared(source: Quantised) -> dict[str, object]:
    found = source.config["quantization_config"]
    assert isinstance(found, dict)
    return found


def _set(source: Quantised, module: str, **suffixes: Tensor | None) -> None:
    """Put, replace or (None) take away tensors of one module."""
    for suffix, one in suffixes.items():
        source.tensors.pop(f"{module}.{suffix}", None)
        if one is not None:
            source.tensors[f"{module}.{suffix}"] = one


def _other(kind: str, rows: int, source: Quantised, module: str) -> None:
    """Store one part as another kind stores it."""
    for name in [name for name in source.tensors if name.startswith(f"{module}.")]:
        del source.tensors[name]
    made = KINDS[kind][1](np.random.default_rng(1), rows, HIDDEN)
    _set(source, module, **made.tensors)


def _bits_differ() -> Quantised:
    source = checkpoint("gptq-4")
    _other("gptq-8", 32, source, f"{QKV}k_proj")
    return source


def _group_differs() -> Quantised:
    source = checkpoint("awq")
    dtype, (groups, columns), data = source.tensors[f"{QKV}v_proj.scales"]
    _set(source, f"{QKV}v_proj", scales=(dtype, (groups * 2, columns), data * 2))
    return source


def _index_differs() -> Quantised:
    source = checkpoint("gptq-4")
    _set(source, f"{QKV}v_proj", g_idx=tensor("I32", np.arange(HIDDEN)[::-1] // 16))
    return source


def _scale_differs() -> Quantised:
    source = checkpoint("fp8-tensor")
    _set(source, f"{MLP}up_proj", weight_scale=tensor("F32", np.array(2.0)))
    return source


def _global_scale_differs() -> Quantised:
    source = checkpoint("ct-nvfp4")
    _set(source, f"{MLP}up_proj", weight_global_scale=tensor("F32", np.array([2.0])))
    return source


def _unaligned() -> Quantised:
    source = checkpoint("fp8-block")
    high, wide = 24, BLOCK[1]
    _declared(source)["weight_block_size"] = [high, wide]
    for module, weight in source.weights.items():
        rows, columns = weight.shape
        shape = (-(-rows // high), -(-columns // wide))
        _set(source, module, weight_scale_inv=tensor("BF16", np.ones(shape, np.float32)))
    return source


def _unaligned_zeros() -> Quantised:
    """12 rows a part fill no whole words of 4 bits."""
    source = checkpoint("ct-int4-zero")
    source.config.update(head_dim=6, num_attention_heads=2, num_key_value_heads=2)
    for layer in range(2):
        for name in ("q_proj", "k_proj", "v_proj"):
            _other("ct-int4", 12, source, f"model.layers.{layer}.self_attn.{name}")
            zero = tensor("I32", np.zeros((2, 4)))
            _set(source, f"model.layers.{layer}.self_attn.{name}", weight_zero_point=zero)
    for layer in range(2):
        for norm in ("q_norm", "k_norm"):
            _set(source, f"model.layers.{layer}.self_attn.{norm}", weight=tensor("BF16", np.ones(6, np.float32)))
    return source


KEPT: dict[str, tuple[Callable[[], Quantised], str, str]] = {
    "bits differ": (_bits_differ, f"{QKV}k_proj", "packed differently"),
    "group size differs": (_group_differs, f"{QKV}v_proj", "packed differently"),
    "g_idx differs": (_index_differs, f"{QKV}v_proj.g_idx", "one copy has to serve all"),
    "scales per tensor differ": (_scale_differs, f"{MLP}up_proj.weight_scale", "one copy has to serve all"),
    "global scales differ": (_global_scale_differs, f"{MLP}up_proj.weight_global_scale", "one copy has to serve all"),
    "a block spans two parts": (_unaligned, f"{QKV}q_proj.weight_scale_inv", "ends inside a block of scales"),
    "zero points of no whole words": (_unaligned_zeros, f"{QKV}q_proj.weight_zero_point", "fill no whole words"),
}
"""Groups without a lossless fused form: refused, or left split by --keep-split."""


@pytest.mark.parametrize("case", KEPT)
def test_what_has_no_lossless_fused_form_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, name, reason = KEPT[case]
    error = refused(make(), tmp_path)
    assert isinstance(error, NoFusedForm)
    assert name in str(error)
    assert reason in str(error)
    assert error.exit_code == 3


@pytest.mark.parametrize("case", KEPT)
def test_keep_split_leaves_it_as_it_is_and_fuses_the_rest(case: str, tmp_path: Path) -> None:
    make, name, reason = KEPT[case]
    source = make()
    out = fused(source, tmp_path, keep_split=True)
    found = read_checkpoint(out)
    scope = name[: name.index("_proj")].rpartition(".")[0]
    kept = {one: data for one, data in source.tensors.items() if one.startswith(scope)}
    assert {one: found.get(one) for one in kept} == kept
    manifest = read_manifest(out)
    assert manifest is not None
    assert any(group.startswith(scope) and reason in why for group, why in manifest.left_split.items())
    report = verify(out, device="cpu")
    assert report.verdict == "equal"
    assert any("left split" in note for note in report.notes)


def _some_ignored() -> Quantised:
    source = checkpoint("fp8-block")
    _declared(source)["modules_to_not_convert"] = ["lm_head", f"{QKV}q_proj"]
    _other("plain", 64, source, f"{QKV}q_proj")
    return source


def _undeclared() -> Quantised:
    source = checkpoint("fp8-block")
    del source.config["quantization_config"]
    return source


def _cache_only() -> Quantised:
    source = checkpoint("modelopt-fp8")
    source.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": None,
        "kv_cache_quant_algo": "FP8",
    }
    return source


def _unscaled() -> Quantised:
    source = checkpoint("plain")
    source.config["quantization_config"] = KINDS["fp8-block"][0]
    return source


def _unknown_suffix() -> Quantised:
    source = checkpoint("gptq-4")
    for part in ("q_proj", "k_proj", "v_proj"):
        _set(source, f"{QKV}{part}", qscale_table=tensor("F16", np.ones((1, 4), np.float16)))
    return source


def _mlx() -> Quantised:
    source = checkpoint("plain")
    source.config["quantization"] = {"group_size": 64, "bits": 4}
    return source


def _declares(**keys: object) -> Callable[[], Quantised]:
    def make() -> Quantised:
        source = checkpoint(str(keys.get("kind", "awq")))
        source.config["quantization_config"] = {**_declared(source), **{k: v for k, v in keys.items() if k != "kind"}}
        return source

    return make


def _shape_lies() -> Quantised:
    source = checkpoint("ct-int4")
    _set(source, f"{MLP}gate_proj", weight_shape=tensor("I64", np.array([95, HIDDEN])))
    return source


def _no_block_size() -> Quantised:
    source = checkpoint("fp8-block")
    del _declared(source)["weight_block_size"]
    return source


REFUSED: dict[str, tuple[Callable[[], Quantised], tuple[str, ...]]] = {
    "some parts ignored": (_some_ignored, ("names only some parts of self_attn.qkv_proj", f"{QKV}q_proj")),
    "scales without a declaration": (_undeclared, (f"{QKV}q_proj.weight_scale_inv", "declares none")),
    "scales, but the cache alone is declared": (_cache_only, (f"{QKV}q_proj.", "declares none")),
    "a declaration without scales": (_unscaled, (f"{QKV}q_proj.weight", "declares fp8", "no ignore list")),
    "a tensor of no known kind": (_unknown_suffix, (f"{QKV}q_proj.qscale_table", "declares gptq")),
    "MLX": (_mlx, ("MLX", "config.json")),
    "AWQ gemv": (_declares(version="gemv"), ("AWQ layouts other than gemm", "gemv")),
    "AWQ gemv_fast": (_declares(version="gemv_fast"), ("AWQ layouts other than gemm", "gemv_fast")),
    "bitsandbytes": (_declares(quant_method="bitsandbytes", load_in_4bit=True), ("not supported", "bitsandbytes")),
    "an unknown method": (_declares(quant_method="aqlm"), ("not supported", "aqlm")),
    "GPTQ for marlin": (_declares(kind="gptq-4", checkpoint_format="marlin"), ("GPTQ layout", "marlin")),
    "other bits than declared": (_declares(kind="gptq-4", bits=8), ("packing contradicts", "4 bits", "8 bits")),
    "another group than declared": (
        _declares(kind="awq", group_size=32),
        ("packing contradicts", "group 16", "group 32"),
    ),
    "a block size that nobody declares": (_no_block_size, (f"{QKV}q_proj.weight_scale_inv", "block size")),
    "a weight_shape that lies": (_shape_lies, (f"{MLP}gate_proj.weight_shape", "[95, 64]", "[96, 64]")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_understood_is_refused(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    error = refused(make(), tmp_path)
    assert not isinstance(error, NoFusedForm)
    assert all(word in str(error) for word in words), str(error)
    assert error.exit_code == 3


def test_an_ignored_layer_stays_plain_and_is_fused_as_such(tmp_path: Path) -> None:
    source = checkpoint("fp8-block")
    for module in [name for name in source.weights if ".layers.0." in name]:
        _other("plain", source.weights[module].shape[0], source, module)
    source.tensors[f"{QKV}o_proj.weight"] = tensor("BF16", np.ones((HIDDEN, 64), np.float32))
    source.tensors[f"{MLP}down_proj.weight"] = tensor("BF16", np.ones((HIDDEN, 96), np.float32))
    _declared(source)["modules_to_not_convert"] = ["lm_head", "model.layers.0"]
    out = fused(source, tmp_path)
    assert read_checkpoint(out) == source.fused()
    report = verify(out, device="cpu")
    assert report.proved == ("exact", "probe", "numeric")
    assert {check.weights for check in report.projections} == {"stored", "dequantised to float32 (fp8)"}


# ------------------------------------------------------------------------------------------------------- declarations


def _beside(source: Quantised, place: Path, **keys: object) -> Path:
    folder = source.write(place / "in")
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], **keys}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}), encoding="utf-8")
    return folder


def test_hf_quant_config_alone_declares(tmp_path: Path) -> None:
    source = checkpoint("modelopt-fp8")
    del source.config["quantization_config"]
    fuse(_beside(source, tmp_path), tmp_path / "out")
    assert read_checkpoint(tmp_path / "out") == source.fused()
    report = verify(tmp_path / "out", device="cpu")
    assert report.proved == ("exact", "probe", "numeric")
    assert {check.weights for check in report.projections} == {"dequantised to float32 (modelopt)"}


@pytest.mark.parametrize("keys", [{"quant_algo": "NVFP4"}, {"exclude_modules": ["lm_head", "model.layers.0"]}])
def test_hf_quant_config_must_agree(keys: dict[str, object], tmp_path: Path) -> None:
    source = checkpoint("modelopt-nvfp4" if "exclude_modules" in keys else "fp8-tensor")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json disagrees"):
        fuse(_beside(source, tmp_path, **keys), tmp_path / "out")


def test_quantising_the_cache_alone_is_none(tmp_path: Path) -> None:
    source = checkpoint("plain")
    source.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": None,
        "kv_cache_quant_algo": "FP8",
    }
    scales = {
        f"model.layers.{layer}.self_attn.{name}": tensor("F32", np.array(value))
        for layer in range(2)
        for name, value in (("k_proj.k_scale", 0.25), ("v_proj.v_scale", 0.5))
    }
    source.tensors.update(scales)
    out = fused(source, tmp_path)
    found = read_checkpoint(out)
    assert found == source.fused()
    assert {name: found[name] for name in scales} == scales
    assert verify(out, device="cpu").proved == ("exact", "probe", "numeric")


@pytest.mark.parametrize("kind", ["fp8-tensor", "modelopt-nvfp4", "gptq-4"])
def test_cache_scales_beside_quantised_parts_keep_their_names(kind: str, tmp_path: Path) -> None:
    source = checkpoint(kind)
    scales = {f"{QKV}{part}.{part[0]}_scale": tensor("F32", np.array(0.25)) for part in ("k_proj", "v_proj")}
    source.tensors.update(scales)
    out = fused(source, tmp_path)
    found = read_checkpoint(out)
    assert found == source.fused()
    assert scales.items() <= found.items()
    assert verify(out, device="cpu").proved == ("exact", "probe", "numeric")


def test_biases_that_gptq_writers_leave_are_fused_and_warned_of(tmp_path: Path) -> None:
    source = checkpoint("gptq-4")
    for module, weight in source.weights.items():
        source.tensors[f"{module}.bias"] = tensor("F16", np.linspace(0, 1, len(weight)).astype(np.float16))
    report = fuse(source.write(tmp_path / "in"), tmp_path / "out")
    assert any("a bias that config.json does not know" in warning for warning in report.warnings)
    assert read_checkpoint(tmp_path / "out") == source.fused()
    assert verify(tmp_path / "out", device="cpu").proved == ("exact", "probe", "numeric")


def test_gptq_gains_its_list_of_modules_and_nothing_else(tmp_path: Path) -> None:
    source = checkpoint("gptq-4")
    out = fused(source, tmp_path)
    text = (out / "config.json").read_text(encoding="utf-8")
    wanted = json.loads(json.dumps(source.config))
    wanted["quantization_config"]["modules_in_block_to_quantize"] = [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    assert json.loads(text) == wanted
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest.config_original == (tmp_path / "in/config.json").read_text(encoding="utf-8")
    (out / "config.json").write_text(text.replace('"desc_act": false', '"desc_act": true'), encoding="utf-8")
    report = verify(out, device="cpu")
    assert report.verdict == "not_equal"
    assert any(finding.file == "config.json" for finding in report.exact.findings)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "gptq" not in kind])
def test_every_other_config_is_copied(kind: str, tmp_path: Path) -> None:
    out = fused(checkpoint(kind, layers=1), tmp_path)
    assert (out / "config.json").read_bytes() == (tmp_path / "in/config.json").read_bytes()


# ------------------------------------------------------------------------------------------------------- plain small floats


@pytest.mark.parametrize(("dtype", "bits"), [("F8_E4M3", 8), ("F4", 4), ("F6_E2M3", 6)])
def test_small_floats_without_scales_fuse_and_are_no_matter_for_a_gemm(dtype: str, bits: int, tmp_path: Path) -> None:
    source = checkpoint("plain")
    choice = np.random.default_rng(0)
    for module, weight in source.weights.items():
        data = choice.integers(0, 128, weight.size * bits // 8, dtype=np.uint8).tobytes()
        source.tensors[f"{module}.weight"] = (dtype, weight.shape, data)
    out = fused(source, tmp_path)
    report = verify(out, device="cpu")
    assert (report.verdict, report.proved) == ("equal", ("exact",))
    for check in report.projections:
        assert check.built == "pass"
        assert (check.probe.verdict, check.numeric.verdict) == ("not run", "not run")
        assert "without scales" in check.probe.reason


# ------------------------------------------------------------------------------------------------------- mutants


def _place(folder: Path, name: str) -> tuple[Path, int, int]:
    """(shard, first byte, number of bytes) of one tensor of a written checkpoint."""
    for shard in sorted(folder.glob("*.safetensors")):
        header = read_header(shard)
        if name in header:
            start, stop = header[name]["data_offsets"]
            return shard, 8 + int.from_bytes(shard.read_bytes()[:8], "little") + start, stop - start
    raise KeyError(name)


def _flip(folder: Path, name: str, share: float, mask: int) -> int:
    """Flip bits of one byte, at `share` of the tensor; returns its place in the tensor."""
    shard, start, size = _place(folder, name)
    data = bytearray(shard.read_bytes())
    at = int(share * (size - 1))
    data[start + at] ^= mask
    shard.write_bytes(data)
    return at


MUTANTS = (
    # kind, fused tensor, where in it (0 to 1), bits to flip, part that has to be named
    ("awq", f"{QKV}qkv_proj.qweight", 0.0, 0x10, f"{QKV}q_proj.qweight"),
    ("awq", f"{QKV}qkv_proj.qweight", 1.0, 0x10, f"{QKV}v_proj.qweight"),
    ("awq", f"{MLP}gate_up_proj.qzeros", 1.0, 0x01, f"{MLP}up_proj.qzeros"),
    ("awq", f"{MLP}gate_up_proj.scales", 0.0, 0x04, f"{MLP}gate_proj.scales"),
    ("gptq-4", f"{QKV}qkv_proj.qweight", 0.0, 0x01, f"{QKV}q_proj.qweight"),
    ("gptq-3", f"{QKV}qkv_proj.qweight", 1.0, 0x80, f"{QKV}v_proj.qweight"),
    ("gptq-4", f"{QKV}qkv_proj.qzeros", 1.0, 0x20, f"{QKV}v_proj.qzeros"),
    ("gptq-4", f"{QKV}qkv_proj.scales", 1.0, 0x01, f"{QKV}v_proj.scales"),
    ("gptq-4-act-order", f"{MLP}gate_up_proj.g_idx", 0.0, 0x01, f"{MLP}gate_proj.g_idx"),
    ("fp8-block", f"{QKV}qkv_proj.weight", 1.0, 0x80, f"{QKV}v_proj.weight"),
    ("fp8-block", f"{QKV}qkv_proj.weight_scale_inv", 0.0, 0x10, f"{QKV}q_proj.weight_scale_inv"),
    ("fp8-channel", f"{MLP}gate_up_proj.weight_scale", 1.0, 0x40, f"{MLP}up_proj.weight_scale"),
    ("fp8-tensor", f"{MLP}gate_up_proj.weight_scale", 0.0, 0x01, f"{MLP}gate_proj.weight_scale"),
    ("modelopt-nvfp4", f"{QKV}qkv_proj.weight", 0.0, 0x10, f"{QKV}q_proj.weight"),
    ("modelopt-nvfp4", f"{QKV}qkv_proj.weight_scale", 1.0, 0x01, f"{QKV}v_proj.weight_scale"),
    ("modelopt-nvfp4", f"{QKV}qkv_proj.weight_scale_2", 0.0, 0x01, f"{QKV}q_proj.weight_scale_2"),
    ("ct-nvfp4", f"{QKV}qkv_proj.weight_packed", 1.0, 0x01, f"{QKV}v_proj.weight_packed"),
    ("ct-nvfp4", f"{QKV}qkv_proj.weight_global_scale", 0.0, 0x01, f"{QKV}q_proj.weight_global_scale"),
    ("ct-int4", f"{QKV}qkv_proj.weight_packed", 0.0, 0x01, f"{QKV}q_proj.weight_packed"),
    ("ct-int4", f"{QKV}qkv_proj.weight_shape", 0.0, 0x01, f"{QKV}qkv_proj.weight_shape"),
    ("ct-int4-zero", f"{MLP}gate_up_proj.weight_zero_point", 1.0, 0x10, f"{MLP}up_proj.weight_zero_point"),
    ("ct-int4-act-order", f"{MLP}gate_up_proj.weight_g_idx", 0.0, 0x01, f"{MLP}gate_proj.weight_g_idx"),
)


@pytest.mark.parametrize("with_source", [True, False], ids=["source", "manifest"])
@pytest.mark.parametrize(("kind", "name", "share", "mask", "part"), MUTANTS)
def test_one_changed_nibble_scale_zero_point_or_index_is_named(
    kind: str, name: str, share: float, mask: int, part: str, *, with_source: bool, tmp_path: Path
) -> None:
    out = fused(checkpoint(kind, layers=1), tmp_path)
    _flip(out, name, share, mask)
    if not with_source:
        shutil.rmtree(tmp_path / "in")
    report = verify(out, device="cpu")
    assert report.verdict == "not_equal"
    assert report.exact.verdict == "fail"
    found = [finding for finding in report.exact.findings if finding.tensor == name]
    assert found, report.exact.findings
    assert name == part or part in {finding.part for finding in found}, found
    hit = [check for check in report.projections if check.tensor.rpartition(".")[0] == name.rpartition(".")[0]]
    seen = {check.probe.verdict for check in hit}
    # a per-tensor scale, g_idx and weight_shape may stay within what probe compares; without a source it is not run
    assert seen <= ({"fail", "not run"} if with_source else {"not run", "fail", "pass"}), hit


def test_a_mutant_is_exit_1_and_the_line_names_tensor_and_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = fused(checkpoint("awq", layers=1), tmp_path)
    _flip(out, f"{QKV}qkv_proj.qweight", 1.0, 0x10)
    monkeypatch.setattr(sys, "argv", ["fusecheck", "verify", str(out), "--device", "cpu", "--quiet"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    text = capsys.readouterr().out
    assert f"{QKV}qkv_proj.qweight" in text
    assert f"{QKV}v_proj.qweight" in text


def test_swapped_experts_are_found(tmp_path: Path) -> None:
    source = checkpoint("gptq-4", "qwen3_moe", layers=1)
    out = fused(source, tmp_path)
    one, two = (f"{MLP}experts.{number}.gate_up_proj.qweight" for number in (1, 2))
    (shard, start, size), (other, place, _) = _place(out, one), _place(out, two)
    data = {path: bytearray(path.read_bytes()) for path in {shard, other}}
    first, second = data[shard][start : start + size], data[other][place : place + size]
    data[shard][start : start + size], data[other][place : place + size] = second, first
    for path, blob in data.items():
        path.write_bytes(blob)
    report = verify(out, device="cpu", all_experts=True)
    assert {finding.tensor for finding in report.exact.findings} >= {one, two}
    assert {check.tensor for check in report.projections if check.probe.verdict == "fail"} == {one, two}
