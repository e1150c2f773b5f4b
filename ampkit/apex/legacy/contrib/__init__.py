"""``apex.contrib``: of its many packages ``optimizers`` and ``clip_grad``."""

from . import optimizers as optimizers  # as amp did in Apex: scripts say apex.contrib.optimizers after import apex
