"""SRC, OUT and options -> everything decided, and the plan that says so; a plan -> the same again, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import fusecheck
from fusecheck.ahead import read_ahead
from fusecheck.digest import digest_of
from fusecheck.errors import CheckpointError, SystemFailure, UsageError
from fusecheck.hub import check_shard_size
from fusecheck.job import Job, Options, decide
from fusecheck.lanes import lane_reads, lanes_of
from fusecheck.mapping import Experts
from fusecheck.origin import Origin, Reading, open_origin
from fusecheck.plan import PlannedFile
from fusecheck.planned import Estimate, Plan, PlannedObject
from fusecheck.reader import Reader, StoredFile
from fusecheck.stores import is_remote
from fusecheck.stores.address import parse
from fusecheck.stores.bucket_publisher import part_size, put_memory
from fusecheck.stores.schedule import schedule
from fusecheck.stores.windows import HELD

MIB = 1 << 20

BASE_MEMORY = 128 * MIB
"""Python, the plan of a large model, pieces: what a run needs beside what is read ahead and what is being written."""
ALLOWED = HELD + 80 * MIB
"""Bytes read ahead and being written at one time: what many objects that are written together take, the first gives."""
_LEAST_AHEAD = 64 * MIB

_ASKED_OF_FILE = 4
"""Requests for a file of OUT beside its parts: to begin and to end it, looks at OUT before it appears and at it after."""
_ASKED_OF_OBJECT = 4
"""More of them for a weight file: its record written and looked at, both read by finalize."""


@dataclass(frozen=True, slots=True)
class Work:
    """An opened source, what is to be made of it, and the plan that says so."""

    origin: Origin
    job: Job
    plan: Plan


def reader_of(origin: Origin, files: Sequence[PlannedFile], out: str) -> AbstractContextManager[Reader]:
    """A reader for these files of OUT, one after another."""
    reads = (read for lane in lanes_of(files) for read in lane_reads(lane))
    return read_ahead(origin.checkpoint.files, reads, held=ahead(_put_memory(files, out)))


def _put_memory(files: Sequence[PlannedFile], out: str) -> int:
    """Bytes held while the lane that takes most is written. A file is written as it comes."""
    lanes = lanes_of(files) if is_remote(out) else ()
    return max((put_memory([file.size for file in lane]) for lane in lanes), default=0)


def ahead(puts: int) -> int:
    """Bytes of the source that are held before they are needed, while so many are held on their way out."""
    return max(_LEAST_AHEAD, min(HELD, ALLOWED - puts))


def open_shared(place: str, reading: Reading, frozen: Mapping[str, StoredFile] | None = None) -> Origin:
    """Open SRC as any machine sees it. What is no folder here is never taken for a repository of that name."""
    if not is_remote(place) and not os.path.lexists(place):
        raise UsageError(
            "SRC does not exist here",
            file=place,
            wanted="a folder that every machine sees, or a URL such as hf://owner/name",
        )
    return open_origin(place, reading=reading, frozen=frozen)


def checked_options(options: Options) -> Options:
    """The options themselves. UsageError where one has no such value, or they contradict each other."""
    ranks = options.wanted_ranks
    if options.experts not in get_args(Experts):
        raise UsageError("--experts has no such form", found=options.experts, wanted=", ".join(get_args(Experts)))
    if options.max_shard_size is not None:
        check_shard_size(options.max_shard_size)
    return options if ranks is None else replace(options, ranks=ranks.listed)


@contextmanager
def planned_work(
    origin: Origin, out: str, options: Options, reading: Reading, *, alone: bool = False
) -> Iterator[Work]:
    """Decide everything. The source is closed with the block. `alone`: no other process will open it anew."""
    with origin.checkpoint:
        _refuse_overlap(origin, out)
        job = decide(origin.checkpoint, options)
        plan = _plan(origin, job, out, reading)
        yield Work(origin, job, replace(plan, source=origin.name) if alone else plan)


@contextmanager
def same_work(plan: Plan) -> Iterator[Work]:
    """Decide anew what a plan says. SystemFailure where anything is not as it was planned."""
    if plan.fusecheck_version != fusecheck.__version__:
        raise SystemFailure(
            "was planned by another version of fusecheck",
            file="plan",
            found=plan.fusecheck_version,
            wanted=fusecheck.__version__,
            remedy="plan again with this one, or run the other one everywhere",
        )
    origin = open_shared(plan.source, plan.reading, plan.files)
    with origin.checkpoint:
        _refuse_overlap(origin, plan.out)
        try:
            job = decide(origin.checkpoint, plan.options)
        except CheckpointError as error:  # it could be planned, so it was another one then
            raise SystemFailure(f"the source is not what was planned: {error}", remedy="plan again") from None
        _check_same(plan, _plan(origin, job, plan.out, plan.reading, plan))
        yield Work(origin, job, plan)


def _plan(origin: Origin, job: Job, out: str, reading: Reading, like: Plan | None = None) -> Plan:
    """What is decided, as a document. From `like`, a plan, where OUT is, as another machine saw it, and what it takes."""
    weights = [shard.file for shard in job.shards]
    names = {file.path for file in weights}
    return Plan(
        fusecheck_version=fusecheck.__version__,
        source=_spelt(origin.place),
        out=_spelt(out),
        options=job.options,
        reading=reading,
        provenance=origin.provenance(out) if like is None else like.provenance,
        files=origin.files,
        objects=tuple(map(_object, weights)),
        beside=tuple(_object(file) for file in job.files if file.path not in names),
        estimate=_estimate(origin, job, out) if like is None else like.estimate,
    )


def _spelt(place: str) -> str:
    """One spelling of a place, so that a slash more makes no other plan of it."""
    return str(parse(place)) if is_remote(place) else str(Path(place))


def _object(file: PlannedFile) -> PlannedObject:
    return PlannedObject(file.path, file.size, digest_of(file.head))


def _estimate(origin: Origin, job: Job, out: str) -> Estimate:
    remote = origin.folder is None
    windows = schedule(read for lane in lanes_of(job.files) for read in lane_reads(lane)) if remote else []
    fetched = sum(window.size for window in windows) if remote else sum(file.size for file in origin.files.values())
    headers = 2 + len(origin.files) if remote else 0
    stored = [file.size for file in job.files] if is_remote(out) else []
    writes = sum(_ASKED_OF_FILE + -(-size // part_size(size)) for size in stored)
    writes += _ASKED_OF_OBJECT * len(job.shards) if stored else 0
    puts = _put_memory(job.files, out)
    held = min(ahead(puts), sum(window.size for window in windows)) if remote else 0
    return Estimate(fetched, job.size, len(windows) + headers + writes, BASE_MEMORY + held + puts)


def _check_same(plan: Plan, now: Plan) -> None:
    for was, item in zip(plan.objects + plan.beside, now.objects + now.beside, strict=False):
        if was != item:
            raise SystemFailure(
                "would not be the object that was planned", file=was.name, remedy="plan again, and run the new plan"
            )
    if plan.digest != now.digest:
        raise SystemFailure("what would be written is not what was planned", remedy="plan again, and run the new plan")


def refuse_nested(source: str, out: str) -> None:
    """UsageError where one address lies below the other: before anything is asked of a store."""
    one, other = parse(source), parse(out)
    if (one.kind, one.root) == (other.kind, other.root) and _nested(one.prefix, other.prefix):
        raise UsageError("OUT is SRC, lies inside it or around it", file=out, remedy="choose another prefix")


def _refuse_overlap(origin: Origin, out: str) -> None:
    if origin.folder is None or is_remote(out):
        refuse_nested(origin.place, out)
        return
    if Path(out).is_symlink():
        raise UsageError("OUT is a symbolic link", file=out, remedy="name the folder itself")
    here, source = Path(os.path.realpath(out)), Path(os.path.realpath(origin.folder.folder))
    if here == source or here in source.parents or source in here.parents:
        raise UsageError("OUT is SRC, lies inside it or around it", file=out, remedy="name a folder outside SRC")


def _nested(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/" if other else "") or f"{other}/".startswith(f"{one}/" if one else "")
