"""The tensors of one packing in one layer -> groups that can be joined, or why not. Pure.

Engines check none of this: parts that do not fit join into a tensor of a plausible shape that serves garbage.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from fusecheck.axes import Packing32, solve
from fusecheck.errors import CheckpointError, NoFusedForm
from fusecheck.fit import form_of, packing_of, shape_of
from fusecheck.forms import METHODS, WEIGHTS, Form, Join
from fusecheck.header import TensorInfo
from fusecheck.mapping import SHARED_EXPERT, Packing, ShardRows
from fusecheck.slot import Linear, Slot, check_bias, check_present, check_required, is_ignored, method_of


class Part(NamedTuple):
    """One split tensor of a group, and what it fills of the fused tensor along the joined axis (in that axis's units)."""

    tensor: TensorInfo
    rows: ShardRows


class Group(NamedTuple):
    """Tensors of one suffix that become one tensor. A tuple: there may be 50,000."""

    fused: str
    """Full name of the fused tensor."""
    packing: Packing
    layer: int
    join: Join
    tensors: tuple[TensorInfo, ...]
    rows: tuple[ShardRows, ...]
    """What each of `tensors` fills."""
    shape: tuple[int, ...]
    """Of the fused tensor."""
    constant: bytes | None = None
    """Its bytes where they are computed anew (Join.SHAPE)."""

    @property
    def dtype(self) -> str:
        """The parts' one dtype."""
        return self.tensors[0].dtype

    @property
    def parts(self) -> tuple[Part, ...]:
        """Each tensor with what it fills."""
        return tuple(map(Part, self.tensors, self.rows))


class Rule(NamedTuple):
    """How the tensors of one suffix join, whatever their names and bytes."""

    suffix: str
    join: Join
    rows: tuple[ShardRows, ...]
    shape: tuple[int, ...]


class Known:
    """What was decided of slots before, by all that the decision depends on but names and bytes.

    A mixture of experts has ten thousand slots that are alike.
    """

    def __init__(self) -> None:
        self._rules: dict[tuple[object, ...], tuple[str, tuple[Rule, ...]]] = {}

    def get(self, slot: Slot, parts: list[Linear], *, ignored: bool) -> tuple[str, tuple[Rule, ...]] | None:
        """Method and rules of parts like these, which passed every check; None where there were none yet."""
        return self._rules.get(_alike(slot, parts, ignored=ignored))

    def add(self, slot: Slot, parts: list[Linear], method: str, rules: Iterable[Rule], *, ignored: bool) -> None:
        """Remember what was decided."""
        self._rules[_alike(slot, parts, ignored=ignored)] = method, tuple(rules)


def _alike(slot: Slot, parts: list[Linear], *, ignored: bool) -> tuple[object, ...]:
    forms = [tuple((suffix, tensor.dtype, tensor.shape) for suffix, tensor in part.items()) for part in parts]
    return (slot.packing.size, ignored, *forms)


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor of the checkpoint that is fused already: (the name each part would have, what it fills)."""

    tensor: TensorInfo
    packing: Packing
    layer: int
    join: Join
    parts: tuple[tuple[str, ShardRows], ...]


def survey_slot(slot: Slot, known: Known) -> tuple[list[Group], list[FusedTensor]]:
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
    found = known.get(slot, parts, ignored=ignored)
    if found is not None:
        method, rules = found
        check_bias(slot, parts, method)  # which may warn
        return [_join(slot, rule, parts) for rule in rules], []
    check_present(slot, parts)
    method = method_of(slot, parts, ignored=ignored)
    check_required(slot, parts, method)
    check_bias(slot, parts, method)
    joined = [(rule, _join(slot, rule, parts)) for rule in _rules(slot, parts, method)]
    known.add(slot, parts, method, [rule for rule, _ in joined], ignored=ignored)
    return [group for _, group in joined], []


def _rules(slot: Slot, parts: list[Linear], method: str) -> Iterator[Rule]:
    rows = slot.config.rows(slot.packing)
    packing = packing_of(slot, parts, method)
    for suffix in sorted(parts[0], key=lambda suffix: (suffix not in WEIGHTS, suffix)):
        tensors = [part[suffix] for part in parts]
        yield _rule(suffix, form_of(slot, tensors, METHODS[method][suffix], rows, packing), tensors, rows)


def _rule(suffix: str, form: Form, tensors: list[TensorInfo], rows: tuple[ShardRows, ...]) -> Rule:
    shape = tensors[0].shape
    axis = {Join.ROWS: 0, Join.COLUMNS: 1}.get(form.join)
    filled, at = [], 0
    for tensor, part in zip(tensors, rows, strict=True):
        size = tensor.shape[axis] if axis is not None else (tensor.shape[0] if tensor.shape else 1)
        filled.append(ShardRows(part.shard_id, at, size))
        at += size if axis is not None else 0
    if axis is not None:
        shape = (*shape[:axis], at, *shape[axis + 1 :])
    return Rule(suffix, form.join, tuple(filled), shape)


def _join(slot: Slot, rule: Rule, parts: list[Linear]) -> Group:
    """The group that a rule makes of these very parts, once their bytes allow it."""
    tensors = tuple([part[rule.suffix] for part in parts])
    constant = None
    if rule.join is Join.ONCE:
        _check_once(slot, tensors)
    elif rule.join is Join.SHAPE:
        constant = _weight_shape(slot, tensors, slot.config.rows(slot.packing))
    fused = slot.name(slot.packing.fused, rule.suffix)
    return Group(fused, slot.packing, slot.layer, rule.join, tensors, rule.rows, rule.shape, constant)


def _check_once(slot: Slot, tensors: tuple[TensorInfo, ...]) -> None:
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


def _weight_shape(slot: Slot, tensors: tuple[TensorInfo, ...], rows: tuple[ShardRows, ...]) -> bytes:
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
