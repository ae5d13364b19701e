"""Temp folders beside what they will become: named after it, locked, removable whatever is in them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

TEMP_NAME = re.compile(r"\.fusecheck-[0-9a-f]{16}-[0-9a-f]{8}")


def make_temp(beside: Path, warnings: list[str]) -> tuple[Path, int]:
    """Make and lock a temp folder; -1 where the file system has no locks. Call it while signals are held.

    Another run's sweep may lock or remove the folder before we lock it. Then it is theirs, and we take a new name: no
    run ever waits for another one.
    """
    digest = hashlib.blake2b(os.fsencode(beside.name), digest_size=8).hexdigest()
    while True:
        path = beside.parent / f".fusecheck-{digest}-{os.urandom(4).hex()}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        handle = -1
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), path.stat()):
                return path, handle
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            if handle >= 0:
                warnings.append(f"{beside.parent}: no locks here ({error.strerror}): what dead runs left stays")
                return path, handle
            remove_tree(path)
            raise
        release(handle)


def release(handle: int) -> None:
    """Let go of the lock that `make_temp` gave, if it gave one."""
    if handle >= 0:
        os.close(handle)


def remove_tree(path: Path) -> bool:
    """Remove what is there, if anything; whether it is gone. Never raises: it must not hide the error that led here."""
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return True
    with suppress(OSError):  # folders that forbid to remove what is in them
        path.chmod(0o700)
        for folder, names, _ in os.walk(path):
            for inner in (Path(folder) / name for name in names):
                if not inner.is_symlink():
                    inner.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # the way that needs no file descriptor
        path.rmdir()
    return not os.path.lexists(path)
