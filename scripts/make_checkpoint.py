#!/usr/bin/env python3
"""A synthetic checkpoint with the names, shapes, dtypes, shards, tensor order and header bytes of a published one.

    make_checkpoint.py Qwen3-0.6B ./Qwen3-0.6B                 the full size: 1,503,300,328 bytes, in seconds
    make_checkpoint.py Qwen3-4B ./tiny --scale 16              small, but the same tensors in the same shards
    make_checkpoint.py Qwen3-32B ./holes --sparse              the full size without taking space
    make_checkpoint.py path/to/config.json ./out --seed 7      any qwen3, qwen3_moe, qwen2, llama or mistral
    make_checkpoint.py Qwen3-235B-A22B-NVFP4 ./many --sparse   146,361 tensors
    make_checkpoint.py Qwen3-8B ./awq --quantise awq --scale 16   quantised as fp8, awq, gptq, compressed-tensors, nvfp4

A published checkpoint is laid out by three rules, and these are applied here:
* shards: transformers walks the tensors in the order in which the modules were made and starts a new file when the
  next tensor would exceed the limit; Qwen's releases were saved with a limit of 4 GB. Whether the q, k and v of a layer
  lie in one file depends on sizes, so the walk is done at full size whatever the --scale;
* order in a file: safetensors sorts by the rank of the dtype, descending, then by name;
* header: compact JSON, `__metadata__` first, padded with spaces to a multiple of 8.

The values are of one seed: two runs give equal bytes, and a tensor's bytes do not depend on the number of shards.
Scales are finite and positive, scalars are equal in the parts that engines fuse, and what describes a weight
(`g_idx`, `weight_shape`) describes it, whatever the fill.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Config: TypeAlias = dict[str, Any]

INDEX = "model.safetensors.index.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
PUBLISHED_LIMIT = 4_000_000_000


# --------------------------------------------------------------------------------------------------- what is published


@dataclass(frozen=True, slots=True)
class Release:
    """A published model by its dimensions; the rest of its config.json is the family's."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    tied: bool
    lm_head: bool  # whether the file carries lm_head.weight
    prefix: str = "model."
    vocab_size: int = 151936
    context: int = 40960
    eos: int = 151645
    version: str = "4.51.0"
    final_newline: bool = False  # of config.json
    experts: int = 0
    moe_intermediate_size: int = 0
    quantised: str | None = None  # a key of DECLARED

    def config(self) -> Config:
        """config.json, key for key as published."""
        moe = self.experts > 0
        theta: float = 1000000.0 if moe else 1000000  # as an integer in the dense models
        everything: Config = {
            "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": self.eos,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.context,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3_moe" if moe else "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": theta,
            "sliding_window": None,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "transformers_version": self.version,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }
        if moe:
            everything |= {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": True,
                "num_experts": self.experts,
                "num_experts_per_tok": 8,
                "output_router_logits": False,
                "router_aux_loss_coef": 0.001,
            }
        return dict(sorted(everything.items()))


RELEASES = {
    "Qwen3-0.6B": Release(28, 1024, 3072, 16, 8, tied=True, lm_head=True),
    "Qwen3-1.7B": Release(28, 2048, 6144, 16, 8, tied=True, lm_head=True),
    "Qwen3-4B": Release(36, 2560, 9728, 32, 8, tied=True, lm_head=False),
    "Qwen3-8B": Release(36, 4096, 12288, 32, 8, tied=False, lm_head=True),
    "Qwen3-14B": Release(40, 5120, 17408, 40, 8, tied=False, lm_head=True),
    "Qwen3-32B": Release(64, 5120, 25600, 64, 8, tied=False, lm_head=True),
    "Qwen3-Embedding-0.6B": Release(
        *(28, 1024, 3072, 16, 8),
        tied=True,
        lm_head=False,
        prefix="",
        vocab_size=151669,
        context=32768,
        eos=151643,
        version="4.51.3",
        final_newline=True,
    ),
    "Qwen3-30B-A3B": Release(48, 2048, 6144, 32, 4, tied=False, lm_head=True, experts=128, moe_intermediate_size=768),
    "Qwen3-235B-A22B": Release(
        94, 4096, 12288, 64, 4, tied=False, lm_head=True, experts=128, moe_intermediate_size=1536
    ),
}
RELEASES["Qwen3-235B-A22B-NVFP4"] = replace(RELEASES["Qwen3-235B-A22B"], version="4.51.3", quantised="nvfp4")
"""Built in, so that no config file is needed."""


