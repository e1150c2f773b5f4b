"""``apex.normalization.fused_layer_norm``: layer norm and RMS norm over torch's kernels.

The plain forms return the input's dtype, the mixed ones the parameters', whatever the two are. Inside
``torch.autocast`` the input counts as autocast's dtype. Statistics are at least float32. If input and parameters have
different dtypes, the wider one is used, so that half-precision activations and float32 weights (O1) go together.
``memory_efficient`` is accepted everywhere: it changed what Apex's kernels kept for the backward pass, not their results.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...casting.engine import active_casting
from ...dtypes import LOWER_PRECISION

Shape = int | Sequence[int]


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Apply layer norm without parameters."""
    input = _in_autocast(input)
    return _layer_norm(input, None, None, normalized_shape, eps, input.dtype)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Apply layer norm, with the result in the input's dtype."""
    input = _in_autocast(input)
    return _layer_norm(input, weight, bias, normalized_shape, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Apply layer norm, with the result in the parameters' dtype."""
    return _layer_norm(_in_autocast(input), weight, bias, normalized_shape, eps, weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Apply RMS norm without parameters."""
    input = _in_autocast(input)
    return _rms_norm(input, None, normalized_shape, eps, input.dtype)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Apply RMS norm, with the result in the input's dtype."""
    input = _in_autocast(input)
    return _rms_norm(input, weight, normalized_shape, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Apply RMS norm, with the result in the weight's dtype."""
    return _rms_norm(_in_autocast(input), weight, normalized_shape, eps, weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Apply RMS norm, with the result in the weight's dtype where that is a lower precision, else in the input's."""
    low = weight is not None and weight.dtype in LOWER_PRECISION
    return _rms_norm(input, weight, normalized_shape, eps, weight.dtype if low else input.dtype)


class FusedLayerNormAffineFunction:
    """The namespace of ``.apply`` for scripts that call it: autograd needs no function of its own here."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormFunction:
    """The namespace of ``.apply`` without parameters."""

    apply = staticmethod(fused_layer_norm)


class FusedRMSNormAffineFunction:
    """The namespace of ``.apply`` of the RMS norm."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormFunction:
    """The namespace of ``.apply`` of the RMS norm without a weight."""

    apply = staticmethod(fused_rms_norm)


class _FusedNorm(nn.Module):
    #: The functions with and without parameters, and the parameters' names.
    _affine: Callable[..., Tensor]
    _plain: Callable[..., Tensor]
    _names: tuple[str, ...]

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = _as_shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in self._names:
            values = nn.Parameter(torch.empty(self.normalized_shape)) if elementwise_affine else None
            self.register_parameter(name, values)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in self._names if self.elementwise_affine else ():
            nn.init.constant_(getattr(self, name), float(name == "weight"))

    def forward(self, input: Tensor) -> Tensor:
        function = self._affine if self.elementwise_affine else self._plain
        parameters = [getattr(self, name) for name in self._names] if self.elementwise_affine else []
        return function(input, *parameters, self.normalized_shape, self.eps, self.memory_efficient)

    def extra_repr(self) -> str:
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_FusedNorm):
    """Layer norm with the output in the input's dtype."""

    _affine, _plain, _names = staticmethod(fused_layer_norm_affine), staticmethod(fused_layer_norm), ("weight", "bias")


class FusedRMSNorm(_FusedNorm):
    """RMS norm with the output in the input's dtype; it has a weight and no bias."""

    _affine, _plain, _names = staticmethod(fused_rms_norm_affine), staticmethod(fused_rms_norm), ("weight",)


class _WithParameters:
    """A mixin before a norm whose output takes the parameters' dtype, which always has parameters."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: object
    ) -> None:
        name = type(self).__name__
        if not kwargs.pop("elementwise_affine", True):
            raise RuntimeError(
                f"{name} does not support elementwise_affine=False: its output takes the parameters' dtype. Use "
                f"{name.removeprefix('Mixed')}."
            )
        if kwargs:
            raise TypeError(f"{name} got an unexpected keyword argument {next(iter(kwargs))!r}")
        super().__init__(normalized_shape, eps, True, memory_efficient)


class MixedFusedLayerNorm(_WithParameters, FusedLayerNorm):
    """Layer norm with the output in the parameters' dtype."""

    _affine = staticmethod(mixed_dtype_fused_layer_norm_affine)


class MixedFusedRMSNorm(_WithParameters, FusedRMSNorm):
    """RMS norm with the output in the weight's dtype."""

    _affine = staticmethod(mixed_dtype_fused_rms_norm_affine)


def _layer_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    input, weight, bias = _in_one_dtype(input, weight, bias)
    return F.layer_norm(input, _as_shape(normalized_shape), weight, bias, eps).to(dtype)


def _rms_norm(input: Tensor, weight: Tensor | None, normalized_shape: Shape, eps: float, dtype: torch.dtype) -> Tensor:
    input, weight = _in_one_dtype(input, weight)
    return F.rms_norm(input, _as_shape(normalized_shape), weight, eps).to(dtype)


def _in_one_dtype(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast tensors to the widest of their dtypes; those of one dtype stay unchanged, since torch accumulates in float32."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) == 1:
        return list(tensors)
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return [None if tensor is None else tensor.to(widest) for tensor in tensors]


def _in_autocast(input: Tensor) -> Tensor:
    """Cast the input to the dtype of a script's torch.autocast. O1 switches that on too, and leaves norms in the input's dtype."""
    device_type = input.device.type
    if input.dtype is torch.float64 or not torch.is_autocast_enabled(device_type):
        return input
    casting = active_casting()
    if casting is not None and casting.is_on():
        return input
    return input.to(torch.get_autocast_dtype(device_type))


def _as_shape(normalized_shape: Shape) -> torch.Size:
    return torch.Size((normalized_shape,) if isinstance(normalized_shape, numbers.Integral) else normalized_shape)
