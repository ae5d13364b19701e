"""finalize: every object of a plan checked, what lies beside them written, and the one commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusecheck.finishing import finish
from fusecheck.origin import Traffic
from fusecheck.parts import opened_target
from fusecheck.planned import read_plan
from fusecheck.reader import Progress
from fusecheck.work import same_work


@dataclass(frozen=True, slots=True)
class FinalizeReport:
    """How it ended: OUT is complete either way. Sizes are bytes."""

    verdict: Literal["committed", "already_done"]
    out: str
    plan: str
    objects: int
    output_bytes: int
    traffic: Traffic
    warnings: tuple[str, ...]
    tp: int | None = None
    """Ranks that OUT was cut for, with a target."""


def finalize(
    plan: str | Path, *, allow_unconditional: bool = False, on_progress: Progress | None = None
) -> FinalizeReport:
    """Commit what the parts of `plan`, a plan.json, have written. Only this makes OUT a checkpoint.

    SystemFailure (exit 4) where an object or its record is missing, naming the part to run again; UsageError (2) where
    OUT is another's. As often as one likes, also at the same time: one commits, the others find it done.
    """
    document = read_plan(Path(plan))
    with (
        same_work(document) as work,
        opened_target(document.out, document.digest, allow_unconditional=allow_unconditional) as target,
    ):
        done = finish(work, target, on_progress)
        return FinalizeReport(
            verdict="already_done" if done.already else "committed",
            out=document.out,
            plan=document.digest,
            objects=len(document.objects),
            output_bytes=work.job.size,
            traffic=work.origin.traffic,
            warnings=done.warnings,
            tp=document.options.tp,
        )
