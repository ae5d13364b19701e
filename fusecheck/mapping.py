"""Which projections are packed into which, per model type, and the row rules of the two weight_loaders. Data.

Source of the rules: vLLM's and nano-vllm's `QKVParallelLinear.weight_loader` and `MergedColumnParallelLinear.weight_loader`
at TP size 1, and the `packed_modules_mapping` of their Qwen3 models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ShardId = Literal["q", "k", "v", 0, 1]
"""Which part of a fused parameter a split tensor fills; the value that engines pass to weight_loader."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One fused projection and its parts in row order, as dotted module paths below `layers.N.`."""

    fused: str
    parts: tuple[tuple[ShardId, str], ...]


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows [shard_offset, shard_offset + shard_size) of a fused parameter that one shard_id fills."""

    shard_id: ShardId
    shard_offset: int
    shard_size: int


QKV = Packing("self_attn.qkv_proj", (("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("v", "self_attn.v_proj")))
GATE_UP = Packing("mlp.gate_up_proj", ((0, "mlp.gate_proj"), (1, "mlp.up_proj")))
PACKINGS = (QKV, GATE_UP)

LAYOUT = "qkv=[q;k;v] gate_up=[gate;up] tp=1"
"""What an output declares: TP=1 row order, not per TP rank, not interleaved per KV group."""


def _last(path: str) -> str:
    return path.rpartition(".")[2]


packed_modules_mapping: dict[str, tuple[str, ShardId]] = {
    _last(part): (_last(packing.fused), shard_id) for packing in PACKINGS for shard_id, part in packing.parts
}
"""part -> (fused, shard_id), in the form that nano-vllm's models carry."""


@dataclass(frozen=True, slots=True)
class Family:
    """One supported `model_type`: what its config may leave out and which tensors each layer must have."""

    model_type: str
    architectures: frozenset[str]
    head_dim_default: int | None
    """head_dim where config.json has none; None means hidden_size / num_attention_heads."""
    tied_default: bool
    """tie_word_embeddings where config.json has none."""
    head_norms: bool
    """Whether q_norm and k_norm [head_dim] stand in every layer."""


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "qwen3",
            frozenset(
                {"Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"}
            ),
            head_dim_default=128,
            tied_default=False,
            head_norms=True,
        ),
    )
}

PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
"""What may stand before `layers.N.`; a model uses exactly one of them."""

WRAPPERS = {
    "_orig_mod.": "save the module inside torch.compile: model._orig_mod.state_dict()",
    "module.": "save the module inside DataParallel / DDP: model.module.state_dict()",
    "base_model.model.": "merge the adapter first: peft's merge_and_unload(), then save_pretrained()",
}
"""Prefixes of wrapped modules, which no engine loads, with the remedy."""

HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
"""Names of the output embedding, by prefix."""

GROUPED_SUFFIXES = ("weight", "bias")
"""Tensors of a packed projection that are joined on dim 0."""

NEVER_GROUPED_SUFFIXES = frozenset({"k_scale", "v_scale", "q_scale"})
"""KV-cache scales stand on k_proj and v_proj by name only; they belong to the cache and are copied as they are."""

FLOAT_DTYPES = frozenset(
    {"F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F6_E2M3", "F6_E3M2", "F4"}
)
"""dtypes that a weight may have without scales."""


def shard_rows(
    packing: Packing, *, num_attention_heads: int, num_key_value_heads: int, head_dim: int, intermediate_size: int
) -> tuple[ShardRows, ...]:
    """The row rule of the packing's weight_loader, for one weight or bias.

    QKVParallelLinear: q at 0 with num_attention_heads * head_dim rows, then k, then v with num_key_value_heads * head_dim
    rows each. MergedColumnParallelLinear: gate at 0, up after it, intermediate_size rows each.
    """
    sizes: dict[ShardId, int] = {
        "q": num_attention_heads * head_dim,
        "k": num_key_value_heads * head_dim,
        "v": num_key_value_heads * head_dim,
        0: intermediate_size,
        1: intermediate_size,
    }
    rows, offset = [], 0
    for shard_id, _ in packing.parts:
        rows.append(ShardRows(shard_id, offset, sizes[shard_id]))
        offset += sizes[shard_id]
    return tuple(rows)
