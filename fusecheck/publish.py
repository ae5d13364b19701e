"""Nothing half-written: OUT is absent or complete, after a signal, a full disk, a crash or a power cut.

A run writes into a temp folder beside OUT and renames it onto OUT once every byte is on the disk. The temp folder's
name holds a hash of OUT's name, so that a name of 250 characters works, and its owner holds a lock (flock) on it:
whatever carries such a name and is not locked belongs to a dead run, and the next run into that parent removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fusecheck.durable import exchange, opened, sync_folder
from fusecheck.errors import Interrupted, SystemFailure
from fusecheck.signals import signals_held
from fusecheck.target import OWN_MACHINE, Target, failure, place_of
from fusecheck.temporary import TEMP_NAME, make_temp, release, remove_tree

if TYPE_CHECKING:
    from types import TracebackType

_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


class TargetTaken(SystemFailure):
    """Something appeared at OUT while we wrote: another run won. It may be this very result: the caller looks."""


def staging_folder(target: Target) -> Staging:
    """Make the temp folder of `target` for a `with` block: write below its `path`, then call its `commit`."""
    return Staging(target)


@dataclass(slots=True)
class Staging:
    """The temp folder of one run. Leaving the `with` block without `commit` removes it and the parents made for it."""

    target: Target
    path: Path = field(init=False, default=Path())
    """Where to write, between `with` and `commit`. Every file must be fsynced by whoever wrote it."""
    warnings: list[str] = field(init=False, default_factory=list)
    """What did not work although OUT is right; complete after the `with` block."""
    committed: bool = field(init=False, default=False)
    _lock: int = field(init=False, default=-1)
    _parents: list[Path] = field(init=False, default_factory=list)

    def __enter__(self) -> Self:
        # A class and not a generator: between this `return` and the block Python does not look for signals.
        try:
            with signals_held():
                self._make_parents()
            self._sweep()
            with signals_held():
                self.path, self._lock = make_temp(self.target.path, self.warnings)
            if self.target.replaces:
                self._try_exchange()
            return self  # noqa: TRY300  # nothing may happen behind the `except`
        except BaseException as error:
            self._clean()
            if isinstance(error, OSError):
                raise failure(error, self.target.shown, "create a folder beside it") from error
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._clean()

    def commit(self) -> None:
        """Make everything durable and let it appear as OUT in one step. Once it has appeared, nothing takes it back.

        TargetTaken: another run was faster. SystemFailure: the rename, or an fsync before or after it, failed.
        """
        try:
            self._commit()
        except OSError as error:
            raise failure(error, self.target.shown, "finish it") from error

    def _commit(self) -> None:
        for folder, _, _ in os.walk(self.path, topdown=False, onerror=_reraise):
            with opened(Path(folder)) as handle:
                self._sync(handle, folder)
        parents = dict.fromkeys([self.target.path.parent, *(folder.parent for folder in self.target.missing)])
        with ExitStack() as stack:
            # Opened before the rename, so that a lack of file descriptors cannot come after it.
            handles = [(stack.enter_context(opened(parent)), str(parent)) for parent in parents]
            with signals_held():
                self._rename()
                self.committed = True
                try:
                    for handle, name in handles:
                        self._sync(handle, name)
                finally:
                    self._discard()

    def _make_parents(self) -> None:
        for folder in self.target.missing:
            with suppress(FileExistsError):  # another run makes the same one; its durability is then our matter too
                folder.mkdir()
                self._parents.append(folder)

    def _sweep(self) -> None:
        """Remove what dead runs left in the parent."""
        parent = self.target.path.parent
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries if TEMP_NAME.fullmatch(entry.name))
        place = place_of(parent) if names else None
        if place and place.kind not in OWN_MACHINE:
            self._warn(f"{parent}: {names[0]} was left alone: its run may be alive on another machine")
            return
        for path in (parent / name for name in names):
            with suppress(OSError), ExitStack() as stack:
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not remove_tree(path):
                    self._warn(f"{path}: left by a run that died, and cannot be removed")

    def _try_exchange(self) -> None:
        one, other = self.path / "one", self.path / "other"
        one.mkdir()
        other.mkdir()
        try:
            exchange(one, other)
        except OSError as error:
            raise SystemFailure(
                f"this file system cannot exchange two folders in one step ({error.strerror}), so --force is not safe",
                file=self.target.shown,
                remedy="write to a new folder",
            ) from error
        one.rmdir()
        other.rmdir()

    def _rename(self) -> None:
        out = self.target
        try:
            if out.replaces:
                with suppress(FileNotFoundError):
                    exchange(self.path, out.path)
                    return
            self.path.rename(out.path)
        except OSError as error:
            if error.errno in _TAKEN:
                raise TargetTaken("something appeared there while this run wrote", file=out.shown) from error
            raise failure(error, out.shown, "rename the finished folder to it") from error

    def _sync(self, handle: int, name: str) -> None:
        try:
            refusal = sync_folder(handle)
        except OSError as error:
            state = "complete, but it may not survive a power cut: " if self.committed else ""
            raise SystemFailure(f"{state}cannot fsync {name}: {error.strerror}", file=self.target.shown) from error
        if refusal:
            self._warn(f"{self.target.shown}: this file system cannot fsync a folder ({refusal})")

    def _discard(self) -> None:
        """Remove whatever carries the temp name: what was half written, or after an exchange the old OUT."""
        if self.path.name and not remove_tree(self.path):
            self._warn(f"{self.path}: this temporary folder cannot be removed")

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _clean(self) -> None:
        while True:
            try:
                with signals_held(deliver=False):
                    self._tidy()
            except (Interrupted, KeyboardInterrupt):  # it came just before the hold; the answer is given already
                continue
            return

    def _tidy(self) -> None:
        self._discard()
        if not self.committed:
            with suppress(OSError):
                while self._parents:
                    self._parents.pop().rmdir()
        release(self._lock)
        self._lock = -1


def _reraise(error: OSError) -> None:
    raise error
