"""SRC as the user wrote it -> a folder and where it came from. The only file that knows huggingface_hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from fusecheck.errors import UsageError
from fusecheck.manifest import Provenance

_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


@dataclass(frozen=True, slots=True)
class Source:
    """A folder to read, and its provenance where that is more than the folder."""

    folder: Path
    repo_id: str | None = None
    revision: str | None = None
    commit: str | None = None

    def provenance(self, out: Path) -> Provenance:
        """As the manifest records it: a hub commit, or the folder relative to OUT, never an absolute path."""
        if self.repo_id is not None:
            return Provenance(repo_id=self.repo_id, revision=self.revision, commit=self.commit)
        here = Path(os.path.realpath(out.parent)) / out.name
        return Provenance(folder=os.path.relpath(os.path.realpath(self.folder), here))


def resolve(source: str) -> Source:
    """An existing folder wins. UsageError where there is none."""
    if not source:
        raise UsageError("SRC is empty", remedy="name a folder, or `.` for this one")
    folder = Path(source)
    if folder.is_dir():
        return Source(folder)
    if folder.exists():
        raise UsageError("SRC is no folder", file=source, remedy="name the folder that holds config.json")
    raise UsageError("SRC does not exist", file=source)
