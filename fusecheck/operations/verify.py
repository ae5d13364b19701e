"""verify: what is in OUT is what was in the source. Three verdicts, never mixed: exact, probe, numeric."""

from __future__ import annotations

import importlib.util
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fusecheck import __version__, digest
from fusecheck.checkpoint import Checkpoint, open_checkpoint, same_bytes
from fusecheck.config import CONFIG
from fusecheck.errors import CheckpointError, SystemFailure, UsageError
from fusecheck.exact import Finding, Slice, compare, pair, slices_by_manifest
from fusecheck.header import strict_json
from fusecheck.hub import resolve
from fusecheck.manifest import Manifest, read_manifest
from fusecheck.manifest_check import check_manifest
from fusecheck.model import Model, survey
from fusecheck.quantisation import MODULES
from fusecheck.sidefiles import ADAPTER, MANIFEST, WEIGHTS

if TYPE_CHECKING:
    from fusecheck.projections import ProjectionCheck

Progress = Callable[[int, int], None]
"""Called with (bytes compared, bytes in total), from any thread, one call at a time."""

MAX_FINDINGS = 100
"""Findings that a report carries; `finding_count` counts all."""

THREADS = 2


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


@dataclass(slots=True)
class _Evidence:
    """What the checks gather on the way to a report."""

    findings: list[Finding]
    notes: list[str]
    warnings: list[str]


def verify(
    out: str | Path,
    *,
    source: str | Path | None = None,
    layers: Sequence[int] = (),
    device: str = "auto",
    seed: int = 0,
    on_progress: Progress | None = None,
) -> VerifyReport:
    """Prove that the fused checkpoint `out` holds its source's tensors, and say what was proved.

    A difference is a verdict, not an exception. UsageError (exit 2) where there is nothing to verify or to compare with,
    CheckpointError (3) where the source is malformed, SystemFailure (4) where the environment fails.
    """
    folder = Path(out)
    if not os.fspath(out) or not folder.is_dir():
        raise UsageError("OUT is no folder", file=str(out))
    evidence = _Evidence([], [], [])
    with ExitStack() as stack:
        manifest, opened = _read_out(folder, evidence)
        if opened is not None:
            stack.enter_context(opened)
        origin = _open_source(folder, source, manifest, evidence)
        if origin is not None:
            stack.enter_context(origin)
        exact = _exact(opened, origin, manifest, evidence, on_progress)
        model = _survey(opened, evidence) if opened is not None else None
        checked = _project(opened, origin, manifest, model, tuple(layers), device, seed, evidence)
        return _conclude(folder, origin, manifest, exact, checked, seed, evidence)


def _read_out(folder: Path, evidence: _Evidence) -> tuple[Manifest | None, Checkpoint | None]:
    """OUT as a server would read it; what is malformed there is a finding, since OUT is what is judged."""
    manifest = opened = None
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        evidence.findings.append(_finding(error))
    try:
        opened = open_checkpoint(folder, follow_links=True)
    except CheckpointError as error:
        evidence.findings.append(_finding(error))
    return manifest, opened


def _finding(error: CheckpointError) -> Finding:
    facts = [f"found {error.found}"] if error.found is not None else []
    facts += [f"wanted {error.wanted}"] if error.wanted is not None else []
    return Finding(": ".join([error.problem, *([", ".join(facts)] if facts else [])]), error.file, error.tensor)


def _open_source(
    out: Path, source: str | Path | None, manifest: Manifest | None, evidence: _Evidence
) -> Checkpoint | None:
    """The source that was named, else the one that the manifest records if it is still that one, else None."""
    if source is not None:
        return open_checkpoint(resolve(os.fspath(source)).folder, follow_links=True)
    if manifest is None:
        raise UsageError(
            f"there is neither a manifest ({MANIFEST}) nor a source to compare with",
            file=str(out),
            remedy="pass --source",
        )
    recorded = manifest.provenance.folder
    if recorded is None or not (out / recorded).is_dir():
        where = recorded or manifest.provenance.repo_id
        evidence.warnings.append(
            f"the source {where} is not there; OUT is checked against its manifest's digests alone"
        )
        return None
    try:
        opened = open_checkpoint(out / recorded, follow_links=True)
    except (CheckpointError, UsageError, SystemFailure) as error:
        evidence.warnings.append(f"the recorded source cannot be read ({error}); digests alone are checked")
        return None
    found = {shard.name: shard.header_digest for shard in opened.shards}
    wanted = {name: shard.header_digest for name, shard in manifest.source_shards.items()}
    if found != wanted and digest.available():
        opened.files.close()
        evidence.warnings.append(f"what is at {recorded} is not the recorded source; digests alone are checked")
        return None
    return opened


