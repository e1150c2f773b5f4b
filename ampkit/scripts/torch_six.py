"""``torch._six``, which torch had until 2.0: `python -m ampkit run` lends it to scripts of that time, such as Swin's."""

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
