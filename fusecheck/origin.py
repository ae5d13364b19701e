"""SRC, in a folder or in a store -> the checkpoint, what tells its files from others, and its provenance."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fusecheck.checkpoint import Checkpoint, open_checkpoint, open_stored
from fusecheck.config import CONFIG
from fusecheck.errors import SystemFailure, UsageError
from fusecheck.header import MAX_HEADER_BYTES
from fusecheck.hub import Source as LocalSource
from fusecheck.hub import resolve
from fusecheck.manifest import read_manifest
from fusecheck.provenance import Provenance
from fusecheck.reader import Progress, Source, StoredFile
from fusecheck.shards import INDEX
from fusecheck.stored import StoredFiles
from fusecheck.stores import is_remote, open_source
from fusecheck.stores.address import parse
from fusecheck.stores.folder import stored_file

HUB = "hf://"


@dataclass(frozen=True, slots=True)
class Reading:
    """How a source is read: what decides whether it is refused, beside the source itself."""

    follow_links: bool = False
    max_header_bytes: int = MAX_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to a store, those that were repeated, bytes that came."""

    requests: int
    retries: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class Origin:
    """An opened source. `files` are those that are read, by their identities."""

    place: str
    checkpoint: Checkpoint
    files: Mapping[str, StoredFile]
    folder: LocalSource | None
    """Where it lies on this machine; None where it is in a store."""

    @property
    def name(self) -> str:
        """What it is, wherever its snapshot lies on this machine."""
        folder = self.folder
        return self.place if folder is None or folder.commit is None else f"{folder.repo_id}@{folder.commit}"

    @property
    def source(self) -> Source | None:
        """The store's reader, which knows requests and retries."""
        files = self.checkpoint.files
        return files.source if isinstance(files, StoredFiles) else None

    @property
    def traffic(self) -> Traffic:
        """What was asked of the source's store so far; nothing for a folder."""
        counts = (getattr(self.source, name, 0) for name in ("requests", "retries", "bytes_read"))
        return Traffic(*map(int, counts))

    def provenance(self, out: str) -> Provenance:
        """As the manifest records it: repository and commit, URL and identities, or the folder as seen from a folder OUT."""
        if self.folder is not None:
            if is_remote(out):  # a path of this machine says nothing there
                return Provenance(repo_id=self.folder.repo_id, revision=self.folder.revision, commit=self.folder.commit)
            return self.folder.provenance(Path(out))
        address = parse(self.place)
        if address.kind == "hf":
            commit = self.files[CONFIG].identity.get("commit")
            return Provenance(repo_id=address.root, revision=address.revision, commit=commit)
        identities = {name: dict(file.identity) for name, file in self.files.items()}
        return Provenance(url=str(address), identities=identities)

    def is_of(self, out: Path) -> bool:
        """Whether the manifest of a folder names this very source; a local folder is looked at in other ways."""
        if self.folder is not None:
            return True
        manifest = read_manifest(out)
        mine = self.provenance(str(out))
        return manifest is not None and replace(manifest.provenance, revision=None) == replace(mine, revision=None)


def open_origin(
    place: str,
    *,
    reading: Reading,
    frozen: Mapping[str, StoredFile] | None = None,
    revision: str | None = None,
    on_download: Progress | None = None,
) -> Origin:
    """Open SRC: a folder, a hub id (its snapshot), or a URL. `frozen`: exactly these files, or SystemFailure."""
    if not is_remote(place):
        found = resolve(place, revision=revision, on_progress=on_download)
        checkpoint = open_checkpoint(
            found.folder, follow_links=reading.follow_links, max_header_bytes=reading.max_header_bytes
        )
        return _origin(place, checkpoint, found, frozen)
    if revision is not None:
        raise UsageError("--revision is for a hub id", file=place, remedy=f"write {HUB}owner/name@{revision}")
    source = open_source(place, frozen=frozen)
    checkpoint = open_stored(source, place, max_header_bytes=reading.max_header_bytes)
    try:
        _ = checkpoint.config
    except BaseException:
        checkpoint.files.close()
        raise
    return _origin(place, checkpoint, None, frozen)


def _origin(
    place: str, checkpoint: Checkpoint, folder: LocalSource | None, frozen: Mapping[str, StoredFile] | None
) -> Origin:
    try:
        names = files_read(checkpoint)
        found = {name: _identity(checkpoint, name, folder) for name in names}
        if frozen is not None:
            _check_same(found, frozen)
    except BaseException:
        checkpoint.files.close()
        raise
    return Origin(place, checkpoint, found, folder)


def files_read(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Every file that a run reads, sorted."""
    index = [INDEX] if checkpoint.index_metadata is not None else []
    names = [*(shard.name for shard in checkpoint.shards), CONFIG, *index]
    return tuple(sorted([*names, *(side.path for side in checkpoint.side_files)]))


def _identity(checkpoint: Checkpoint, name: str, folder: LocalSource | None) -> StoredFile:
    """A snapshot of the hub is told by its commit: another download of it has other times."""
    if isinstance(checkpoint.files, StoredFiles):
        return checkpoint.files.add(name)
    with suppress(OSError):
        found = stored_file((checkpoint.folder / name).stat())
        return found if folder is None or folder.commit is None else replace(found, identity={"commit": folder.commit})
    raise SystemFailure("vanished while it was looked at", file=name)


def _check_same(found: Mapping[str, StoredFile], frozen: Mapping[str, StoredFile]) -> None:
    """SystemFailure where the source is no longer the one that was planned."""
    for name in sorted(found.keys() | frozen.keys()):
        if found.get(name) != frozen.get(name):
            what = "changed" if name in found and name in frozen else "is new" if name in found else "is gone"
            raise SystemFailure(f"{what} since it was planned", file=name, remedy="plan again, and run the new plan")
