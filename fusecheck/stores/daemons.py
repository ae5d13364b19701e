"""Threads that end with the process: those of concurrent.futures keep it alive until a server that is silent answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Daemons:
    """Up to `most` threads, started as they are needed; whoever waits for what they do can be interrupted by a signal."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = self._idle = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do it in one of the threads; what it raises is raised by the future."""
        future: Future[T] = Future()

        def carry_out() -> None:
            if self._closed.is_set() or not future.set_running_or_notify_cancel():
                future.cancel()
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)

        with self._lock:
            self._queue.put(carry_out)
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


def aside(work: Callable[[], T]) -> T:
    """Do it in a thread of its own and wait, so that a signal interrupts the wait."""
    thread = Daemons(1, "fusecheck-ask")
    try:
        return thread.submit(work).result()
    finally:
        thread.close()
