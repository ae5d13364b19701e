"""plan: what several machines are to write together, decided by one, as a document for all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusecheck.errors import UsageError
from fusecheck.header import MAX_HEADER_BYTES
from fusecheck.job import Options
from fusecheck.ledger import judge
from fusecheck.mapping import Experts
from fusecheck.origin import Reading
from fusecheck.parts import opened_target
from fusecheck.planned import Estimate, to_text
from fusecheck.work import checked_options, open_shared, planned_work


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan. `text` is plan.json, the same for the same source, options and version."""

    verdict: Literal["planned"]
    source: str
    out: str
    digest: str
    objects: int
    """Weight files, which the parts share among themselves."""
    estimate: Estimate
    text: str
    warnings: tuple[str, ...]


def make_plan(
    source: str | Path,
    out: str | Path,
    *,
    max_shard_size: str | None = None,
    checksums: bool = False,
    drop_tied_lm_head: bool = False,
    keep_split: bool = False,
    experts: Experts = "per-expert",
    target: str | None = None,
    tp: int | None = None,
    ranks: str | None = None,
    follow_links: bool = False,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> PlanReport:
    """Read the headers of `source`, look at `out`, and decide all that `run` and `finalize` will do. Writes nothing.

    `source` is a folder or a URL (hf://, s3://, gs://, az://), `out` a folder or a bucket's URL, as every machine sees
    them. Raises UsageError (exit 2), CheckpointError (3), SystemFailure (4).
    """
    options = checked_options(
        Options(max_shard_size, checksums, drop_tied_lm_head, keep_split, experts, target, tp, ranks)
    )
    place, there = os.fspath(source), os.fspath(out)
    for path in (place, there):
        if any("\ud800" <= character <= "\udfff" for character in path):
            raise UsageError("is no Unicode text, which a plan has to be", file=path, remedy="choose another name")
    reading = Reading(follow_links, max_header_bytes)
    with planned_work(open_shared(place, reading), there, options, reading) as work:
        plan = work.plan
        with opened_target(there, plan.digest, allow_unconditional=False) as opened:
            judge(opened, plan)
        warnings = work.job.warnings
        text = to_text(plan).decode()
        return PlanReport("planned", place, there, plan.digest, len(plan.objects), plan.estimate, text, warnings)
