"""What verify judges and what it holds it to: OUT, its manifest, the source that was named or recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fusecheck import digest
from fusecheck.case_store import files_at, manifest_at, open_url
from fusecheck.checkpoint import Checkpoint, open_folder
from fusecheck.config import ModelConfig
from fusecheck.errors import CheckpointError, FusecheckError, UsageError
from fusecheck.exact import Finding, Slice
from fusecheck.hub import resolve
from fusecheck.manifest import Manifest, read_manifest
from fusecheck.model import Model, survey
from fusecheck.sidefiles import MANIFEST
from fusecheck.source import is_recorded, recorded_folder, source_in_words
from fusecheck.stores import is_remote


@dataclass(slots=True)
class Case:
    """What is judged, what it is held to, and what the checks gather on the way to a report."""

    place: str
    """OUT as it was given: a folder, or a URL."""
    manifest: Manifest | None = None
    described: bool = False
    """There is a manifest, though perhaps one that cannot be read."""
    out: Checkpoint | None = None
    config: ModelConfig | None = None
    model: Model | None = None
    source: Checkpoint | None = None
    origin: Checkpoint | None = None
    """The source, where its headers are those that the manifest records."""
    slices: list[Slice] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """OUT, where it is a folder."""
        return Path(self.place)

    def blame(self, error: CheckpointError) -> None:
        """What is malformed in OUT is a finding, since OUT is what is judged."""
        facts = [f"found {error.found}"] if error.found is not None else []
        facts += [f"wanted {error.wanted}"] if error.wanted is not None else []
        problem = f"{error.problem}: {', '.join(facts)}" if facts else error.problem
        self.findings.append(Finding(problem, error.file, error.tensor))


@contextmanager
def opened_case(out: str | Path, source: str | Path | None) -> Iterator[Case]:
    """OUT and its source, open for the block; SystemFailure at its end where either has changed meanwhile."""
    case = Case(os.fspath(out) if is_remote(os.fspath(out)) else str(Path(out)))
    with ExitStack() as stack:
        _read_out(case, stack)
        _open_source(case, None if source is None else os.fspath(source), stack)
        yield case
        for opened in (case.out, case.source):
            if opened is not None:
                opened.files.check_unchanged()


def _read_out(case: Case, stack: ExitStack) -> None:
    """OUT as a server would read it."""
    if is_remote(case.place):
        _read_stored(case, stack)
    else:
        _read_folder(case, stack)
    if case.out is None or case.config is None or case.out.ranked:
        return
    try:
        case.model = survey(case.out.tensors, case.config, case.out.peek, keep_split=True)
    except CheckpointError as error:
        case.blame(error)


def _read_stored(case: Case, stack: ExitStack) -> None:
    files = files_at(case.place)
    stack.callback(files.close)
    case.described, case.manifest, problem = manifest_at(files)
    if problem is not None:
        case.blame(problem)
    try:
        case.out = stack.enter_context(open_url(case.place))
        case.config = case.out.config
    except CheckpointError as error:
        case.blame(error)


def _read_folder(case: Case, stack: ExitStack) -> None:
    if not os.path.isdir(case.folder):  # noqa: PTH112 - Path.is_dir raises where the parent is not searchable
        problem = "OUT is no folder" if os.path.lexists(case.folder) else "OUT does not exist"
        raise UsageError(problem, file=str(case.folder), remedy="name the folder that fuse has written, or its URL")
    try:
        case.described = os.path.lexists(case.folder / MANIFEST)
        case.manifest = read_manifest(case.folder)
    except CheckpointError as error:
        case.blame(error)
    try:
        case.out = stack.enter_context(open_folder(case.folder, follow_links=True, ranked=True))
        case.config = case.out.config
    except CheckpointError as error:
        case.blame(error)


def _open_source(case: Case, named: str | None, stack: ExitStack) -> None:
    """The source that was named, else the one that the manifest records if it is still that one, else none."""
    manifest = case.manifest
    if named is None and not case.described:
        raise UsageError(
            f"there is neither a manifest ({MANIFEST}) nor a source to compare with",
            file=case.place,
            remedy="pass --source",
        )
    if named is not None:
        place = named if is_remote(named) else str(resolve(named).folder)
        if _same_place(place, case.place):
            case.findings.append(Finding("the source that was named is OUT itself, which proves nothing", named))
        case.source = stack.enter_context(_complete(place))
    elif manifest is not None:
        case.source = _recorded(case, manifest, stack)
    if case.source is None or manifest is None or not digest.available():
        return
    if is_recorded(case.source, manifest):
        case.origin = case.source
    elif named is not None:
        case.notes.append("the manifest records another source than the one that was named, whose bytes are compared")
    else:
        case.source = None
        case.warnings.append("what is at the recorded place is not the recorded source; digests alone are checked")


def _same_place(one: str, other: str) -> bool:
    if is_remote(one) or is_remote(other):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)


def _complete(place: str) -> Checkpoint:
    """A source that `fuse` would take too. CheckpointError where it is none."""
    opened = open_url(place) if is_remote(place) else open_folder(Path(place), follow_links=True)
    try:
        survey(opened.tensors, opened.config, opened.peek, keep_split=True)
    except BaseException:
        opened.files.close()
        raise
    return opened


def _recorded(case: Case, manifest: Manifest, stack: ExitStack) -> Checkpoint | None:
    """What is at the place that the manifest records; digests alone are checked, with a warning, where that is nothing."""
    folder = recorded_folder(None if is_remote(case.place) else case.folder, manifest)
    if folder is None:
        source, url = source_in_words(manifest), manifest.provenance.url
        what = "is read only where --source names it" if url is not None else "is not there"
        case.warnings.append(f"{source} {what}; OUT is checked against its manifest's digests alone")
        return None
    try:
        return stack.enter_context(_complete(str(folder)))
    except FusecheckError as error:
        case.warnings.append(f"the recorded source cannot be read ({error}); digests alone are checked")
        return None
