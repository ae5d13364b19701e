"""Fused tensors -> the parts that they were joined from, as planned tensors: the inverse of `plan.output_tensors`. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping

from fusecheck.config import ModelConfig
from fusecheck.errors import UnsupportedCheckpoint
from fusecheck.forms import Join
from fusecheck.group import FusedTensor
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.mapping import ShardRows
from fusecheck.plan import Block, Constant, OutputTensor, Strip, contiguous, copied


def split_tensors(
    tensors: Mapping[str, TensorInfo], fused: Iterable[FusedTensor], config: ModelConfig
) -> list[OutputTensor]:
    """Every part of what is fused, and every other tensor, in the order of the source.

    UnsupportedCheckpoint where the parts cannot be told apart.
    """
    wholes = {whole.tensor.name: whole for whole in fused}
    outputs: list[OutputTensor] = []
    for name, tensor in tensors.items():
        outputs += _parts(wholes[name], config) if name in wholes else [copied(name, tensor)]
    return outputs


def split_view(
    tensors: Mapping[str, TensorInfo], fused: Iterable[FusedTensor], config: ModelConfig
) -> dict[str, TensorInfo]:
    """Every tensor of the split form, where its bytes stand: a part that was joined by rows is a range of the whole.

    UnsupportedCheckpoint for parts that were joined otherwise, whose bytes do not follow one another.
    """
    view = {}
    for output in split_tensors(tensors, fused, config):
        (strip,) = output.strips
        if isinstance(strip, Constant) or strip[0].stride != 1:
            raise UnsupportedCheckpoint(
                "its parts are no ranges of its bytes", file=output.source.shard, tensor=output.source.name
            )
        start = strip[0].offset
        view[output.name] = TensorInfo(
            output.name, output.dtype, output.shape, strip[0].file, start, start + output.nbytes
        )
    return view


def _parts(whole: FusedTensor, config: ModelConfig) -> Iterator[OutputTensor]:
    """The parts of one fused tensor. Along dim 0 each is a range of its bytes, along dim 1 one strided block."""
    tensor, axis = whole.tensor, {Join.ROWS: 0, Join.COLUMNS: 1}.get(whole.join)
    if axis is not None:
        _check_cuts(whole, axis, config)
    for (name, cut), rows in zip(whole.parts, config.rows(whole.packing), strict=True):
        shape = tensor.shape if axis is None else (*tensor.shape[:axis], cut.shard_size, *tensor.shape[axis + 1 :])
        if whole.join is Join.STACK:
            shape = (cut.shard_size, tensor.shape[-1])
        if whole.join is Join.SHAPE:
            strip: Strip = Constant(weight_shape(tensor, rows.shard_size, config))
        else:
            strip = (_cut(whole, cut),)
        yield OutputTensor(name, tensor.dtype, shape, tensor, (strip,))


def weight_shape(tensor: TensorInfo, rows: int, config: ModelConfig) -> bytes:
    """The bytes of a `weight_shape` for so many rows."""
    return struct.pack({"I64": "<2q", "I32": "<2i"}[tensor.dtype], rows, config.hidden_size)


def _cut(whole: FusedTensor, cut: ShardRows) -> Block:
    """Where one part stands in a fused tensor. Rows were found to be whole bytes by whoever made the FusedTensor."""
    tensor = whole.tensor
    match whole.join:
        case Join.ROWS | Join.STACK:
            row_bytes = tensor_bytes(tensor.dtype, tensor.shape[2 if whole.join is Join.STACK else 1 :]) or 0
            return Block(tensor.shard, tensor.start + cut.shard_offset * row_bytes, cut.shard_size * row_bytes, 1, 1)
        case Join.COLUMNS:
            rows, columns = tensor.shape
            stride = tensor.nbytes // rows
            width = stride // columns
            start = tensor.start + cut.shard_offset * width
            return Block(tensor.shard, start, rows, cut.shard_size * width, stride)
        case _:
            return contiguous(tensor)


def _check_cuts(whole: FusedTensor, axis: int, config: ModelConfig) -> None:
    """The parts fill the fused tensor, and none begins inside a block of scales."""
    tensor, block = whole.tensor, config.quantisation.block
    cuts = [cut for _, cut in whole.parts]
    inside = any(
        block is not None and cut.shard_size != rows.shard_size and rows.shard_offset % block[0]
        for cut, rows in zip(cuts, config.rows(whole.packing), strict=True)
    )
    if inside or sum(cut.shard_size for cut in cuts) != tensor.shape[axis]:
        raise UnsupportedCheckpoint(
            "cannot be split: its parts share scales or words",
            file=tensor.shard,
            tensor=tensor.name,
            found=tensor.form,
            wanted=f"{' + '.join(str(cut.shard_size) for cut in cuts)} along dim {axis}",
        )
