"""Memory of a benchmark: what is freed stays with the process, and what autograd saves is counted.

A benchmark shall not measure where its heap happens to end. glibc gives the top of the heap back to the system and asks for it
again, by the accident of which block lies there, at the price of thousands of page faults a step. Long-running training jobs use
allocators that do not.
"""

import ctypes
import sys

# <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 1 << 25


def keep_freed_memory():
    """Keep freed memory in this process from now on; without effect if the C library is not glibc."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
            mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)


def saved_bytes(step, models):
    """The bytes of everything that autograd saves in ``step()``, each storage counted once, the models' parameters left out."""
    import torch

    parameters = {param.untyped_storage().data_ptr() for model in models for param in model.parameters()}
    alive, sizes = [], {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive.append(storage)  # so that no other storage comes to lie at its address
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step()
    return sum(sizes.values())
