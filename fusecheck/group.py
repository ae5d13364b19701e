"""The tensors of one packing in one layer -> groups that can be joined, or why not. Pure.

Engines check none of this: parts that do not fit join into a tensor of a plausible shape that serves garbage.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from fusecheck.config import CONFIG, ModelConfig
from fusecheck.errors import CheckpointError, NoFusedForm, UnsupportedCheckpoint
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.mapping import NEVER_GROUPED_SUFFIXES, QKV, SHARED_EXPERT, Packing, ShardRows
from fusecheck.quantisation import METHODS, REQUIRED, WEIGHTS, Form, Join, Packing32, Quantisation, length, solve

Peek = Callable[[TensorInfo], bytes]
"""Gives the bytes of a small tensor: scales, g_idx and weight_shape are compared before anything is planned."""

Linear = Mapping[str, TensorInfo]
"""The tensors of one stored Linear by suffix, KV-cache scales left out."""


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


@dataclass(frozen=True, slots=True)
class Slot:
    """One packing of one layer: the stored Linears found there, fused and split, and what the config says of them."""

    config: ModelConfig
    base: str
    """Prefix of every name, such as `model.layers.0.`."""
    packing: Packing
    layer: int
    modules: Mapping[str, Linear]
    """All Linears of the layer by module path."""
    peek: Peek
    warnings: list[str] = field(default_factory=list)

    def name(self, module: str, suffix: str = "weight") -> str:
        """Full name of a tensor."""
        return f"{self.base}{module}.{suffix}"

    @property
    def whole(self) -> Linear:
        """Tensors of the fused form."""
        return _own(self.modules.get(self.packing.fused))

    @property
    def parts(self) -> list[Linear]:
        """Tensors of each split part, in the packing's order; empty where a part is absent."""
        return [_own(self.modules.get(module)) for _, module in self.packing.parts]


def _own(linear: Linear | None) -> Linear:
    if not linear:
        return {}
    return {suffix: tensor for suffix, tensor in linear.items() if suffix not in NEVER_GROUPED_SUFFIXES}


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
    ignored = _ignored(slot)  # before a part without scales is called incomplete
    _check_present(slot, parts)
    method = _method(slot, parts, ignored=ignored)
    _check_required(slot, parts, method)
    _check_bias(slot, parts, method)
    return _groups(slot, parts, method), []


def _check_present(slot: Slot, parts: list[Linear]) -> None:
    """Every part has a weight, and what one part has, all have."""
    found = [tensor for part in parts for tensor in part.values()]
    weights = [next((suffix for suffix in WEIGHTS if suffix in part), None) for part in parts]
    kind = next((weight for weight in weights if weight), "weight")
    for (_, module), part in zip(slot.packing.parts, parts, strict=True):
        if kind not in part:
            raise _missing(slot, slot.name(module, kind), found, part)
    for suffix in sorted({suffix for part in parts for suffix in part} - {"bias"}):
        for (_, module), part in zip(slot.packing.parts, parts, strict=True):
            if suffix not in part:
                raise _missing(slot, slot.name(module, suffix), found, part)


def _missing(slot: Slot, name: str, found: list[TensorInfo], part: Linear) -> CheckpointError:
    """Name the missing tensor, and one that only looks like it, by code points."""
    scope = slot.packing.fused.rpartition(".")[0]
    lookalike = next(
        (m for m in slot.modules if m.startswith(f"{scope}.") and (not m.isascii() or m != m.lower())), None
    )
    other = next(iter(part.values()), None)
    beside = ascii(lookalike) if lookalike else ascii(other.name) if other else None
    return CheckpointError(
        f"layer {slot.layer} is incomplete: a part of {slot.packing.fused} is missing",
        file=found[0].shard if found else CONFIG,
        tensor=name,
        found=f"only {beside}" if beside else ", ".join(tensor.name for tensor in found) or "no part at all",
        wanted=", ".join(module for _, module in slot.packing.parts),
    )


