"""config.json -> the dimensions that decide rows and shapes. Pure; read as strictly as a header."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fusecheck.errors import CheckpointError, UnsupportedCheckpoint, shown
from fusecheck.json_text import strict_json
from fusecheck.mapping import (
    FAMILIES,
    GATE_UP,
    QKV,
    SHARED_EXPERT,
    Family,
    Packing,
    ShardRows,
    Size,
    expert_packing,
    rows_of,
)
from fusecheck.quantisation import Quantisation, declared

CONFIG = "config.json"
MAX_DIMENSION = 2**31 - 1
"""Largest number that a config may give; engines hold them in 32 bits."""

HF_QUANT_CONFIG = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The part of config.json that fusing and completeness depend on. Sizes are elements, counts are counts."""

    family: Family
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool
    mlp_bias: bool
    num_experts: int
    """0 where every MLP is dense."""
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    declares_shared_expert: bool
    """Whether config.json itself gives that size; else it is that of the other experts."""
    mlp_only_layers: frozenset[int]
    decoder_sparse_step: int
    quantisation: Quantisation
    runs_code: bool
    """`auto_map` names code of the checkpoint; it is copied, never run."""

    def rows(self, packing: Packing) -> tuple[ShardRows, ...]:
        """The rows of each part of one packing's weight, by this model's dimensions."""
        kv = self.num_key_value_heads * self.head_dim
        sizes: dict[Size, tuple[int, ...]] = {
            "heads": (self.num_attention_heads * self.head_dim, kv, kv),
            "mlp": (self.intermediate_size,) * 2,
            "expert": (self.moe_intermediate_size,) * 2,
            "shared": (self.shared_expert_intermediate_size,) * 2,
            "stacked_up": (self.moe_intermediate_size,),
            "stacked_down": (self.hidden_size,),
        }
        return rows_of(packing, sizes)

    def stacked_shape(self, packing: Packing) -> tuple[int, int, int]:
        """Shape of a stack of all experts: [E, 2I, H] or [E, H, I]."""
        if packing.size == "stacked_up":
            return self.num_experts, 2 * self.moe_intermediate_size, self.hidden_size
        return self.num_experts, self.hidden_size, self.moe_intermediate_size

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        if not self.num_experts or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    def packings(self, layer: int) -> Iterator[Packing]:
        """The packings that a layer may have, lazily: num_experts is foreign. SHARED_EXPERT is optional."""
        yield QKV
        if self.is_sparse(layer):
            yield from map(expert_packing, range(self.num_experts))
            yield SHARED_EXPERT
        else:
            yield GATE_UP


def parse_config(blob: bytes, beside: bytes | None = None) -> ModelConfig:
    """Check config.json, and hf_quant_config.json `beside` it, and take what is needed.

    CheckpointError where they are malformed or contradictory, UnsupportedCheckpoint for what cannot be fused.
    """
    config = _object(blob, CONFIG)
    family = _family(config)
    quantisation = declared(config, None if beside is None else _object(beside, HF_QUANT_CONFIG), file=CONFIG)
    text = _text_config(config, family)
    heads = _size(text, "num_attention_heads")
    hidden_size = _size(text, "hidden_size")
    kv_heads = heads if text.get("num_key_value_heads") is None else _size(text, "num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            "num_key_value_heads does not divide num_attention_heads", file=CONFIG, found=f"{kv_heads} and {heads}"
        )
    sparse = family.experts and (text.get("num_experts") is not None or text.get("num_local_experts") is not None)
    if family.experts and not sparse:
        raise CheckpointError("num_experts is absent although the model_type has experts", file=CONFIG)
    expert_size = _size(text, "moe_intermediate_size") if sparse else 0
    shared = text.get("shared_expert_intermediate_size") is not None
    bias = family.qkv_bias == "always" or (
        family.qkv_bias == "attention_bias" and _flag(text, "attention_bias", default=False)
    )
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=_size(text, "intermediate_size"),
        num_hidden_layers=_size(text, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(text, family, hidden_size, heads),
        vocab_size=_size(text, "vocab_size"),
        tie_word_embeddings=_tied(config, text, family),
        qkv_bias=bias,
        mlp_bias=family.mlp_bias and _flag(text, "mlp_bias", default=False),
        num_experts=_experts(text) if sparse else 0,
        moe_intermediate_size=expert_size,
        shared_expert_intermediate_size=_size(text, "shared_expert_intermediate_size") if shared else expert_size,
        declares_shared_expert=shared and sparse,
        mlp_only_layers=_layers(text.get("mlp_only_layers")),
        decoder_sparse_step=1 if text.get("decoder_sparse_step") is None else _size(text, "decoder_sparse_step"),
        quantisation=quantisation,
        runs_code=config.get("auto_map") is not None,
    )


