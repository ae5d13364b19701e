"""Where a source came from, as a manifest or a plan says it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusecheck.fields import checked

_OF_BUCKETS = frozenset({"url", "identities"})


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the source came from: a folder RELATIVE to OUT, a hub repository at a commit, or a bucket prefix."""

    folder: str | None = None
    repo_id: str | None = None
    revision: str | None = None
    commit: str | None = None
    url: str | None = None
    identities: Mapping[str, Mapping[str, str]] | None = None
    """File below `url` -> what told its content from any other: ETag and version."""


def provenance_fields(provenance: Provenance) -> dict[str, object]:
    """As JSON. A bucket's fields only where there is a bucket, so that what 0.1.0 wrote stays as it was."""
    return {
        key: value
        for key, value in ((name, getattr(provenance, name)) for name in Provenance.__slots__)
        if value is not None or key not in _OF_BUCKETS
    }


def read_provenance(value: dict[str, object]) -> Provenance:
    """The inverse. KeyError, TypeError or ValueError where it is malformed."""
    unknown = value.keys() - set(Provenance.__slots__)
    if unknown:
        raise ValueError(f"provenance {min(unknown)}")
    rows = value.get("identities")
    return Provenance(
        _text(value.get("folder")),
        _text(value.get("repo_id")),
        _text(value.get("revision")),
        _text(value.get("commit")),
        _text(value.get("url")),
        None if rows is None else {name: _texts(row) for name, row in checked(rows, dict).items()},
    )


def _text(value: object) -> str | None:
    return None if value is None else checked(value, str)


def _texts(row: object) -> dict[str, str]:
    return {key: checked(item, str) for key, item in checked(row, dict).items()}
