"""Which files beside the weights go along: tokenizer, templates, licence, code. Names only; nothing is opened or run."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fusecheck.errors import CheckpointError, SystemFailure, invisible
from fusecheck.json_text import strict_json

MANIFEST = "fusecheck.json"
CHECKSUMS = "SHA256SUMS"
OWN = ".fusecheck"
"""Folder of an output that says what several machines wrote there; no part of the checkpoint."""
MAX_FOLDERS_DEEP = 3
"""Sub-folders below the checkpoint that are copied, such as 1_Pooling of a sentence-transformers model."""

WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".safetensors")
"""Weight kinds that are never side files."""

WEIGHTS = "a weight file that is not read"
ADAPTER_FILES = frozenset({"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"})
ADAPTER = "an adapter, not part of the model"
"""Reasons that verify asks about: an engine may pick such a file up."""

MODULES = "modules.json"
MAX_MODULES_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class SideFile:
    """A regular file that is copied byte for byte; `path` is POSIX, relative to the folder."""

    path: str
    size: int


@dataclass(frozen=True, slots=True, order=True)
class LeftOut:
    """An entry that is not copied, and why."""

    path: str
    reason: str


def survey_side_files(
    root: Path, taken: frozenset[str], *, follow_links: bool
) -> tuple[tuple[SideFile, ...], tuple[LeftOut, ...]]:
    """All side files of a checkpoint and all entries left out, both sorted by path; `taken` are its other files.

    CheckpointError for a link that is dangling or leads out of the folder and the hub cache.
    """
    found: list[SideFile] = []
    left_out: list[LeftOut] = []
    with_adapter = is_with_adapter({name for name in ADAPTER_FILES if (root / name).exists()})
    modules = _module_folders(root)
    for path, entry in _walk(root, "", 0, left_out, follow_links=follow_links):
        if path in taken:
            continue
        reason = left_out_reason(path, modules, with_adapter=with_adapter) or _not_regular(path, entry)
        if reason:
            left_out.append(LeftOut(path, reason))
            continue
        _check_link(root, path, follow_links=follow_links)
        found.append(SideFile(path, entry.stat().st_size))
    return tuple(sorted(found)), tuple(sorted(left_out))


def _walk(
    root: Path, below: str, depth: int, left_out: list[LeftOut], *, follow_links: bool
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    try:
        entries = sorted(os.scandir(root / below), key=lambda entry: entry.name)
    except OSError as error:
        raise SystemFailure.from_os(error, below or str(root), "list") from None
    for entry in entries:
        path = f"{below}{entry.name}"
        reason = bad_name(entry.name)
        if reason:
            left_out.append(LeftOut(path, reason))
        elif not _is_folder(entry):
            yield path, entry
        elif entry.name.lower().endswith(WEIGHT_SUFFIXES):
            left_out.append(LeftOut(path, "a folder named like a weight file"))
        elif depth == MAX_FOLDERS_DEEP:
            left_out.append(LeftOut(path, f"deeper than {MAX_FOLDERS_DEEP} folders"))
        else:
            if entry.is_symlink():
                _check_link(root, path, follow_links=follow_links)
                if Path(os.path.realpath(root)).is_relative_to(os.path.realpath(root / path)):
                    left_out.append(LeftOut(path, "a link to the folder that it lies in"))
                    continue
            yield from _walk(root, f"{path}/", depth + 1, left_out, follow_links=follow_links)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def bad_name(name: str) -> str | None:
    """Why an entry is left out by its own name, or None."""
    if not name:
        return "its path has an empty part"
    if name.startswith("."):
        return "hidden"
    if any(map(invisible, name)):
        return "its name holds control, invisible or undecodable characters"
    return None


def left_out_reason(path: str, modules: frozenset[str], *, with_adapter: bool) -> str | None:
    """Why a file is no side file, by its name alone."""
    folder, _, name = path.rpartition("/")
    if name.endswith(".safetensors") and folder in modules:
        return None
    if with_adapter and path in ADAPTER_FILES:
        return ADAPTER
    if name.lower().endswith(WEIGHT_SUFFIXES):
        return WEIGHTS
    if name.endswith(".index.json"):
        return "an index of other files"
    if name in {MANIFEST, CHECKSUMS} and not folder:
        return "describes the source's files, made anew"
    return None


def _not_regular(path: str, entry: os.DirEntry[str]) -> str | None:
    try:
        mode = entry.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError("is a dangling link", file=path, remedy="download it again, or remove it") from None
    except OSError as error:
        if entry.is_symlink():
            raise CheckpointError(f"is a link that cannot be followed: {error.strerror}", file=path) from None
        raise SystemFailure.from_os(error, path, "look at") from None
    return None if stat.S_ISREG(mode) else "no regular file"


def _check_link(root: Path, path: str, *, follow_links: bool) -> None:
    """Side links may lead to the folder itself or to a hub cache's blobs; anything else could be any file of the machine."""
    target = Path(os.path.realpath(root / path))
    if follow_links or target.is_relative_to(os.path.realpath(root)):
        return
    if any(up.name == "blobs" and up.parent.name.startswith("models--") for up in target.parents):
        return
    raise CheckpointError(
        "is a link that leads out of the folder", file=path, remedy="copy the file there, or pass --follow-links"
    )


def is_with_adapter(names: Collection[str]) -> bool:
    """Whether the weights of an adapter are among some files."""
    return "adapter_model.safetensors" in names or "adapter_model.bin" in names


def _module_folders(root: Path) -> frozenset[str]:
    path = root / MODULES
    try:
        if not path.is_file() or path.stat().st_size > MAX_MODULES_BYTES:
            return frozenset()
        return module_folders(path.read_bytes())
    except OSError:
        return frozenset()


def module_folders(blob: bytes) -> frozenset[str]:
    """Folders that modules.json (sentence-transformers) names: their weights belong to the model."""
    try:
        modules = strict_json(blob, file=MODULES)
    except CheckpointError:
        return frozenset()
    if not isinstance(modules, list):
        return frozenset()
    paths = (module.get("path") for module in modules if isinstance(module, dict))
    return frozenset(posixpath.normpath(path) for path in paths if isinstance(path, str) and path)
