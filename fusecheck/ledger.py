"""`.fusecheck/` below an OUT that several machines fill: whose it is, and what stands there already.

`.fusecheck/plan.json` says by its plan's digest whose OUT this is. `.fusecheck/NNN-....json` is written after object NNN
of the plan and says what was written: it holds for exactly the object that has the identity (ETag, version; in a folder
the time of the last write) by which it is named, so that two runs of one part never take each other's word away. All of
it stays after the commit, where it says whether OUT is still what was committed; whoever reads a checkpoint ignores it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fusecheck.daemons import Daemons, result_of
from fusecheck.digest import digest_of
from fusecheck.errors import CheckpointError, UsageError
from fusecheck.execute import Written
from fusecheck.json_text import strict_json
from fusecheck.planned import Plan, PlannedObject
from fusecheck.reader import StoredFile
from fusecheck.sidefiles import CHECKSUMS, MANIFEST, OWN
from fusecheck.stores import Target

_OURS = f"{OWN}/"
MARK = f"{_OURS}plan.json"
RECORD_SCHEMA = 1

_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Record:
    """What one run wrote under the name of an object, as `part` (i, N) of a plan."""

    plan: str
    name: str
    stored: StoredFile
    written: Written
    sha256: str | None
    part: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Standing:
    """What is at OUT: is it ours already, is it committed, and the records that are there, by object."""

    begun: bool
    committed: bool
    names: tuple[str, ...]


def judge(target: Target, plan: Plan) -> Standing:
    """Look at OUT. UsageError where anything is there that this plan did not put there."""
    found = target.list()
    if MARK not in found and target.have(MARK) is not None:  # a listing of many pages is not of one moment
        found = target.list()
    foreign = [name for name in found if not name.startswith(_OURS)]
    if MARK not in found:
        if foreign:
            raise UsageError("OUT is not empty", file=plan.out, found=foreign[0], remedy="choose a fresh one")
        return Standing(begun=False, committed=False, names=tuple(found))
    check_mark(target, plan)
    planned = {item.name for item in (*plan.objects, *plan.beside)} | {MANIFEST, CHECKSUMS}
    other = next((name for name in foreign if name not in planned), None)
    if other is not None:
        raise UsageError("OUT holds what this plan does not put there", file=plan.out, found=other)
    return Standing(begun=True, committed=is_committed(target), names=tuple(found))


def is_committed(target: Target) -> bool:
    """Whether a manifest stands there; asked by name, since a listing is older and holds no folders."""
    return target.have(MANIFEST) is not None


def begin(target: Target, plan: Plan, standing: Standing) -> None:
    """Make OUT ours. SystemFailure where it cannot be written, UsageError where another plan was faster."""
    if not standing.begun:
        target.check()
        _put(target, MARK, {"schema_version": RECORD_SCHEMA, "plan": plan.digest})
        check_mark(target, plan)


def check_mark(target: Target, plan: Plan) -> None:
    """UsageError unless OUT is this plan's."""
    try:
        value = strict_json(target.read(MARK), file=MARK)
    except CheckpointError:
        value = None
    if not isinstance(value, dict) or value.get("plan") != plan.digest:
        raise UsageError(
            "OUT holds the work of another plan", file=plan.out, remedy="choose a fresh OUT, or run that other plan"
        )


def add_record(target: Target, number: int, record: Record) -> None:
    """Write down an object that stands."""
    value: dict[str, object] = {
        "schema_version": RECORD_SCHEMA,
        "plan": record.plan,
        "name": record.name,
        "size": record.stored.size,
        "identity": dict(record.stored.identity),
        "head": record.written.head,
        "strips": [list(strip) for strip in record.written.strips],
        "sha256": record.sha256,
        "part": list(record.part),
    }
    _put(target, f"{_stem(number)}-{_mark_of(record.stored)}.json", {**value, "digest": _digest(value)})


def find_records(
    target: Target, plan: Plan, numbers: Sequence[int], names: Sequence[str]
) -> tuple[dict[int, Record], list[Record]]:
    """Object -> the record of what stands there, for those objects that have one; and all other records of them."""
    by_stem: dict[str, list[str]] = {}
    for name in names:
        by_stem.setdefault(name.rpartition("-")[0], []).append(name)
    threads = Daemons(_AT_ONCE, "fusecheck-record")
    try:
        finds = (partial(_find, target, plan, plan.objects[n], by_stem.get(_stem(n), ())) for n in numbers)
        found = [result_of(coming) for coming in [threads.submit(find) for find in finds]]
    finally:
        threads.close()
    good = {number: record for number, (record, _) in zip(numbers, found, strict=True) if record is not None}
    return good, [record for _, others in found for record in others]


def _find(target: Target, plan: Plan, item: PlannedObject, names: Sequence[str]) -> tuple[Record | None, list[Record]]:
    records = [record for name in names if (record := _read(target, name)) is not None]
    mine = [record for record in records if (record.plan, record.name) == (plan.digest, item.name)]
    here = target.have(item.name) if mine else None
    fits = here is not None and here.size == item.size
    good = next((record for record in mine if fits and record.stored == here), None)
    if good is not None and good.written.head != item.header_digest:
        good = None
    return good, [record for record in mine if record is not good]


def _stem(number: int) -> str:
    return f"{_OURS}{number:05d}"


def _digest(value: Mapping[str, object]) -> str:
    """A record's digests go into the manifest unseen, so that a bit of them that fell over must not look like one."""
    return digest_of(json.dumps(value, sort_keys=True).encode())


def _mark_of(stored: StoredFile) -> str:
    return digest_of(json.dumps([stored.size, sorted(stored.identity.items())]).encode())[:16]


def _put(target: Target, name: str, value: Mapping[str, object]) -> None:
    data = (json.dumps(value, sort_keys=True) + "\n").encode()
    target.put(name, iter([memoryview(data)]), len(data))


def _read(target: Target, name: str) -> Record | None:
    """None for what is no record, whatever it is: the object is then written again."""
    try:
        value = strict_json(target.read(name), file=name, members=6_000_000)
        if not isinstance(value, dict) or value.pop("digest") != _digest(value):
            return None
        if value["schema_version"] != RECORD_SCHEMA:
            return None
        part, total = value["part"]
        return Record(
            plan=str(value["plan"]),
            name=str(value["name"]),
            stored=StoredFile(int(value["size"]), dict(value["identity"])),
            written=Written(str(value["head"]), tuple(tuple(strip) for strip in value["strips"])),
            sha256=value["sha256"],
            part=(int(part), int(total)),
        )
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None
