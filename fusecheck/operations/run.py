"""run: the objects of one part of a plan, written where they do not stand yet."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusecheck.errors import UsageError
from fusecheck.origin import Traffic
from fusecheck.parts import opened_target, run_objects
from fusecheck.planned import read_plan
from fusecheck.reader import Progress
from fusecheck.work import same_work

INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID")
"""Where a Kubernetes Indexed Job and a Slurm array tell a process which one it is."""

_PART = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run did. Names are those of weight files; sizes are bytes."""

    verdict: Literal["written", "already_done"]
    out: str
    plan: str
    part: int
    parts: int
    written: tuple[str, ...]
    stood: tuple[str, ...]
    """Objects that stood there already, as their records say."""
    bytes_written: int
    traffic: Traffic
    warnings: tuple[str, ...]


def run_part(
    plan: str | Path,
    *,
    part: int = 0,
    parts: int = 1,
    allow_unconditional: bool = False,
    on_progress: Progress | None = None,
) -> RunReport:
    """Write the objects of part `part` of `parts` that `plan`, a plan.json, names and that do not stand at OUT yet.

    Any part, in any order, on any machine, as often as one likes. UsageError (exit 2) where OUT is another's,
    SystemFailure (4) where source or version are not those of the plan.
    """
    if not 0 <= part < parts:
        raise UsageError("there is no such part", found=f"{part}/{parts}", wanted="i/N with i from 0 to N - 1")
    document = read_plan(Path(plan))
    with (
        same_work(document) as work,
        opened_target(document.out, document.digest, allow_unconditional=allow_unconditional) as target,
    ):
        done = run_objects(work, target, (part, parts), on_progress)
        sizes = {item.name: item.size for item in document.objects}
        return RunReport(
            verdict="written" if done.written else "already_done",
            out=document.out,
            plan=document.digest,
            part=part,
            parts=parts,
            written=done.written,
            stood=done.stood,
            bytes_written=sum(sizes[name] for name in done.written),
            traffic=work.origin.traffic,
            warnings=work.job.checkpoint.warnings,
        )


def which_part(part: str | None, parts: int | None, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """`--part i/N`, or `--parts N` and what the scheduler says. Neither: the whole plan is one part. UsageError."""
    if part is not None:
        match = _PART.fullmatch(part)
        if match is None or parts not in {None, int(match[2])}:
            raise UsageError("--part is no part", found=part, wanted="i/N with i from 0 to N - 1")
        return _checked(int(match[1]), int(match[2]), "--part counts from 0")
    if parts is None:
        return 0, 1
    told = {name: environment[name] for name in INDEX_VARIABLES if environment.get(name)}
    if len(set(told.values())) > 1:
        raise UsageError(
            "two schedulers say which part this is",
            found=", ".join(f"{name}={value}" for name, value in told.items()),
            remedy=f"give --part i/{parts}",
        )
    if not told:
        raise UsageError(
            "--parts alone needs to be told which part this is",
            wanted=" or ".join(INDEX_VARIABLES),
            remedy=f"give --part i/{parts}",
        )
    variable, value = next(iter(told.items()))
    if re.fullmatch(r"[0-9]{1,6}", value, re.ASCII) is None:
        raise UsageError(f"{variable} is no number of a part", found=value)
    return _checked(int(value), parts, f"{variable} counts from 0 (Slurm: --array=0-{parts - 1})")


def _checked(part: int, parts: int, remedy: str) -> tuple[int, int]:
    if not part < parts:
        raise UsageError("there is no such part", found=f"{part}/{parts}", remedy=remedy)
    return part, parts
