"""A folder or a store -> values: config, index, headers, side files, and all checks between them.

Nothing here follows a name out of the folder that the name did not plainly give, unpickles, imports or maps memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from fusecheck import digest
from fusecheck.collector import collector_paused
from fusecheck.config import CONFIG, HF_QUANT_CONFIG, ModelConfig, parse_config
from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UnsupportedCheckpoint, UsageError
from fusecheck.files import MAX_JSON_BYTES, Files
from fusecheck.header import LIBRARY_HEADER_BYTES, MAX_HEADER_BYTES, Header, TensorInfo, parse_header
from fusecheck.listing import CheckpointFiles
from fusecheck.reader import Source
from fusecheck.shards import INDEX, check_covered, choose_rank_files, choose_shards, merge_tensors, read_index
from fusecheck.sidefiles import ADAPTER_FILES, LeftOut, SideFile
from fusecheck.stored import StoredFiles

MAX_PEEK_BYTES = 64 * 1024 * 1024
"""Largest tensor (g_idx) of which one copy may have to serve several parts."""

_MAGIC = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the weights", "run `git lfs pull`"),
    (b"\x80", "is a Python pickle, not safetensors", "convert it; fusecheck never unpickles"),
    (b"PK\x03\x04", "is a zip archive (a torch .pt or .bin?), not safetensors", "convert it to safetensors"),
    (b"GGUF", "is a GGUF file, not safetensors", "use the safetensors checkpoint"),
    (b"\x1f\x8b", "is gzip-compressed", "gunzip it first"),
    (b"<", "is an HTML or XML page, not safetensors", "download it again"),
)


@dataclass(frozen=True, slots=True)
class Shard:
    """One weight file: its size in bytes, the BLAKE3 of its length prefix and header, its `__metadata__`."""

    name: str
    size: int
    header_digest: str | None
    """None where digests cannot be made."""
    metadata: Mapping[str, str] | None


class Windows:
    """Small reads, served from the last few stretches that were read: scalars of one file stand side by side."""

    BYTES = 1 << 16
    KEPT = 16

    def __init__(self, files: CheckpointFiles, sizes: Mapping[str, int]) -> None:
        self._files, self._sizes = files, sizes
        self._kept: dict[str, tuple[int, bytes]] = {}

    def read(self, shard: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of one weight file."""
        begin, kept = self._kept.get(shard, (0, b""))
        if begin <= start and stop <= begin + len(kept):
            return kept[start - begin : stop - begin]
        data = bytearray(min(max(self.BYTES, stop - start), self._sizes[shard] - start))
        self._files.read_into(shard, start, memoryview(data))
        kept = bytes(data)
        if len(kept) <= self.BYTES:
            self._kept.pop(shard, None)
            self._kept[shard] = start, kept
            if len(self._kept) > self.KEPT:
                del self._kept[next(iter(self._kept))]
        return kept[: stop - start]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and agrees with itself. `files` stays open until it is closed."""

    files: CheckpointFiles
    shards: tuple[Shard, ...]
    """In natural order of their names."""
    tensors: Mapping[str, TensorInfo]
    """In the order of the shards, then of the data; by name, or where it is cut for ranks by file and name."""
    index_metadata: Mapping[str, object] | None
    """None where the folder has no index."""
    config_text: bytes
    side_files: tuple[SideFile, ...]
    left_out: tuple[LeftOut, ...]
    """Everything of the folder that is neither read nor copied, with the reason."""
    warnings: tuple[str, ...]
    ranked: bool = False
    """Whether the weights are cut for tensor parallelism, a file or more for each rank."""

    @cached_property
    def config(self) -> ModelConfig:
        """The dimensions. CheckpointError where config.json is malformed or of an unsupported model."""
        return parse_config(self.config_text, self._beside())

    def _beside(self) -> bytes | None:
        """hf_quant_config.json counts as config."""
        found = any(side.path == HF_QUANT_CONFIG for side in self.side_files)
        return self.files.read(HF_QUANT_CONFIG, MAX_JSON_BYTES) if found else None

    @property
    def folder(self) -> Path:
        """Where the files lie. UsageError where that is no folder."""
        if self.files.root is None:
            raise UsageError("lies in a store, and this needs a folder", file=self.files.place)
        return self.files.root

    def peek(self, tensor: TensorInfo) -> bytes:
        """All bytes of a small tensor. UnsupportedCheckpoint where it is none."""
        if tensor.nbytes > MAX_PEEK_BYTES:
            raise UnsupportedCheckpoint(
                "is too large to be compared before fusing", file=tensor.shard, tensor=tensor.name, found=tensor.form
            )
        return self._windows.read(tensor.shard, tensor.start, tensor.stop)

    @cached_property
    def _windows(self) -> Windows:
        return Windows(self.files, {shard.name: shard.size for shard in self.shards})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.files.close()


def open_checkpoint(
    folder: Path, *, follow_links: bool = False, max_header_bytes: int = MAX_HEADER_BYTES, ranked: bool = False
) -> Checkpoint:
    """Read everything but the data of `folder` and check it.

    UsageError where there is no folder, CheckpointError where it is malformed or unsupported, SystemFailure where it
    cannot be read.
    """
    found = open_folder(folder, follow_links=follow_links, max_header_bytes=max_header_bytes, ranked=ranked)
    try:
        _ = found.config
    except BaseException:
        found.files.close()
        raise
    return found


def open_folder(
    folder: Path, *, follow_links: bool = False, max_header_bytes: int = MAX_HEADER_BYTES, ranked: bool = False
) -> Checkpoint:
    """`open_checkpoint` without a look into config.json: what is there, whatever model it is.

    `ranked` admits a folder that is cut for the ranks of an engine.
    """
    names = _list(folder)
    files = Files(folder)
    rank_files = choose_rank_files(names) if ranked else []
    try:
        with collector_paused():
            return _read(files, names, rank_files, follow_links=follow_links, max_header_bytes=max_header_bytes)
    except BaseException:
        files.close()
        raise


def open_stored(
    source: Source, place: str, *, max_header_bytes: int = MAX_HEADER_BYTES, ranked: bool = False
) -> Checkpoint:
    """`open_folder` for files in a store: the same checks, but those of links and special files. Closes the source."""
    files = StoredFiles(source, place)
    try:
        names = files.names()
        rank_files = choose_rank_files(names) if ranked else []
        with collector_paused():
            return _read(files, names, rank_files, follow_links=False, max_header_bytes=max_header_bytes)
    except BaseException:
        files.close()
        raise


def _read(
    files: CheckpointFiles, names: frozenset[str], rank_files: list[str], *, follow_links: bool, max_header_bytes: int
) -> Checkpoint:
    warnings: list[str] = []
    index = read_index(files) if INDEX in names else None
    listed = index.weight_map if index else None
    metadata = index.metadata if index else None
    del index  # its names are as large as those of the headers; of `listed` nothing is left in the end
    chosen = rank_files or choose_shards(files, names, listed, warnings)
    if CONFIG not in names:
        raise CheckpointError("is missing; no engine can serve the weights without it", file=CONFIG)
    files.add(CONFIG)
    config_text = files.read(CONFIG, MAX_JSON_BYTES)
    shards: list[Shard] = []
    tensors: dict[str, TensorInfo] = {}
    files.expect_heads(chosen)
    for name in chosen:
        shard, header = read_shard(files, name, max_header_bytes)
        shards.append(shard)
        if rank_files:
            tensors |= {f"{name}/{tensor.name}": tensor for tensor in header.tensors}
        else:
            merge_tensors(tensors, header.tensors, listed)
    files.expect_heads(())
    if listed:
        check_covered(listed)
    side_files, left_out = files.side_files(frozenset((*chosen, CONFIG, INDEX)), follow_links=follow_links)
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
        index_metadata=metadata,
        config_text=config_text,
        side_files=side_files,
        left_out=left_out,
        warnings=tuple(warnings),
        ranked=bool(rank_files),
    )


def _list(folder: Path) -> frozenset[str]:
    try:
        return frozenset(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError("is no folder", file=str(folder)) from None
    except OSError as error:
        raise SystemFailure.from_os(error, str(folder), "list") from None


def read_shard(files: CheckpointFiles, name: str, max_header_bytes: int = MAX_HEADER_BYTES) -> tuple[Shard, Header]:
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


def _explain(files: CheckpointFiles, name: str, size: int, error: FusecheckError) -> FusecheckError:
    """Say what a file really is. Only where no JSON object follows the length: `80 02` is also a legal header length."""
    head = bytearray(min(64, size))
    files.read_into(name, 0, memoryview(head))
    if head[8:].lstrip(b" \t\r\n").startswith(b"{"):
        return error
    for magic, problem, remedy in _MAGIC:
        if head.startswith(magic):
            return CheckpointError(problem, file=name, remedy=remedy)
    return error
