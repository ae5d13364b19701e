"""One tensor of a checkpoint as torch has it.

Opened by `safetensors.safe_open`, so that two readers of the format must agree; what torch has no dtype for is read by
ours, as bytes.
"""

from __future__ import annotations

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from fusecheck.checkpoint import Checkpoint
from fusecheck.errors import SystemFailure
from fusecheck.header import TensorInfo, encode_header, tensor_bytes

_OPAQUE = frozenset({"F4", "F6_E2M3", "F6_E3M2"}) | (
    frozenset() if hasattr(torch, "float8_e8m0fnu") else frozenset({"F8_E8M0"})
)
"""dtypes that torch cannot open, or opens as something else than [rows, in]."""


def load_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """In its own shape, or as uint8 [rows, bytes of a row] where torch cannot open its dtype.

    `name` is its key in `checkpoint.tensors`. Raises `SafetensorError`, or `SystemFailure` where the file cannot be opened.
    """
    info = checkpoint.tensors[name]
    if info.dtype in _OPAQUE:
        data = _bytes_of(checkpoint, info)
        width = tensor_bytes(info.dtype, info.shape[1:]) or 0
        raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return raw.reshape(info.shape[0], width) if info.shape else raw
    if checkpoint.files.root is None:
        return _from_store(checkpoint, info)
    try:
        with safe_open(checkpoint.folder / info.shard, framework="pt") as file:
            tensor: Tensor = file.get_tensor(info.name)
    except OSError as error:
        raise SystemFailure.from_os(error, info.shard, "open") from None
    return tensor


def load_slice(checkpoint: Checkpoint, name: str, *at: slice) -> Tensor:
    """`load_tensor(checkpoint, name)[at]`, of one row or matrix after another no more than that; errors are the same."""
    info = checkpoint.tensors[name]
    if info.dtype in _OPAQUE:
        return load_tensor(checkpoint, name)[at]
    if checkpoint.files.root is None:
        return _from_store(checkpoint, _rows(info, at[0]))[(slice(None), *at[1:])]
    try:
        with safe_open(checkpoint.folder / info.shard, framework="pt") as file:
            tensor: Tensor = file.get_slice(info.name)[at]
    except OSError as error:
        raise SystemFailure.from_os(error, info.shard, "open") from None
    return tensor


def _rows(info: TensorInfo, at: slice) -> TensorInfo:
    """As if these were all."""
    first, stop, _ = at.indices(info.shape[0])
    row = tensor_bytes(info.dtype, info.shape[1:]) or 0
    start = info.start + first * row
    return info._replace(shape=(stop - first, *info.shape[1:]), start=start, stop=info.start + stop * row)


def _bytes_of(checkpoint: Checkpoint, info: TensorInfo) -> bytearray:
    data = bytearray(info.nbytes)
    checkpoint.files.read_into(info.shard, info.start, memoryview(data))
    return data


def _from_store(checkpoint: Checkpoint, info: TensorInfo) -> Tensor:
    """The library opens files only: it is given one that holds this tensor alone."""
    head = encode_header([(info.name, info.dtype, info.shape, info.nbytes)], None)
    return load(head + bytes(_bytes_of(checkpoint, info)))[info.name]
