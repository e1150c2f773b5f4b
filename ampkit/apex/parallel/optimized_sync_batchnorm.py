"""``apex.parallel.optimized_sync_batchnorm``: the class of ``apex.parallel``."""

from .sync_batchnorm import SyncBatchNorm as SyncBatchNorm
