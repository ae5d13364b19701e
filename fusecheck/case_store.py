"""Checkpoints in stores, as verify opens them: the same steps as for a folder."""

from __future__ import annotations

from fusecheck.checkpoint import Checkpoint, open_stored
from fusecheck.errors import CheckpointError
from fusecheck.manifest import MAX_BYTES, Manifest, from_text
from fusecheck.sidefiles import MANIFEST
from fusecheck.stored import StoredFiles
from fusecheck.stores import open_source


def open_url(url: str) -> Checkpoint:
    """What lies at a URL, by its headers. UsageError where that is nothing, CheckpointError where it is malformed."""
    return open_stored(open_source(url), url, ranked=True)


def files_at(url: str) -> StoredFiles:
    """The bare files at a URL, whatever they are."""
    return StoredFiles(open_source(url), url)


def manifest_at(files: StoredFiles) -> tuple[bool, Manifest | None, CheckpointError | None]:
    """(whether there is one, the manifest, what is wrong with it)."""
    if MANIFEST not in files.names():
        return False, None, None
    try:
        return True, from_text(files.read(MANIFEST, MAX_BYTES)), None
    except CheckpointError as error:
        return True, None, error
