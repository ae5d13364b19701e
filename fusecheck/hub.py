"""SRC as the user wrote it -> a folder and where it came from; shard splitting. The only file that knows huggingface_hub.

The library is imported inside the functions that need it: a folder never pays for it, and its environment (HF_HOME,
HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT) means what the hub's own documentation says. Its errors carry URLs, signed ones
among them, so no text of theirs reaches a message of ours.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import fusecheck
from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UsageError
from fusecheck.manifest import Provenance
from fusecheck.sidefiles import WEIGHT_SUFFIXES

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import tqdm

Progress = Callable[[int, int], None]
"""Called with (bytes downloaded, bytes known so far), from any thread, one call at a time."""

UNREAD = tuple(f"*{suffix}" for suffix in WEIGHT_SUFFIXES if suffix != ".safetensors")
"""Patterns of weight kinds that are never read: not downloaded."""

SPARED = ("consolidated.safetensors", "consolidated-[0-9]*-of-[0-9]*.safetensors", "original/*.safetensors")
"""Second copies of the weights in another layout: downloaded only where the index or modules.json may ask for them."""

_REPO_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_SNAPSHOT = re.compile(
    r"(?:.*/)?models--(?P<owner>(?:(?!--)[A-Za-z0-9._-])+)--(?P<name>(?:(?!--)[A-Za-z0-9._-])+)"
    r"/snapshots/(?P<commit>[0-9a-f]{40})",
    re.ASCII | re.DOTALL,
)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_NO_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|^[/-]|/$|//|@\{")
"""What git forbids in the name of a branch or tag."""
_SHARD_SIZE = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,15})?) ?[KMGT]B", re.ASCII | re.IGNORECASE)
_STEP = 256 * 1024
"""Bytes of a download between two looks at whether to stop; the hub's own 10 MB times eight files last too long."""
_INDEX = "model.safetensors.index.json"
_REFUSED = frozenset({400, 401, 403, 404, 410, 451})
"""HTTP answers of the hub that a retry does not change."""


@dataclass(frozen=True, slots=True)
class Source:
    """A folder to read, and its provenance where that is more than the folder."""

    folder: Path
    repo_id: str | None = None
    revision: str | None = None
    """As asked for; None for the repository's default."""
    commit: str | None = None

    def provenance(self, out: Path) -> Provenance:
        """As the manifest records it: a hub commit, or the folder relative to OUT, never an absolute path."""
        if self.repo_id is not None:
            return Provenance(repo_id=self.repo_id, revision=self.revision, commit=self.commit)
        here = Path(os.path.realpath(out.parent)) / out.name
        folder = os.path.relpath(os.path.realpath(self.folder), here)
        try:
            folder.encode()
        except UnicodeEncodeError:  # JSON cannot hold it; verify then needs --source
            return Provenance()
        return Provenance(folder=folder)


def resolve(source: str, *, revision: str | None = None, on_progress: Progress | None = None) -> Source:
    """An existing folder wins; else `owner/name` is a hub id, and its snapshot is downloaded or taken from the cache.

    UsageError where there is neither, or for a repository or revision that the hub refuses; SystemFailure where network,
    cache or disk fail; CheckpointError where offline mode leaves a snapshot with files missing.
    """
    if not source:
        raise UsageError("SRC is empty", remedy="name a folder, or `.` for this one")
    if _is_folder(source):
        if revision is not None:
            raise UsageError("--revision is for a hub id, and SRC is a folder", file=source, remedy="drop --revision")
        return _folder(source)
    if not _REPO_ID.fullmatch(source):
        raise UsageError(
            "SRC does not exist", file=source, remedy="name a folder, or a repository of the hub in the form owner/name"
        )
    if revision is not None and (not revision or _NO_REF.search(revision)):
        raise UsageError("--revision is no branch, tag or commit", found=repr(revision))
    return _download(source, revision, on_progress)


def cached(provenance: Provenance) -> Path | None:
    """The snapshot that a manifest names, if the local hub cache holds it complete. Never touches the network."""
    repo_id, commit = provenance.repo_id, provenance.commit
    if repo_id is None or commit is None or not _REPO_ID.fullmatch(repo_id) or not _COMMIT.fullmatch(commit):
        return None
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - a folder must not pay for it

        ignored = [*UNREAD, *SPARED]
        return Path(snapshot_download(repo_id, revision=commit, local_files_only=True, ignore_patterns=ignored))
    except (OSError, ValueError, ImportError):
        return None


def shard_groups(sizes: Mapping[str, int], max_shard_size: str | int) -> list[list[str]]:
    """Names grouped by the hub's own splitter: `sizes` in bytes and in order, `max_shard_size` in bytes or as "5GB".

    A tensor above the limit gets a shard of its own, which then stands before the one that was being filled.
    UsageError for a limit that is none.
    """
    check_shard_size(max_shard_size)
    from huggingface_hub import split_state_dict_into_shards_factory  # noqa: PLC0415 - a folder must not pay for it

    split = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return [list(names) for names in split.filename_to_tensors.values()]


