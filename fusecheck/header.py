"""safetensors headers <-> values. Pure: bytes in, values out, no file is opened here.

The format (github.com/huggingface/safetensors, README "Format"): 8 bytes little-endian length N, N bytes of JSON, then the
data. The JSON maps each tensor name to {"dtype", "shape", "data_offsets": [begin, end)} counted from the start of the
data; ranges must tile the data exactly. Rust's `Metadata::validate` is the reference; where two readers could disagree
(duplicate keys, entries as arrays, unread fields) this one refuses.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from operator import itemgetter
from typing import NamedTuple

from fusecheck.errors import CheckpointError, invisible
from fusecheck.json_text import MAX_ENTRIES, strict_json

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element of every dtype of safetensors 0.8, in its rank order: the writer sorts by rank, largest first."""

_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Largest header that is read unless the caller raises it."""

LIBRARY_HEADER_BYTES = 100_000_000
"""Largest header that the library reads, and so the most that MAX_HEADER_BYTES can be raised to."""

_U64 = 2**64 - 1
_TO_TOKENS = str.maketrans(dict.fromkeys("[]{},: \t\n\r", " ") | dict.fromkeys("0123456789", "0"))


class TensorInfo(NamedTuple):
    """One tensor of one shard; [start, stop) are bytes from the start of the file. A tuple: there may be 150,000."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.stop - self.start

    @property
    def form(self) -> str:
        """Dtype and shape as messages show them: `BF16 [1024, 2048]`."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. `tensors` stand in data order; `metadata` is None where the file has none (or null)."""

    metadata: Mapping[str, str] | None
    tensors: tuple[TensorInfo, ...]


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int | None:
    """Bytes that `shape` x `dtype` takes, or None where a product passes 2**64 - 1 or ends inside a byte.

    The product is checked dimension by dimension as Rust's `checked_mul` does: [0, 2**63, 4] is 0, [2**63, 4, 0] overflows.
    """
    bits = 1
    for dimension in (*shape, DTYPE_BITS[dtype]):
        bits *= dimension
        if bits > _U64:
            return None
    return bits // 8 if bits % 8 == 0 else None


