"""``apex.contrib``: only ``optimizers`` and ``clip_grad`` of its many packages."""

from . import optimizers as optimizers  # as amp did in Apex: scripts say apex.contrib.optimizers after import apex