@dataclass(frozen=True, slots=True)
class Declared:
    """How a writer declares what it quantised: the object, and its key for the modules that it left alone."""

    says: Config
    ignore_key: str | None
    beside: bool = False  # as `quantization` of hf_quant_config.json instead of `quantization_config` of config.json


DECLARED = {
    "fp8": Declared(
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "modules_to_not_convert",
    ),
    "awq": Declared(
        {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True},
        "modules_to_not_convert",
    ),
    "gptq": Declared(
        {
            "bits": 4,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "group_size": 128,
            "quant_method": "gptq",
            "sym": True,
        },
        None,
    ),
    "compressed-tensors": Declared(
        {
            "config_groups": {
                "group_0": {
                    "input_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "group_size": 128,
                        "num_bits": 4,
                        "strategy": "group",
                        "symmetric": True,
                        "type": "int",
                    },
                }
            },
            "format": "pack-quantized",
            "quant_method": "compressed-tensors",
        },
        "ignore",
    ),
    "nvfp4": Declared(
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}, "exclude_modules", beside=True
    ),
}
"""What `--quantise` may ask for."""

LONG_CONTEXT = 262144
"""From this context on (the 2507 releases), the modules of Qwen3's MoE were made in another order."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type adds to the common decoder layer, and in which order its modules were made."""

    qk_norm: bool = False
    qkv_bias: bool = False  # always, whatever the config says
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_tied: bool = False
    mlp: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    norms_before_mlp: bool = False
    router_last: bool = False


FAMILIES = {
    "qwen3": Family(qk_norm=True, default_head_dim=128),
    "qwen3_moe": Family(qk_norm=True, default_head_dim=128),
    "qwen3_moe, long context": Family(
        qk_norm=True, default_head_dim=128, mlp=("up_proj", "gate_proj", "down_proj"), router_last=True
    ),
    "qwen2": Family(qkv_bias=True, mlp=("up_proj", "gate_proj", "down_proj"), norms_before_mlp=True),
    "llama": Family(),
    "mistral": Family(),
}


def family_of(config: Config) -> Family:
    """The family by model_type; ValueError for one that is not known."""
    model_type = config.get("model_type")
    if model_type == "qwen3_moe" and config.get("max_position_embeddings", 0) >= LONG_CONTEXT:
        return FAMILIES["qwen3_moe, long context"]
    if model_type not in FAMILIES:
        message = f"model_type {model_type} is not known here"
        raise ValueError(message)
    return FAMILIES[model_type]


# ----------------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header to be."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Fill = "values"
    linear: tuple[int, int] = (0, 0)  # [out, in] of what a description describes
    group_size: int = 1

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of safetensors as this script fills it."""

    rank: int  # place in safetensors' enum; its files are sorted by it, descending
    itemsize: int
    torch_name: str
    exponent: int  # mask of the bits that `--fill random` leaves to the normal distribution


Fill: TypeAlias = 'Literal["values", "scale", "shared", "weight_shape", "g_idx"]'
"""What a tensor holds: anything; positive scales; scales that all parts of a fused projection share; a description."""

DTYPES = {
    "U8": Dtype(4, 1, "uint8", 0),
    "F8_E4M3": Dtype(7, 1, "float8_e4m3fn", 0x78),
    "I32": Dtype(15, 4, "int32", 0),
    "I64": Dtype(20, 8, "int64", 0),
    "F16": Dtype(13, 2, "float16", 0x7C00),
    "BF16": Dtype(14, 2, "bfloat16", 0x7F80),
    "F32": Dtype(17, 4, "float32", 0x7F800000),
    "F64": Dtype(19, 8, "float64", 0x7FF0000000000000),
}


PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")

Axis: TypeAlias = 'Literal["o", "i", "o/w", "i/w", "i/2", "o/b", "i/b", "i/g", "2"]'
"""Out or in features: all, or one for every 32-bit word of `bits`, byte of two, block, group. Rounded up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a stored Linear; dtype None is the model's."""

    suffix: str
    dtype: str | None
    axes: tuple[Axis, ...]
    fill: Fill = "values"


