"""plan.json: what several machines are to write together, as a value <-> text. The same source gives the same bytes.

It holds no time stamp, no credential and no path but those that the user gave. Each run decides anew what to write, and
writes only where that is what stands here: the plan is a promise to be checked, not a list of orders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_args

from fusecheck.digest import digest_of
from fusecheck.errors import CheckpointError, UsageError
from fusecheck.fields import checked
from fusecheck.job import Options
from fusecheck.json_text import strict_json
from fusecheck.mapping import Experts
from fusecheck.origin import Reading
from fusecheck.provenance import Provenance, provenance_fields, read_provenance
from fusecheck.reader import StoredFile
from fusecheck.target import failure

PLAN_SCHEMA = 1
MAX_PLAN_BYTES = 256 << 20
_MEMBERS = 6_000_000


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One file of OUT: bytes, and the BLAKE3 of its head: the header of a weight file, all of an index or config."""

    name: str
    size: int
    header_digest: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """What it takes: bytes read and written, requests to read and to write, bytes of memory of each run at its peak.

    Of a folder all files are counted: what is read again for another rank comes out of the page cache.
    """

    bytes_read: int
    bytes_written: int
    requests: int
    memory: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole of plan.json but its digest. `objects` are the parts' work, `beside` is what finalize writes."""

    fusecheck_version: str
    source: str
    out: str
    options: Options
    reading: Reading
    provenance: Provenance
    files: Mapping[str, StoredFile]
    objects: tuple[PlannedObject, ...]
    beside: tuple[PlannedObject, ...]
    estimate: Estimate

    @property
    def digest(self) -> str:
        """BLAKE3 of all that the plan says."""
        return digest_of(_canonical(_fields(self)))


def to_text(plan: Plan) -> bytes:
    """The plan as JSON: sorted keys, one space of indent, final newline."""
    value = {"schema_version": PLAN_SCHEMA, "verdict": "planned", "digest": plan.digest, **_fields(plan)}
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def from_text(blob: bytes, file: str) -> Plan:
    """Read a plan back. UsageError where it is none, or was edited."""
    if len(blob) > MAX_PLAN_BYTES:
        raise UsageError("is too large for a plan", file=file, found=f"{len(blob)} bytes")
    remedy = "make it with `fusecheck plan SRC OUT > plan.json`"
    try:
        value = strict_json(blob, file=file, members=_MEMBERS)
    except CheckpointError as error:  # a plan is named on the command line: what is wrong with it is wrong there
        raise UsageError(f"is no plan: {error.problem}", file=file, remedy=remedy) from None
    if not isinstance(value, dict) or value.get("schema_version") != PLAN_SCHEMA or value.get("verdict") != "planned":
        raise UsageError("is no plan of a known schema", file=file, remedy=remedy)
    try:
        plan = _plan(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"is no plan: {type(error).__name__} {error}", file=file, remedy=remedy) from None
    if value.get("digest") != plan.digest:
        raise UsageError("was edited: its digest is not that of what it says", file=file, remedy=remedy)
    return plan


def read_plan(path: Path) -> Plan:
    """The plan in a file. UsageError where there is none, SystemFailure where it cannot be read."""
    try:
        with path.open("rb") as file:
            blob = file.read(MAX_PLAN_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError, ValueError):
        raise UsageError("there is no such plan", file=str(path)) from None
    except OSError as error:
        raise failure(error, str(path), "read") from None
    return from_text(blob, str(path))


def _canonical(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _fields(plan: Plan) -> dict[str, object]:
    return {
        "fusecheck_version": plan.fusecheck_version,
        "source": plan.source,
        "out": plan.out,
        "options": asdict(plan.options),
        "reading": asdict(plan.reading),
        "provenance": provenance_fields(plan.provenance),
        "files": {name: {"size": file.size, "identity": dict(file.identity)} for name, file in plan.files.items()},
        "objects": [asdict(item) for item in plan.objects],
        "beside": [asdict(item) for item in plan.beside],
        "estimate": asdict(plan.estimate),
    }


def _plan(value: Mapping[str, object]) -> Plan:
    def table(key: str) -> dict[str, object]:
        return checked(value[key], dict)

    reading = table("reading")
    return Plan(
        fusecheck_version=checked(value["fusecheck_version"], str),
        source=checked(value["source"], str),
        out=checked(value["out"], str),
        options=_options(table("options")),
        reading=Reading(checked(reading["follow_links"], bool), checked(reading["max_header_bytes"], int)),
        provenance=read_provenance(table("provenance")),
        files={name: _file(checked(row, dict)) for name, row in table("files").items()},
        objects=_objects(checked(value["objects"], list)),
        beside=_objects(checked(value["beside"], list)),
        estimate=Estimate(**{key: checked(item, int) for key, item in table("estimate").items()}),
    )


def _options(table: Mapping[str, object]) -> Options:
    """Whatever options there are, each of a plain type."""
    if table.keys() != {field.name for field in fields(Options)} or table["experts"] not in get_args(Experts):
        raise ValueError("options")
    if any(isinstance(value, dict | list) for value in table.values()):
        raise TypeError("options")
    return Options(**table)  # type: ignore[arg-type]


def _file(row: Mapping[str, object]) -> StoredFile:
    identity = checked(row["identity"], dict)
    return StoredFile(checked(row["size"], int), {key: checked(item, str) for key, item in identity.items()})


def _objects(rows: Sequence[object]) -> tuple[PlannedObject, ...]:
    found = (checked(row, dict) for row in rows)
    return tuple(
        PlannedObject(checked(r["name"], str), checked(r["size"], int), checked(r["header_digest"], str)) for r in found
    )
