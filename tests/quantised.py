"""Small quantised checkpoints of every method, with the weights that they stand for. Imports nothing of fusecheck.

    source = checkpoint("gptq-4", "qwen3_moe")
    source.write(tmp_path / "in")
    assert read_checkpoint(tmp_path / "out") == source.fused()
    source.weights["model.layers.0.self_attn.q_proj"]       # float32 [rows, in], worked out by numpy alone

Codes, zero points and scales are drawn first and packed then, so that no unpacking is trusted. Bits are packed by
numpy's packbits; FP8 and E2M1 are read from tables made of the formats' definitions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from checkpoints import INDEX, Tensor, Tensors, write_safetensors

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, MOE, SHARED, EXPERTS, VOCAB = 64, 4, 2, 16, 96, 32, 64, 6, 8
GROUP = 16
BLOCK = (16, 24)
"""Of in_features 64 it leaves a ragged block of columns."""
SQUARE = 16
"""A block that two ranks share every Linear by."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
COLUMNS = frozenset({"qweight", "qzeros", "scales"})
"""Tensors that lie [in, out], so that parts stand side by side."""
ONCE = frozenset({"g_idx", "weight_g_idx"})

_ITEMS = {
    "F32": "<f4",
    "F16": "<f2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "u1",
    "I8": "i1",
    "F8_E4M3": "u1",
    "BF16": "<u2",
}


@dataclass(frozen=True)
class Linear:
    """One stored Linear: suffix -> tensor, and the weight [rows, in_features] that it stands for."""

    tensors: Tensors
    weight: Floats


# ------------------------------------------------------------------------------------------------------- numbers