FORMS: dict[str | None, tuple[Piece, ...]] = {
    None: (Piece("weight", None, ("o", "i")),),
    "fp8": (
        Piece("weight", "F8_E4M3", ("o", "i")),
        Piece("weight_scale_inv", None, ("o/b", "i/b"), "scale"),
    ),
    "awq": (
        Piece("qweight", "I32", ("i", "o/w")),
        Piece("qzeros", "I32", ("i/g", "o/w")),
        Piece("scales", "F16", ("i/g", "o"), "scale"),
    ),
    "gptq": (
        Piece("qweight", "I32", ("i/w", "o")),
        Piece("qzeros", "I32", ("i/g", "o/w")),
        Piece("scales", "F16", ("i/g", "o"), "scale"),
        Piece("g_idx", "I32", ("i",), "g_idx"),
    ),
    "compressed-tensors": (
        Piece("weight_packed", "I32", ("o", "i/w")),
        Piece("weight_scale", None, ("o", "i/g"), "scale"),
        Piece("weight_shape", "I64", ("2",), "weight_shape"),
    ),
    "modelopt": (
        Piece("weight", "U8", ("o", "i/2")),
        Piece("weight_scale", "F8_E4M3", ("o", "i/g"), "scale"),
        Piece("weight_scale_2", "F32", (), "shared"),
        Piece("input_scale", "F32", (), "shared"),
    ),
}
"""How a Linear is stored, by `quant_method`."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """What a config declares of its quantisation."""

    method: str | None = None
    bits: int = 4
    group: int = 128
    block: tuple[int, int] = (128, 128)
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, beside: Config | None) -> Quantised:
        """Read config.json, and hf_quant_config.json beside it; ValueError for what is not known here."""
        says = config.get("quantization_config") or (beside or {}).get("quantization")
        if not says:
            return cls()
        method = says.get("quant_method") or ("modelopt" if says.get("quant_algo") == "NVFP4" else None)
        kind = says.get("format", "pack-quantized")
        if (
            method is None
            or method not in FORMS
            or kind != "pack-quantized"
            or says.get("quant_algo", "NVFP4") != "NVFP4"
        ):
            message = f"quant_method {method or says.get('quant_algo')} ({kind}) is not known here"
            raise ValueError(message)
        weights = says.get("config_groups", {}).get("group_0", {}).get("weights", {})
        rows, columns = says.get("weight_block_size") or (128, 128)
        ignored = [says.get(key) or () for key in ("ignore", "modules_to_not_convert", "exclude_modules")]
        return cls(
            method,
            says.get("bits") or weights.get("num_bits") or 4,
            says.get("group_size") or weights.get("group_size") or 128,
            (rows, columns),
            tuple(name for names in ignored for name in names),
        )

    def ignores(self, module: str) -> bool:
        """Routers are never quantised, whether the config says so or not."""
        names = self.ignored
        return module.endswith(".mlp.gate") or any(module == name or fnmatchcase(module, name) for name in names)

    def length(self, axis: Axis, out: int, inner: int) -> int:
        """How long an axis of a Linear [out, in] is."""
        if axis == "2":
            return 2
        whole, block = (out, self.block[0]) if axis[0] == "o" else (inner, self.block[1])
        per = {"": 1, "/w": 32 // self.bits, "/2": 2, "/b": block, "/g": self.group}[axis[1:]]
        return -(-whole // per)

    def scaled(self, scale: int) -> Quantised:
        """Groups and blocks as much smaller as widths are, but no smaller than 8; NVFP4 has 16 in hardware."""
        group = self.group if self.method == "modelopt" else max(8, self.group // scale)
        rows, columns = (max(8, size // scale) for size in self.block)
        return replace(self, group=group, block=(rows, columns))


@dataclass(frozen=True, slots=True)
class Model:
    """A config read for its layout."""

    config: Config
    family: Family
    dtype: str
    prefix: str
    lm_head: bool
    quantised: Quantised = Quantised()

    @property
    def head_dim(self) -> int:
        """As given, the family's default, or what hidden_size implies (an explicit null asks for that)."""
        implied = int(self.config["hidden_size"]) // int(self.config["num_attention_heads"])
        return int(self.config.get("head_dim", self.family.default_head_dim) or implied)

    def linear(self, name: str, out: int, inner: int, *, bias: bool = False) -> Iterator[Tensor]:
        """The tensors of one Linear."""
        how = self.quantised
        for piece in FORMS[None if how.ignores(name) else how.method]:
            shape = tuple(how.length(axis, out, inner) for axis in piece.axes)
            dtype = piece.dtype or self.dtype
            yield Tensor(f"{name}.{piece.suffix}", dtype, shape, piece.fill, (out, inner), how.group)
        if bias:
            yield Tensor(f"{name}.bias", self.dtype, (out,))

    def norm(self, name: str, size: int) -> Tensor:
        """The weight of one RMSNorm."""
        return Tensor(f"{name}.weight", self.dtype, (size,))

    def tensors(self) -> Iterator[Tensor]:
        """All tensors in the order in which transformers saves them."""
        vocabulary = (int(self.config["vocab_size"]), int(self.config["hidden_size"]))
        yield Tensor(f"{self.prefix}embed_tokens.weight", self.dtype, vocabulary)
        for layer in range(self.config["num_hidden_layers"]):
            yield from self.layer(layer)
        yield self.norm(f"{self.prefix}norm", vocabulary[1])
        if self.lm_head:
            yield Tensor("lm_head.weight", self.dtype, vocabulary)

    def layer(self, number: int) -> Iterator[Tensor]:
        """One decoder layer."""
        at, hidden = f"{self.prefix}layers.{number}.", self.config["hidden_size"]
        norms = [self.norm(f"{at}{name}", hidden) for name in ("input_layernorm", "post_attention_layernorm")]
        yield from self.attention(f"{at}self_attn.")
        if self.family.norms_before_mlp:
            yield from norms
        if self.is_sparse(number):
            yield from self.experts(f"{at}mlp.")
        else:
            yield from self.mlp(f"{at}mlp.", self.config["intermediate_size"])
        if not self.family.norms_before_mlp:
            yield from norms

    def attention(self, at: str) -> Iterator[Tensor]:
        """q, k, v, o and the norms of q and k."""
        hidden, heads, dim = self.config["hidden_size"], self.config["num_attention_heads"], self.head_dim
        kv_heads = self.config.get("num_key_value_heads") or heads
        declared = bool(self.config.get("attention_bias"))
        for part, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            yield from self.linear(at + part, count * dim, hidden, bias=declared or self.family.qkv_bias)
        yield from self.linear(f"{at}o_proj", hidden, heads * dim, bias=declared)
        if self.family.qk_norm:
            yield self.norm(f"{at}q_norm", dim)
            yield self.norm(f"{at}k_norm", dim)

    def mlp(self, at: str, intermediate: int) -> Iterator[Tensor]:
        """Gate, up and down in the family's order."""
        hidden, bias = self.config["hidden_size"], bool(self.config.get("mlp_bias"))
        for part in self.family.mlp:
            rows, columns = (hidden, intermediate) if part == "down_proj" else (intermediate, hidden)
            yield from self.linear(at + part, rows, columns, bias=bias)

    def experts(self, at: str) -> Iterator[Tensor]:
        """The router and every expert."""
        count = self.config["num_experts"]
        router = list(self.linear(f"{at}gate", count, self.config["hidden_size"]))
        if not self.family.router_last:
            yield from router
        for expert in range(count):
            yield from self.mlp(f"{at}experts.{expert}.", self.config["moe_intermediate_size"])
        if self.family.router_last:
            yield from router

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        if not self.config.get("num_experts") or layer in (self.config.get("mlp_only_layers") or ()):
            return False
        return (layer + 1) % int(self.config.get("decoder_sparse_step") or 1) == 0