def _survey(opened: Checkpoint, evidence: _Evidence) -> Model | None:
    """Completeness against config.json, which no engine checks."""
    try:
        model = survey(opened.tensors, opened.config, opened.peek, keep_split=True)
    except CheckpointError as error:
        evidence.findings.append(_finding(error))
        return None
    if not model.fused:
        evidence.findings.append(Finding("no group is fused"))
    elif model.split:
        evidence.notes.append(f"{len(model.split)} groups are left split, such as {model.split[0].fused}")
    return model


def _exact(
    out: Checkpoint | None,
    source: Checkpoint | None,
    manifest: Manifest | None,
    evidence: _Evidence,
    on_progress: Progress | None,
) -> ExactReport:
    slices: list[Slice] = []
    hashed = manifest is not None and digest.available()
    if manifest is not None and not digest.available():
        if source is None:
            raise SystemFailure("the blake3 package is missing and the source is gone", remedy="pip install blake3")
        evidence.notes.append(
            "digests not checked: the blake3 package is missing; the bytes are compared with the source"
        )
    if out is not None:
        if source is not None:
            slices, found = pair(
                out.tensors, source.tensors, source.config, manifest.dropped if manifest is not None else {}
            )
        else:
            slices, found = slices_by_manifest(out.tensors, manifest) if manifest is not None else ([], [])
        evidence.findings += found
        digests = _compare_all(slices, out, source, evidence, hashed=hashed, on_progress=on_progress)
        _check_files(out, source, manifest, evidence)
        if manifest is not None:
            evidence.findings += check_manifest(manifest, out, slices, digests, evidence.notes)
        out.files.check_unchanged()
    if source is not None:
        source.files.check_unchanged()
    return ExactReport(
        verdict="pass",
        against="source bytes" if source is not None else "manifest digests",
        digests_checked=hashed,
        tensors=len(out.tensors) if out is not None else 0,
        fused=len({part.out.name for part in slices if part.is_part}),
        bytes=sum(part.nbytes for part in slices),
        findings=(),
        finding_count=0,
    )


def _compare_all(
    slices: Sequence[Slice],
    out: Checkpoint,
    source: Checkpoint | None,
    evidence: _Evidence,
    *,
    hashed: bool,
    on_progress: Progress | None,
) -> list[str | None]:
    """Every byte of every slice, on two threads; reads, compares and hashes release the interpreter."""
    total = sum(part.nbytes for part in slices)
    lock, done = threading.Lock(), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if on_progress is not None:
                on_progress(done, total)

    def one(part: Slice) -> tuple[Finding | None, str | None]:
        return compare(part, out, source, hashed=hashed, on_bytes=on_bytes)

    pool = ThreadPoolExecutor(THREADS)
    try:
        results = list(pool.map(one, slices))
    finally:
        pool.shutdown(cancel_futures=True)
    evidence.findings += [finding for finding, _ in results if finding is not None]
    return [found for _, found in results]


def _check_files(out: Checkpoint, source: Checkpoint | None, manifest: Manifest | None, evidence: _Evidence) -> None:
    """Everything beside the tensors: config, side files, stray weight files."""
    for item in out.left_out:
        if item.reason in {WEIGHTS, ADAPTER}:
            evidence.findings.append(Finding("a stray weight file, which an engine may load", item.path))
    if source is not None:
        if out.config_text != source.config_text and not _only_gained_modules(out, source, manifest):
            evidence.findings.append(Finding("differs from the source's", "config.json"))
        wanted = {side.path: side.size for side in source.side_files}
        evidence.findings += list(_side_findings(out, source, wanted))
    elif manifest is not None:
        wanted = {path: entry.size for path, entry in manifest.side_files.items()}
        present = {side.path for side in out.side_files}
        evidence.findings += [Finding("side file is missing", path) for path in wanted if path not in present]
    else:
        wanted = {}
    extra = sorted({side.path for side in out.side_files} - wanted.keys())
    if extra:
        evidence.notes.append(f"side files that the source has not: {', '.join(extra)}")


