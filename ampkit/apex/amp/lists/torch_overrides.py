"""``apex.amp.lists.torch_overrides``: the lists for the functions of torch."""

import torch

from ....policy.cast_rules import CastKind
from ..rnn_compat import RNN_NAMES
from .tables import names, promoted

MODULE = torch
_RECURRENT = {*RNN_NAMES, *(f"{name}_cell" for name in RNN_NAMES)}
FP16_FUNCS = [name for name in names("torch", CastKind.LOWER_PRECISION_FP) if name not in _RECURRENT]
FP32_FUNCS = names("torch", CastKind.FP32)
CASTS = promoted("torch")
SEQUENCE_CASTS = ["cat", "stack"]
