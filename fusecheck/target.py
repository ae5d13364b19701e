"""Where OUT may be: judged before anything is written, for a dry run too."""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fusecheck.errors import SystemFailure, UsageError
from fusecheck.units import size_text

OWN_MACHINE = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""File systems that one machine has to itself. On others (NFS, FUSE, 9p) flock may not reach the other machines."""


class TargetOccupied(UsageError):
    """OUT is a folder with something in it and --force was not given. It may be this very result: the caller looks."""


@dataclass(frozen=True, slots=True)
class Target:
    """An OUT that may be written, as `check_target` found it."""

    path: Path
    """Absolute; its parent holds no link and no `..`."""
    shown: str
    """OUT as the user spelled it, for messages."""
    replaces: bool
    """Something stands there, and --force allows to exchange it."""
    missing: tuple[Path, ...]
    """The parents that have to be made, outermost first."""


class Place(NamedTuple):
    """Where a path really lies: bind mounts show one folder under several paths."""

    device: str
    inner: Path
    mount: Path
    kind: str


def check_target(out: Path, source: Path | None, *, force: bool) -> Target:
    """Judge OUT without creating anything; `source` is None while it is not known yet (a hub id before its download).

    UsageError: OUT can never be written like this. TargetOccupied: not without `force`. SystemFailure: not now, or not
    by this user.
    """
    shown = str(out)
    if any(0xD800 <= ord(character) < 0xE000 for character in shown):  # how Python spells a byte that is no UTF-8
        problem = "OUT's path is not UTF-8, and safetensors, which engines read with, opens no such path"
        raise UsageError(problem, file=shown, remedy="choose another name")
    try:
        path = _resolve(out)
        missing = _missing_parents(path, shown)
        occupied = _occupied(path, shown)
        if source is not None:
            _refuse_overlap(path, source, shown)
        if occupied and not force:
            raise TargetOccupied("the folder is not empty", file=shown, remedy="--force to replace it")
        _require_writable(path, missing, shown, occupied=occupied)
    except OSError as error:
        raise failure(error, shown, "write there") from error
    except ValueError as error:
        raise UsageError("no file can have this name", file=shown) from error
    return Target(path, shown, occupied, missing)


def free_space(path: Path) -> int | None:
    """Bytes that we may still write where `path` lies or will lie; None when the file system cannot tell."""
    for place in (path, *path.parents):
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return found.f_bavail * found.f_frsize if found.f_blocks else None
    return None


def require_space(path: Path, needed: int, shown: str) -> None:
    """Fail before the first byte is written. Call it within `staging_folder`, which frees what dead runs occupy."""
    found = free_space(path)
    if found is not None and found < needed:
        raise SystemFailure(
            "not enough free space",
            file=shown,
            found=size_text(found),
            wanted=size_text(needed),
            remedy="free some, or choose another disk",
        )


def _resolve(out: Path) -> Path:
    if not out.parts:
        raise UsageError("OUT is empty or the current folder", remedy="name a folder that fusecheck may create")
    for parent in out.parents:
        if parent.is_symlink() and not parent.exists():
            raise UsageError(f"its parent {parent} is a link to nowhere", file=str(out))
    if out.name in {"", ".."}:
        return Path(os.path.realpath(out))
    return Path(os.path.realpath(out.parent)) / out.name


def _missing_parents(path: Path, shown: str) -> tuple[Path, ...]:
    missing: list[Path] = []
    for parent in path.parents:
        try:
            mode = parent.stat().st_mode
        except FileNotFoundError:
            missing.insert(0, parent)
            continue
        if not stat.S_ISDIR(mode):
            raise UsageError(f"its parent {parent} is not a folder", file=shown)
        limit = os.pathconf(parent, "PC_NAME_MAX")
        long = [part for part in (*missing, path) if len(os.fsencode(part.name)) > limit > 0]
        if long:
            raise UsageError(f"the name is too long for this file system (at most {limit} bytes)", file=shown)
        break
    return tuple(missing)


def _occupied(path: Path, shown: str) -> bool:
    """Whether something stands in OUT. Refuses what no --force may replace."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(mode):
        raise UsageError("OUT is a symbolic link", file=shown, remedy="name the folder itself")
    if not stat.S_ISDIR(mode):
        raise UsageError("OUT exists and is not a folder", file=shown, remedy="name a folder that is not there yet")
    place = place_of(path)
    if os.path.ismount(path) or (place and place.mount == path):
        remedy = f"use a folder below it, such as {path / 'model'}"
        raise UsageError("OUT is a mount point, which cannot be renamed onto", file=shown, remedy=remedy)
    with suppress(FileNotFoundError):  # the current folder may be gone
        if _identity(path) in _chain(Path.cwd()):
            raise UsageError("OUT holds the current folder, which would be replaced", file=shown)
    with os.scandir(path) as entries:
        return next(entries, None) is not None


