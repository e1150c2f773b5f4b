"""The number of times that code reads a value from a tensor on the host, each of which waits for a GPU."""

import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Reads(TorchDispatchMode):
    """A mode that counts operations that read values of a tensor on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
        return func(*args, **(kwargs or {}))


def count_reads(run, device):
    if torch.device(device).type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)
    with Reads() as reads:
        run()
    return reads.count
