"""Probe and numeric of a case: on which device, of which layers, and what came out."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusecheck.case import Case
from fusecheck.checkpoint import Checkpoint
from fusecheck.errors import SystemFailure, UsageError
from fusecheck.verdicts import ProjectionCheck

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Lab:
    """Where probe and numeric run, and for which layers. Without a device they don't."""

    layers: tuple[int, ...] = ()
    device: torch.device | None = None
    name: str | None = None
    note: str | None = None


def prepare(case: Case, layers: tuple[int, ...], device: str) -> Lab:
    """Find what was asked wrongly, or is not there, before a terabyte is compared. No layers: first, middle, last."""
    if case.config is not None:
        count = case.config.num_hidden_layers
        beyond = next((layer for layer in layers if not 0 <= layer < count), None)
        if beyond is not None:
            raise UsageError("--layer is beyond the model", found=beyond, wanted=f"0 to {count - 1}")
        layers = tuple(sorted(set(layers or (0, count // 2, count - 1))))
    if importlib.util.find_spec("torch") is None:
        if device != "auto":
            raise SystemFailure(f"--device {device} needs torch, which is missing", remedy="pip install torch")
        case.warnings.append("probe and numeric not run: torch is not installed; exact needs none")
        return Lab(layers)
    from fusecheck.device import describe, pick_device  # noqa: PLC0415 - torch costs seconds and 200 MB

    chosen = pick_device(device)
    about = describe(chosen)
    return Lab(layers, chosen, about.name, about.note)


def project(case: Case, lab: Lab, seed: int, *, all_experts: bool) -> tuple[ProjectionCheck, ...]:
    """What each projection of these layers comes to; nothing where there is no device, or OUT is no model."""
    if lab.device is None:
        return ()
    if case.out is not None and case.out.ranked and case.config is not None:
        return _project_ranks(case, case.out, lab, lab.device, seed, all_experts=all_experts)
    if case.out is None or case.model is None:
        case.notes.append("probe and numeric not run: OUT is not a complete model")
        return ()
    if case.source is None and (case.findings or case.manifest is None):
        case.notes.append("probe and numeric not run: without a source they need a manifest that agrees with OUT")
        return ()
    if case.source is None:
        case.notes.append("probe and numeric: the split weights are cut out of OUT at the manifest's offsets")
    from fusecheck.projections import check_projections  # noqa: PLC0415 - as above

    checks = check_projections(
        case.out, case.source, case.manifest, case.model, lab.layers, lab.device, seed, all_experts=all_experts
    )
    case.notes += checks.notes
    return checks.projections


def _project_ranks(
    case: Case, out: Checkpoint, lab: Lab, device: torch.device, seed: int, *, all_experts: bool
) -> tuple[ProjectionCheck, ...]:
    """Probe and numeric of what ranks hold. Cut out of themselves they would prove nothing."""
    if case.source is None:
        case.notes.append(
            "probe and numeric not run: the source is gone, and ranks cut out of themselves prove nothing"
        )
        return ()
    from fusecheck.rank_projections import check_rank_projections  # noqa: PLC0415 - as above

    checks = check_rank_projections(out, case.source, case.manifest, lab.layers, device, seed, all_experts=all_experts)
    case.notes += checks.notes
    return checks.projections
