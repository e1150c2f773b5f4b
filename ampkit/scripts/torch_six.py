"""``torch._six``, which torch had until 2.0: `python -m ampkit run` lends it to scripts of that time, such as Swin's."""

import collections.abc as container_abcs
import math
import queue as queue

inf, nan = math.inf, math.nan
string_classes = (str, bytes)
int_classes = int
FileNotFoundError = FileNotFoundError
PY2, PY3, PY37 = False, True, True

__all__ = [
    "PY2",
    "PY3",
    "PY37",
    "FileNotFoundError",
    "container_abcs",
    "inf",
    "int_classes",
    "istuple",
    "nan",
    "queue",
    "string_classes",
]


def istuple(value: object) -> bool:
    return isinstance(value, tuple)
