"""stdout and stderr, whatever they are: closed, full, a pipe whose reader has gone, a terminal of few characters."""

from __future__ import annotations

import os
import sys


def prepare_streams() -> None:
    """A terminal that cannot show a character gets an escape, not an exception; a closed stream swallows.

    Descriptors 0 to 2 are filled first: an output file that took number 1 would get what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def discard(descriptor: int) -> None:
    """Point stdout or stderr at nothing, so that the interpreter does not complain at exit about a reader that has gone."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
