"""Files into a folder of a shared volume: each whole or not at all, the manifest last and only where none stands.

Several nodes write into one folder at once, so that unlike `fuse` it is not exchanged as a whole. Temporaries lie in
`.fusecheck/` below it, on the same file system, and are locked while their writer lives.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fusecheck.durable import opened, sync_folder
from fusecheck.errors import FusecheckError, SystemFailure, UsageError
from fusecheck.reader import StoredFile
from fusecheck.sidefiles import MANIFEST
from fusecheck.stores.address import is_name
from fusecheck.stores.folder import stored_file
from fusecheck.target import failure

OWN = ".fusecheck"
"""The folder below a target that is ours."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""What file systems without hard links say: object stores that are mounted, FAT, some shares."""
TEMPORARY = "tmp-"
"""How the names of temporaries in it begin."""


class FolderPublisher:
    """Writes below one folder, which is made with the first file. Safe from several threads, processes and nodes."""

    def __init__(self, root: Path, *, plan_digest: str = "", allow_unconditional: bool = False) -> None:
        self._root = root
        self._allow_unconditional = allow_unconditional
        self._plan = hashlib.blake2b(plan_digest.encode(), digest_size=4).hexdigest()
        if os.path.lexists(root) and not root.is_dir():
            raise UsageError("is no folder", file=str(root))

    def check(self) -> None:
        """Write, link and remove a file: by a link alone a commit cannot overwrite another one. SystemFailure."""
        with self._told("write to"), self._temporary("check") as (_, temporary):
            twin = temporary.with_name(f"{temporary.name}-twin")
            self._link(temporary, twin)
            twin.unlink(missing_ok=True)

    def have(self, name: str) -> StoredFile | None:
        """Size and time of the last write of what stands there."""
        try:
            return stored_file(self._path(name).lstat())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise failure(error, name, "look at") from None

    def put(self, name: str, blocks: Iterator[memoryview], size: int) -> StoredFile:
        """Write and fsync under a temporary name, then rename: over what stands there, which is the same or was left."""
        path = self._path(name)
        with self._told("write", name), self._temporary(name) as (handle, temporary):
            written = 0
            for block in blocks:
                left = block
                while left:
                    left = left[os.write(handle, left) :]
                written += len(block)
            if written != size:
                raise FusecheckError("was given as another size", file=name, found=written, wanted=size)
            os.fsync(handle)
            status = os.fstat(handle)
            self._make(path.parent)
            temporary.replace(path)
            _sync(path.parent)
        if status.st_size != size:
            raise SystemFailure("was not stored whole", file=name, found=status.st_size, wanted=size)
        return stored_file(status)

    def commit(self, manifest: bytes) -> bool:
        """Link the manifest to its name, which fails where one stands; then clear what dead runs left."""
        path = self._path(MANIFEST)
        with self._told("write", MANIFEST), self._temporary(MANIFEST) as (handle, temporary):
            left = memoryview(manifest)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
            try:
                if not self._link(temporary, path):
                    temporary.replace(path)
            except FileExistsError:
                if self.read(MANIFEST) != manifest:
                    raise taken(str(self._root)) from None
                return False
            _sync(path.parent)
        self._sweep("")
        return True

    def list(self) -> Mapping[str, StoredFile]:
        """Every file, link or other entry that is no folder, temporaries apart; none where there is no folder yet."""
        found: dict[str, StoredFile] = {}

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        with self._told("list"):
            for folder, folders, names in os.walk(self._root, onerror=fail):
                for name in [*names, *(name for name in folders if Path(folder, name).is_symlink())]:
                    path = Path(folder, name)
                    inner = path.relative_to(self._root).as_posix()
                    if not inner.startswith(f"{OWN}/{TEMPORARY}"):
                        with suppress(FileNotFoundError):  # removed meanwhile
                            found[inner] = stored_file(path.lstat())
        return dict(sorted(found.items()))

    def read(self, name: str) -> bytes:
        """All bytes of a small file."""
        try:
            return self._path(name).read_bytes()
        except OSError as error:
            raise failure(error, name, "read") from None

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._told("remove", name):
            self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is held between two calls."""

    def _link(self, temporary: Path, path: Path) -> bool:
        """Give a file a second name. False where the file system has none, that is allowed, and nothing stands there."""
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not self._allow_unconditional:
                raise SystemFailure(
                    "the file system has no hard links, so that two runs could overwrite each other's commit",
                    file=str(self._root),
                    remedy="give --allow-unconditional if no other run writes there",
                ) from None
            if os.path.lexists(path):
                raise FileExistsError from None
            return False
        return True

    def _path(self, name: str) -> Path:
        if not is_name(name):
            raise FusecheckError("is no name of a file", found=repr(name))
        return self._root / name

    @contextmanager
    def _told(self, doing: str, name: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise failure(error, str(self._root / name if name else self._root), doing) from None

    def _make(self, folder: Path) -> None:
        """Make a folder below the root, and the root, durably."""
        if not folder.is_dir():
            if folder != self._root.parent:
                self._make(folder.parent)
            folder.mkdir(parents=folder == self._root.parent, exist_ok=True)
            _sync(folder.parent)

    @contextmanager
    def _temporary(self, name: str) -> Iterator[tuple[int, Path]]:
        """A new locked file in our own folder, gone afterwards unless it was renamed; those that died for `name` go."""
        self._make(self._root / OWN)
        mark = f"{self._plan}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}-"
        self._sweep(mark)
        path = self._root / OWN / f"{TEMPORARY}{mark}"
        handle = -1
        try:
            while handle < 0:
                path = path.with_name(f"{TEMPORARY}{mark}{os.urandom(4).hex()}")
                handle = _create_locked(path)
            yield handle, path
        finally:
            if handle >= 0:
                os.close(handle)
            path.unlink(missing_ok=True)

    def _sweep(self, mark: str) -> None:
        """Remove temporaries that nobody holds; after a commit (no mark) those too of which no locks tell."""
        for path in (self._root / OWN).glob(f"{TEMPORARY}{mark}*"):
            with suppress(OSError):
                handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _lock(handle) or (not mark and _lock(handle) is None):
                        path.unlink(missing_ok=True)
                finally:
                    os.close(handle)


def _lock(handle: int) -> bool | None:
    """Whether the file is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _create_locked(path: Path) -> int:
    """A new file, open for writing; -1 where another run's sweep took it before it was locked."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with suppress(FileNotFoundError):
        if _lock(handle) is not False and os.path.samestat(os.fstat(handle), path.stat()):
            return handle
    os.close(handle)
    return -1


def taken(target: str) -> UsageError:
    """Another result has been committed there."""
    return UsageError("OUT holds another committed result", file=target, remedy="choose a new folder or prefix")


def _sync(folder: Path) -> None:
    with opened(folder) as handle:
        sync_folder(handle)
