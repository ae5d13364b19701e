"""The exact verdict of an output that is cut for the ranks of an engine: which bytes of it have to be which of its source.

Pure, and independent of how such an output is planned: it goes from each split tensor to its places in the engine's
modules, and asks of every rank's file that these places fill it, to the byte, with nothing missing and nothing over.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from fusecheck.config import ModelConfig
from fusecheck.engines.vllm_sharded import Cut, ShardedLayout
from fusecheck.exact import Finding, Slice, span
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.mapping import HEADS
from fusecheck.split_form import Shape, parsed, prefix_of, shape_of

NORM = "model.norm.weight"
MAX_PADDING = 64 * 1024 * 1024
"""Bytes of zeros after a vocabulary: of any real model, less than one."""


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
        _, layer, module, suffix = parsed(name)
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
        share = Share(order, name, shape_of(module, suffix, config), axis, cut)
        shares.setdefault(f"model.layers.{layer}.{target}", []).append(share)
    return {
        target: Held(tuple(sorted(found, key=lambda share: share.order)), _stacked(target, config))
        for target, found in shares.items()
    }


def _stacked(target: str, config: ModelConfig) -> int | None:
    return config.num_experts if ".routed_experts." in target else None


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
                0 if share.axis == 1 else rows - shape[0],
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