def check_shard_size(max_shard_size: str | int) -> None:
    """UsageError unless it is a positive number of bytes or one in the hub's decimal units."""
    if isinstance(max_shard_size, str):
        match = _SHARD_SIZE.fullmatch(max_shard_size.strip())
        valid = match is not None and float(match["number"]) > 0
    else:
        valid = type(max_shard_size) is int and max_shard_size > 0
    if not valid:
        raise UsageError(
            "--max-shard-size is no size",
            found=repr(max_shard_size),
            wanted="a number and KB, MB, GB or TB, such as 5GB",
        )


def _is_folder(source: str) -> bool:
    """False where nothing is there; UsageError where something else is."""
    try:
        mode = Path(source).stat().st_mode
    except ValueError:
        raise UsageError("SRC is no path", found=repr(source)) from None
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENAMETOOLONG} or (
            error.errno == errno.ENOENT and Path(source).is_symlink()
        ):
            raise UsageError(f"SRC cannot be followed: {error.strerror}", file=source) from None
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return False
        raise SystemFailure.from_os(error, source, "look at") from None
    if not stat.S_ISDIR(mode):
        raise UsageError("SRC is no folder", file=source, remedy="name the folder that holds config.json")
    return True


def _folder(source: str) -> Source:
    """A snapshot of a hub cache says by its path what it is, so the manifest is the same as that of the hub id."""
    match = _SNAPSHOT.fullmatch(os.path.realpath(source))
    if match is None:
        return Source(Path(source))
    return Source(Path(source), repo_id=f"{match['owner']}/{match['name']}", commit=match["commit"])


def _download(repo_id: str, revision: str | None, on_progress: Progress | None) -> Source:
    try:
        from huggingface_hub import constants  # noqa: F401, PLC0415 - reads the environment, and may choke on it
    except (ImportError, ValueError) as error:
        raise SystemFailure(f"huggingface_hub cannot be loaded: {error}", remedy="check the HF_ variables") from None
    stop = threading.Event()
    try:
        with _tame_library(), ThreadPoolExecutor(1) as pool:
            future = pool.submit(_snapshot, repo_id, revision, _bars(on_progress, stop))
            try:
                folder = future.result()
            except BaseException:
                stop.set()  # a signal: without it the hub would finish the files that it has begun
                raise
    except FusecheckError:
        raise
    except Exception as error:  # noqa: BLE001 - network, server, disk, three libraries: what they raise is not ours to list
        raise _failure(error, repo_id, revision) from None
    return Source(folder, repo_id, revision, folder.name if _COMMIT.fullmatch(folder.name) else None)


def _snapshot(repo_id: str, revision: str | None, bars: type[tqdm]) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - a folder must not pay for it

    def fetch(wanted: str | None, ignored: tuple[str, ...]) -> Path:
        found = snapshot_download(
            repo_id,
            revision=wanted,
            ignore_patterns=list(ignored),
            tqdm_class=bars,
            library_name="fusecheck",
            library_version=fusecheck.__version__,
        )
        return Path(found)

    folder = fetch(revision, (*UNREAD, *SPARED))
    if _may_need_spared(folder):
        fetch(folder.name, UNREAD)
    return folder


def _may_need_spared(folder: Path) -> bool:
    """Whether the index may name a second copy, or modules.json its folder."""
    index = folder / _INDEX
    return (folder / "modules.json").exists() or (index.is_file() and b'"consolidated' in index.read_bytes())


@contextmanager
def _tame_library() -> Iterator[None]:
    """Silence what the library says on its own (its warnings hold signed URLs), end waits that it leaves endless."""
    from huggingface_hub import constants, get_session  # noqa: PLC0415 - a folder must not pay for it
    from huggingface_hub.utils import logging  # noqa: PLC0415

    def limit_wait(request: object) -> None:
        extensions: dict[str, object] = getattr(request, "extensions", {})
        limits = extensions.get("timeout")
        if isinstance(limits, dict) and not any(limits.values()):
            extensions["timeout"] = dict.fromkeys(limits, float(constants.HF_HUB_DOWNLOAD_TIMEOUT))

    hooks = get_session().event_hooks["request"]
    hooks.append(limit_wait)
    before, step = logging.get_verbosity(), constants.DOWNLOAD_CHUNK_SIZE
    constants.DOWNLOAD_CHUNK_SIZE = _STEP
    if not os.environ.get("HF_HUB_VERBOSITY") and not os.environ.get("HF_DEBUG"):
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = step
        logging.set_verbosity(before)
        hooks.remove(limit_wait)