def _method(slot: Slot, linears: list[Linear], *, ignored: bool) -> str:
    """How these Linears are stored, held against what the config declares of them."""
    quantisation = slot.config.quantisation
    extra = sorted({suffix for linear in linears for suffix in linear} - {"weight", "bias"})
    some = next(iter(linears[0].values()))
    if not extra:
        if quantisation.method == "none" or ignored:
            return "none"
        raise CheckpointError(
            f"{CONFIG} declares {quantisation.method}, yet this is plain and on no ignore list",
            file=some.shard,
            tensor=some.name,
            found=some.form,
        )
    known = METHODS["none" if ignored else quantisation.method]
    unknown = next((suffix for suffix in extra if suffix not in known), None)
    if unknown is None:
        return quantisation.method
    culprit = next(linear[unknown] for linear in linears if unknown in linear)
    says = "has it on the ignore list" if ignored else f"declares {quantisation.method}"
    raise UnsupportedCheckpoint(
        f"a kind of tensor that {CONFIG} does not explain, which {says}",
        file=culprit.shard,
        tensor=culprit.name,
        wanted=", ".join(known),
    )


def _ignored(slot: Slot) -> bool:
    """Ignore lists keep split names; one that names only some parts of a group contradicts itself."""
    quantisation = slot.config.quantisation
    if quantisation.method == "none":
        return False
    modules = [f"{slot.base}{module}" for _, module in slot.packing.parts]
    ignored = [quantisation.ignores(module) for module in modules]
    if any(ignored) and not all(ignored):
        raise CheckpointError(
            f"the quantisation's ignore list names only some parts of {slot.packing.fused} in layer {slot.layer}",
            file=CONFIG,
            tensor=modules[ignored.index(True)],
            wanted=", ".join(modules),
        )
    return all(ignored)


def _check_required(slot: Slot, linears: list[Linear], method: str) -> None:
    """A quantised weight without its scales loads, and serves garbage."""
    for wanted in REQUIRED[method]:
        for linear in linears:
            if not wanted & linear.keys():
                some = next(iter(linear.values()))
                raise CheckpointError(
                    f"layer {slot.layer} is incomplete: {method} needs {' or '.join(sorted(wanted))} beside every weight",
                    file=some.shard,
                    tensor=some.name,
                    found=", ".join(sorted(linear)),
                )


def _check_bias(slot: Slot, linears: list[Linear], method: str) -> None:
    """attention_bias decides for q, k, v, mlp_bias for gate and up. GPTQ writers leave zeros that engines skip."""
    attention = slot.packing is QKV
    wanted = slot.config.qkv_bias if attention else slot.config.mlp_bias
    key = "attention_bias" if attention else "mlp_bias"
    biases = [linear["bias"] for linear in linears if "bias" in linear]
    if not biases:
        if wanted:
            some = next(iter(linears[0].values()))
            raise CheckpointError(
                f"layer {slot.layer} has no bias on {slot.packing.fused}",
                file=some.shard,
                tensor=slot.name(slot.packing.parts[0][1], "bias"),
                wanted=f"a bias on every part: {key}",
            )
        return
    if not wanted and method != "gptq":
        raise CheckpointError(
            f"a bias that {CONFIG} does not know",
            file=biases[0].shard,
            tensor=biases[0].name,
            wanted=f"{key} true, or no bias",
        )
    if len(biases) != len(linears):
        absent = next(
            module for (_, module), part in zip(slot.packing.parts, linears, strict=True) if "bias" not in part
        )
        raise (CheckpointError if attention else NoFusedForm)(
            f"layer {slot.layer} has a bias on some parts of {slot.packing.fused} only",
            file=biases[0].shard,
            tensor=slot.name(absent, "bias"),
            found=", ".join(bias.name for bias in biases),
            wanted="a bias on every part",
        )
    if not wanted:
        slot.warnings.append(f"{biases[0].name}: a bias that {CONFIG} does not know; engines may skip it")


def _groups(slot: Slot, parts: list[Linear], method: str) -> list[Group]:
    rows = slot.config.rows(slot.packing)
    packing = _solved(slot, parts, method)
    suffixes = sorted(parts[0], key=lambda suffix: (suffix not in WEIGHTS, suffix))
    groups = []
    for suffix in suffixes:
        tensors = [part[suffix] for part in parts]
        form = _form(slot, tensors, METHODS[method][suffix], rows, packing)
        groups.append(_join(slot, suffix, form, tensors, rows))
    return groups


