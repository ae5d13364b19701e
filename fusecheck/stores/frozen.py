"""The files of a source at one moment, and the words for what is not as it was then."""

from __future__ import annotations

from collections.abc import Mapping

from fusecheck.errors import FusecheckError, SystemFailure
from fusecheck.reader import StoredFile


def changed(file: str) -> SystemFailure:
    """A file is not what it was when the source was opened, or planned."""
    return SystemFailure(
        "changed while it was read", file=file, remedy="plan and run again once nothing writes to the source"
    )


def agreed(now: Mapping[str, StoredFile], frozen: Mapping[str, StoredFile] | None) -> Mapping[str, StoredFile]:
    """What is there now, or the files that a plan froze once each of them is seen to be the same. SystemFailure."""
    if frozen is None:
        return now
    for name, file in frozen.items():
        if now.get(name) != file:
            what = "changed since it was planned" if name in now else "is gone since it was planned"
            raise SystemFailure(what, file=name, remedy="plan again, and run the new plan")
    return dict(frozen)


def stored(files: Mapping[str, StoredFile], file: str, offset: int, size: int) -> StoredFile:
    """The file, which must hold the bytes asked for; a reader that asks for others is a bug."""
    found = files.get(file)
    if found is None:
        raise FusecheckError("is no file of this source", file=file)
    if offset < 0 or offset + size > found.size:
        raise FusecheckError(
            "is read beyond its end", file=file, found=f"[{offset}, {offset + size})", wanted=f"<= {found.size}"
        )
    return found
