"""The reason why an operator made inf or NaN of finite numbers: the kind, and the numbers that prove it.

The operator runs again in float64 on the same inputs. If that result is finite, the number format was too small. Otherwise the
inputs are outside of the function's domain, and are examined.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..sharding import local
from .watching import COMPLEX, FLOATING, Call, arguments_written, cast, stored_in, tensors_in
from .words import short

OVERFLOW = "overflow of the format"
KERNEL = "a wrong result of the kernel"
DIVISION = "division by zero"
LOG = "log of zero"
DIFFERENCE = "inf - inf"
PRODUCT = "0 * inf"
SCALE = "the loss scale itself"
MASK = "inf that the script writes"
GIVEN = "not finite before the iteration"
DOMAIN = "outside of the function's domain"
SPIKE = "gradients that spike"
DIVERGES = "the run diverges"
ONE_ROW = "a deviation of one element"

#: Inputs up to this size cause no overflow: exp() of them fits into float32.
_LEAST_TO_OVERFLOW = 80.0
#: Changes to a model that fails in float32 too.
HINTS = {
    KERNEL: "compute the function in float32, or with another version of torch, and report it",
    OVERFLOW: "bring its input down: clamp it, or divide before the function; torch.softmax and logsumexp subtract the largest",
    DIVISION: "keep the divisor from 0, or what a root is taken of, before it: x.clamp(min=eps).sqrt()",
    LOG: "keep its input from 0: clamp(min=eps), log_softmax or logsigmoid; torch.where does not stop the gradient",
    DIFFERENCE: "leave at least one element of each row unmasked",
    PRODUCT: "mask with torch.where, which multiplies nothing",
    DOMAIN: "clamp its input to the domain",
    SPIKE: "most likely in float32 too: bring the number down, or up from 0, as by a larger eps; clip_grad_norm_ bounds the rest",
    DIVERGES: "most likely in float32 too: lower the learning rate, or warm it up",
    ONE_ROW: "unbiased=False divides by 1 and not by 0; drop_last=True of the DataLoader leaves out a last batch of one row",
}
#: The kinds that a run with growing numbers may end in.
ENDS_OF_GROWTH = (OVERFLOW, KERNEL, DIFFERENCE, PRODUCT, GIVEN)

_DIVISORS = {"div": 1, "true_divide": 1, "remainder": 1, "reciprocal": 0, "rsqrt": 0, "addcdiv": 2, "pow": 0}
_PRODUCTS = {"mul", "matmul", "linear", "conv", "dot", "mv", "baddbmm", "addcmul", "grouped_mm"}


def explain(call: Call, inputs: Any, made: list[torch.Tensor]) -> tuple[str, str, float | None]:
    """Return the kind, the numbers in words, and the largest number that the result needs (None if unknown). ``inputs`` are those
    before the call. A tensor in ``made``, which the call returned or wrote, has inf or NaN.
    """
    values = [readable(value) for value in tensors_in(inputs) if value.is_floating_point() or value.is_complex()]
    finite = [value[value.isfinite()] for value in values]
    size = max((x.abs().double().max().item() for x in finite if x.numel()), default=math.inf)
    number, bad = next((i, x) for i, x in enumerate(made) if not is_finite(x))
    result, exact = readable(bad), dict(enumerate(map(readable, _in_float64(call, inputs)))).get(number)
    wrong = ~result.isfinite()
    if exact is not None and exact.shape == wrong.shape and exact[wrong].isfinite().all():
        needs = exact[wrong].abs().max().item()
        divisor = divisor_of(call.name, inputs[0])
        by = "" if divisor is None or not divisor.numel() else f", min |divisor| = {float(divisor.abs().min()):.4g}"
        end = torch.finfo(bad.dtype).max
        text = f"max |input| = {size:.4g}{by}, {subject(call)} needs {needs:.4g}, {short(bad.dtype)} ends at "
        return KERNEL if needs <= end else OVERFLOW, text + (f"{end:.0f}" if end < 1e6 else f"{end:.2g}"), needs
    for kind, text in _outside(call, inputs, values, wrong):
        return kind, text, None
    if result.isinf().any() and size > _LEAST_TO_OVERFLOW:
        return OVERFLOW, f"max |input| = {size:.4g}, {subject(call)} needs more than float64 has", None
    return DOMAIN, f"{subject(call)} is not defined for inputs up to {size:.4g}", None


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local values of a tensor; floating-point ones of one byte, with few operators, as float32."""
    values = stored_in(local(tensor.detach()))
    return values.float() if values.is_floating_point() and values.element_size() < 2 else values


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, NaN if there is a NaN; 0 for lazy, meta, empty and integer tensors."""
    if is_lazy(tensor) or tensor.is_meta:
        return 0.0
    values = readable(tensor)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point() or not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def is_finite(tensor: torch.Tensor) -> bool:
    return math.isfinite(largest(tensor))


def _outside(call: Call, inputs: Any, values: list[torch.Tensor], wrong: torch.Tensor) -> Any:
    """Yield the kinds that the inputs give evidence of, the most specific first, each with its numbers in words."""
    if any(value.isinf().any() for value in values):
        kind = PRODUCT if call.name in _PRODUCTS else DIFFERENCE
        infinite = next(value for value in values if value.isinf().any())
        share = _share(infinite.isinf())
        yield kind, f"{share} elements of its input are infinite, and {subject(call)} makes NaN of them"
    if (divisor := divisor_of(call.name, inputs[0])) is not None and (divisor == 0).any():
        kind = LOG if call.backward and "log" in call.function.rpartition(".")[2] else DIVISION
        yield kind, f"the divisor is 0 in {_share(divisor == 0)} elements, where {subject(call)} gives inf or NaN"
    first = values[0] if values else None
    if call.name.startswith(("std", "var")) and wrong.any() and first is not None and first.numel():
        yield ONE_ROW, f"{subject(call)} of one element, divided by a number of elements less 1, which is 0"
    if call.name in ("log", "log2", "log10") and first is not None and (first == 0).any():
        yield LOG, f"its input is 0 in {_share(first == 0)} elements, and log(0) is -inf"
    is_of_positive = call.name in ("log", "log2", "log10", "sqrt", "rsqrt", "pow")
    if is_of_positive and first is not None and not first.is_complex() and (first < 0).any():
        yield DOMAIN, f"{subject(call)} of negative numbers, the lowest is {first.min().item():.4g}"
    if first is not None and not first.numel():
        yield DIVISION, f"{subject(call)} of no elements"
    if call.name.startswith("nll_loss"):
        yield DIVISION, "every target is ignored: the mean is over 0 elements"


def _in_float64(call: Call, inputs: Any) -> list[torch.Tensor]:
    """Run the operator in float64 and return its results; an empty list if it does not support float64."""
    args, kwargs = cast(cast(inputs, torch.float64, FLOATING), torch.complex128, COMPLEX)
    with contextlib.suppress(Exception), torch.no_grad():
        out = call.op(*args, **kwargs)
        return [*tensors_in(out), *(tensor for _, tensor in arguments_written(call.op, args, kwargs))]
    return []


def divisor_of(name: str, args: Any) -> torch.Tensor | None:
    """Return the divisor of an operator, or the base of a negative power; None if there is neither."""
    place = _DIVISORS.get(name.removeprefix("foreach_"))
    if place is None or place >= len(args):
        return None
    if name.endswith("pow") and not (isinstance(args[1], (int, float)) and args[1] < 0):
        return None
    parts = args[place] if isinstance(args[place], (tuple, list)) else [args[place]]  # a list of tensors or of numbers
    return torch.cat([readable(torch.as_tensor(part)).flatten() for part in parts]) if len(parts) else None


def subject(call: Call) -> str:
    """The name of the function as the subject of a sentence."""
    name = call.function.rpartition(".")[2].strip("_")
    if call.name == "cast":
        return "the cast"
    return f"the gradient of {name}" if call.backward else name


def _share(mask: torch.Tensor) -> str:
    return f"{int(mask.sum())} of {math.prod(mask.shape)}"
