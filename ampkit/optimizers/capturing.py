"""What must not begin while a CUDA graph is captured."""

from __future__ import annotations

import torch

from ..errors import ConfigurationError


def refuse_to_begin(what: str, device: torch.device) -> None:
    """Raise where a graph is captured before the first iteration: what begins in it begins anew at each replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            f"A CUDA graph is captured before the first iteration: each replay would begin with {what} anew. Run an iteration "
            "or two before the capture, on a side stream (see examples/recipes/cuda_graph.py)."
        )
