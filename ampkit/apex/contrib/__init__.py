"""``apex.contrib``: of its many packages only ``optimizers``."""