def canonical_order(tensors: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(name, dtype) pairs in the order in which safetensors writes them: dtype rank descending, then name."""
    return sorted(tensors, key=lambda pair: (-_RANK[pair[1]], pair[0]))


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None
) -> bytes:
    """The first bytes of a file that holds (name, dtype, shape, nbytes) back to back: length, JSON, padding to 8.

    Byte for byte what safetensors' own writer gives, but for the order of metadata keys, which it draws at random. None
    is no `__metadata__` at all.
    """
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    blob = _compact(entries)
    blob += b" " * (-len(blob) % 8)
    return struct.pack("<Q", len(blob)) + blob


def metadata_orders(head: bytes, metadata: Mapping[str, str]) -> Iterator[bytes]:
    """What `encode_header` gave, with the keys of `__metadata__` in each order in which the library may write them."""
    known = _compact(dict(sorted(metadata.items())))
    for order in permutations(sorted(metadata.items())):
        yield head.replace(known, _compact(dict(order)), 1)


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def parse_header(blob: bytes, *, shard: str, data_bytes: int) -> Header:
    """The JSON part of a header, checked against the `data_bytes` that follow it. CheckpointError names shard and tensor."""
    entries = strict_json(blob, file=shard, members=5 * MAX_ENTRIES, surrogates=True, outside=_check_tokens)
    if not isinstance(entries, dict):
        raise CheckpointError("header is not a JSON object", file=shard, found=type(entries).__name__, wanted="object")
    metadata = _metadata(entries.pop("__metadata__", None), shard)
    if len(entries) > MAX_ENTRIES:
        raise CheckpointError("header has too many tensors", file=shard, found=len(entries), wanted=f"<= {MAX_ENTRIES}")
    base = 8 + len(blob)
    tensors = list(_tensors(entries, shard, base))
    tensors.sort(key=itemgetter(4, 5))  # start, stop
    _check_tiling(tensors, shard, base, data_bytes)
    return Header(metadata, tuple(tensors))


def _check_tokens(bare: str, shard: str) -> None:
    """Nothing but brackets, commas, colons, whitespace, null and numbers of at most 20 digits stands there."""
    kept = bare.replace("null", " ").translate(_TO_TOKENS)
    if kept.strip("0 ") or "0" * 21 in kept:
        raise CheckpointError("header holds something other than names, whole numbers, lists and objects", file=shard)


def _metadata(value: object, shard: str) -> Mapping[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise CheckpointError("__metadata__ is not an object of strings", file=shard, found=type(value).__name__)
    for key, text in value.items():
        if not isinstance(text, str):
            raise CheckpointError(
                "__metadata__ holds a value that is no string", file=shard, tensor=key, found=type(text).__name__
            )
        _check_unicode(key, shard)
        _check_unicode(text, shard)
    return value


def _check_unicode(text: str, shard: str) -> None:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise CheckpointError("holds a lone surrogate, which is no Unicode text", file=shard, tensor=text)


def _check_name(name: str, shard: str) -> None:
    if not name:
        raise CheckpointError("a tensor has the empty name", file=shard)
    if not (name.isascii() and name.isprintable()) and any(map(invisible, name)):
        raise CheckpointError(
            "tensor name holds a control, bidirectional or invisible character", file=shard, tensor=name
        )


def _tensors(entries: Mapping[str, object], shard: str, base: int) -> Iterator[TensorInfo]:
    """Every entry as a value. Most tensors of a file share dtype and shape with one before: that is judged once.

    What does not have the usual build, or is the first of its form, is judged, and refused, alone.
    """
    names = "".join(entries)
    plain = names.isascii() and names.isprintable()
    forms: dict[tuple[object, ...], tuple[str, tuple[int, ...], int]] = {}
    for name, entry in entries.items():
        found = _recognised(entry, forms) if plain and name else None
        if found is None:
            tensor = _tensor(name, entry, shard, base)
            forms[tensor.dtype, *tensor.shape] = tensor.dtype, tensor.shape, tensor.nbytes
            yield tensor
        else:
            dtype, shape, begin, end = found
            yield TensorInfo(name, dtype, shape, shard, base + begin, base + end)


def _recognised(
    entry: object, forms: Mapping[tuple[object, ...], tuple[str, tuple[int, ...], int]]
) -> tuple[str, tuple[int, ...], int, int] | None:
    """Dtype, shape and offsets of an entry whose form was judged before; None where anything is unusual."""
    if type(entry) is not dict or len(entry) != 3:
        return None
    try:
        shape, offsets = entry["shape"], entry["data_offsets"]
        if type(shape) is not list or type(offsets) is not list:
            return None
        (begin, end), (dtype, known, size) = offsets, forms[entry["dtype"], *shape]
        return (dtype, known, begin, end) if end - begin == size and begin >= 0 and end <= _U64 else None
    except (KeyError, TypeError, ValueError):  # not seen before; not numbers, not two of them
        return None


def _tensor(name: str, entry: object, shard: str, base: int) -> TensorInfo:
    _check_name(name, shard)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise CheckpointError(
            "header entry is malformed",
            file=shard,
            tensor=name,
            found=found,
            wanted="an object of dtype, shape, data_offsets",
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            "unknown dtype", file=shard, tensor=name, found=dtype, wanted=f"one of {', '.join(DTYPE_BITS)}"
        )
    if not _is_u64_list(shape):
        raise CheckpointError("shape is no list of whole numbers", file=shard, tensor=name, found=shape)
    if not _is_u64_list(offsets) or len(offsets) != 2:
        raise CheckpointError("data_offsets are not two whole numbers", file=shard, tensor=name, found=offsets)
    begin, end = offsets
    size = tensor_bytes(dtype, shape)
    if size is None or end - begin != size:
        wanted = "a shape that fits 64 bits and whole bytes" if size is None else f"{size} bytes for {dtype} {shape}"
        raise CheckpointError(
            "shape x dtype disagrees with data_offsets",
            file=shard,
            tensor=name,
            found=f"{end - begin} bytes",
            wanted=wanted,
        )
    return TensorInfo(name, sys.intern(dtype), tuple(shape), shard, base + begin, base + end)


def _is_u64_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _U64 for item in value)


def _check_tiling(tensors: list[TensorInfo], shard: str, base: int, data_bytes: int) -> None:
    at = base
    for tensor in tensors:
        if tensor.start != at:
            problem = "data overlaps the tensor before it" if tensor.start < at else "a hole in the data lies before it"
            raise CheckpointError(
                problem, file=shard, tensor=tensor.name, found=f"start {tensor.start}", wanted=f"start {at}"
            )
        at = tensor.stop
    if at - base != data_bytes:
        problem = (
            "file is truncated (an incomplete download?)" if at - base > data_bytes else "bytes follow the last tensor"
        )
        raise CheckpointError(problem, file=shard, found=f"{base + data_bytes} bytes", wanted=f"{at} bytes")
