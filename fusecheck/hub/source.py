"""SRC as the user wrote it -> a folder, and where it came from."""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from fusecheck.errors import SystemFailure, UsageError
from fusecheck.hub.download import download
from fusecheck.hub.patterns import SPARED, UNREAD
from fusecheck.provenance import Provenance
from fusecheck.reader import Progress

_REPO_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_SNAPSHOT = re.compile(
    r"(?:.*/)?models--(?P<owner>(?:(?!--)[A-Za-z0-9._-])+)--(?P<name>(?:(?!--)[A-Za-z0-9._-])+)"
    r"/snapshots/(?P<commit>[0-9a-f]{40})",
    re.ASCII | re.DOTALL,
)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_NO_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|^[/-]|/$|//|@\{")
"""What git forbids in the name of a branch or tag."""


@dataclass(frozen=True, slots=True)
class Source:
    """A folder to read, and its provenance where that is more than the folder."""

    folder: Path
    repo_id: str | None = None
    revision: str | None = None
    """As asked for; None for the repository's default."""
    commit: str | None = None

    def provenance(self, out: Path) -> Provenance:
        """As the manifest records it: a hub commit, or the folder relative to OUT, never an absolute path."""
        if self.repo_id is not None:
            return Provenance(repo_id=self.repo_id, revision=self.revision, commit=self.commit)
        here = Path(os.path.realpath(out.parent)) / out.name
        folder = os.path.relpath(os.path.realpath(self.folder), here)
        try:
            folder.encode()
        except UnicodeEncodeError:  # JSON cannot hold it; verify then needs --source
            return Provenance()
        return Provenance(folder=folder)


def resolve(source: str, *, revision: str | None = None, on_progress: Progress | None = None) -> Source:
    """An existing folder wins; else `owner/name` is a hub id, and its snapshot is downloaded or taken from the cache.

    UsageError where there is neither, or for a repository or revision that the hub refuses; SystemFailure where network,
    cache or disk fail; CheckpointError where offline mode leaves a snapshot with files missing.
    """
    if not source:
        raise UsageError("SRC is empty", remedy="name a folder, or `.` for this one")
    if _is_folder(source):
        if revision is not None:
            raise UsageError("--revision is for a hub id, and SRC is a folder", file=source, remedy="drop --revision")
        return _folder(source)
    if not _REPO_ID.fullmatch(source):
        raise UsageError(
            "SRC does not exist", file=source, remedy="name a folder, or a repository of the hub in the form owner/name"
        )
    if revision is not None and (not revision or _NO_REF.search(revision)):
        raise UsageError("--revision is no branch, tag or commit", found=repr(revision))
    folder = download(source, revision, on_progress)
    return Source(folder, source, revision, folder.name if _COMMIT.fullmatch(folder.name) else None)


def cached(provenance: Provenance) -> Path | None:
    """The snapshot that a manifest names, if the local hub cache holds it complete. Never touches the network."""
    repo_id, commit = provenance.repo_id, provenance.commit
    if repo_id is None or commit is None or not _REPO_ID.fullmatch(repo_id) or not _COMMIT.fullmatch(commit):
        return None
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - a folder must not pay for it

        ignored = [*UNREAD, *SPARED]
        return Path(snapshot_download(repo_id, revision=commit, local_files_only=True, ignore_patterns=ignored))
    except (OSError, ValueError, ImportError):
        return None


def _is_folder(source: str) -> bool:
    """False where nothing is there; UsageError where something else is."""
    try:
        mode = Path(source).stat().st_mode
    except ValueError:
        raise UsageError("SRC is no path", found=repr(source)) from None
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENAMETOOLONG} or (
            error.errno == errno.ENOENT and Path(source).is_symlink()
        ):
            raise UsageError(f"SRC cannot be followed: {error.strerror}", file=source) from None
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return False
        raise SystemFailure.from_os(error, source, "look at") from None
    if not stat.S_ISDIR(mode):
        raise UsageError("SRC is no folder", file=source, remedy="name the folder that holds config.json")
    return True


def _folder(source: str) -> Source:
    """A snapshot of a hub cache says by its path what it is, so the manifest is the same as that of the hub id."""
    match = _SNAPSHOT.fullmatch(os.path.realpath(source))
    if match is None:
        return Source(Path(source))
    return Source(Path(source), repo_id=f"{match['owner']}/{match['name']}", commit=match["commit"])