def _only_gained_modules(out: Checkpoint, source: Checkpoint, manifest: Manifest | None) -> bool:
    """Whether config.json differs by GPTQ's list of quantised modules alone, as the manifest records."""
    if manifest is None or manifest.config_original is None or manifest.config_original.encode() != source.config_text:
        return False
    ours, theirs = (strict_json(c.config_text, file=CONFIG, constants=True) for c in (out, source))
    declared = ours.get("quantization_config") if isinstance(ours, dict) else None
    if not isinstance(declared, dict) or declared.pop(MODULES, None) is None:
        return False
    return ours == theirs


def _side_findings(out: Checkpoint, source: Checkpoint, wanted: dict[str, int]) -> Iterator[Finding]:
    present = {side.path: side.size for side in out.side_files}
    for path, size in wanted.items():
        if path not in present:
            yield Finding("side file is missing", path)
        elif present[path] != size or not same_bytes(out.files, (path, 0), source.files, (path, 0), size):
            yield Finding("side file differs from the source's", path)


def _project(
    out: Checkpoint | None,
    source: Checkpoint | None,
    manifest: Manifest | None,
    model: Model | None,
    layers: tuple[int, ...],
    device: str,
    seed: int,
    evidence: _Evidence,
) -> tuple[tuple[int, ...], tuple[ProjectionCheck, ...], str | None, str | None]:
    """Probe and numeric, where torch is there and OUT is a model."""
    if out is not None:
        count = out.config.num_hidden_layers
        if any(not 0 <= layer < count for layer in layers):
            raise UsageError("--layer is beyond the model", found=max(layers), wanted=f"0 to {count - 1}")
        layers = tuple(sorted(set(layers or (0, count // 2, count - 1))))
    if importlib.util.find_spec("torch") is None:
        if device != "auto":
            raise SystemFailure(f"--device {device} needs torch, which is missing", remedy="pip install torch")
        evidence.warnings.append("probe and numeric not run: torch is not installed; exact needs none")
        return layers, (), None, None
    from fusecheck.numeric import describe, pick_device  # noqa: PLC0415
    from fusecheck.projections import check_projections  # noqa: PLC0415 - torch costs seconds and 200 MB

    chosen = pick_device(device)
    about = describe(chosen)
    if out is None or model is None:
        evidence.notes.append("probe and numeric not run: OUT is not a complete model")
        return layers, (), about.name, about.note
    if source is None:
        evidence.notes.append("probe and numeric: the split weights are cut out of OUT at the manifest's offsets")
    checked = check_projections(out, source, manifest, model, layers, chosen, seed)
    return layers, checked, about.name, about.note


def _conclude(
    folder: Path,
    source: Checkpoint | None,
    manifest: Manifest | None,
    exact: ExactReport,
    checked: tuple[tuple[int, ...], tuple[ProjectionCheck, ...], str | None, str | None],
    seed: int,
    evidence: _Evidence,
) -> VerifyReport:
    layers, projections, device, note = checked
    found = evidence.findings
    exact = ExactReport(
        verdict="fail" if found else "pass",
        against=exact.against,
        digests_checked=exact.digests_checked,
        tensors=exact.tensors,
        fused=exact.fused,
        bytes=exact.bytes,
        findings=tuple(found[:MAX_FINDINGS]),
        finding_count=len(found),
    )
    verdicts = {
        "exact": [exact.verdict, *(check.built for check in projections)],
        "probe": [check.probe.verdict for check in projections],
        "numeric": [check.numeric.verdict for check in projections],
    }
    failed = any("fail" in seen for seen in verdicts.values())
    proved = [name for name, seen in verdicts.items() if "pass" in seen and "fail" not in seen]
    return VerifyReport(
        verdict="not_equal" if failed else "equal",
        out=str(folder),
        source=str(source.files.root) if source is not None else None,
        proved=tuple(proved),
        exact=exact,
        layers=layers,
        projections=projections,
        device=device,
        device_note=note,
        seed=seed,
        digests=_digests(manifest) if manifest is not None else (),
        versions=_versions(),
        notes=tuple(evidence.notes),
        warnings=tuple(evidence.warnings),
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
