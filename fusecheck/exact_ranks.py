"""The exact verdict of an output that is cut for the ranks of an engine: which bytes of it have to be which of its source.

Pure, and independent of how such an output is planned: it goes from each split tensor to its places in the engine's
modules, and asks of every rank's file that these places fill it, to the byte, with nothing missing and nothing over.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from fusecheck.config import ModelConfig
from fusecheck.engines.vllm_sharded import Cut, ShardedLayout
from fusecheck.exact import Finding, Slice, span
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.mapping import (
    GATE_UP,
    HEADS,
    PREFIXES,
    QKV,
    SHARED_EXPERT,
    Packing,
    expert_packing,
    split_module,
    stacked_packings,
)

SCALES = "weight_scale_inv"
NORM = "model.norm.weight"
_STACKS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""All experts in one tensor of `mlp.experts` -> the parts of each."""
MAX_PADDING = 64 * 1024 * 1024
"""Bytes of zeros after a vocabulary: of any real model, less than one."""
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """One split tensor's place in a tensor of the engine: after all those of a lower `order`."""

    order: int
    name: str
    shape: Shape
    """Of the whole split tensor, by config.json."""
    axis: int | None
    """Along which it is cut; None: whole on every rank."""
    cut: Cut


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that every rank has to hold."""

    shares: tuple[Share, ...]
    experts: int | None = None
    """Where it is a stack of so many experts."""


# ---------------------------------------------------------------------------------------------- names and shapes


def split_names(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> dict[str, TensorInfo]:
    """A source's tensors by the names that they have in the split form: a fused one is several ranges of rows."""
    found: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        parts = list(_rows_of(name, tensor, config))
        found |= {part.name: part for part in parts} if parts else {name: tensor}
    return found


def _rows_of(name: str, tensor: TensorInfo, config: ModelConfig) -> Iterator[TensorInfo]:
    prefix, layer, module, suffix = _parsed(name)
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


def _parsed(name: str) -> tuple[str, str | None, str, str]:
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


