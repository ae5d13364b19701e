"""An address -> what reads it or writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from fusecheck.errors import UsageError
from fusecheck.reader import Publisher, Source, StoredFile
from fusecheck.stores.address import is_remote, parse

__all__ = ["Target", "is_remote", "open_publisher", "open_source"]


class Target(Publisher, Protocol):
    """A publisher as `open_publisher` gives it: it can also say what is there. Files below `.fusecheck/` are ours."""

    def check(self) -> None:
        """Try that the target can be written, and that a commit cannot overwrite another one; SystemFailure if not."""

    def list(self) -> Mapping[str, StoredFile]:
        """Every file there now, by its POSIX path below the target, but for what a put has not finished."""

    def read(self, name: str) -> bytes:
        """All bytes of a small file; SystemFailure where it is missing."""

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens where there is none."""

    def close(self) -> None:
        """Give back connections and threads."""


def open_source(url: str, *, frozen: Mapping[str, StoredFile] | None = None) -> Source:
    """The files at `hf://owner/name[@revision]`, `s3://bucket/prefix`, `gs://`, `az://` or in a folder, frozen now.

    With `frozen`, what a plan recorded: exactly these files, at these identities. SystemFailure where one of them is no
    longer that, at once or when it is read; UsageError where there is nothing, or nothing that we may see.
    """
    address = parse(url)
    if address.kind == "hf":
        from fusecheck.stores.hub_source import HubSource  # noqa: PLC0415 - a folder must not pay for it

        return HubSource(address, frozen=frozen)
    if address.kind == "folder":
        from fusecheck.stores.folder import FolderSource  # noqa: PLC0415 - as below

        return FolderSource(Path(address.root), frozen=frozen)
    from fusecheck.stores.bucket_source import BucketSource  # noqa: PLC0415 - obstore

    return BucketSource(address, frozen=frozen)


def open_publisher(url: str, *, allow_unconditional: bool = False, plan_digest: str = "") -> Target:
    """What writes to a bucket prefix, or into a folder of a shared volume.

    `plan_digest` marks temporaries, so that runs of one plan may clear what dead ones of the same plan left.
    `allow_unconditional`: commit to a store that cannot refuse to overwrite, after a look at what stands there.
    """
    address = parse(url)
    if address.kind == "hf":
        raise UsageError("the hub cannot be written to", file=url, wanted="s3://, gs://, az:// or a folder")
    if address.kind == "folder":
        from fusecheck.stores.folder_publisher import FolderPublisher  # noqa: PLC0415 - as above

        return FolderPublisher(Path(address.root), plan_digest=plan_digest, allow_unconditional=allow_unconditional)
    from fusecheck.stores.bucket_publisher import BucketPublisher  # noqa: PLC0415 - obstore

    return BucketPublisher(address, allow_unconditional=allow_unconditional)
