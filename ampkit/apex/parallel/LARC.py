"""``apex.parallel.LARC``: the class of ``ampkit.parallel``."""

from ...optimizers import LARC as LARC
