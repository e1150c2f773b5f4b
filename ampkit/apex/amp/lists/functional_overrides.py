"""``apex.amp.lists.functional_overrides``: the lists for torch.nn.functional."""

import torch.nn.functional

from ....policy.cast_rules import CastKind
from .tables import names

MODULE = torch.nn.functional
FP16_FUNCS = [name for name in names("torch.nn.functional", CastKind.LOWER_PRECISION_FP) if name != "prelu"]
FP32_FUNCS = names("torch.nn.functional", CastKind.FP32)
BANNED_FUNCS = [
    (name, f"F.{name} is refused for lower-precision tensors: see the error that it raises.")
    for name in names("torch.nn.functional", CastKind.BANNED)
]
