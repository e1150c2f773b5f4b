"""``apex.contrib``: its packages ``optimizers`` and ``clip_grad``, of many."""

from . import optimizers as optimizers  # as amp did in Apex: scripts say apex.contrib.optimizers after import apex
