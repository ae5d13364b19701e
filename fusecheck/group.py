"""The tensors of one packing in one layer -> groups that can be joined, or why not. Pure.

Engines check none of this: parts that do not fit join into a tensor of a plausible shape that serves garbage.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import chain

from fusecheck.axes import Packing32, solve
from fusecheck.errors import CheckpointError, NoFusedForm
from fusecheck.fit import form_of, packing_of, shape_of
from fusecheck.forms import METHODS, WEIGHTS, Form, Join
from fusecheck.header import TensorInfo
from fusecheck.mapping import SHARED_EXPERT, Packing, ShardRows
from fusecheck.slot import Linear, Slot, check_bias, check_present, check_required, is_ignored, method_of


@dataclass(frozen=True, slots=True)
class Part:
    """One split tensor of a group, and what it fills of the fused tensor along the joined axis (in that axis's units)."""

    tensor: TensorInfo
    rows: ShardRows


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one suffix that become one tensor."""

    fused: str
    """Full name of the fused tensor."""
    packing: Packing
    layer: int
    join: Join
    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    """Of the fused tensor."""
    constant: bytes | None = None
    """Its bytes where they are computed anew (Join.SHAPE)."""

    @property
    def dtype(self) -> str:
        """The parts' one dtype."""
        return self.parts[0].tensor.dtype


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor of the checkpoint that is fused already: (the name each part would have, what it fills)."""

    tensor: TensorInfo
    packing: Packing
    layer: int
    join: Join
    parts: tuple[tuple[str, ShardRows], ...]


def survey_slot(slot: Slot) -> tuple[list[Group], list[FusedTensor]]:
    """The groups of one packing in one layer, or its fused tensors. Errors name layer, tensor, found and wanted."""
    whole, parts = slot.whole, slot.parts
    first = next(iter(chain.from_iterable(part.values() for part in parts)), None)
    if whole and first is not None:
        stored = next(iter(whole.values()))
        raise CheckpointError(
            "both forms of one projection, fused and split",
            file=stored.shard,
            tensor=stored.name,
            found=f"beside {first.name}",
        )
    if not whole and first is None and slot.packing is SHARED_EXPERT:
        return [], []
    if whole:
        return [], _fused(slot, whole)
    ignored = is_ignored(slot)  # before a part without scales is called incomplete
    check_present(slot, parts)
    method = method_of(slot, parts, ignored=ignored)
    check_required(slot, parts, method)
    check_bias(slot, parts, method)
    return _groups(slot, parts, method), []


def _groups(slot: Slot, parts: list[Linear], method: str) -> list[Group]:
    rows = slot.config.rows(slot.packing)
    packing = packing_of(slot, parts, method)
    suffixes = sorted(parts[0], key=lambda suffix: (suffix not in WEIGHTS, suffix))
    groups = []
    for suffix in suffixes:
        tensors = [part[suffix] for part in parts]
        form = form_of(slot, tensors, METHODS[method][suffix], rows, packing)
        groups.append(_join(slot, suffix, form, tensors, rows))
    return groups


def _join(slot: Slot, suffix: str, form: Form, tensors: list[TensorInfo], rows: tuple[ShardRows, ...]) -> Group:
    first = tensors[0]
    fused = slot.name(slot.packing.fused, suffix)
    axis = {Join.ROWS: 0, Join.COLUMNS: 1}.get(form.join)
    parts, at = [], 0
    for tensor, part in zip(tensors, rows, strict=True):
        size = tensor.shape[axis] if axis is not None else (tensor.shape[0] if tensor.shape else 1)
        parts.append(Part(tensor, ShardRows(part.shard_id, at, size)))
        at += size if axis is not None else 0
    shape, constant = first.shape, None
    if axis is not None:
        shape = (*first.shape[:axis], at, *first.shape[axis + 1 :])
    elif form.join is Join.ONCE:
        _check_once(slot, tensors)
    else:
        constant = _weight_shape(slot, tensors, rows)
    return Group(fused, slot.packing, slot.layer, form.join, tuple(parts), shape, constant)


def _check_once(slot: Slot, tensors: list[TensorInfo]) -> None:
    wanted = slot.peek(tensors[0])
    for tensor in tensors[1:]:
        if slot.peek(tensor) != wanted:
            raise NoFusedForm(
                f"parts of {slot.packing.fused} in layer {slot.layer} differ, and one copy has to serve all",
                file=tensor.shard,
                tensor=tensor.name,
                found=slot.peek(tensor)[:8].hex(),
                wanted=f"{wanted[:8].hex()}, as {tensors[0].name}",
            )


def _weight_shape(slot: Slot, tensors: list[TensorInfo], rows: tuple[ShardRows, ...]) -> bytes:
    code = {"I64": "<2q", "I32": "<2i"}[tensors[0].dtype]
    for tensor, part in zip(tensors, rows, strict=True):
        found = struct.unpack(code, slot.peek(tensor))
        if found != (part.shard_size, slot.config.hidden_size):
            raise CheckpointError(
                "weight_shape is not the shape of its weight",
                file=tensor.shard,
                tensor=tensor.name,
                found=list(found),
                wanted=[part.shard_size, slot.config.hidden_size],
            )
    return struct.pack(code, sum(part.shard_size for part in rows), slot.config.hidden_size)


def _fused(slot: Slot, whole: Linear) -> list[FusedTensor]:
    """A projection that is fused already: complete, of a known kind, of the rows that all parts have together."""
    sizes = slot.config.rows(slot.packing)
    total = sum(part.shard_size for part in sizes)
    kind = next((suffix for suffix in WEIGHTS if suffix in whole), None)
    if kind is None:
        some = next(iter(whole.values()))
        raise CheckpointError(
            "a tensor that the model needs is missing",
            file=some.shard,
            tensor=slot.name(slot.packing.fused),
            found=some.name,
        )
    method = method_of(slot, [whole], ignored=is_ignored(slot))
    check_required(slot, [whole], method)
    check_bias(slot, [whole], method)
    shapes = {suffix: tensor.shape for suffix, tensor in whole.items()}
    packing = solve(method, shapes, total, slot.config.hidden_size)
    one = (ShardRows(sizes[0].shard_id, 0, total),)
    found = []
    for suffix, tensor in whole.items():
        form = form_of(slot, [tensor], METHODS[method][suffix], one, packing)
        found.append(FusedTensor(tensor, slot.packing, slot.layer, form.join, _cuts(slot, suffix, form, packing)))
    return found


def _cuts(slot: Slot, suffix: str, form: Form, packing: Packing32) -> tuple[tuple[str, ShardRows], ...]:
    """Where each part lies in a tensor that is fused already."""
    axis = {Join.ROWS: 0, Join.COLUMNS: 1}.get(form.join)
    cuts, at = [], 0
    for (shard_id, module), part in zip(slot.packing.parts, slot.config.rows(slot.packing), strict=True):
        shape = shape_of(slot, form, part.shard_size, packing)
        size = (shape[axis] or 0) if axis is not None else (shape[0] or 1 if shape else 1)
        cuts.append((slot.name(module, suffix), ShardRows(shard_id, at, size)))
        at += size if axis is not None else 0
    return tuple(cuts)