def scaled(config: Config, scale: int, quantised: Quantised) -> Config:
    """Widths divided by `scale`, counts (layers, heads, experts) kept; whole multiples of 8 where that is possible.

    Of quantised models, multiples of a small group and block, which the declaration then names.
    """
    if scale == 1:
        return config
    small_form = quantised.scaled(scale)
    unit = 8 if quantised.method is None else max(16, small_form.group, *small_form.block)

    def smaller(width: int) -> int:
        return max(unit, width // scale // unit * unit)

    family, small = family_of(config), dict(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", family.default_head_dim)
    if head_dim:
        small["head_dim"] = max(2, head_dim // scale)
        small["hidden_size"] = smaller(config["hidden_size"])
    else:  # hidden_size goes on implying head_dim
        small["hidden_size"] = max(2, config["hidden_size"] // heads // scale) * heads
    for key in ("intermediate_size", "moe_intermediate_size", "vocab_size"):
        if config.get(key):
            small[key] = smaller(config[key])
    if config.get("quantization_config"):
        small["quantization_config"] = redeclared(config["quantization_config"], small_form)
    return small


def redeclared(says: Config, quantised: Quantised) -> Config:
    """The declaration with other groups and blocks."""
    changed: Config = {}
    for key, value in says.items():
        if key == "group_size":
            changed[key] = quantised.group
        elif key == "weight_block_size":
            changed[key] = list(quantised.block)
        else:
            changed[key] = redeclared(value, quantised) if isinstance(value, dict) else value
    return changed


def declaration(config: Config, kind: str, prefix: str) -> tuple[Config, Config | None]:
    """The config, and hf_quant_config.json beside it, of a model quantised as `--quantise` says."""
    how, family = DECLARED[kind], family_of(config)
    model = Model(config, family, "BF16", prefix, lm_head=True)
    routers = sorted(f"{prefix}layers.{i}.mlp.gate" for i in range(config["num_hidden_layers"]) if model.is_sparse(i))
    says = how.says | ({how.ignore_key: [*routers, "lm_head"]} if how.ignore_key else {})
    if how.beside:
        return config, {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": says}
    return config | {"quantization_config": says}, None


# ------------------------------------------------------------------------------------------------------------ values


class Values:
    """Streams of values made from two random pools, fast: one XOR a value, and no two stretches alike.

    Block k is base[i] ^ noise[i + d(k)] over consecutive i, where d(k) differs for every k. Hence no pair of places in
    the pools is ever used twice, and neither two rows nor two tensors are equal but by the chance of the bits. For
    `random`, the base is normal with deviation 0.02 and the noise touches sign and mantissa only: all is finite.
    """

    BLOCK = 1 << 19
    POOL = 1 << 21

    def __init__(self, dtype: str, fill: Literal["random", "bits"], seed: int) -> None:
        kind = DTYPES[dtype]
        self.itemsize = kind.itemsize
        unsigned = np.dtype(f"<u{kind.itemsize}")
        rng = np.random.Generator(np.random.PCG64([seed, kind.rank]))
        noise = np.frombuffer(rng.bytes(self.POOL * kind.itemsize), unsigned)
        if dtype == "F8_E4M3" and fill == "random":  # below 2, so that none is NaN
            base = np.frombuffer(rng.bytes(self.POOL), unsigned) & 0xBF
            noise = noise & 0x87
        elif fill == "bits" or dtype not in PLAIN_DTYPES:
            base = np.frombuffer(rng.bytes(self.POOL * kind.itemsize), unsigned)
        else:
            base = encoded(rng.standard_normal(self.POOL) * 0.0178, dtype)  # 0.02 after the noise
            noise = noise & unsigned.type(~kind.exponent & ((1 << 8 * kind.itemsize) - 1))
        self._base = np.concatenate([base, base[: self.BLOCK]])  # a block may run over the end
        self._noise = np.concatenate([noise, noise[: self.BLOCK]])
        self._buffer = np.empty(self.BLOCK, unsigned)

    def blocks(self, first: int, count: int) -> Iterator[memoryview]:
        """The bytes of `count` values from block `first` on; each view is valid until the next one is asked for."""
        for number, done in enumerate(range(0, count, self.BLOCK), first):
            length = min(self.BLOCK, count - done)
            start = number * 0x9E375 % self.POOL
            other = (start + number * 0x5BD1E9 + 0x12345) % self.POOL
            into = self._buffer[:length]
            np.bitwise_xor(self._base[start : start + length], self._noise[other : other + length], out=into)
            yield into.data.cast("B")


def encoded(numbers: np.ndarray[Any, np.dtype[np.float64]], dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Numbers as the bits of a dtype; BF16 is rounded to nearest, ties to even."""
    if dtype == "BF16":
        wide = numbers.astype("<f4").view("<u4")
        rounded: np.ndarray[Any, np.dtype[Any]] = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
        return rounded.astype("<u2")
    size = DTYPES[dtype].itemsize
    return numbers.astype(f"<f{size}").view(f"<u{size}")


def scales(rng: np.random.Generator, count: int, dtype: str) -> bytes:
    """Positive, finite, never subnormal, of one order of magnitude."""
    if dtype == "F8_E4M3":
        return rng.integers(0x20, 0x40, count, np.uint8).tobytes()
    return encoded(rng.uniform(0.001, 0.01, count), dtype).tobytes()


def described(tensor: Tensor) -> bytes | None:
    """The bytes of a tensor that describes a weight; None for any other."""
    if tensor.fill == "weight_shape":
        return np.array(tensor.linear, "<i8").tobytes()
    if tensor.fill == "g_idx":
        return (np.arange(tensor.linear[1]) // tensor.group_size).astype("<i4").tobytes()
    return None


def fused_name(name: str) -> str:
    """The name with the projection into which engines fuse it."""
    name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
    return re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name)


class Filler:
    """Gives every tensor its bytes, by its place in the save order, whatever file it lies in."""

    def __init__(self, tensors: Sequence[Tensor], fill: str, seed: int, *, tied: bool) -> None:
        self._fill, self._seed = fill, seed
        self._pools: dict[str, Values] = {}
        self._first: dict[str, int] = {}
        self._shared: dict[str, int] = {}
        block = 0
        for tensor in tensors:
            self._first[tensor.name] = block
            block += -(-math.prod(tensor.shape) // Values.BLOCK)
        if block > Values.POOL:
            message = f"{block} blocks of values, but only {Values.POOL} differ"
            raise ValueError(message)
        for tensor in tensors:
            if tensor.fill == "shared":
                self._first[tensor.name] = self._shared.setdefault(fused_name(tensor.name), self._first[tensor.name])
        if tied and tensors[-1].name == "lm_head.weight":
            self._first["lm_head.weight"] = self._first[tensors[0].name]

    def data(self, tensor: Tensor) -> Iterator[bytes | memoryview]:
        """The bytes of one tensor, in pieces."""
        if (description := described(tensor)) is not None:
            yield description
        elif self._fill == "zero":
            for done in range(0, tensor.size, 1 << 20):
                yield bytes(min(1 << 20, tensor.size - done))
        elif tensor.fill in {"scale", "shared"}:
            rng = np.random.Generator(np.random.PCG64([self._seed, 2, self._first[tensor.name]]))
            for done in range(0, math.prod(tensor.shape), Values.BLOCK):
                yield scales(rng, min(Values.BLOCK, math.prod(tensor.shape) - done), tensor.dtype)
        elif self._fill == "random" and tensor.name.endswith("norm.weight"):  # around 1, as RMSNorm's are
            rng = np.random.Generator(np.random.PCG64([self._seed, 1, self._first[tensor.name]]))
            yield encoded(rng.standard_normal(tensor.shape) * 0.05 + 1, tensor.dtype).tobytes()
        else:
            pool = self._pools.get(tensor.dtype)
            if pool is None:
                kind: Literal["random", "bits"] = "random" if self._fill == "random" else "bits"
                pool = self._pools[tensor.dtype] = Values(tensor.dtype, kind, self._seed)
            yield from pool.blocks(self._first[tensor.name], math.prod(tensor.shape))


# ------------------------------------------------------------------------------------------------------------- files


def shards(tensors: Sequence[Tensor], limit: int) -> list[list[int]]:
    """Places of the tensors of every file, by transformers' greedy walk; a tensor over the limit gets its own file."""
    files: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for place, tensor in enumerate(tensors):
        if tensor.size > limit:
            files.append([place])
            continue
        if filled + tensor.size > limit:
            files.append(current)
            current, filled = [], 0
        current.append(place)
        filled += tensor.size
    return [file for file in [*files, current] if file]


def in_file_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As safetensors writes them."""
    return sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].rank, tensor.name))


def header(ordered: Sequence[Tensor]) -> bytes:
    """Length, JSON and padding."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.size
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_shard(path: Path, tensors: Sequence[Tensor], filler: Filler | None) -> int:
    """Write one file, with holes for data where there is no filler; its size in bytes."""
    ordered = in_file_order(tensors)
    head = header(ordered)
    size = len(head) + sum(tensor.size for tensor in ordered)
    with path.open("wb", buffering=0) as file:
        file.write(head)
        if filler is None:
            file.truncate(size)
            at = len(head)
            for tensor in ordered:
                if (description := described(tensor)) is not None:
                    file.seek(at)
                    file.write(description)
                at += tensor.size
            return size
        for tensor in ordered:
            for piece in filler.data(tensor):
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
    return size


def index(files: dict[str, list[Tensor]]) -> str:
    """model.safetensors.index.json as transformers writes it."""
    total = sum(tensor.size for tensors in files.values() for tensor in tensors)
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def side_files(config: Config) -> dict[str, str]:
    """Small stand-ins for what lies beside the weights."""
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)]  # one character for each byte
    tokenizer: Config = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {chr(code): i for i, code in enumerate(alphabet)}, "merges": []},
    }
    tokens: Config = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    contents: dict[str, object] = {
        "generation_config.json": {**tokens, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        "tokenizer_config.json": {"model_max_length": 131072, "tokenizer_class": "PreTrainedTokenizerFast"},
        "tokenizer.json": tokenizer,
    }
    texts = {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in contents.items()}
    return texts | {"LICENSE": "Synthetic weights, made by scripts/make_checkpoint.py. No rights reserved.\n"}


# ------------------------------------------------------------------------------------------------------ command line


def byte_count(text: str) -> int:
    """`5GB`, `512MiB`, `4000000000`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text, re.IGNORECASE)
    if found is None:
        message = f"{text} is no size such as 4GB"
        raise argparse.ArgumentTypeError(message)
    number, unit, binary = found.groups()
    return max(1, int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")))


def positive(text: str) -> int:
    """A count."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="names: " + ", ".join(RELEASES),
    )
    made.add_argument("source", metavar="CONFIG.json|NAME")
    made.add_argument("out", type=Path, metavar="OUT")
    made.add_argument("--scale", type=positive, default=1, metavar="N", help="divide the widths by N; counts stay")
    made.add_argument("--layers", type=positive, metavar="N", help="fewer or more layers")
    made.add_argument("--dtype", choices=PLAIN_DTYPES)
    made.add_argument("--quantise", choices=sorted(DECLARED), help="declare and store it so")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--fill", choices=["random", "bits", "zero"], default="random", help="bits: any bit pattern")
    made.add_argument("--sparse", action="store_true", help="files with holes instead of values")
    made.add_argument("--prefix", help="of all names but lm_head; default: the release's, or `model.`")
    made.add_argument("--max-shard-size", type=byte_count, default=PUBLISHED_LIMIT, metavar="SIZE", help="at full size")
    made.add_argument("--tied", choices=["auto", "yes", "no"], default="auto", help="tie_word_embeddings")
    made.add_argument("--lm-head", choices=["auto", "yes", "no"], default="auto", help="auto: as in the release")
    return made


def read_source(source: str) -> tuple[Config, str, Config | None, Release | None]:
    """The config, its text, what lies beside it in hf_quant_config.json, and the release that it is, if it is one."""
    if source in RELEASES:
        release = RELEASES[source]
        text = json.dumps(release.config(), indent=2) + "\n" * release.final_newline
        beside = declaration(release.config(), release.quantised, release.prefix)[1] if release.quantised else None
        return release.config(), text, beside, release
    text = Path(source).read_text(encoding="utf-8")
    config: Config = json.loads(text)
    at = Path(source).parent / HF_QUANT_CONFIG
    beside = json.loads(at.read_text(encoding="utf-8")) if at.exists() else None
    return config, text, beside, next((release for release in RELEASES.values() if release.config() == config), None)


def wanted_config(config: Config, options: argparse.Namespace) -> tuple[Config, str]:
    """The config at full size with the options applied, and the dtype."""
    torch_names = {DTYPES[dtype].torch_name: dtype for dtype in PLAIN_DTYPES}
    key = "dtype" if "dtype" in config else "torch_dtype"
    dtype = options.dtype or torch_names.get(config.get(key) or "bfloat16")
    if dtype is None:
        message = f"{key} {config[key]} is not known here"
        raise ValueError(message)
    changes: Config = {}
    if options.dtype:
        changes[key] = DTYPES[dtype].torch_name
    if options.layers:
        changes["num_hidden_layers"] = options.layers
    if options.tied != "auto":
        changes["tie_word_embeddings"] = options.tied == "yes"
    return config | changes, dtype


def make(options: argparse.Namespace) -> dict[str, object]:
    """Write the checkpoint and describe it."""
    published, original, beside, release = read_source(options.source)
    full, dtype = wanted_config(published, options)
    family = family_of(full)
    tied = bool(full.get("tie_word_embeddings", family.default_tied))
    lm_head = options.lm_head == "yes"
    if options.lm_head == "auto":
        lm_head = release.lm_head if release is not None and tied == release.tied else not tied
    prefix = options.prefix
    if prefix is None:
        prefix = release.prefix if release else "model."
    if options.quantise:
        full, beside = declaration(full, options.quantise, prefix)
    quantised = Quantised.of(full, beside)
    config = scaled(full, options.scale, quantised)
    full_size = list(Model(full, family, dtype, prefix, lm_head, quantised).tensors())
    small = quantised.scaled(options.scale) if options.scale > 1 else quantised
    tensors = list(Model(config, family, dtype, prefix, lm_head, small).tensors())
    groups = shards(full_size, options.max_shard_size)
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        names = ["model.safetensors"]
    files = {name: [tensors[place] for place in group] for name, group in zip(names, groups, strict=True)}
    filler = None if options.sparse else Filler(tensors, options.fill, options.seed, tied=tied)
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        message = f"{options.out} is not empty"
        raise FileExistsError(message)
    text = json.dumps(config, indent=2) + "\n"
    if config == published:
        text = original
    if beside is not None:
        (options.out / HF_QUANT_CONFIG).write_text(json.dumps(beside, indent=4), encoding="utf-8")
    for name, content in (side_files(config) | {"config.json": text}).items():
        (options.out / name).write_text(content, encoding="utf-8")
    if len(files) > 1:
        (options.out / INDEX).write_text(index(files), encoding="utf-8")
    sizes = {name: write_shard(options.out / name, members, filler) for name, members in files.items()}
    return {"out": str(options.out), "tensors": len(tensors), "files": sizes, "bytes": sum(sizes.values())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; exit 2 where the source or OUT is not what it should be."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        print(json.dumps(make(options), indent=2))
    except (OSError, ValueError, KeyError) as error:
        made.error(f"{type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