def _shape(module: str, suffix: str, config: ModelConfig) -> Shape:
    dimensions = _dimensions(module, config)
    if suffix == "bias":
        return dimensions[:1]
    block = config.quantisation.block
    if suffix == SCALES and block is not None:
        return tuple(-(-size // unit) for size, unit in zip(dimensions, block, strict=False))
    return dimensions


# ------------------------------------------------------------------------------------------- what ranks must hold


def held(names: Iterable[str], config: ModelConfig, layout: ShardedLayout) -> dict[str, Held]:
    """The engine's tensors that the split tensors `names` make; a name without a place there makes none."""
    homes = {
        part: (module.name, place, cut) for module in layout.layer for place, (part, cut) in enumerate(module.parts)
    }
    stacks = {
        part: (f"{stack.module}.{stack.prefix}", place, len(stack.parts), cut)
        for stack in layout.experts
        for place, (part, cut) in enumerate(stack.parts)
    }
    shares: dict[str, list[Share]] = {}
    for name in names:
        _, layer, module, suffix = _parsed(name)
        if layer is None:
            continue
        scope, _, last = module.rpartition(".")
        number = scope.removeprefix("mlp.experts.")
        cut = Cut.WHOLE
        if scope != number and number.isdecimal() and last in stacks:
            home, place, count, cut = stacks[last]
            target, order = f"{home}{suffix}", int(number) * count + place
        elif module in homes:
            home, order, cut = homes[module]
            target = f"{home}.{suffix}"
        else:
            continue
        axis = {Cut.WHOLE: None, Cut.COLUMNS: 1 if suffix != "bias" else None}.get(cut, 0)
        share = Share(order, name, _shape(module, suffix, config), axis, cut)
        shares.setdefault(f"model.layers.{layer}.{target}", []).append(share)
    return {
        target: Held(tuple(sorted(found, key=lambda share: share.order)), _stacked(target, config))
        for target, found in shares.items()
    }


def _stacked(target: str, config: ModelConfig) -> int | None:
    return config.num_experts if ".routed_experts." in target else None


def prefix_of(names: Iterable[str]) -> str:
    """What stands before `layers.`; that of the first name which has one."""
    return next((prefix for prefix, layer, _, _ in map(_parsed, names) if layer is not None), "model.")


def outside(names: Collection[str], config: ModelConfig) -> dict[str, str]:
    """The engine's tensors outside the layers -> the split tensor that each is made of."""
    prefix = prefix_of(names)
    embedding = next((name for name in (f"{prefix}embed_tokens.weight",) if name in names), None)
    head = next((name for name in HEADS if name in names), None)
    source = (embedding or head) if config.tie_word_embeddings else head
    made = {"lm_head.weight": source, NORM: f"{prefix}norm.weight"}
    if not config.tie_word_embeddings:
        made["model.embed_tokens.weight"] = embedding
    return {target: name for target, name in made.items() if name is not None and name in names}


def beyond(config: ModelConfig, names: Collection[str]) -> str | None:
    """Which number of config.json no checkpoint of so many tensors can have; foreign ones must not fill the memory."""
    counts = {"num_hidden_layers": config.num_hidden_layers, "num_experts": config.num_experts}
    return next((name for name, count in counts.items() if count > len(names)), None)


def constants(config: ModelConfig, layout: ShardedLayout) -> dict[str, tuple[str | None, float]]:
    """Scalars of every layer -> dtype (None: the model's) and value."""
    found = {}
    for layer in range(config.num_hidden_layers):
        for scalar in (*layout.constants, *(layout.fp8_constants if config.quantisation.method == "fp8" else ())):
            found[f"model.layers.{layer}.{scalar.name}"] = (scalar.dtype, scalar.value)
    return found


# -------------------------------------------------------------------------------------------------- slices of OUT


@dataclass(frozen=True, slots=True)
class Demand:
    """What every rank of one size has to hold."""

    config: ModelConfig
    layout: ShardedLayout
    tp: int
    within: Mapping[str, Held]
    around: Mapping[str, str]
    scalars: Mapping[str, tuple[str | None, float]]

    @property
    def names(self) -> set[str]:
        """All of a rank's tensors."""
        return {*self.within, *self.around, *self.scalars}


def pair_rank(
    rank: int, own: Mapping[str, TensorInfo], demand: Demand, source: Mapping[str, TensorInfo] | None
) -> tuple[dict[str, list[Slice]], list[Finding]]:
    """Every byte of one rank's tensors, by tensor in order. Findings: a key missing or over, or of another form."""
    findings = [Finding(f"rank {rank} lacks it", None, name) for name in sorted(demand.names - own.keys())]
    slices: dict[str, list[Slice]] = {}
    for name, tensor in own.items():
        if name in demand.scalars:
            slices[name] = _scalar(tensor, demand.scalars[name])
        elif name in demand.within:
            found = _joined(tensor, demand.within[name], rank, demand, source)
            slices[name] = found
        elif name in demand.around:
            slices[name] = _outside(tensor, demand.around[name], rank, demand, source)
        else:
            findings.append(Finding(f"rank {rank} holds it, and the engine has no such key", tensor.shard, name))
            continue
        if not slices[name]:
            findings.append(Finding(f"is {tensor.form}, which is not rank {rank}'s share", tensor.shard, name))
    return slices, findings


def _run(cut: Cut, rank: int, demand: Demand) -> tuple[int, int]:
    """Which of how many equal runs."""
    kv = demand.config.num_key_value_heads
    if cut is Cut.KV_ROWS and demand.tp > kv:
        return rank // (demand.tp // kv), kv
    return rank, demand.tp


def _joined(
    tensor: TensorInfo, held: Held, rank: int, demand: Demand, source: Mapping[str, TensorInfo] | None
) -> list[Slice]:
    """The shares fill the tensor, one after another; [] where they do not."""
    slices: list[Slice] = []
    at = 0
    rows, rest = 0, None
    for share in held.shares:
        number, count = _run(share.cut, rank, demand) if share.axis is not None else (0, 1)
        whole = source.get(share.name) if source is not None else None
        if whole is not None and (whole.dtype, whole.shape) != (tensor.dtype, share.shape):
            return []
        shape = list(share.shape)
        if share.axis is not None:
            if len(shape) <= share.axis or shape[share.axis] % count:
                return []
            shape[share.axis] //= count
        size, row = tensor_bytes(tensor.dtype, shape), tensor_bytes(tensor.dtype, share.shape[1:])
        if size is None or row is None or (rest is not None and rest != tuple(shape[1:])):
            return []
        rest, rows = tuple(shape[1:]), rows + shape[0]
        height, width = (shape[0], size // shape[0]) if share.axis == 1 else (1, size)
        start = number * (width if share.axis == 1 else size)
        slices.append(
            Slice(
                tensor,
                tensor.start + at,
                height,
                width,
                width,
                share.name,
                0 if share.axis == 1 else rows,
                source=whole,
                source_start=start,
                source_stride=row if share.axis == 1 else width,
                part_first_row=number * shape[0] if share.axis == 0 else 0,
            )
        )
        at += size
    shape = [rows, *(rest or ())]
    if held.experts is not None:
        shape = [held.experts, rows // held.experts, *(rest or ())] if rows % held.experts == 0 else []
    return slices if list(tensor.shape) == shape and at == tensor.nbytes else []


def _outside(
    tensor: TensorInfo, name: str, rank: int, demand: Demand, source: Mapping[str, TensorInfo] | None
) -> list[Slice]:
    """The final norm whole; of a vocabulary the rank's rows, and zeros after the last."""
    config, hidden = demand.config, demand.config.hidden_size
    whole = source.get(name) if source is not None else None
    vocabulary = tensor.name != NORM
    shape = (config.vocab_size, hidden) if vocabulary else (hidden,)
    if whole is not None and (whole.dtype, whole.shape) != (tensor.dtype, shape):
        return []
    if not vocabulary:
        return [span(tensor, name, source=whole)] if tensor.shape == shape else []
    multiple = demand.layout.vocab_padding
    rows = (config.vocab_size + multiple - 1) // multiple * multiple // demand.tp
    row = tensor_bytes(tensor.dtype, (hidden,)) or 0
    if tensor.shape != (rows, hidden):
        return []
    first = rank * rows
    real = max(0, min(rows, config.vocab_size - first))
    slices = []
    if real:
        made = Slice(tensor, tensor.start, 1, real * row, real * row, name, source=whole)
        slices.append(replace(made, source_start=first * row, source_stride=real * row, part_first_row=first))
    size = (rows - real) * row
    if size > MAX_PADDING:
        return []
    if size:
        slices.append(Slice(tensor, tensor.start + real * row, 1, size, size, first_row=real, wanted=bytes(size)))
    return slices


def _scalar(tensor: TensorInfo, scalar: tuple[str | None, float]) -> list[Slice]:
    dtype, value = scalar
    single = struct.pack("<f", value)
    known = {"F32": single, "BF16": single[2:], "F16": struct.pack("<e", value), "F64": struct.pack("<d", value)}
    wanted = known.get(tensor.dtype)
    if tensor.shape != () or wanted is None or dtype not in {None, tensor.dtype}:
        return []
    return [span(tensor, wanted=wanted)]
