"""A folder -> values: config, index, headers, side files, and all checks between them; and the open files behind one reader.

Nothing here follows a name out of the folder that the name did not plainly give, unpickles, imports or maps memory.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from fusecheck import digest
from fusecheck.config import CONFIG, HF_QUANT_CONFIG, ModelConfig, parse_config
from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UnsupportedCheckpoint, UsageError
from fusecheck.header import LIBRARY_HEADER_BYTES, MAX_HEADER_BYTES, Header, TensorInfo, parse_header, strict_json
from fusecheck.reader import Reader
from fusecheck.sidefiles import ADAPTER_FILES, LeftOut, SideFile, survey_side_files

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 64 * 1024 * 1024
"""Largest index or config that is read."""

MAX_INDEXED = 1_000_000
"""Most tensors that an index names."""

MAX_PEEK_BYTES = 64 * 1024 * 1024
"""Largest tensor (g_idx) of which one copy may have to serve several parts."""

MAX_OPEN = 256
"""Files of one checkpoint held open at once; those beyond are opened for each read and checked to be the same."""

_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", re.ASCII)
_NUMBERED = re.compile(r"(.+)-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors", re.ASCII)
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")
_MAGIC = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the weights", "run `git lfs pull`"),
    (b"\x80", "is a Python pickle, not safetensors", "convert it; fusecheck never unpickles"),
    (b"PK\x03\x04", "is a zip archive (a torch .pt or .bin?), not safetensors", "convert it to safetensors"),
    (b"GGUF", "is a GGUF file, not safetensors", "use the safetensors checkpoint"),
    (b"\x1f\x8b", "is gzip-compressed", "gunzip it first"),
    (b"<", "is an HTML or XML page, not safetensors", "download it again"),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What fstat says of a file; a difference between two looks means that it changed."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Take the fields of one stat result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Files:
    """Regular files of one folder, opened once, read by pread. A context manager; close() gives the descriptors back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._identity: dict[str, Identity] = {}
        self._open: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor."""
        while self._open:
            os.close(self._open.popitem()[1])

    def add(self, name: str) -> Identity:
        """Open `name` and remember what it is. CheckpointError unless it is a regular file."""
        descriptor, status = self._open_file(name)
        self._identity[name] = Identity.of(status)
        if len(self._open) < MAX_OPEN:
            self._open[name] = descriptor
        else:
            os.close(descriptor)
        return self._identity[name]

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of `file`; a short file is a source that changed (SystemFailure)."""
        kept = self._open.get(file)
        descriptor = self._reopen(file) if kept is None else kept
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(descriptor, [buffer[done:]], offset + done)
                if not got:
                    raise SystemFailure("became shorter while it was read", file=file, found=f"end at {offset + done}")
                done += got
        except OSError as error:
            raise SystemFailure.from_os(error, file, "read") from None
        finally:
            if kept is None:
                os.close(descriptor)

    def read(self, file: str, limit: int) -> bytes:
        """All bytes of a small file of this folder; CheckpointError above `limit` bytes."""
        size = self._identity[file].size
        if size > limit:
            raise CheckpointError("is too large", file=file, found=f"{size} bytes", wanted=f"<= {limit}")
        data = bytearray(size)
        self.read_into(file, 0, memoryview(data))
        return bytes(data)

    def digest(self, file: str, start: int = 0, stop: int | None = None) -> str:
        """BLAKE3 of a file, or of its bytes [start, stop), as hex."""
        state, at = digest.hasher(), start
        end = self._identity[file].size if stop is None else stop
        buffer = memoryview(bytearray(min(end - start, 1 << 20)))
        while at < end:
            block = buffer[: min(len(buffer), end - at)]
            self.read_into(file, at, block)
            state.update(block)
            at += len(block)
        return state.hexdigest()

    def changed_since(self, moment_ns: int) -> bool:
        """Whether any file was written, or came to be, after a moment. Copies that keep mtime still renew ctime."""
        return any(max(file.mtime_ns, file.ctime_ns) > moment_ns for file in self._identity.values())

    def check_unchanged(self) -> None:
        """SystemFailure when any file is no longer what it was when it was opened."""
        for name, was in self._identity.items():
            descriptor = self._open.get(name)
            try:
                now = Identity.of(os.fstat(descriptor) if descriptor is not None else (self.root / name).stat())
            except OSError as error:
                raise SystemFailure.from_os(error, name, "look at") from None
            if now != was:
                raise _changed(name)

    def _reopen(self, name: str) -> int:
        try:
            descriptor, status = self._open_file(name)
        except CheckpointError:  # gone, or no regular file any more
            raise _changed(name) from None
        if Identity.of(status) != self._identity[name]:
            os.close(descriptor)
            raise _changed(name)
        return descriptor

    def _open_file(self, name: str) -> tuple[int, os.stat_result]:
        try:
            # without O_NONBLOCK a FIFO blocks for ever; regular files ignore it
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            dangling = (self.root / name).is_symlink()
            raise CheckpointError("is a dangling link" if dangling else "is missing", file=name) from None
        except OSError as error:
            if stat.S_ISSOCK(_mode(self.root / name)):
                raise CheckpointError("is no regular file", file=name, found="a socket") from None
            if error.errno == errno.ELOOP:
                raise CheckpointError("is a link that leads to itself", file=name) from None
            raise SystemFailure.from_os(error, name, "open") from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise CheckpointError("is no regular file", file=name, found=_kind(status.st_mode))
        return descriptor, status


