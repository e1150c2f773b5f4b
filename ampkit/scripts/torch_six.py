"""A replacement for ``torch._six``, removed in torch 2.0: ``python -m ampkit run`` provides it to older scripts, such as Swin's."""

import collections.abc
import math
import queue as queue

container_abcs = collections.abc
inf, nan = math.inf, math.nan
string_classes = (str, bytes)
int_classes = int
FileNotFoundError = FileNotFoundError
PY2, PY3, PY37 = False, True, True


def istuple(value: object) -> bool:
    return isinstance(value, tuple)
