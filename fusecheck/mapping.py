"""Which projections are packed into which, per model type, and the row rules of the two weight_loaders. Data.

Source of the rules: vLLM's and nano-vllm's `QKVParallelLinear.weight_loader` and `MergedColumnParallelLinear.weight_loader`
at TP size 1, and the `packed_modules_mapping` of their Qwen3 models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import Literal

ShardId = Literal["q", "k", "v", 0, 1, "w1", "w2", "w3"]
"""Which part of a fused parameter a split tensor fills; the value that engines pass to weight_loader.

w1, w3 and w2 are gate, up and down of one expert inside a stack of experts.
"""

Experts = Literal["per-expert", "stacked", "split"]
"""What becomes of the experts of a mixture: a gate_up_proj for each, all in two 3-D tensors, or left as they are."""

Size = Literal["heads", "mlp", "expert", "shared", "stacked_up", "stacked_down"]
"""Which numbers of config.json give the rows of a packing's parts."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One fused projection and its parts in row order, as dotted module paths below `layers.N.`."""

    fused: str
    parts: tuple[tuple[ShardId, str], ...]
    size: Size


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows [shard_offset, shard_offset + shard_size) of a fused parameter that one shard_id fills."""

    shard_id: ShardId
    shard_offset: int
    shard_size: int


QKV = Packing(
    "self_attn.qkv_proj", (("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("v", "self_attn.v_proj")), "heads"
)


def _gate_up(mlp: str, size: Size) -> Packing:
    return Packing(f"{mlp}.gate_up_proj", ((0, f"{mlp}.gate_proj"), (1, f"{mlp}.up_proj")), size)


GATE_UP = _gate_up("mlp", "mlp")
SHARED_EXPERT = _gate_up("mlp.shared_expert", "shared")
PACKINGS = (QKV, GATE_UP)


@lru_cache(maxsize=1024)  # the experts of one layer are those of the next
def expert_packing(number: int) -> Packing:
    """gate_up of one expert of a sparse MLP. `mlp.gate` is the router and `shared_expert_gate` a gate: neither is packed."""
    return _gate_up(f"mlp.experts.{number}", "expert")


def stacked_packings(experts: int) -> tuple[Packing, Packing]:
    """All experts of one MLP in two 3-D tensors, as transformers 5 stores them: [E, 2I, H] and [E, H, I].

    Rows follow one another: gate and up of expert 0, gate and up of expert 1, and so on. The fused names have no suffix.
    """
    up: list[tuple[ShardId, str]] = []
    for number in range(experts):
        up += [("w1", f"mlp.experts.{number}.gate_proj"), ("w3", f"mlp.experts.{number}.up_proj")]
    down: list[tuple[ShardId, str]] = [("w2", f"mlp.experts.{number}.down_proj") for number in range(experts)]
    return (
        Packing("mlp.experts.gate_up_proj", tuple(up), "stacked_up"),
        Packing("mlp.experts.down_proj", tuple(down), "stacked_down"),
    )


OWN_KEY = "fusecheck"
"""The key of `__metadata__` under which an output declares its layout."""

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
    head_dim_default: int | None = None
    """head_dim where config.json has none; None means hidden_size / num_attention_heads."""
    tied_default: bool = False
    """tie_word_embeddings where config.json has none."""
    head_norms: bool = False
    """Whether q_norm and k_norm [head_dim] stand in every layer."""
    qkv_bias: Literal["always", "attention_bias", "never"] = "attention_bias"
    mlp_bias: bool = False
    """Whether the config's `mlp_bias` decides over gate and up biases; elsewhere they have none."""
    experts: bool = False
    """Whether MLPs may be sparse: num_experts, mlp_only_layers, decoder_sparse_step."""
    text_type: str | None = None
    """model_type of the `text_config` in which the dimensions stand; None where they stand at the top."""


def _named(stem: str, *heads: str) -> frozenset[str]:
    return frozenset(f"{stem}{head}" for head in ("ForCausalLM", "Model", *heads))


_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")

FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen3", _named("Qwen3", *_CLASSIFIERS), 128, head_norms=True),
        Family("qwen3_moe", _named("Qwen3Moe", *_CLASSIFIERS), 128, head_norms=True, experts=True),
        Family("qwen2", _named("Qwen2", *_CLASSIFIERS, "ForRewardModel", "ForProcessRewardModel"), qkv_bias="always"),
        Family("llama", _named("Llama", *_CLASSIFIERS), mlp_bias=True),
        Family("mistral", _named("Mistral", *_CLASSIFIERS), qkv_bias="never"),
        Family(
            "qwen3_vl",
            frozenset({"Qwen3VLForConditionalGeneration", "Qwen3VLModel"}),
            128,
            head_norms=True,
            text_type="qwen3_vl_text",
        ),
        Family(
            "qwen3_vl_moe",
            frozenset({"Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeModel"}),
            128,
            head_norms=True,
            experts=True,
            text_type="qwen3_vl_moe_text",
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

NEVER_GROUPED_SUFFIXES = frozenset({"k_scale", "v_scale", "q_scale", "output_scale"})
"""KV-cache scales stand on k_proj and v_proj by name only; they belong to the cache and are copied as they are."""


def split_module(path: str) -> tuple[str, str]:
    """`self_attn.q_proj.weight` -> (`self_attn.q_proj`, `weight`), `mlp.experts.3.up_proj.weight` likewise.

    By component, never by substring; what follows the module stays whole, so that `weight.absmax` is no `weight`.
    """
    pieces = path.split(".")
    depth = 2
    if pieces[0] == "mlp" and len(pieces) > 2:
        depth = {"experts": 4 if pieces[2].isdecimal() else 2, "shared_expert": 3}.get(pieces[1], 2)
    return ".".join(pieces[:depth]), ".".join(pieces[depth:])


def rows_of(packing: Packing, sizes: Mapping[Size, tuple[int, ...]]) -> tuple[ShardRows, ...]:
    """The row rule of the packing's weight_loader, for one weight or bias; `sizes` gives each part's rows.

    QKVParallelLinear: q at 0 with num_attention_heads * head_dim rows, then k, then v with num_key_value_heads * head_dim
    rows each. MergedColumnParallelLinear: gate at 0, up after it, intermediate_size rows each.
    """
    rows, offset = [], 0
    for (shard_id, _), size in zip(packing.parts, cycle(sizes[packing.size]), strict=False):
        rows.append(ShardRows(shard_id, offset, size))
        offset += size
    return tuple(rows)
