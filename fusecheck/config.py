"""config.json -> the dimensions that decide rows and shapes. Pure; read as strictly as a header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fusecheck.errors import CheckpointError, UnsupportedCheckpoint, shown
from fusecheck.header import strict_json
from fusecheck.mapping import FAMILIES, Family, Packing, ShardRows, shard_rows

CONFIG = "config.json"
MAX_DIMENSION = 2**31 - 1
"""Largest number that a config may give; engines hold them in 32 bits."""

_QUANTISED = ("quantization_config", "quantization", "compression_config")


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
    attention_bias: bool
    runs_code: bool
    """`auto_map` names code of the checkpoint; it is copied, never run."""

    def rows(self, packing: Packing) -> tuple[ShardRows, ...]:
        """The rows of each part of one packing, by this model's dimensions."""
        return shard_rows(
            packing,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
        )


def parse_config(blob: bytes) -> ModelConfig:
    """Check config.json and take what is needed. CheckpointError where it is malformed, contradictory or unsupported."""
    config = strict_json(blob, file=CONFIG, constants=True)
    if not isinstance(config, dict):
        raise CheckpointError("is not a JSON object", file=CONFIG, found=type(config).__name__)
    family = _family(config)
    _check_nested(config)
    for key in _QUANTISED:
        if config.get(key) is not None:
            raise UnsupportedCheckpoint("quantised checkpoints are not supported", file=CONFIG, found=key)
    heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    kv_heads = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            "num_key_value_heads does not divide num_attention_heads", file=CONFIG, found=f"{kv_heads} and {heads}"
        )
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_hidden_layers=_size(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(config, family, hidden_size, heads),
        vocab_size=_size(config, "vocab_size"),
        tie_word_embeddings=_flag(config, "tie_word_embeddings", default=family.tied_default),
        attention_bias=_flag(config, "attention_bias", default=False),
        runs_code=config.get("auto_map") is not None,
    )


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


def _check_nested(config: Mapping[str, object]) -> None:
    nested = config.get("text_config")
    if nested is None:
        return
    if not isinstance(nested, dict):
        raise CheckpointError("text_config is not an object", file=CONFIG, found=type(nested).__name__)
    for key, value in nested.items():
        if key in config and config[key] != value:
            raise CheckpointError(
                f"text_config disagrees with the top level on {shown(key)}",
                file=CONFIG,
                found=json.dumps(value),
                wanted=json.dumps(config[key]),
            )


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
