"""scripts/make_checkpoint.py: the published layout, small and at full size with holes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors
from checkpoints import INDEX, PACKINGS, as_float64, canonical_order, read_checkpoint, read_header, serialized

import fusecheck

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_checkpoint.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_checkpoint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


script = _load()


def make(out: Path, *arguments: str) -> Path:
    assert script.main([*arguments[:1], str(out), *arguments[1:]]) == 0
    return out


def weight_map(folder: Path) -> dict[str, str]:
    placed: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return placed


def straddling(folder: Path) -> dict[str, set[int]]:
    """Layers whose parts of one packing lie in different shards."""
    homes: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name, shard in weight_map(folder).items():
        layer = re.match(r"model\.layers\.(\d+)\.\w+\.(\w+)\.weight$", name)
        for packing, parts in PACKINGS.items():
            if layer and layer[2] in parts:
                homes[packing, int(layer[1])].add(shard)
    return {p: {layer for (q, layer), shards in homes.items() if q == p and len(shards) > 1} for p in PACKINGS}


def test_the_full_size_of_the_smallest(tmp_path: Path) -> None:
    folder = make(tmp_path / "out", "Qwen3-0.6B", "--sparse")
    weights = folder / "model.safetensors"
    assert weights.stat().st_size == 1_503_300_328
    assert weights.stat().st_blocks * 512 < 1 << 20  # holes
    header = read_header(weights)
    assert header.pop("__metadata__") == {"format": "pt"}
    assert len(header) == 311
    assert header["model.layers.27.self_attn.q_proj.weight"]["shape"] == [2048, 1024]
    assert header["model.layers.0.mlp.gate_proj.weight"]["shape"] == [3072, 1024]
    assert list(header) == sorted(header)
    assert not (folder / INDEX).exists()


# The last column begins the sha256 of the published index.
@pytest.mark.parametrize(
    ("name", "shards", "total_size", "sha256"),
    [
        ("Qwen3-1.7B", 2, 4_063_479_808, "0d660e94b165eb91"),
        ("Qwen3-4B", 3, 8_044_936_192, "6dc0981b8829fead"),
        ("Qwen3-8B", 5, 16_381_470_720, "f9fdbcb91c23971c"),
        ("Qwen3-14B", 8, 29_536_614_400, "62d7ad35757bae5e"),
        ("Qwen3-32B", 17, 65_524_246_528, "bed42c6c55274bc0"),
        ("Qwen3-30B-A3B", 16, 61_064_245_248, "df0d481ec595c55a"),
    ],
)
def test_published_totals(tmp_path: Path, name: str, shards: int, total_size: int, sha256: str) -> None:
    folder = make(tmp_path / "out", name, "--sparse")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    assert index["metadata"] == {"total_size": total_size}
    assert hashlib.sha256((folder / INDEX).read_bytes()).hexdigest().startswith(sha256)
    assert len(set(index["weight_map"].values())) == shards
    assert {p.name for p in folder.glob("*.safetensors")} == set(index["weight_map"].values())


def test_parts_straddle_as_published(tmp_path: Path) -> None:
    small = ("--scale", "64", "--fill", "zero")
    found = {name: straddling(make(tmp_path / name, name, *small)) for name in ("Qwen3-4B", "Qwen3-14B", "Qwen3-32B")}
    assert set().union(*found["Qwen3-4B"].values()) == {35}
    assert len(set().union(*found["Qwen3-14B"].values())) == 7
    assert len(set().union(*found["Qwen3-32B"].values())) == 16


def test_scaling_keeps_names_ratios_and_shards(tmp_path: Path) -> None:
    full = make(tmp_path / "full", "Qwen3-4B", "--sparse")
    small = make(tmp_path / "small", "Qwen3-4B", "--scale", "32")
    assert weight_map(small) == weight_map(full)
    config = json.loads((small / "config.json").read_text(encoding="utf-8"))
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (32, 8, 4)
    assert config["num_hidden_layers"] == 36
    for shard in sorted(small.glob("*.safetensors")):
        with safetensors.safe_open(shard, framework="numpy") as opened:
            assert {weight_map(small)[name] for name in opened.keys()} == {shard.name}  # noqa: SIM118 - no mapping
            names = [name for name in opened.keys() if name.endswith("q_proj.weight")]  # noqa: SIM118
            assert all(opened.get_slice(name).get_shape() == [32 * 4, 80] for name in names)


def test_the_files_are_as_the_library_writes_them(tmp_path: Path) -> None:
    folder = make(tmp_path / "out", "Qwen3-0.6B", "--scale", "64")
    content = read_checkpoint(folder)
    assert len(content) == 311
    assert (folder / "model.safetensors").read_bytes() == serialized(content, metadata={"format": "pt"})
    assert content["lm_head.weight"] == content["model.embed_tokens.weight"]
    assert list(read_header(folder / "model.safetensors"))[1:] == canonical_order(content)


def test_values_are_finite_normal_and_all_different(tmp_path: Path) -> None:
    content = read_checkpoint(make(tmp_path / "out", "Qwen3-0.6B", "--scale", "16"))
    del content["lm_head.weight"]
    assert len({data for _, _, data in content.values()}) == len(content)
    rows = [
        row.tobytes() for t in content.values() if len(t[1]) == 2 for row in np.frombuffer(t[2], "<u2").reshape(t[1])
    ]
    assert len(set(rows)) == len(rows) > 9000
    every = np.concatenate([as_float64(t).ravel() for t in content.values() if len(t[1]) == 2])
    assert np.isfinite(every).all()
    assert 0.019 < every.std() < 0.021
    assert np.abs(every).max() < 0.2
    norms = np.concatenate([as_float64(t) for name, t in content.items() if name.endswith("layernorm.weight")])
    assert 0.9 < norms.mean() < 1.1


def test_blocks_that_wrap_around_the_pools_differ() -> None:
    values = script.Values("BF16", "random", 0)
    seen = {hashlib.sha256(piece).digest() for first in range(64) for piece in values.blocks(first, values.BLOCK)}
    assert len(seen) == 64
    assert sum(len(piece) for piece in values.blocks(3, values.BLOCK * 2 + 1)) == (values.BLOCK * 2 + 1) * 2


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("fill", ["random", "bits", "zero"])
def test_dtypes_and_fills(tmp_path: Path, dtype: str, fill: str) -> None:
    folder = make(tmp_path / "out", "Qwen3-0.6B", "--scale=64", "--layers=1", f"--dtype={dtype}", f"--fill={fill}")
    content = read_checkpoint(folder)
    assert {tensor[0] for tensor in content.values()} == {dtype}
    finite = all(np.isfinite(as_float64(tensor)).all() for tensor in content.values())
    assert finite == (fill != "bits")
    assert any(any(data) for _, _, data in content.values()) == (fill != "zero")
    torch_name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["torch_dtype"]
    assert torch_name == {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}[dtype]


def test_one_seed_gives_one_content(tmp_path: Path) -> None:
    def content(out: str, *more: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        return read_checkpoint(make(tmp_path / out, "Qwen3-0.6B", "--scale=64", "--layers=2", *more))

    first, again, other = content("a"), content("b"), content("c", "--seed=1")
    assert first == again
    assert all(first[name] != other[name] for name in first)
    assert content("d", "--max-shard-size=100MB") == first
    assert len(list((tmp_path / "d").glob("*.safetensors"))) > 2
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert one == two


def test_forms_of_the_head_and_the_names(tmp_path: Path) -> None:
    def names(out: str, *arguments: str) -> set[str]:
        return set(read_checkpoint(make(tmp_path / out, *arguments, "--scale=64", "--layers=1")))

    assert "lm_head.weight" in names("a", "Qwen3-8B")
    assert "lm_head.weight" not in names("b", "Qwen3-8B", "--lm-head=no")
    assert "lm_head.weight" not in names("c", "Qwen3-4B")
    assert "lm_head.weight" in names("d", "Qwen3-4B", "--tied=no")
    assert "embed_tokens.weight" in names("e", "Qwen3-Embedding-0.6B")
    assert "model.language_model.norm.weight" in names("f", "Qwen3-4B", "--prefix=model.language_model.")


def test_other_families_by_config(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "vocab_size": 9} | {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }

    def shapes(**more: object) -> dict[str, tuple[int, ...]]:
        path = tmp_path / f"{more['model_type']}.json"
        path.write_text(json.dumps(config | more), encoding="utf-8")
        folder = make(tmp_path / str(more["model_type"]), str(path))
        assert (folder / "config.json").read_bytes() == path.read_bytes()
        return {name: shape for name, (_, shape, _) in read_checkpoint(folder).items()}

    qwen2 = shapes(model_type="qwen2")
    assert (qwen2["model.layers.1.self_attn.k_proj.bias"], qwen2["lm_head.weight"]) == ((4,), (9, 8))
    llama = shapes(model_type="llama", head_dim=3, attention_bias=True, mlp_bias=True)
    assert (llama["model.layers.0.mlp.up_proj.bias"], llama["model.layers.0.self_attn.o_proj.bias"]) == ((12,), (8,))
    assert llama["model.layers.0.self_attn.q_proj.weight"] == (12, 8)
    assert "model.layers.0.self_attn.q_norm.weight" not in shapes(model_type="mistral")
    assert shapes(model_type="qwen3")["model.layers.0.self_attn.q_norm.weight"] == (128,)
    moe = shapes(model_type="qwen3_moe", num_experts=3, moe_intermediate_size=5, mlp_only_layers=[0])
    assert moe["model.layers.1.mlp.gate.weight"] == (3, 8)
    assert moe["model.layers.1.mlp.experts.2.down_proj.weight"] == (8, 5)
    assert moe["model.layers.0.mlp.down_proj.weight"] == (8, 12)


NVFP4_INDEX = "8825c2d3c1c8670a"
"""Begins the sha256 of an index made independently of this script, from the release's config.json."""

