"""The end of a plan: every object checked, what lies beside them written, and the one commit."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fusecheck.errors import SystemFailure
from fusecheck.job import compare_heads, manifest_of
from fusecheck.lanes import OnBytes, Sent, send
from fusecheck.ledger import Record, Standing, find_records, judge
from fusecheck.manifest import to_text
from fusecheck.parts import Committed, counter, place_of, run_objects, shares_of
from fusecheck.plan import PlannedFile
from fusecheck.planned import Plan
from fusecheck.reader import Progress, Publisher, Reader
from fusecheck.record import checksum_line
from fusecheck.shards import INDEX
from fusecheck.sidefiles import CHECKSUMS, MANIFEST
from fusecheck.stores import Target
from fusecheck.work import Work, reader_of


@dataclass(frozen=True, slots=True)
class Finished:
    """How a finalize ended. `already`: the same plan had been committed."""

    already: bool
    warnings: tuple[str, ...]


def finish(work: Work, target: Target, on_progress: Progress | None) -> Finished:
    """Check every object and record, write what lies beside, commit. SystemFailure names what is missing.

    Where it is committed already, the same is done to see that all of it stands.
    """
    standing = judge(target, work.plan)
    if standing.committed:
        run_objects(work, target, (0, 1), None)
        standing = judge(target, work.plan)
    records = _all_records(work.plan, target, standing)
    try:
        return _commit(work, place_of(work, target, standing), records, on_progress)
    except Committed:
        return finish(work, target, on_progress)


def _commit(work: Work, place: Publisher, records: Sequence[Record], on_progress: Progress | None) -> Finished:
    weights = {record.name: (record.written, record.sha256) for record in records}
    beside = [file for file in work.job.files if file.path not in weights]
    with reader_of(work.origin, beside, work.plan.out) as reader:
        tell = counter(sum(file.size for file in beside), on_progress)
        sent = [_send_one(file, reader, place, tell, work) for file in _data_first(beside)]
    made = weights | {item.file.path: (item.written, item.sha256) for item in sent}
    work.job.checkpoint.files.check_unchanged()
    manifest = manifest_of(work.job, [made[file.path][0] for file in work.job.files], work.plan.provenance)
    text = to_text(manifest)
    if work.job.options.checksums:
        _put_checksums(place, {name: sha for name, (_, sha) in made.items()}, text)
    new = place.commit(text)
    return Finished(already=not new, warnings=compare_heads(work.job, manifest))


def _send_one(file: PlannedFile, reader: Reader, place: Publisher, tell: OnBytes, work: Work) -> Sent:
    (sent,) = send((file,), reader, place, tell, sha256=work.job.options.checksums)
    return sent


def _data_first(files: Sequence[PlannedFile]) -> list[PlannedFile]:
    """Side files and config.json, then the index: what a loader looks for comes last."""
    return sorted(files, key=lambda file: file.path == INDEX)


def _put_checksums(place: Publisher, digests: dict[str, str | None], manifest: bytes) -> None:
    known = {**digests, MANIFEST: hashlib.sha256(manifest).hexdigest()}
    data = "".join(checksum_line(name, known[name] or "") for name in sorted(known)).encode()
    place.put(CHECKSUMS, iter([memoryview(data)]), len(data))


def _all_records(plan: Plan, target: Target, standing: Standing) -> list[Record]:
    numbers = range(len(plan.objects))
    good, others = find_records(target, plan, numbers, standing.names)
    missing = [number for number in numbers if number not in good]
    if missing:
        raise _missing(plan, missing, [*good.values(), *others])
    return [good[number] for number in numbers]


def _missing(plan: Plan, missing: Sequence[int], seen: Sequence[Record]) -> SystemFailure:
    """Name the part to run again: of as many parts as the records speak of most often."""
    parts = Counter(record.part[1] for record in seen).most_common(1)
    total = parts[0][0] if parts else 1
    again = [part for part, share in enumerate(shares_of(plan, total)) if not set(share).isdisjoint(missing)]
    more = f", nor do {len(missing) - 1} others" if len(missing) > 1 else ""
    runs = ", ".join(f"--part {part}/{total}" for part in again[:8])
    return SystemFailure(
        f"does not stand at OUT with its record{more}",
        file=plan.objects[missing[0]].name,
        remedy=f"run again: {runs}{' ...' if len(again) > 8 else ''}",
    )
