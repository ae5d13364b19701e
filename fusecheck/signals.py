"""Signals as exceptions, put off, or ignored. Done with handlers: a mask would only move them to another thread."""

from __future__ import annotations

import signal
import sys
import threading
from _thread import interrupt_main
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from fusecheck.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from sys import UnraisableHookArgs
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_SECONDS = 0.005
"""How long after a finaliser in which a handler ran, and whose exceptions Python drops, the signal comes again."""


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into `Interrupted` in the main thread.

    Later ones are ignored: they must not stop the cleaning up. A signal that was ignored stays so (nohup). The former
    handlers come back. Outside the main thread: no effect.
    """
    stopping = False

    def stop(signum: int, _: FrameType | None) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise Interrupted(signum)

    def swallowed(lost: UnraisableHookArgs) -> None:
        nonlocal stopping
        if isinstance(lost.exc_value, Interrupted):
            stopping = False
            threading.Timer(_AGAIN_SECONDS, interrupt_main, (lost.exc_value.signum,)).start()
        else:
            former(lost)

    former = sys.unraisablehook
    with _handlers(stop), ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(setattr, sys, "unraisablehook", former)
            sys.unraisablehook = swallowed
        yield


def ignore_signals() -> None:
    """For the exit of a program that has done and told all: a signal must neither change its code nor bring a traceback."""
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextmanager
def signals_held(*, deliver: bool = True) -> Iterator[None]:
    """Put signals off until the block is done; without `deliver`, drop them.

    Done with handlers and not with a mask: another thread would take a masked signal, and Python would still run the
    handler in the main thread.
    """
    came: list[int] = []
    with _handlers(lambda signum, _: came.append(signum)):
        yield
    if came and deliver:
        signal.raise_signal(came[0])


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    with ExitStack() as stack:
        for signum in _SIGNALS if threading.current_thread() is threading.main_thread() else ():
            former = signal.getsignal(signum)
            if former not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, signum, former)
                signal.signal(signum, handler)
        yield
