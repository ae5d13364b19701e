"""Which of its method's forms a stored tensor fits: bits, group size, dtype, shape, whole blocks of scales. Pure."""

from __future__ import annotations

from fusecheck.axes import Packing32, length, solve
from fusecheck.config import CONFIG
from fusecheck.errors import CheckpointError, NoFusedForm, UnsupportedCheckpoint
from fusecheck.forms import WEIGHTS, Form, Join
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.mapping import ShardRows
from fusecheck.slot import Linear, Slot


def packing_of(slot: Slot, parts: list[Linear], method: str) -> Packing32:
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


def form_of(
    slot: Slot, tensors: list[TensorInfo], forms: tuple[Form, ...], rows: tuple[ShardRows, ...], packing: Packing32
) -> Form:
    """The first form that every part has."""
    for form in forms:
        shapes = [shape_of(slot, form, part.shard_size, packing) for part in rows]
        fit = [tensor.shape == shape for tensor, shape in zip(tensors, shapes, strict=True)]
        if all(fit) and all(tensor.dtype in form.dtypes for tensor in tensors):
            _check_one_dtype(tensors)
            _check_boundaries(slot, form, tensors, rows)
            return form
    raise _no_form(slot, tensors, forms, rows, packing)


def shape_of(slot: Slot, form: Form, rows: int, packing: Packing32) -> tuple[int | None, ...]:
    """The shape that a tensor of `rows` has in this form; None for an axis whose length cannot be."""
    config = slot.config
    return tuple(length(axis, rows, config.hidden_size, packing, config.quantisation) for axis in form.axes)


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
        shapes = [shape_of(slot, form, part.shard_size, packing) for form in possible]
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