def _refuse_overlap(path: Path, source: Path, shown: str) -> None:
    real = Path(os.path.realpath(source))
    if not real.is_dir():
        return  # not for us to judge
    if _within(path, real):
        raise UsageError("OUT is SRC, or lies inside it", file=shown, remedy="name a folder outside SRC")
    held = {real}
    with suppress(PermissionError), os.scandir(real) as entries:
        held |= {Path(os.path.realpath(entry.path)).parent for entry in entries if entry.is_symlink()}
    if any(_within(each, path) for each in held):
        raise UsageError("SRC, or what it links to, lies inside OUT", file=shown, remedy="name a folder outside SRC")


def _within(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or lies below it, through whatever links, bind mounts and letter cases."""
    if _identity(folder) in _chain(path):
        return True
    one, other = place_of(path), place_of(folder)
    if not one or not other or one.kind not in OWN_MACHINE:  # NFS calls the root of every mount "/"
        return False
    return one.device == other.device and one.inner.is_relative_to(other.inner)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _chain(path: Path) -> set[tuple[int, int]]:
    """The identities of a path and of everything above it, as far as they exist."""
    return {found for each in (path, *path.parents) if (found := _identity(each))}


def place_of(path: Path) -> Place | None:
    """Read from the kernel's table of mounts; `os.path.ismount` does not see a bind mount within one file system."""
    best: Place | None = None
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return None
    for line in table.splitlines():
        fields = [os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), f)) for f in line.split(b" ")]
        mount = Path(fields[4])
        if path.is_relative_to(mount) and (best is None or len(mount.parts) >= len(best.mount.parts)):
            inner = Path(fields[3]) / path.relative_to(mount)
            best = Place(fields[2], inner, mount, fields[fields.index("-") + 1])
    return best


def _require_writable(path: Path, missing: tuple[Path, ...], shown: str, *, occupied: bool) -> None:
    parent = missing[0].parent if missing else path.parent
    for folder in (parent, path) if occupied else (parent,):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
            why = "is on a read-only file system" if read_only else "may not be written by this user"
            raise SystemFailure(f"the folder {folder} {why}", file=shown)
    sticky = path.exists() and parent.stat().st_mode & stat.S_ISVTX
    if sticky and os.geteuid() not in {0, parent.stat().st_uid, path.stat().st_uid}:
        raise SystemFailure(f"it belongs to another user, and {parent} lets only owners rename", file=shown)


def failure(error: OSError, file: str, doing: str) -> UsageError | SystemFailure:
    """The error with file and cause, which `OSError` itself forgets for write and fsync."""
    cause = error.strerror or str(error)
    if error.errno in {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP}:
        return UsageError(f"cannot {doing}: {cause}", file=file)
    remedies = {
        errno.EBUSY: "use a folder below it",
        errno.EXDEV: "write to a new folder",  # overlayfs cannot exchange a folder of a lower layer
        errno.ENOSPC: "free some space there",
        errno.EDQUOT: "free some of your quota there",
        errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    }
    return SystemFailure(f"cannot {doing}: {cause}", file=file, remedy=remedies.get(error.errno or 0))
