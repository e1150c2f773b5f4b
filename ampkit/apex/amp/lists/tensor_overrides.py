"""``apex.amp.lists.tensor_overrides``: the lists for the methods of Tensor."""

import torch

from ....policy.cast_rules import CastKind
from .tables import names, promoted

MODULE = torch.Tensor
FP16_FUNCS = names("torch.Tensor", CastKind.LOWER_PRECISION_FP)
FP32_FUNCS = names("torch.Tensor", CastKind.FP32)
CASTS = promoted("torch.Tensor")
SEQUENCE_CASTS: list[str] = []