def e4m3(codes: Bytes) -> Floats:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity."""
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float32)
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(np.float32) - 10))
    return np.where(codes & 128, -size, size).astype(np.float32)


def e2m1(codes: Bytes) -> Floats:
    """Sign, 2 bits of exponent (bias 1), 1 of mantissa."""
    exponent, mantissa = codes >> 1 & 3, (codes & 1).astype(np.float32)
    size = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent.astype(np.float32) - 1))
    return np.where(codes & 8, -size, size).astype(np.float32)


def stream(values: npt.NDArray[np.integer], bits: int) -> npt.NDArray[np.int32]:
    """[n, k] -> int32 [n, k * bits / 32]: the values' bits one after another, lowest first."""
    single = (values[..., None].astype(np.int64) >> np.arange(bits)) & 1
    packed = np.packbits(single.astype(np.uint8).reshape(len(values), -1), axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<i4")


def tensor(dtype: str, values: npt.NDArray[np.generic]) -> Tensor:
    """An array as the header and the bytes of one tensor; BF16 from float32 that it holds exactly."""
    if dtype == "BF16":
        values = (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2")
    return dtype, values.shape, np.ascontiguousarray(values).astype(_ITEMS[dtype]).tobytes()


def _short(choice: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Positive numbers of 6 significant bits: exact in bf16, fp16 and float32."""
    return (choice.integers(32, 64, shape) * 2.0 ** choice.integers(-12, -8, shape)).astype(np.float32)


def _fp8(choice: np.random.Generator, *shape: int) -> Bytes:
    codes = choice.integers(0, 256, shape, dtype=np.uint8)
    return np.where(codes & 0x7F == 0x7F, codes ^ 1, codes).astype(np.uint8)


# ------------------------------------------------------------------------------------------------------- methods

Make: TypeAlias = Callable[[np.random.Generator, int, int], Linear]
"""(what is drawn from, rows, in_features) -> one stored Linear."""


def _spread(grid: Floats, rows: int, columns: int, block: tuple[int, int]) -> Floats:
    """Each entry over its block of rows and columns, cut to the weight's size."""
    wide: Floats = np.repeat(np.repeat(grid, block[0], axis=0), block[1], axis=1)[:rows, :columns]
    return wide


def _fp8_scaled(suffix: str, scale_dtype: str, block: Callable[[int, int], tuple[int, int]], *, static: bool) -> Make:
    """FP8 with one scale a block; `block` gives its size for [rows, in]. `static`: the scale is a scalar, its input's too."""

    def make(choice: np.random.Generator, rows: int, columns: int) -> Linear:
        high, wide = block(rows, columns)
        codes = _fp8(choice, rows, columns)
        if static:
            scale = np.full((1, 1), 0.0421, np.float32)  # one for all parts
            tensors = {
                "input_scale": tensor(scale_dtype, np.array(1.5)),
                suffix: tensor(scale_dtype, scale.reshape(())),
            }
        else:
            scale = _short(choice, (-(-rows // high), -(-columns // wide)))
            tensors = {suffix: tensor(scale_dtype, scale)}
        weight = e4m3(codes) * _spread(scale, rows, columns, (high, wide))
        return Linear({"weight": tensor("F8_E4M3", codes), **tensors}, weight)

    return make


def _nvfp4(weight: str, own: str, *, divides: bool) -> Make:
    def make(choice: np.random.Generator, rows: int, columns: int) -> Linear:
        codes = choice.integers(0, 16, (rows, columns), dtype=np.uint8)
        blocks = choice.integers(0x30, 0x60, (rows, columns // 16), dtype=np.uint8)
        single = np.float32(307.0 if divides else 0.0037)
        scale = e4m3(blocks) / single if divides else e4m3(blocks) * single
        tensors = {
            weight: tensor("U8", codes[:, ::2] | codes[:, 1::2] << 4),
            "weight_scale": tensor("F8_E4M3", blocks),
            own: tensor("F32", np.full((1,) if divides else (), single, np.float32)),
            "input_global_scale" if divides else "input_scale": tensor("F32", np.full((1,) if divides else (), 0.5)),
        }
        return Linear(tensors, e2m1(codes) * _spread(scale, rows, columns, (1, 16)))

    return make


def _ordered(columns: int) -> npt.NDArray[np.int64]:
    """The group of each column after reordering by activations: equal groups, the same in every Linear of one input."""
    return np.random.default_rng(columns).permutation(columns) // GROUP


def _gptq(bits: int, *, offset: int, act_order: bool = False, with_index: bool = True) -> Make:
    def make(choice: np.random.Generator, rows: int, columns: int) -> Linear:
        index = _ordered(columns) if act_order else np.arange(columns) // GROUP
        codes = choice.integers(0, 2**bits, (rows, columns))
        zeros = choice.integers(offset, 2**bits, (rows, columns // GROUP))
        scale = _short(choice, zeros.shape)
        tensors = {
            "qweight": tensor("I32", stream(codes, bits).T),
            "qzeros": tensor("I32", stream(zeros.T - offset, bits)),
            "scales": tensor("F16", scale.T),
        }
        if with_index:
            tensors["g_idx"] = tensor("I32", index)
        return Linear(tensors, (codes - zeros[:, index]).astype(np.float32) * scale[:, index])

    return make


def _awq(choice: np.random.Generator, rows: int, columns: int) -> Linear:
    def interleaved(values: npt.NDArray[np.int64]) -> Tensor:
        """Nibble n of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[n] of eight."""
        order = np.concatenate([np.arange(0, 8, 2), np.arange(1, 8, 2)])
        return tensor("I32", stream(values.reshape(len(values), -1, 8)[:, :, order].reshape(values.shape), 4))

    index = np.arange(columns) // GROUP
    codes, zeros = choice.integers(0, 16, (rows, columns)), choice.integers(0, 16, (rows, columns // GROUP))
    scale = _short(choice, zeros.shape)
    tensors = {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": tensor("F16", scale.T)}
    return Linear(tensors, (codes - zeros[:, index]).astype(np.float32) * scale[:, index])


def _packed(bits: int, group: int | None, *, zero: bool = False, act_order: bool = False) -> Make:
    """compressed-tensors' pack-quantized; `group` None is one scale a channel."""

    def make(choice: np.random.Generator, rows: int, columns: int) -> Linear:
        half = 2 ** (bits - 1)
        size = group or columns
        index = _ordered(columns) if act_order else np.arange(columns) // size
        codes = choice.integers(-half, half, (rows, columns))
        zeros = choice.integers(-half, half, (rows, columns // size)) * zero
        scale = _short(choice, zeros.shape)
        tensors = {
            "weight_packed": tensor("I32", stream(codes + half, bits)),
            "weight_scale": tensor("BF16", scale),
            "weight_shape": tensor("I64", np.array([rows, columns])),
        }
        if zero:
            tensors["weight_zero_point"] = tensor("I32", stream(zeros.T + half, bits).T)
        if act_order:
            tensors["weight_g_idx"] = tensor("I32", index)
        return Linear(tensors, (codes - zeros[:, index]).astype(np.float32) * scale[:, index])

    return make


def _int8(choice: np.random.Generator, rows: int, columns: int) -> Linear:
    codes, scale = choice.integers(-128, 128, (rows, columns)), _short(choice, (rows, 1))
    return Linear(
        {"weight": tensor("I8", codes), "weight_scale": tensor("BF16", scale)}, codes.astype(np.float32) * scale
    )


def _plain(choice: np.random.Generator, rows: int, columns: int) -> Linear:
    weight = _short(choice, (rows, columns)) * choice.choice(np.array([-1, 1], np.float32), (rows, columns))
    return Linear({"weight": tensor("BF16", weight)}, weight)


def _ct(format_: str, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "ignore": ["lm_head", "re:.*mlp[.]gate$", "re:.*shared_expert_gate$"],
        "config_groups": {"group_0": group},
    }


def _gptq_config(bits: int, layout: str = "gptq", *, act_order: bool = False) -> dict[str, object]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": act_order,
        "sym": False,
        "checkpoint_format": layout,
    }


_FP8: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_AWQ: dict[str, object] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_MODELOPT: dict[str, object] = {"quant_method": "modelopt", "exclude_modules": ["lm_head", "*mlp.gate"]}


def _block(_rows: int, _columns: int) -> tuple[int, int]:
    return BLOCK


def _square(_rows: int, _columns: int) -> tuple[int, int]:
    return SQUARE, SQUARE


def _channel(_rows: int, columns: int) -> tuple[int, int]:
    return 1, columns


def _whole(rows: int, columns: int) -> tuple[int, int]:
    return rows, columns


KINDS: Mapping[str, tuple[dict[str, object] | None, Make]] = {
    "plain": (None, _plain),
    "fp8-block": (
        {**_FP8, "weight_block_size": list(BLOCK)},
        _fp8_scaled("weight_scale_inv", "BF16", _block, static=False),
    ),
    "fp8-square": (
        {**_FP8, "weight_block_size": [SQUARE, SQUARE], "modules_to_not_convert": ["lm_head", "mlp.gate"]},
        _fp8_scaled("weight_scale_inv", "F32", _square, static=False),
    ),
    "fp8-channel": (_FP8, _fp8_scaled("weight_scale", "F32", _channel, static=False)),
    "fp8-tensor": ({**_FP8, "activation_scheme": "static"}, _fp8_scaled("weight_scale", "F32", _whole, static=True)),
    "modelopt-fp8": ({**_MODELOPT, "quant_algo": "FP8"}, _fp8_scaled("weight_scale", "F32", _whole, static=True)),
    "modelopt-nvfp4": (
        {**_MODELOPT, "quant_algo": "NVFP4", "group_size": 16},
        _nvfp4("weight", "weight_scale_2", divides=False),
    ),
    "awq": (_AWQ, _awq),
    "gptq-2": (_gptq_config(2), _gptq(2, offset=1)),
    "gptq-3": (_gptq_config(3), _gptq(3, offset=1)),
    "gptq-4": (_gptq_config(4), _gptq(4, offset=1)),
    "gptq-8": (_gptq_config(8), _gptq(8, offset=1)),
    "gptq-4-act-order": (_gptq_config(4, act_order=True), _gptq(4, offset=1, act_order=True)),
    "gptq-4-no-g_idx": (_gptq_config(4), _gptq(4, offset=1, with_index=False)),
    "gptq_v2-4": (_gptq_config(4, "gptq_v2"), _gptq(4, offset=0)),
    "ct-int4": (_ct("pack-quantized", num_bits=4, type="int", group_size=GROUP), _packed(4, GROUP)),
    "ct-int4-zero": (
        _ct("pack-quantized", num_bits=4, type="int", group_size=GROUP, symmetric=False),
        _packed(4, GROUP, zero=True),
    ),
    "ct-int4-act-order": (
        _ct("pack-quantized", num_bits=4, type="int", group_size=GROUP, actorder="group"),
        _packed(4, GROUP, act_order=True),
    ),
    "ct-int8": (_ct("pack-quantized", num_bits=8, type="int", strategy="channel"), _packed(8, None)),
    "ct-int8-plain": (_ct("int-quantized", num_bits=8, type="int", strategy="channel"), _int8),
    "ct-fp8-channel": (
        _ct("float-quantized", num_bits=8, type="float", strategy="channel"),
        _fp8_scaled("weight_scale", "BF16", _channel, static=False),
    ),
    "ct-fp8-tensor": (
        _ct("float-quantized", num_bits=8, type="float", strategy="tensor"),
        _fp8_scaled("weight_scale", "F32", _whole, static=True),
    ),
    "ct-fp8-block": (
        _ct("float-quantized", num_bits=8, type="float", strategy="block", block_structure=list(BLOCK)),
        _fp8_scaled("weight_scale", "BF16", _block, static=False),
    ),
    "ct-nvfp4": (
        _ct("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        _nvfp4("weight_packed", "weight_global_scale", divides=True),
    ),
}
"""What quantization_config says, and what makes a Linear of that kind."""


# ------------------------------------------------------------------------------------------------------- checkpoints

FAMILIES: Mapping[str, str] = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


@dataclass(frozen=True)
class Quantised:
    """A checkpoint before it is written; `weights`: module -> what it stands for. Change what you like."""

    config: dict[str, object]
    tensors: Tensors
    weights: dict[str, Floats]

    def write(self, folder: Path) -> Path:
        """Two shards and an index, every second tensor in either, so that groups straddle."""
        folder.mkdir(parents=True, exist_ok=True)
        names = list(self.tensors)
        placed = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
        for shard in sorted(set(placed.values())):
            own = {name: self.tensors[name] for name in names if placed[name] == shard}
            write_safetensors(folder / shard, own, metadata={"format": "pt"})
        index = {"metadata": {"total_size": sum(len(data) for *_, data in self.tensors.values())}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")
        return folder

    def fused(self) -> Tensors:
        """What fusing has to give, by whole arrays."""
        found: Tensors = {}
        for name, one in self.tensors.items():
            place = group_of(name)
            if place is None:
                found[name] = one
            elif place[0] not in found:
                found[place[0]] = joined(name.rpartition(".")[2], [self.tensors[part] for part in place[1]])
        return found

    def groups(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(module of the fused form, modules of its parts)."""
        for module in self.weights:
            place = group_of(f"{module}.weight")
            if place is not None and place[1][0] == f"{module}.weight":
                yield place[0].rpartition(".")[0], tuple(part.rpartition(".")[0] for part in place[1])

    def linear(self, module: str) -> Tensors:
        """The tensors of one module by suffix."""
        return {name.rpartition(".")[2]: one for name, one in self.tensors.items() if name.rpartition(".")[0] == module}


def group_of(name: str) -> tuple[str, tuple[str, ...]] | None:
    """(name of the fused tensor, names of its parts), or None for what is no part."""
    *scope, module, suffix = name.split(".")
    for fused, parts in GROUPS.items():
        if module in parts and suffix not in {"k_scale", "v_scale"}:
            base = ".".join(scope)
            return f"{base}.{fused}.{suffix}", tuple(f"{base}.{part}.{suffix}" for part in parts)
    return None


def joined(suffix: str, parts: list[Tensor]) -> Tensor:
    """Parts of one suffix as one tensor, on the axis that the format demands."""
    dtype, shape, data = parts[0]
    if suffix == "weight_shape":
        sizes = [np.frombuffer(part[2], "<i8") for part in parts]
        return tensor(dtype, np.array([sum(size[0] for size in sizes), sizes[0][1]]))
    if suffix in ONCE or shape in {(), (1,)}:
        return dtype, shape, data
    arrays = [np.frombuffer(part[2], _ITEMS[dtype]).reshape(part[1]) for part in parts]
    whole = np.concatenate(arrays, axis=1 if suffix in COLUMNS else 0)
    return dtype, whole.shape, whole.tobytes()


def checkpoint(kind: str, family: str = "qwen3", *, layers: int = 2, seed: int = 0) -> Quantised:
    """A complete model of `family` whose Linears are all stored as `kind` says; embedding, head and routers are BF16."""
    declared, make = KINDS[kind]
    choice = np.random.default_rng(seed)
    tensors: Tensors = {}
    weights: dict[str, Floats] = {}
    prefix = "model.language_model." if family == "qwen3_vl" else "model."
    plain = list(_plain_tensors(prefix, family, layers))
    for module, rows, columns in _linears(prefix, family, layers):
        made = make(choice, rows, columns)
        weights[module] = made.weight
        tensors.update({f"{module}.{suffix}": one for suffix, one in made.tensors.items()})
        if family == "qwen2" and module.endswith(("q_proj", "k_proj", "v_proj")):
            tensors[f"{module}.bias"] = tensor(
                "F16" if "gptq" in kind or "awq" in kind else "BF16", _short(choice, (rows,))
            )
    tensors.update({name: tensor("BF16", _short(choice, shape)) for name, shape in plain})
    return Quantised(config(family, declared, layers), tensors, weights)


def _linears(prefix: str, family: str, layers: int) -> Iterator[tuple[str, int, int]]:
    heads = HEADS * HEAD_DIM
    for layer in range(layers):
        base = f"{prefix}layers.{layer}."
        yield f"{base}self_attn.q_proj", heads, HIDDEN
        yield f"{base}self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN
        yield f"{base}self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN
        yield f"{base}self_attn.o_proj", HIDDEN, heads
        mlps = {"mlp": INTERMEDIATE}
        if family == "qwen3_moe":
            mlps = {f"mlp.experts.{number}": MOE for number in range(EXPERTS)} | {"mlp.shared_expert": SHARED}
        for mlp, size in mlps.items():
            yield f"{base}{mlp}.gate_proj", size, HIDDEN
            yield f"{base}{mlp}.up_proj", size, HIDDEN
            yield f"{base}{mlp}.down_proj", HIDDEN, size


def _plain_tensors(prefix: str, family: str, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}embed_tokens.weight", (VOCAB, HIDDEN)
    yield f"{prefix}norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)
    if family == "qwen3_vl":
        yield "model.visual.blocks.0.attn.qkv.weight", (6, 2)
    for layer in range(layers):
        base = f"{prefix}layers.{layer}."
        yield f"{base}input_layernorm.weight", (HIDDEN,)
        yield f"{base}post_attention_layernorm.weight", (HIDDEN,)
        if family.startswith("qwen3"):
            yield f"{base}self_attn.q_norm.weight", (HEAD_DIM,)
            yield f"{base}self_attn.k_norm.weight", (HEAD_DIM,)
        if family == "qwen3_moe":
            yield f"{base}mlp.gate.weight", (EXPERTS, HIDDEN)
            yield f"{base}mlp.shared_expert_gate.weight", (1, HIDDEN)


def config(family: str, declared: Mapping[str, object] | None, layers: int) -> dict[str, object]:
    """config.json of one family."""
    sizes: dict[str, object] = {
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    if family == "qwen3_moe":
        sizes |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": MOE}
        sizes |= {"shared_expert_intermediate_size": SHARED, "decoder_sparse_step": 1, "mlp_only_layers": []}
    whole: dict[str, object] = {"architectures": [FAMILIES[family]], "model_type": family}
    if family == "qwen3_vl":
        whole |= {"text_config": {"model_type": "qwen3_vl_text", **sizes}, "tie_word_embeddings": False}
    else:
        whole |= sizes
    return whole if declared is None else {**whole, "quantization_config": json.loads(json.dumps(declared))}
