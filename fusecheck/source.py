"""The source of a fused checkpoint: where its manifest says that it is, and whether that is still the same one."""

from __future__ import annotations

import os
from pathlib import Path

from fusecheck.checkpoint import Checkpoint
from fusecheck.errors import shown
from fusecheck.hub import cached
from fusecheck.manifest import Manifest


def recorded_folder(out: Path | None, manifest: Manifest) -> Path | None:
    """The folder that the manifest of `out` records, or the cached repo; None where there is none, or only OUT itself.

    `out` None: it is no folder, and a path as seen from it says nothing.
    """
    recorded = manifest.provenance.folder
    beside = out / recorded if out is not None and recorded is not None else None
    folder = cached(manifest.provenance) if recorded is None else beside
    if folder is None or not os.path.isdir(folder):  # noqa: PTH112 - the path is foreign; Path.is_dir may raise
        return None
    return None if out is not None and os.path.realpath(folder) == os.path.realpath(out) else folder


def is_recorded(source: Checkpoint, manifest: Manifest) -> bool:
    """Whether every header is the recorded one; needs the blake3 package."""
    found = {shard.name: shard.header_digest for shard in source.shards}
    return found == {name: shard.header_digest for name, shard in manifest.source_shards.items()}


def source_in_words(manifest: Manifest) -> str:
    """What the manifest calls it, for people."""
    named = manifest.provenance
    where = named.folder or named.repo_id or named.url
    return f"the source {shown(where)}" if where is not None else "the source, whose path is no Unicode text,"
