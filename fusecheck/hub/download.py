"""A snapshot of the hub, downloaded or taken from the cache."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import fusecheck
from fusecheck.errors import FusecheckError, SystemFailure
from fusecheck.hub.failure import failure
from fusecheck.hub.patterns import SPARED, UNREAD
from fusecheck.reader import Progress

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm


_STEP = 256 * 1024
"""Bytes of a download between two looks at whether to stop; the hub's own 10 MB times eight files last too long."""
_INDEX = "model.safetensors.index.json"


def download(repo_id: str, revision: str | None, on_progress: Progress | None) -> Path:
    """The folder of a snapshot, complete but for what is never read. Every failure in our words."""
    try:
        from huggingface_hub import constants  # noqa: F401, PLC0415 - reads the environment, and may choke on it
    except (ImportError, ValueError) as error:
        raise SystemFailure(f"huggingface_hub cannot be loaded: {error}", remedy="check the HF_ variables") from None
    stop = threading.Event()
    try:
        with _tame_library(), ThreadPoolExecutor(1) as pool:
            future = pool.submit(_snapshot, repo_id, revision, _bars(on_progress, stop))
            try:
                return future.result()
            except BaseException:
                stop.set()  # a signal: without it the hub would finish the files that it has begun
                raise
    except FusecheckError:
        raise
    except Exception as error:  # noqa: BLE001 - network, server, disk, three libraries: what they raise is not ours to list
        raise failure(error, repo_id, revision) from None


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