def _object(blob: bytes, file: str) -> dict[str, object]:
    value = strict_json(blob, file=file, constants=True)
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", file=file, found=type(value).__name__)
    return value


def _text_config(config: dict[str, object], family: Family) -> dict[str, object]:
    """Where the dimensions stand."""
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError("text_config is not an object", file=CONFIG, found=type(nested).__name__)
    if family.text_type is None:
        for key, value in (nested or {}).items():
            if key in config and config[key] != value:
                raise CheckpointError(
                    f"text_config disagrees with the top level on {shown(key)}",
                    file=CONFIG,
                    found=json.dumps(value),
                    wanted=json.dumps(config[key]),
                )
        return config
    if nested is None:
        raise CheckpointError(f"text_config is absent, which {family.model_type} has", file=CONFIG)
    if nested.get("model_type", family.text_type) != family.text_type:
        raise UnsupportedCheckpoint(
            "model_type of text_config is not supported",
            file=CONFIG,
            found=json.dumps(nested.get("model_type")),
            wanted=family.text_type,
        )
    return nested


def _tied(config: Mapping[str, object], text: Mapping[str, object], family: Family) -> bool:
    source = config if config.get("tie_word_embeddings") is not None else text
    return _flag(source, "tie_word_embeddings", default=family.tied_default)


def _experts(text: Mapping[str, object]) -> int:
    return _size(text, "num_experts" if text.get("num_experts") is not None else "num_local_experts")


def _layers(value: object) -> frozenset[int]:
    if value is None:
        return frozenset()
    if isinstance(value, list) and all(type(layer) is int for layer in value):
        return frozenset(value)
    raise CheckpointError("mlp_only_layers is no list of layer numbers", file=CONFIG, found=json.dumps(value))


def _family(config: Mapping[str, object]) -> Family:
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedCheckpoint(
            "model_type is not supported",
            file=CONFIG,
            found=json.dumps(model_type),
            wanted=f"one of {', '.join(sorted(FAMILIES))}",
        )
    architectures = config.get("architectures")
    if architectures is None:
        return family
    if not isinstance(architectures, list) or architectures not in [[known] for known in family.architectures]:
        raise CheckpointError(
            f"architectures does not belong to model_type {family.model_type}",
            file=CONFIG,
            found=json.dumps(architectures),
            wanted=f"exactly one of {', '.join(sorted(family.architectures))}",
        )
    return family


def _head_dim(config: Mapping[str, object], family: Family, hidden_size: int, heads: int) -> int:
    """Absent: the family's default, as its config class has it. Explicit null: hidden_size / num_attention_heads."""
    if config.get("head_dim") is not None:
        return _size(config, "head_dim")
    if "head_dim" not in config and family.head_dim_default is not None:
        return family.head_dim_default
    if hidden_size % heads:
        raise CheckpointError(
            "head_dim is absent and num_attention_heads does not divide hidden_size",
            file=CONFIG,
            found=f"{heads} and {hidden_size}",
        )
    return hidden_size // heads


def _size(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= MAX_DIMENSION:
        raise CheckpointError(f"{key} is no positive whole number", file=CONFIG, found=json.dumps(value))
    return value


def _flag(config: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} is neither true nor false", file=CONFIG, found=json.dumps(value))
    return value
