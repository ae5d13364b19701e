"""verify: what is in OUT is what was in the source. Three verdicts, never mixed: exact, probe, numeric."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from fusecheck import __version__, digest
from fusecheck.ahead import read_ahead
from fusecheck.beside import check_alone, check_config, check_side_files, declared_tp, notes
from fusecheck.case import Case, opened_case
from fusecheck.case_store import files_at
from fusecheck.checkpoint import Checkpoint
from fusecheck.compare import compare_all, comparers, out_reads, source_reads
from fusecheck.config import CONFIG
from fusecheck.engines.vllm_sharded import VLLM
from fusecheck.errors import SystemFailure, UsageError, shown
from fusecheck.exact import Finding, Slice, pair
from fusecheck.files import Files
from fusecheck.listing import CheckpointFiles
from fusecheck.manifest import Manifest
from fusecheck.manifest_check import check_manifest, layout_wanted, slices_of
from fusecheck.mapping import LAYOUT
from fusecheck.on_device import Lab, prepare, project
from fusecheck.ranks_check import check_ranks
from fusecheck.reader import Progress
from fusecheck.source_check import check_sha256
from fusecheck.stores import is_remote
from fusecheck.stores.windows import HELD
from fusecheck.unopened import check_unopened
from fusecheck.verdicts import ProjectionCheck, verdicts_of

MAX_FINDINGS = 100
"""Findings that a report carries; `finding_count` counts all."""


@dataclass(frozen=True, slots=True)
class ExactReport:
    """The exact verdict. `against` says what OUT's bytes were held to."""

    verdict: Literal["pass", "fail"]
    against: Literal["source bytes", "manifest digests"]
    digests_checked: bool
    tensors: int
    fused: int
    """Fused tensors of OUT."""
    bytes: int
    findings: tuple[Finding, ...]
    finding_count: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All that was checked, and what was not. `proved` names the verdicts that passed."""

    verdict: Literal["equal", "not_equal"]
    out: str
    source: str | None
    proved: tuple[str, ...]
    exact: ExactReport
    layers: tuple[int, ...]
    projections: tuple[ProjectionCheck, ...]
    device: str | None
    device_note: str | None
    seed: int
    digests: tuple[tuple[str, str], ...]
    """File of OUT -> its BLAKE3 as the manifest records it; of a weight file that over its tensors' digests."""
    versions: tuple[tuple[str, str], ...]
    """Package -> version of what ran."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def verify(
    out: str | Path,
    *,
    source: str | Path | None = None,
    layers: Sequence[int] = (),
    device: str = "auto",
    seed: int = 0,
    exact_only: bool = False,
    all_experts: bool = False,
    check_source: bool = False,
    on_progress: Progress | None = None,
    on_source: Progress | None = None,
) -> VerifyReport:
    """Prove that the fused checkpoint `out` holds its source's tensors, and say what was proved.

    Either may be a folder or a URL. `exact_only` leaves out probe and numeric, and with them torch; `check_source` hashes
    the source's whole files too, where its store names their SHA-256 (`on_source` hears how far).
    A difference is a verdict, not an exception.
    UsageError (exit 2) where there is nothing to verify or to compare with, CheckpointError (3) where the source is
    malformed, SystemFailure (4) where the environment fails.
    """
    with opened_case(out, source) as case:
        lab = Lab() if exact_only else prepare(case, tuple(layers), device)
        _exact(case, on_progress)
        if check_source:
            _check_source(case, on_source)
        projections = project(case, lab, seed, all_experts=all_experts)
        return _conclude(case, lab, projections, seed)


def _exact(case: Case, on_progress: Progress | None) -> None:
    """Every byte of every tensor, and everything beside them; or what is known of files that are no checkpoint."""
    out, manifest = case.out, case.manifest
    if out is not None:
        case.slices = _slices(case, out)
        case.findings += _compared(case, out, on_progress)
        _check_folder(case, out)
        return
    case.notes.append("no tensor was compared: OUT does not open as a checkpoint")
    if manifest is not None:
        case.findings += check_unopened(manifest, _bare_files(case.place))


def _check_source(case: Case, on_progress: Progress | None) -> None:
    if case.source is None:
        raise UsageError("--check-source without a source that is there", file=case.place, remedy="pass --source")
    found, hashed, unknown = check_sha256(case.source, on_progress)
    case.findings += found
    if hashed and not found:
        case.notes.append(f"{hashed} files of the source have the SHA-256 that its store names")
    if unknown:
        case.warnings.append(f"the SHA-256 of {unknown} files of the source is not known, so they were not checked")


def _compared(case: Case, out: Checkpoint, on_progress: Progress | None) -> list[Finding]:
    """One pass over OUT and its source; whichever lies in a store is read ahead."""
    with comparers() as pool, ExitStack() as stack:
        ours = stack.enter_context(read_ahead(out.files, out_reads(case.slices), held=HELD // 2))
        theirs = None
        if case.source is not None:
            theirs = stack.enter_context(read_ahead(case.source.files, source_reads(case.slices), held=HELD // 2))
        return compare_all(pool, case.slices, ours, theirs, on_progress)


def _bare_files(place: str) -> CheckpointFiles:
    return files_at(place) if is_remote(place) else Files(Path(place))


def _slices(case: Case, out: Checkpoint) -> list[Slice]:
    """What to compare with the source, and what to digest as it passes; whatever the source cuts otherwise, on its own."""
    manifest = case.manifest
    if out.ranked:
        return _rank_slices(case, out)
    named, found = slices_of(out.tensors, manifest) if manifest is not None else ([], [])
    case.findings += found
    if manifest is not None and not digest.available():
        if case.source is None:
            raise SystemFailure("the blake3 package is missing and the source is gone", remedy="pip install blake3")
        named = []
        case.notes.append("digests not checked: the blake3 package is missing; the bytes are compared with the source")
    if case.source is None:
        return named
    same_as = {name: entry.same_as for name, entry in manifest.dropped.items()} if manifest is not None else {}
    slices, found = pair(out.tensors, case.source.tensors, case.source.config, same_as)
    case.findings += found
    digests = {part.place: part.digest for part in named}
    paired = {part.place for part in slices}
    return [
        *(replace(part, digest=digests.get(part.place)) for part in slices),
        *(part for part in named if part.place not in paired),
    ]


def _rank_slices(case: Case, out: Checkpoint) -> list[Slice]:
    if case.config is None:
        return []
    check = check_ranks(out, case.config, case.manifest, case.source)
    case.findings += check.findings
    case.notes += check.notes
    if not digest.available():
        case.notes.append("digests not checked: the blake3 package is missing; the bytes are compared with the source")
        return [replace(part, digest=None) for part in check.slices]
    return check.slices


def _check_folder(case: Case, out: Checkpoint) -> None:
    """Everything beside the tensors' bytes."""
    manifest, source, model = case.manifest, case.source, case.model
    left_split = manifest is not None and bool(manifest.left_split)
    if model is not None and not model.fused and not (left_split and not model.split):
        case.findings.append(Finding("no group is fused"))
    elif model is not None and (model.split or model.left_split):
        names = [*(group.fused for group in model.split), *(left.fused for left in model.left_split)]
        case.notes.append(f"{len(names)} groups are left split, such as {shown(names[0])}")
    alone = LAYOUT if not out.ranked else VLLM.declared(declared_tp(out) or 1)
    case.findings += check_alone(out, layout_wanted(manifest) if manifest is not None else alone)
    case.findings += check_config(out, source, manifest.config_original if manifest is not None else None)
    known = {side.path for side in source.side_files} if source is not None else set[str]()
    if source is not None:
        case.findings += check_side_files(out, source)
    if manifest is not None:
        known |= manifest.side_files.keys()
        case.findings += check_manifest(manifest, out, case.config, model, case.origin)
    told = source is not None or manifest is not None
    case.notes += notes(out, known if told else None, ours=manifest is not None)