def _solved(slot: Slot, parts: list[Linear], method: str) -> Packing32:
    """Bits and group size, which all parts must share and the config must not contradict."""
    in_features = slot.config.hidden_size
    sizes = slot.config.rows(slot.packing)
    solved = [
        solve(method, {suffix: tensor.shape for suffix, tensor in part.items()}, rows.shard_size, in_features)
        for part, rows in zip(parts, sizes, strict=True)
    ]
    first = next(iter(parts[0].values()))
    for (_, module), one, part in zip(slot.packing.parts, solved, parts, strict=True):
        if one != solved[0]:
            other = next(part[suffix] for suffix in WEIGHTS if suffix in part)
            raise NoFusedForm(
                f"parts of {slot.packing.fused} in layer {slot.layer} are packed differently: {module}",
                file=other.shard,
                tensor=other.name,
                found=f"{one.bits} bits, group {one.group}, {other.form}",
                wanted=f"{solved[0].bits} bits, group {solved[0].group}, as {first.name}",
            )
    _check_declared(slot, solved[0], first)
    return solved[0]


def _check_declared(slot: Slot, found: Packing32, tensor: TensorInfo) -> None:
    declared, in_features = slot.config.quantisation, slot.config.hidden_size
    if declared.varies:
        return
    groups = [-(-in_features // group) for group in (found.group, declared.group) if group and group > 0]
    wrong_bits = found.bits and declared.bits and found.bits != declared.bits
    if wrong_bits or len(set(groups)) > 1:
        raise CheckpointError(
            f"packing contradicts {CONFIG}",
            file=tensor.shard,
            tensor=tensor.name,
            found=f"{found.bits} bits, group {found.group}",
            wanted=f"{declared.bits} bits, group {declared.group}",
        )


def _form(
    slot: Slot, tensors: list[TensorInfo], forms: tuple[Form, ...], rows: tuple[ShardRows, ...], packing: Packing32
) -> Form:
    """The first form that every part has."""
    quantisation, in_features = slot.config.quantisation, slot.config.hidden_size
    for form in forms:
        shapes = [_shape(form, part.shard_size, in_features, packing, quantisation) for part in rows]
        fit = [tensor.shape == shape for tensor, shape in zip(tensors, shapes, strict=True)]
        if all(fit) and all(tensor.dtype in form.dtypes for tensor in tensors):
            _check_one_dtype(tensors)
            _check_boundaries(slot, form, tensors, rows)
            return form
    raise _no_form(slot, tensors, forms, rows, packing)


def _shape(
    form: Form, rows: int, in_features: int, packing: Packing32, quantisation: Quantisation
) -> tuple[int | None, ...]:
    return tuple(length(axis, rows, in_features, packing, quantisation) for axis in form.axes)


def _no_form(
    slot: Slot, tensors: list[TensorInfo], forms: tuple[Form, ...], rows: tuple[ShardRows, ...], packing: Packing32
) -> CheckpointError:
    """Say what is wrong: a dtype, or the first part's shape that fits no form."""
    _check_one_dtype(tensors)
    first = tensors[0]
    allowed = sorted({dtype for form in forms for dtype in form.dtypes})
    if first.dtype not in allowed:
        return UnsupportedCheckpoint(
            "a dtype that this tensor of a packed projection cannot have",
            file=first.shard,
            tensor=first.name,
            found=first.dtype,
            wanted=", ".join(allowed),
        )
    possible = [form for form in forms if first.dtype in form.dtypes]
    for tensor, part in zip(tensors, rows, strict=True):
        shapes = [
            _shape(form, part.shard_size, slot.config.hidden_size, packing, slot.config.quantisation)
            for form in possible
        ]
        if tensor.shape not in shapes:
            return _no_shape(tensor, part, list(zip(possible, shapes, strict=True)))
    return NoFusedForm("parts are stored in different forms", file=first.shard, tensor=first.name, found=first.form)


def _no_shape(tensor: TensorInfo, part: ShardRows, forms: list[tuple[Form, tuple[int | None, ...]]]) -> CheckpointError:
    """Say why no form's shape is this tensor's: words that two parts would share, or what it should have been."""
    for form, shape in forms:
        if len(shape) == len(tensor.shape) and all(
            want == found or (want is None and axis.endswith("/w"))
            for want, found, axis in zip(shape, tensor.shape, form.axes, strict=True)
        ):
            packed = f"{part.shard_size} rows" if "r/w" in form.axes else "in_features"
            return NoFusedForm(
                f"{packed} fill no whole words", file=tensor.shard, tensor=tensor.name, found=tensor.form
            )
    known = [shape for _, shape in forms if None not in shape]
    near = next((shape for shape in known if len(shape) == len(tensor.shape)), next(iter(known), None))
    wanted = "a shape that the declared bits or block size explain"
    if near is not None:
        wanted = f"{list(near)} (weight_loader rows for shard_id {part.shard_id!r})"
    return CheckpointError(
        f"shape contradicts {CONFIG}", file=tensor.shard, tensor=tensor.name, found=list(tensor.shape), wanted=wanted
    )


def _check_one_dtype(tensors: list[TensorInfo]) -> None:
    first = tensors[0]
    for other in tensors[1:]:
        if other.dtype != first.dtype:
            raise NoFusedForm(
                "parts of one group differ in dtype",
                file=other.shard,
                tensor=other.name,
                found=other.form,
                wanted=f"{first.dtype}, as {first.name}",
                remedy="store the group in one dtype, or pass --keep-split to leave it split",
            )


def _check_boundaries(slot: Slot, form: Form, tensors: list[TensorInfo], rows: tuple[ShardRows, ...]) -> None:
    """Rows must be whole bytes, and every part but the last must end where a block of scales ends."""
    for tensor in tensors:
        if form.join is Join.ROWS and tensor_bytes(tensor.dtype, tensor.shape[1:]) is None:
            raise UnsupportedCheckpoint(
                "rows are no whole bytes", file=tensor.shard, tensor=tensor.name, found=tensor.form
            )
    block = slot.config.quantisation.block
    if "r/b" not in form.axes or block is None:
        return
    for tensor, part in zip(tensors[:-1], rows[:-1], strict=True):
        if part.shard_size % block[0]:
            raise NoFusedForm(
                f"a part of {slot.packing.fused} in layer {slot.layer} ends inside a block of scales, "
                "so the joined rows would get the wrong scales",
                file=tensor.shard,
                tensor=tensor.name,
                found=f"{part.shard_size} rows",
                wanted=f"a multiple of {block[0]}",
            )


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
    method = _method(slot, [whole], ignored=_ignored(slot))
    _check_required(slot, [whole], method)
    _check_bias(slot, [whole], method)
    shapes = {suffix: tensor.shape for suffix, tensor in whole.items()}
    packing = solve(method, shapes, total, slot.config.hidden_size)
    one = (ShardRows(sizes[0].shard_id, 0, total),)
    found = []
    for suffix, tensor in whole.items():
        form = _form(slot, [tensor], METHODS[method][suffix], one, packing)
        found.append(FusedTensor(tensor, slot.packing, slot.layer, form.join, _cuts(slot, suffix, form, packing)))
    return found


def _cuts(slot: Slot, suffix: str, form: Form, packing: Packing32) -> tuple[tuple[str, ShardRows], ...]:
    """Where each part lies in a tensor that is fused already."""
    axis = {Join.ROWS: 0, Join.COLUMNS: 1}.get(form.join)
    cuts, at = [], 0
    for (shard_id, module), part in zip(slot.packing.parts, slot.config.rows(slot.packing), strict=True):
        shape = _shape(form, part.shard_size, slot.config.hidden_size, packing, slot.config.quantisation)
        size = (shape[axis] or 0) if axis is not None else (shape[0] or 1 if shape else 1)
        cuts.append((slot.name(module, suffix), ShardRows(shard_id, at, size)))
        at += size if axis is not None else 0
    return tuple(cuts)
