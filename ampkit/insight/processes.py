"""Processes for measurements: a `Worker` is a process that makes an object and calls its methods on request.

O1 patches torch for the whole process, so each way of training needs a process of its own. `ampkit.tune` and benchmarks use them.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from typing import Any

#: An environment for glibc, read when a process starts; mallopt() would keep no block of more than 32 MB. If a process returns
#: freed memory, later page faults disturb the measured times.
KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "2000000000"}


class WorkerError(Exception):
    """An exception of a worker, in a line; ``details`` is its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Worker:
    """A process that holds the object of ``make(*arguments)``; `ask` calls its methods. ``context`` is one of multiprocessing's.

    A spawned process has the variables of ``environment`` in addition to those of this process.
    """

    def __init__(self, context: Any, make: Callable[..., Any], *arguments: Any, environment: Any = ()) -> None:
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._connection, child_end, make, arguments))
        original = dict(os.environ)
        os.environ.update(environment)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(original)
        child_end.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method in the worker and return its result. Raises `WorkerError` if the method raises or the process has ended."""
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
        """End the process, after the call that runs."""
        with contextlib.suppress(OSError):
            self._connection.send((None, ()))
        self._connection.close()
        self._process.join()


def _serve(of_parent: Any, connection: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answer requests in the worker process until it is stopped, or its parent ends, which closes the other end of the pipe."""
    of_parent.close()
    made = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, method_arguments = connection.recv()
            if method is None:
                return
            try:
                made = make(*arguments) if made is None else made
                answer: tuple[bool, Any] = False, getattr(made, method)(*method_arguments)
            except WorkerError as error:  # of a worker of this worker
                answer = True, (str(error), error.details)
            except Exception as error:
                first = next(iter(str(error).splitlines()), "")
                answer = True, (f"{type(error).__name__}: {first}", traceback.format_exc())
            connection.send(answer)
