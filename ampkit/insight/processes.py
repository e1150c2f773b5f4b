"""Processes to measure in: a `Worker` is one that makes an object and calls its methods when it is asked to.

O1 patches torch for the whole process, so that a way of training needs its own. `ampkit.tune` and benchmarks use these.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from typing import Any

#: Environments for glibc, read when a process starts; mallopt() would keep no block of more than 32 MB. A process that gives
#: freed memory back asks for it again by page faults, which disturbs times; one that keeps it hides when it held most.
KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "2000000000"}
GIVE_BACK = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}


class WorkerError(Exception):
    """What a worker raised, in a line; ``details`` is its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Worker:
    """A process in which ``make(*arguments)`` is an object, whose methods `ask` calls. ``context`` is one of multiprocessing's.

    One that is spawned has ``environment`` beside that of this process.
    """

    def __init__(self, context: Any, make: Callable[..., Any], *arguments: Any, environment: Any = ()) -> None:
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._connection, theirs, make, arguments))
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Raises `WorkerError` for what the method raises, and where the process has ended."""
        try:
            self._connection.send((method, arguments))
            is_error, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            killed = ": killed, perhaps for want of memory" if code == -9 else ""
            raise WorkerError(f"its process ended with exit code {code}{killed}") from None
        if is_error:
            raise WorkerError(*value)
        return value

    def stop(self) -> None:
        """End the process, when it is done with what it was asked for."""
        with contextlib.suppress(OSError):
            self._connection.send((None, ()))
        self._connection.close()
        self._process.join()


def _serve(of_parent: Any, connection: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The body of the process, which ends where its parent has ended: nothing holds the other end of the pipe then."""
    of_parent.close()
    made = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, given = connection.recv()
            if method is None:
                return
            try:
                made = make(*arguments) if made is None else made
                answer: tuple[bool, Any] = False, getattr(made, method)(*given)
            except WorkerError as error:  # of one that this one asked
                answer = True, (str(error), error.details)
            except Exception as error:
                first = next(iter(str(error).splitlines()), "")
                answer = True, (f"{type(error).__name__}: {first}", traceback.format_exc())
            connection.send(answer)
