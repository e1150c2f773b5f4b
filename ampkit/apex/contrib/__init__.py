"""``apex.contrib``: of its many packages ``optimizers`` and ``clip_grad``."""