def same_bytes(one: Reader, ours: tuple[str, int], other: Reader, theirs: tuple[str, int], size: int) -> bool:
    """Whether `size` bytes from (file, offset) `ours` of one reader equal those from `theirs` of the other."""
    for at in range(0, size, 1 << 20):
        blocks = bytearray(min(1 << 20, size - at)), bytearray(min(1 << 20, size - at))
        one.read_into(ours[0], ours[1] + at, memoryview(blocks[0]))
        other.read_into(theirs[0], theirs[1] + at, memoryview(blocks[1]))
        if blocks[0] != blocks[1]:
            return False
    return True


def _changed(name: str) -> SystemFailure:
    return SystemFailure("changed while it was read", file=name, remedy="run again once nothing writes to the source")


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(mode)), "a special file")


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file: its size in bytes, the BLAKE3 of its length prefix and header, its `__metadata__`."""

    name: str
    size: int
    header_digest: str | None
    """None where digests cannot be made."""
    metadata: Mapping[str, str] | None


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was read and agrees with itself. `files` stays open until it is closed."""

    files: Files
    shards: tuple[Shard, ...]
    """In natural order of their names."""
    tensors: Mapping[str, TensorInfo]
    """In the order of the shards, then of the data."""
    index_metadata: Mapping[str, object] | None
    """None where the folder has no index."""
    config_text: bytes
    side_files: tuple[SideFile, ...]
    left_out: tuple[LeftOut, ...]
    """Everything of the folder that is neither read nor copied, with the reason."""
    warnings: tuple[str, ...]

    @cached_property
    def config(self) -> ModelConfig:
        """The dimensions. CheckpointError where config.json is malformed or of an unsupported model."""
        return parse_config(self.config_text, self._beside())

    def _beside(self) -> bytes | None:
        """hf_quant_config.json counts as config."""
        found = any(side.path == HF_QUANT_CONFIG for side in self.side_files)
        return self.files.read(HF_QUANT_CONFIG, MAX_JSON_BYTES) if found else None

    def peek(self, tensor: TensorInfo) -> bytes:
        """All bytes of a small tensor. UnsupportedCheckpoint where it is none."""
        if tensor.nbytes > MAX_PEEK_BYTES:
            raise UnsupportedCheckpoint(
                "is too large to be compared before fusing", file=tensor.shard, tensor=tensor.name, found=tensor.form
            )
        data = bytearray(tensor.nbytes)
        self.files.read_into(tensor.shard, tensor.start, memoryview(data))
        return bytes(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.files.close()


def open_checkpoint(
    folder: Path, *, follow_links: bool = False, max_header_bytes: int = MAX_HEADER_BYTES
) -> Checkpoint:
    """Read everything but the data of `folder` and check it.

    UsageError where there is no folder, CheckpointError where it is malformed or unsupported, SystemFailure where it
    cannot be read.
    """
    found = open_folder(folder, follow_links=follow_links, max_header_bytes=max_header_bytes)
    try:
        _ = found.config
    except BaseException:
        found.files.close()
        raise
    return found


def open_folder(folder: Path, *, follow_links: bool = False, max_header_bytes: int = MAX_HEADER_BYTES) -> Checkpoint:
    """`open_checkpoint` without a look into config.json: what is there, whatever model it is."""
    names = _list(folder)
    files = Files(folder)
    try:
        return _read(files, names, follow_links=follow_links, max_header_bytes=max_header_bytes)
    except BaseException:
        files.close()
        raise


def _read(files: Files, names: frozenset[str], *, follow_links: bool, max_header_bytes: int) -> Checkpoint:
    warnings: list[str] = []
    index = _read_index(files) if INDEX in names else None
    chosen = _choose_shards(files.root, names, index.weight_map if index else None, warnings)
    if CONFIG not in names:
        raise CheckpointError("is missing; no engine can serve the weights without it", file=CONFIG)
    files.add(CONFIG)
    config_text = files.read(CONFIG, MAX_JSON_BYTES)
    shards: list[Shard] = []
    tensors: dict[str, TensorInfo] = {}
    for name in chosen:
        shard, header = read_shard(files, name, max_header_bytes)
        shards.append(shard)
        _merge(tensors, header.tensors, index)
    if index:
        _check_index_is_covered(index, tensors)
    side_files, left_out = survey_side_files(files.root, frozenset((*chosen, CONFIG, INDEX)), follow_links=follow_links)
    for side_file in side_files:
        files.add(side_file.path)
    if any(item.path in ADAPTER_FILES for item in left_out):
        warnings.append(
            "an adapter lies beside the model: the model alone is read, the adapter is left out, not merged"
        )
    return Checkpoint(
        files=files,
        shards=tuple(shards),
        tensors=tensors,
        index_metadata=index.metadata if index else None,
        config_text=config_text,
        side_files=side_files,
        left_out=left_out,
        warnings=tuple(warnings),
    )


def _list(folder: Path) -> frozenset[str]:
    try:
        return frozenset(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError("is no folder", file=str(folder)) from None
    except OSError as error:
        raise SystemFailure.from_os(error, str(folder), "list") from None


@dataclass(frozen=True, slots=True)
class _Index:
    metadata: Mapping[str, object]
    weight_map: Mapping[str, str]


def _read_index(files: Files) -> _Index:
    files.add(INDEX)
    value = strict_json(files.read(INDEX, MAX_JSON_BYTES), file=INDEX, members=MAX_INDEXED)
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("has no weight_map object with entries", file=INDEX)
    metadata = value.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise CheckpointError("metadata is no object", file=INDEX, found=type(metadata).__name__)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(
                "names a shard that is no plain safetensors file name",
                file=INDEX,
                tensor=tensor,
                found=shard,
                wanted="a file beside the index, such as model-00001-of-00002.safetensors",
            )
    return _Index(metadata or {}, weight_map)


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that counts: shard 2 before shard 10."""
    pieces = re.split(r"([0-9]+)", name)
    return tuple((int(piece[:4000]), piece) if piece.isdecimal() else (-1, piece) for piece in pieces)


def _choose_shards(
    root: Path, names: frozenset[str], weight_map: Mapping[str, str] | None, warnings: list[str]
) -> list[str]:
    """Which weight files the checkpoint is made of, or why that is not certain."""
    present = {name for name in names if name.endswith(".safetensors") and not stat.S_ISDIR(_mode(root / name))}
    numbered = {name: match for name in present if (match := _NUMBERED.fullmatch(name)) and match[1] == "model"}
    if weight_map is not None:
        chosen = set(weight_map.values())
        if SINGLE in present and SINGLE not in chosen:
            raise CheckpointError(
                f"stands beside an {INDEX} that does not name it: two readers would load two models",
                file=SINGLE,
                remedy="remove the one that is stale",
            )
        _check_listed(chosen, names)
    elif SINGLE in names:
        if numbered:
            raise CheckpointError(
                "stands beside numbered shards: two readers would load two models",
                file=SINGLE,
                found=f"beside {min(numbered)}",
                remedy="remove the ones that are stale",
            )
        chosen = {SINGLE}
    elif numbered:
        chosen = _complete_set(numbered)
        warnings.append(f"{INDEX} is absent; the {len(chosen)} numbered shards are a complete set, an index is made")
    else:
        raise _no_weights(names, present)
    ignored = sorted(present - chosen - ADAPTER_FILES)
    if ignored:
        warnings.append(f"other weight files are ignored, neither read nor copied: {', '.join(ignored)}")
    return sorted(chosen, key=natural_key)


def _check_listed(chosen: set[str], names: frozenset[str]) -> None:
    missing = sorted(chosen - names, key=natural_key)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"names shards that are missing: {', '.join(missing[:3])}{more}", file=INDEX, remedy="complete the download"
        )
    sets = {(match[1], match[3]) for name in chosen if (match := _NUMBERED.fullmatch(name))}
    for name in sorted(names - chosen):
        match = _NUMBERED.fullmatch(name)
        if match and (match[1], match[3]) in sets:
            raise CheckpointError(f"belongs to the numbered set, yet {INDEX} does not name it", file=name)


def _complete_set(numbered: Mapping[str, re.Match[str]]) -> set[str]:
    totals = {match[3] for match in numbered.values()}
    if len(totals) > 1:
        raise CheckpointError(
            "several numbered sets and no index to choose by",
            file=min(numbered),
            found=f"-of-{' and -of-'.join(sorted(totals))}",
        )
    (total,) = totals
    by_number = {int(match[2]): name for name, match in numbered.items()}
    absent = next((number for number in range(1, int(total) + 1) if number not in by_number), None)
    if absent is not None or len(by_number) != len(numbered) or len(by_number) != int(total):
        what = (
            f"shard {absent} of {int(total)} is missing"
            if absent is not None
            else "shard numbers repeat or pass the total"
        )
        raise CheckpointError(
            f"{what}, and there is no index", file=f"model-*-of-{total}.safetensors", remedy="complete the download"
        )
    return set(numbered)


def _no_weights(names: Iterable[str], present: set[str]) -> CheckpointError:
    others = sorted(name for name in names if name.lower().endswith(_OTHER_WEIGHTS))
    if present & ADAPTER_FILES:
        return CheckpointError(
            "this folder holds an adapter only",
            file=min(present & ADAPTER_FILES),
            remedy="merge it into its base model first",
        )
    if present:
        return CheckpointError(
            f"has a name that no engine looks for, and there is no {INDEX}",
            file=", ".join(sorted(present)),
            remedy=f"rename it to {SINGLE} if it is the whole model",
        )
    if others:
        return CheckpointError(
            "no safetensors weights; other formats are never read",
            file=others[0],
            wanted=SINGLE,
            remedy="convert the checkpoint to safetensors",
        )
    return CheckpointError("no weights in this folder", file=SINGLE, wanted=f"{SINGLE}, or shards and {INDEX}")


def read_shard(files: Files, name: str, max_header_bytes: int = MAX_HEADER_BYTES) -> tuple[Shard, Header]:
    """Add one weight file to `files` and check its header against its size. CheckpointError names file and tensor."""
    size = files.add(name).size
    prefix = bytearray(min(8, size))
    files.read_into(name, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    try:
        _check_length(name, size, length, max_header_bytes)
        blob = bytearray(8 + length)
        files.read_into(name, 0, memoryview(blob))
        header = parse_header(bytes(blob[8:]), shard=name, data_bytes=size - 8 - length)
    except CheckpointError as error:
        raise _explain(files, name, size, error) from None
    return Shard(name, size, digest.digest_of(blob) if digest.available() else None, header.metadata), header


def _check_length(name: str, size: int, length: int, limit: int) -> None:
    if size < 8:
        problem = "is empty" if size == 0 else "is too short for a safetensors file"
        raise CheckpointError(problem, file=name, found=f"{size} bytes", remedy="download it again")
    if length > size - 8:
        raise CheckpointError(
            "header length reaches beyond the file (an incomplete download?)",
            file=name,
            found=f"{size} bytes",
            wanted=f"at least 8 + {length}",
        )
    if length > min(limit, LIBRARY_HEADER_BYTES):
        raise CheckpointError(
            "header is too large",
            file=name,
            found=f"{length} bytes",
            wanted=f"<= {min(limit, LIBRARY_HEADER_BYTES)}",
            remedy="raise --max-header-size" if length <= LIBRARY_HEADER_BYTES else None,
        )


def _explain(files: Files, name: str, size: int, error: FusecheckError) -> FusecheckError:
    """Say what a file really is. Only where no JSON object follows the length: `80 02` is also a legal header length."""
    head = bytearray(min(64, size))
    files.read_into(name, 0, memoryview(head))
    if head[8:].lstrip(b" \t\r\n").startswith(b"{"):
        return error
    for magic, problem, remedy in _MAGIC:
        if head.startswith(magic):
            return CheckpointError(problem, file=name, remedy=remedy)
    return error


def _merge(tensors: dict[str, TensorInfo], found: Iterable[TensorInfo], index: _Index | None) -> None:
    for tensor in found:
        twin = tensors.get(tensor.name)
        if twin is not None:
            raise CheckpointError(
                "the same tensor stands in two shards",
                file=tensor.shard,
                tensor=tensor.name,
                found=f"also in {twin.shard}",
            )
        listed = index.weight_map.get(tensor.name) if index else tensor.shard
        if listed is None:
            raise CheckpointError(f"holds a tensor that {INDEX} does not name", file=tensor.shard, tensor=tensor.name)
        if listed != tensor.shard:
            raise CheckpointError(
                "the index names another shard", file=INDEX, tensor=tensor.name, found=listed, wanted=tensor.shard
            )
        tensors[tensor.name] = tensor


def _check_index_is_covered(index: _Index, tensors: Mapping[str, TensorInfo]) -> None:
    for name, shard in index.weight_map.items():
        if name not in tensors:
            raise CheckpointError("the index names a tensor that its shard lacks", file=INDEX, tensor=name, found=shard)
