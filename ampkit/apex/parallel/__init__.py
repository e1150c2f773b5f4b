"""``apex.parallel``: DistributedDataParallel, Reducer, and batch norm over all processes; LARC is in its own module."""

from torch.distributed import ReduceOp as ReduceOp

from . import LARC as LARC
from .distributed import DistributedDataParallel as DistributedDataParallel
from .distributed import Reducer as Reducer
from .sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from .sync_batchnorm import convert_syncbn_model as convert_syncbn_model
from .sync_batchnorm import create_syncbn_process_group as create_syncbn_process_group
