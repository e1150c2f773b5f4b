"""Recurrent layers on GPUs, where cuDNN takes the weights of a layer in one chunk of memory.

Casts that are made one by one lie apart: in every call torch copies them together, and warns. torch.autocast casts the weights
of a layer into one chunk, but to float16 whatever its precision is (``_cudnn_rnn_cast_reflatten`` in torch's AutocastRNN.cpp).
So float16 is left to it. Other precisions are cast like all weights, and torch.autocast is kept from making float16 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .state import CastingState

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def in_one_chunk(wrapper: Callable, original: Callable, state: CastingState) -> Callable:
    """``wrapper`` of one of `RECURRENT`, but for calls of cuDNN in float16, whose weights torch.autocast casts."""

    def recurrent(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and torch.backends.cudnn.is_acceptable(args[0]) and state.is_on():
            if (state.other_precision() or state.lower_precision) is torch.float16:
                return original(*args, **kwargs)
        return wrapper(*args, **kwargs)

    return recurrent
