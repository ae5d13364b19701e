"""Threads that end with the process: those of concurrent.futures keep it alive until a server that is silent answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar, cast

T = TypeVar("T")

LOOK_SECONDS = 0.5
"""How long one wait of the main thread lasts: a signal that falls just before it begins interrupts only the next."""


class Daemons:
    """Up to `most` threads, started as they are needed; whoever waits for what they do can be interrupted by a signal."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = self._idle = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do it in one of the threads; what it raises is raised by the future."""
        future: Future[T] = Future()
        with self._lock:
            self._queue.put(lambda: future.cancel() if self._closed.is_set() else _carry_out(future, work))
            if self._idle:
                self._idle -= 1
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Begin nothing more."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                work = self._queue.get(timeout=1)
            except queue.Empty:
                continue
            work()
            with self._lock:
                self._idle += 1


def apart(work: Callable[[], T], name: str) -> Future[T]:
    """Do it in a thread of its own, however many there are."""
    future: Future[T] = Future()
    threading.Thread(target=_carry_out, args=(future, work), name=name, daemon=True).start()
    return future


def aside(work: Callable[[], T]) -> T:
    """Do it in a thread of its own and wait, so that a signal interrupts the wait."""
    return result_of(apart(work, "fusecheck-ask"))


def result_of(future: Future[T]) -> T:
    """Wait for it as a main thread can, which has to look for signals."""
    wait_for_one(future)
    return future.result()


def wait_for_one(*futures: Future[T] | Future[None]) -> None:
    """Until one of them is done, in slices."""
    while not any(future.done() for future in futures):
        wait(cast("list[Future[object]]", futures), timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)


def _carry_out(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits
        future.set_exception(error)