QUANTISED = [
    ("fp8", {"weight": "F8_E4M3", "weight_scale_inv": "BF16"}),
    ("awq", {"qweight": "I32", "qzeros": "I32", "scales": "F16"}),
    ("gptq", {"qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32"}),
    ("compressed-tensors", {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"}),
    ("nvfp4", {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"}),
]


@pytest.mark.parametrize(("kind", "suffixes"), QUANTISED)
@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_every_quantised_layout_fuses_and_verifies(
    tmp_path: Path, name: str, kind: str, suffixes: dict[str, str]
) -> None:
    dense = name == "Qwen3-8B"
    small = ("--scale=16", "--layers=2") if dense else ("--scale=32", "--layers=1")
    folder = make(tmp_path / "source", name, f"--quantise={kind}", *small)
    content = read_checkpoint(folder)
    stored = {tensor: suffix for tensor in content for at, _, suffix in [tensor.partition("q_proj.")] if suffix}
    assert {suffix: content[tensor][0] for tensor, suffix in stored.items()} == suffixes
    assert content["lm_head.weight"][0] == "BF16"
    if not dense and kind == "gptq":  # routers have no place in its declaration
        return
    report = fusecheck.inspect(folder)
    assert (report.would_fuse, report.reason) == (True, None)
    planned = fusecheck.fuse(folder, tmp_path / "out", dry_run=True)
    made = fusecheck.fuse(folder, tmp_path / "out")
    assert planned.fused == made.fused == report.split_groups == len(suffixes) * (4 if dense else 129)
    found = fusecheck.verify(tmp_path / "out", device="cpu")
    assert found.verdict == "equal"


def test_scales_are_finite_and_scalars_shared(tmp_path: Path) -> None:
    for fill in ("random", "bits"):
        folder = make(tmp_path / fill, "Qwen3-8B", "--quantise=nvfp4", "--scale=16", "--layers=2", f"--fill={fill}")
        content = read_checkpoint(folder)
        scalars = {name: np.frombuffer(t[2], "<f4")[0] for name, t in content.items() if t[1] == ()}
        assert all(0.001 <= value <= 0.01 for value in scalars.values())
        at = "model.layers.0.self_attn."
        assert len({scalars[f"{at}{part}_proj.input_scale"] for part in "qkv"}) == 1
        assert len(set(scalars.values())) == 2 * 2 * 4  # layers x scalars x (qkv, o, gate_up, down)
        bytes_of_scales = b"".join(data for name, (_, _, data) in content.items() if name.endswith("weight_scale"))
        assert 0x20 <= min(bytes_of_scales) <= max(bytes_of_scales) < 0x40


def test_float8_weights_are_no_nan(tmp_path: Path) -> None:
    content = read_checkpoint(make(tmp_path / "out", "Qwen3-8B", "--quantise=fp8", "--scale=16", "--layers=1"))
    weights = b"".join(data for dtype, _, data in content.values() if dtype == "F8_E4M3")
    assert {byte & 0x40 for byte in weights} == {0}
    assert len(set(weights)) == 128


def test_descriptions_describe_in_sparse_files_too(tmp_path: Path) -> None:
    for kind, suffix in (("compressed-tensors", "weight_shape"), ("gptq", "g_idx")):
        content = read_checkpoint(
            make(tmp_path / kind, "Qwen3-8B", f"--quantise={kind}", "--scale=16", "--layers=1", "--sparse")
        )
        data = content[f"model.layers.0.self_attn.q_proj.{suffix}"][2]
        wanted = np.array([32 * 8, 256], "<i8") if suffix == "weight_shape" else (np.arange(256) // 8).astype("<i4")
        assert data == wanted.tobytes()


def test_the_largest_published_number_of_tensors(tmp_path: Path) -> None:
    folder = make(tmp_path / "out", "Qwen3-235B-A22B-NVFP4", "--sparse")
    index = (folder / INDEX).read_bytes()
    assert hashlib.sha256(index).hexdigest().startswith(NVFP4_INDEX)
    assert len(json.loads(index)["weight_map"]) == 146_361
    assert len(list(folder.glob("*.safetensors"))) == 34
    excluded = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert len(excluded) == 95
    assert excluded[2] == "model.layers.10.mlp.gate"


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        folder = make(tmp_path / "out", "Qwen3-0.6B", "--scale=64", "--layers=1")
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Qwen3-0.6B", "--quantise=much"], "invalid choice"),
        (["absent.json"], "No such file"),
        (["Qwen3-0.6B", "--scale=0"], "at least 1"),
        (["Qwen3-0.6B", "--max-shard-size=much"], "no size"),
    ],
)
def test_what_cannot_be_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        make(tmp_path / "out", *arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit):
        make(tmp_path, "Qwen3-0.6B", "--sparse")
    assert "not empty" in capsys.readouterr().err
