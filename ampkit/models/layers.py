"""Layers of torch.nn inside a cast model, which take no other dtype than that of their weights.

What a model makes in float32 on its way (an embedding of the time, noise, a state of zeros, rotated queries) meets weights in lower
precision. torch.autocast would cast both; here a hook casts the inputs. A call that would have run without it is left alone,
so nothing is rounded that was not to be.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..casting.tensors import cast_floating
from ..dtypes import CASTABLE
from .keep_fp32 import own_precision

_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers inside ``model`` that have weights in lower precision."""
    one_kernel = {
        inner
        for layer in model.modules()
        if isinstance(layer, nn.TransformerEncoderLayer) and not any(m._forward_pre_hooks for m in layer.modules())
        for inner in layer.modules()
    }  # a hook would have it call its parts instead
    return [
        module
        for module in model.modules()
        if module is not model and _is_layer(module) and module not in one_kernel and own_precision(module) is not None
    ]


def take_the_weights_dtype(layer: nn.Module) -> None:
    """Have the layer's inputs cast to the dtype of its weights."""
    layer.register_forward_pre_hook(_inputs_to_weights, with_kwargs=True)


def _is_layer(module: nn.Module) -> bool:
    """A subclass with a forward of its own may do anything with what it is given, and is left alone."""
    return isinstance(module, _LAYERS) and type(module).forward.__module__.startswith("torch.nn.")


def _inputs_to_weights(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    weight = layer._parameters.get("weight")
    if weight is not None and len(args) == 1 and not kwargs and getattr(args[0], "dtype", None) is weight.dtype:
        return None  # nearly every call, and soon told
    dtype = weight.dtype if weight is not None and weight.dtype in CASTABLE else own_precision(layer)
    if dtype is None:
        return None
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)