def _conclude(case: Case, lab: Lab, projections: tuple[ProjectionCheck, ...], seed: int) -> VerifyReport:
    exact = _exact_report(case)
    failed, proved = verdicts_of(projections, exact.verdict)
    return VerifyReport(
        verdict="not_equal" if failed else "equal",
        out=case.place,
        source=case.source.files.place if case.source is not None else None,
        proved=proved,
        exact=exact,
        layers=lab.layers,
        projections=projections,
        device=lab.name,
        device_note=lab.note,
        seed=seed,
        digests=_digests(case.manifest) if case.manifest is not None else (),
        versions=_versions(),
        notes=tuple(case.notes),
        warnings=tuple(case.warnings),
    )


def _exact_report(case: Case) -> ExactReport:
    tensors = case.out.tensors if case.out is not None else {}
    found = tuple(dict.fromkeys(case.findings))
    return ExactReport(
        verdict="fail" if found else "pass",
        against="source bytes" if case.source is not None else "manifest digests",
        digests_checked=any(part.digest is not None for part in case.slices),
        tensors=len(tensors),
        fused=len({part.out.name for part in case.slices if part.part is not None}),
        bytes=sum(tensor.nbytes for tensor in tensors.values()) if case.slices else 0,
        findings=found[:MAX_FINDINGS],
        finding_count=len(found),
    )


def _digests(manifest: Manifest) -> tuple[tuple[str, str], ...]:
    weights = {name: entry.digest for name, entry in manifest.files.items()}
    sides = {name: entry.digest for name, entry in manifest.side_files.items()}
    return (*sorted(weights.items()), (CONFIG, manifest.config.digest), *sorted(sides.items()))


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("fusecheck", __version__), ("python", platform.python_version())]
    for package in ("torch", "safetensors", "blake3"):
        with suppress(PackageNotFoundError):
            found.append((package, version(package)))
    return tuple(found)