class _Stopped(KeyboardInterrupt):
    """Ends a download in a worker thread of the hub, which gives up at nothing less."""


def _bars(on_progress: Progress | None, stop: threading.Event) -> type[tqdm]:
    """The hub's progress bar, never drawn: bytes go to `on_progress`, and `stop` ends the download."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, tqdm  # noqa: PLC0415 - as above

    lock = threading.Lock()
    report = None if are_progress_bars_disabled() else on_progress

    class Bar(tqdm):
        def __init__(self, *args: object, **options: object) -> None:
            self._bytes = options.get("unit") == "B" and options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise _Stopped
            with lock:
                self.n += n or 0
                if self._bytes and report is not None and self.total:
                    report(int(self.n), int(self.total))

    return Bar


def _failure(error: Exception, repo_id: str, revision: str | None) -> FusecheckError:
    """What a failed download means for the user: our words, and of the library's only the name of its exception."""
    from huggingface_hub import constants, errors  # noqa: PLC0415 - a folder must not pay for it

    host = constants.ENDPOINT.partition("://")[2].partition("/")[0].rpartition("@")[2] or "the hub"
    cause = _root(error)
    if isinstance(cause, errors.HFValidationError):
        return UsageError("is no folder here, and no possible name of a repository of the hub", file=repo_id)
    if isinstance(cause, errors.HfHubHTTPError):
        return _answered(cause, repo_id, revision, host)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return _offline(error, repo_id)
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError | TimeoutError):
        return SystemFailure.from_os(cause, str(cause.filename or repo_id), "write to the hub cache")
    if type(cause) is OSError:
        return SystemFailure(f"the download from {host} was cut short", file=repo_id, remedy="run again")
    what = f"is no folder here, and the repository of that name cannot be had from {host}: {type(cause).__name__}"
    return SystemFailure(what, file=repo_id, remedy="check the network and HF_ENDPOINT, and run again")


def _root(error: BaseException) -> BaseException:
    """The hub wraps what happened into `LocalEntryNotFoundError`; an answer of the server is itself."""
    from huggingface_hub import errors  # noqa: PLC0415 - a folder must not pay for it

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _answered(error: HfHubHTTPError, repo_id: str, revision: str | None, host: str) -> FusecheckError:
    """The hub, or the store behind it, answered with an error."""
    from huggingface_hub import constants, errors  # noqa: PLC0415 - a folder must not pay for it

    code = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        remedy = f"accept its licence at {host}/{repo_id}, and set HF_TOKEN to a token of that account"
        return UsageError("is a gated repository, and you are not on its list", file=repo_id, remedy=remedy)
    if isinstance(error, errors.RevisionNotFoundError):
        remedy = "check the spelling of --revision"
        return UsageError(f"has no such revision at {host}", file=repo_id, found=revision or "main", remedy=remedy)
    if isinstance(error, errors.DisabledRepoError):
        return UsageError(f"has been disabled at {host}", file=repo_id)
    if isinstance(error, errors.RepositoryNotFoundError):
        what = f"is neither a folder here nor a repository that {host} shows you"
        return UsageError(what, file=repo_id, remedy="check the spelling; a private one needs HF_TOKEN")
    by_hub = str(error.response.request.url).startswith(f"{constants.ENDPOINT}/")
    if isinstance(error, errors.EntryNotFoundError) or not by_hub or code not in _REFUSED:
        whom = host if by_hub else f"the store behind {host}"
        return SystemFailure(f"cannot be downloaded: {whom} answered {code}", file=repo_id, remedy="run again later")
    what = f"is no folder here, and {host} refuses the repository of that name: it answered {code}"
    return UsageError(what, file=repo_id, remedy="check the spelling, HF_TOKEN and HF_ENDPOINT")


def _offline(error: Exception, repo_id: str) -> FusecheckError:
    """Offline mode, and the cache has nothing of that name, or less than all of it."""
    snapshot: str | None = getattr(error, "snapshot_path", None)
    if snapshot is None:
        what = "is no folder here, and the repository of that name is not in the cache, while HF_HUB_OFFLINE is set"
        return SystemFailure(what, file=repo_id, remedy="fill the cache first, or unset HF_HUB_OFFLINE")
    from huggingface_hub import get_cached_repo_tree  # noqa: PLC0415 - a folder must not pay for it

    names = (file.path for file in get_cached_repo_tree(repo_id, revision=Path(snapshot).name))
    absent = sorted(name for name in names if not (Path(snapshot) / name).exists() and not _matches(name, UNREAD))
    missing = [name for name in absent if not _matches(name, SPARED)] or absent
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return CheckpointError(  # side files count too: no later check could miss them
        f"the cached snapshot lacks {', '.join(missing[:3])}{more}, and HF_HUB_OFFLINE is set",
        file=repo_id,
        remedy="complete the download",
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
