"""The split form of a model, by names and config.json alone: what has to be there, of what shape, and where it stands. Pure.

Verification's own: the plan has another way to the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from fusecheck.config import ModelConfig
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.mapping import (
    GATE_UP,
    PREFIXES,
    QKV,
    SHARED_EXPERT,
    Packing,
    expert_packing,
    split_module,
    stacked_packings,
)

SCALES = "weight_scale_inv"
_STACKS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""All experts in one tensor of `mlp.experts` -> the parts of each."""
Shape: TypeAlias = tuple[int, ...]


def split_names(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> dict[str, TensorInfo]:
    """A source's tensors by the names that they have in the split form: a fused one is several ranges of rows."""
    found: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        parts = list(_rows_of(name, tensor, config))
        found |= {part.name: part for part in parts} if parts else {name: tensor}
    return found


def _rows_of(name: str, tensor: TensorInfo, config: ModelConfig) -> Iterator[TensorInfo]:
    prefix, layer, module, suffix = parsed(name)
    if layer is None:
        return
    base = f"{prefix}layers.{layer}."
    stacked = _STACKS.get(suffix) if module == "mlp.experts" and len(tensor.shape) == 3 else None
    known = [config.stacked_shape(packing) for packing in stacked_packings(config.num_experts)] if stacked else []
    if stacked is not None and tensor.shape in known:
        parts = [f"mlp.experts.{e}.{part}" for e in range(tensor.shape[0]) for part in stacked]
        rows = [tensor.shape[1] // len(stacked)] * len(parts)
        yield from _ranges(tensor, [f"{base}{part}.weight" for part in parts], rows, tensor.shape[2:])
    elif (packing := _packing(module)) is not None:
        rows = [part.shard_size for part in config.rows(packing)]
        if suffix == SCALES and config.quantisation.block is not None:
            rows = [-(-size // config.quantisation.block[0]) for size in rows]
        yield from _ranges(tensor, [f"{base}{part}.{suffix}" for _, part in packing.parts], rows, tensor.shape[1:])


def _packing(module: str) -> Packing | None:
    for packing in (QKV, GATE_UP, SHARED_EXPERT):
        if module == packing.fused:
            return packing
    number = module.removeprefix("mlp.experts.").removesuffix(".gate_up_proj")
    return expert_packing(int(number)) if number.isdecimal() and len(number) < 10 else None


def _ranges(tensor: TensorInfo, names: Sequence[str], rows: Sequence[int], rest: Shape) -> Iterator[TensorInfo]:
    at, row = tensor.start, tensor_bytes(tensor.dtype, rest) or 0
    for name, count in zip(names, rows, strict=True):
        yield TensorInfo(name, tensor.dtype, (count, *rest), tensor.shard, at, at + count * row)
        at += count * row


def parsed(name: str) -> tuple[str, str | None, str, str]:
    """Prefix, layer, module below it, suffix; layer None for what stands outside the layers."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(f"{prefix}layers.")), None)
    if prefix is None:
        module, _, suffix = name.rpartition(".")
        return "", None, module, suffix
    layer, _, path = name.removeprefix(f"{prefix}layers.").partition(".")
    module, suffix = split_module(path)
    if not suffix:  # a norm stands right in its layer
        module, _, suffix = module.rpartition(".")
    return prefix, layer, module, suffix


def required(config: ModelConfig, prefix: str) -> Iterator[str]:
    """Every split tensor of such a model, by config.json alone, but for embedding and head: no more, and no fewer.

    The engine registers a bias, a norm or a scale by what its config says, whatever a checkpoint may hold.
    """
    yield f"{prefix}norm.weight"
    for layer in range(config.num_hidden_layers):
        base = f"{prefix}layers.{layer}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += [f"self_attn.{part}_norm" for part in "qk"] * config.family.head_norms
        yield from (f"{base}{norm}.weight" for norm in norms)
        for part in "qkvo":
            biased = config.qkv_bias and (part != "o" or config.family.model_type == "llama")
            yield from _linear(config, f"{base}self_attn.{part}_proj", biased=biased)
        sparse = config.is_sparse(layer)
        for mlp in [f"mlp.experts.{number}" for number in range(config.num_experts)] if sparse else ["mlp"]:
            for part in ("gate", "up", "down"):
                yield from _linear(config, f"{base}{mlp}.{part}_proj", biased=config.mlp_bias and not sparse)
        if sparse:
            yield from _linear(config, f"{base}mlp.gate", biased=False)
        if sparse and config.declares_shared_expert:
            yield f"{base}mlp.shared_expert_gate.weight"
            for part in ("gate", "up", "down"):
                yield from _linear(config, f"{base}mlp.shared_expert.{part}_proj", biased=False)


def _linear(config: ModelConfig, module: str, *, biased: bool) -> Iterator[str]:
    yield f"{module}.weight"
    if biased:
        yield f"{module}.bias"
    if config.quantisation.method == "fp8" and not config.quantisation.ignores(module):
        yield f"{module}.{SCALES}"


def _dimensions(module: str, config: ModelConfig) -> tuple[int, ...]:
    """[out_features, in_features] of a Linear, or [size] of a norm."""
    hidden, heads, kv = (
        config.hidden_size,
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
    scope, _, last = module.rpartition(".")
    inner = {"mlp": config.intermediate_size, "mlp.shared_expert": config.shared_expert_intermediate_size}.get(
        scope, config.moe_intermediate_size
    )
    known: dict[str, tuple[int, ...]] = {
        "q_proj": (heads, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "gate": (config.num_experts, hidden),
        "shared_expert_gate": (1, hidden),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }
    return known.get(last, (hidden,))


def shape_of(module: str, suffix: str, config: ModelConfig) -> Shape:
    """Shape of one tensor of a Linear or a norm inside a layer."""
    dimensions = _dimensions(module, config)
    if suffix == "bias":
        return dimensions[:1]
    block = config.quantisation.block
    if suffix == SCALES and block is not None:
        return tuple(-(-size // unit) for size, unit in zip(dimensions, block, strict=False))
    return dimensions


def prefix_of(names: Iterable[str]) -> str:
    """What stands before `layers.`; that of the first name which has one."""
    return next((prefix for prefix, layer, _, _ in map(parsed, names) if layer is not None), "model.")


def beyond(config: ModelConfig, names: Collection[str]) -> str | None:
    """Which number of config.json no checkpoint of so many tensors can have; foreign ones must not fill the memory."""
    counts = {"num_hidden_layers": config.num_hidden_layers, "num_experts": config.num_experts}
    return next((name for name, count in counts.items() if count > len(names)), None)
