"""The dtypes that mixed precision is about."""

import torch

LOWER_PRECISION = (torch.float16, torch.bfloat16)

#: What is cast, and what the compiled kernels take. float64 is left out: a script that uses it needs it.
CASTABLE = frozenset((torch.float32, *LOWER_PRECISION))
