"""Environment variables, which processes that a script spawns inherit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block, and restore it afterwards."""
    original = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if original is not None:
            os.environ[name] = original
