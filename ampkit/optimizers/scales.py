"""Arithmetic with loss scales, which are numbers (static) or tensors of one element (dynamic) that the host does not read."""

from __future__ import annotations

import torch

from .. import kernels
from ..errors import ConfigurationError
from ..kernels.reference import Number as Scale
from ..kernels.reference import moved_to
from ..sharding import by_placement, is_sharded, total_over

__all__ = ["Scale", "moved_to", "norm_of", "refuse_to_begin"]


def refuse_to_begin(state: str, device: torch.device) -> None:
    """Raise where a graph is captured before the first iteration: state that begins in it begins anew at each replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            f"A CUDA graph is captured before the first iteration: each replay would begin with {state} anew. Run an iteration "
            "or two before the capture, on a side stream (see examples/recipes/cuda_graph.py)."
        )


def norm_of(gradients: list[torch.Tensor], factor: Scale | None = None) -> torch.Tensor | None:
    """The Euclidean norm of all gradients, over all processes: float32, shape [1]; None of none. ``factor`` multiplies it."""
    if not gradients:
        return None
    if not any(map(is_sharded, gradients)):
        return kernels.multi_tensor_unscale_l2norm(gradients, None, factor)[0]
    squares = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for parts, groups in by_placement(gradients):
        square = total_over(groups, kernels.multi_tensor_unscale_l2norm(parts, None, factor)[0].double().square())
        squares = squares + moved_to(square, squares.device)
    return squares.sqrt().float().reshape(1)
