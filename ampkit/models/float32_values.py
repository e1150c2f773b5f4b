"""The float32 values of weights stored in lower precision, and the parameters that `master_params` lends for them: see NOTES.md.

`join` gives values to weights that come later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .. import kernels
from ..casting.state import stored
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..kernels import joined


@dataclass
class Loan:
    """A float32 parameter that a script holds for the weight ``lower``.

    While the loan runs, ``lent`` is that parameter, ``gradient`` is the weight's, and ``before`` a copy of the weight's bits.
    """

    lower: Tensor
    held: weakref.ref[Tensor]
    lent: Tensor | None = None
    before: Tensor | None = None
    gradient: Tensor | None = None


class Loans(dict["Float32Value", Loan]):
    """The loans of one session. Each ends at the next forward or step, which writes the script's changes to the weight."""

    def lend_parameter(self, master: Float32Value, lower: Tensor) -> Tensor:
        """Return the float32 value as a parameter with the gradient of ``lower``: the same object as long as a script holds it."""
        self.end(master)
        lent = self.held_by_script(master)
        if lent is None:
            lent = nn.Parameter(lower.new_empty(0, dtype=torch.float32), requires_grad=lower.requires_grad)
            self[master] = Loan(lower, weakref.ref(lent))
        self.lend_again(master)
        return lent

    def held_by_script(self, master: Float32Value) -> Tensor | None:
        """Return the parameter that was lent, or None if no script holds it any more."""
        return self[master].held() if master in self else None

    def end(self, master: Float32Value | None = None, refuses: bool = True) -> None:
        """Write a script's changes of one loan, or of all, to the weights. A rest must not change while its value is lent.

        Raises `ConfigurationError` where a script has written to the weight too; without ``refuses`` that write wins.
        """
        if self and (master is None or master in self):
            loans = self.items() if master is None else [(master, self[master])]
            _take_back([pair for pair in loans if pair[1].lent is not None], refuses)

    def lend_again(self, master: Float32Value | None = None) -> None:
        """Update the parameters that a script still holds, of one value or of all, to the present values and gradients."""
        for key in list(self) if master is None else [master] if master in self else []:
            loan = self[key]
            if (held := loan.held()) is None:
                del self[key]
                continue
            if loan.lent is None:
                key.move_rest_beside(loan.lower)
                held.data = joined(loan.lower.detach(), key.rest)
                loan.lent, loan.before = held, loan.lower.detach().clone()
            loan.gradient = loan.lower.grad
            put_gradient(held, loan.gradient)  # inside of a block it is in lower precision


def put_gradient(param: Tensor, gradient: Tensor | None) -> None:
    """Set ``param.grad`` to a gradient of any dtype: torch by itself allows the parameter's dtype only."""
    if gradient is not None and gradient.dtype is not param.dtype:
        param.grad_dtype = None
    param.grad = gradient


def clear_gradient(param: Tensor) -> None:
    """Clear ``param.grad``, and have the next backward pass make one in the parameter's dtype, which DDP asks for."""
    gradient, param.grad = param.grad, None
    if gradient is not None and gradient.dtype is not param.dtype:
        param.grad_dtype = param.dtype


@torch.no_grad()
def _take_back(ended: list[tuple[Float32Value, Loan]], refuses: bool) -> None:
    """Write to weights and rests what a script has written to the parameters of these loans."""
    written: list[tuple[Float32Value, Tensor, Tensor, Tensor, Tensor]] = []
    for master, loan in ended:
        lent, before, loan.lent, loan.before = loan.lent, loan.before, None, None
        if lent.grad is not loan.gradient:
            put_gradient(loan.lower, lent.grad)
        if lent.shape != before.shape or lent.dtype is not torch.float32:
            raise ConfigurationError(
                f"A float32 value of shape {tuple(before.shape)}, from ampkit.master_params, was made {lent.dtype} of shape "
                f"{tuple(lent.shape)}. Write values of the same shape to it, or to the model's weight."
            )
        value = lent.detach().to(before.device)
        elements = joined(before, master.rest).view(torch.int32) != value.view(torch.int32)
        written.append((master, loan.lower, before, value, elements))
    # One read of each device; more only where something was written.
    devices = {elements.device for *_, elements in written}
    flags = [torch.stack([x.any() for *_, x in written if x.device == device]) for device in devices]
    taken = []
    for master, lower, before, value, elements in written if any(bool(flag.any()) for flag in flags) else ():
        weight = lower.detach().to(before.device)
        if not elements.any() or weight.shape != before.shape or weight.dtype is not before.dtype:
            continue  # another weight is in its place by now, and stays as it is
        bits = weight.view(torch.int16)
        if any(torch.equal(bits, x.view(torch.int16)) for x in (before, value.to(weight.dtype))):
            taken.append((master, lower, value, elements))
        elif refuses:
            raise ConfigurationError(
                f"A weight of shape {tuple(lower.shape)} and its float32 value (from ampkit.master_params) were both written to "
                "since the last forward or step, and now differ: one of the two writes would be lost. Write to one of them only, "
                "or call master_params again after writing to the weight."
            )
    for master, *what in taken:  # nothing, where one is refused
        master.write(*what)


@dataclass(eq=False)
class Float32Value:
    """The float32 value of one weight that is stored in ``dtype``: the weight, given to each method, and its ``rest``.

    ``rest`` is int16, in the weight's shape; without it the weight alone is the value, as at O3. ``loans`` are its session's.
    """

    loans: Loans
    dtype: torch.dtype
    rest: Tensor | None = None
    was_made_float32: bool = False  # by ``model.float()``, which is refused; ``p.data = values`` is not
    saved: tuple[str, Callable[[], Tensor | None]] = ("", lambda: None)  # a key of the last state dict, and its tensor

    def move_rest_beside(self, lower: Tensor) -> None:
        """Move the rest to the device and strides of ``lower``, as after ``model.to(...)``; of another shape it begins at 0."""
        rest = self.rest
        if rest is None or (rest.device, rest.shape, rest.stride()) == (lower.device, lower.shape, lower.stride()):
            return
        self.rest = torch.zeros_like(lower, dtype=torch.int16, requires_grad=False)
        if rest.shape == lower.shape:
            self.rest.copy_(rest)

    def current(self, lower: Tensor) -> Tensor:
        """Return a copy of the value, float32."""
        self.loans.end(self)
        self.move_rest_beside(lower)
        self.loans.lend_again(self)
        return joined(lower, self.rest)

    @torch.no_grad()
    def put(self, lower: Tensor, value: Tensor) -> None:
        """Set the value: a write to ``lower`` that torch counts."""
        self.loans.end(self)
        self.write(lower, value)
        self.loans.lend_again(self)

    def write(self, lower: Tensor, value: Tensor, elements: Tensor | None = None) -> None:
        """Split ``value`` into ``lower`` and its rest. Where ``elements`` is False the rest stays, beside 0 and inf too."""
        self.move_rest_beside(lower)
        if (rest := self.rest) is None:
            lower.copy_(value)
            return
        fresh = torch.empty_like(rest)
        kernels.multi_tensor_split([value.detach().to(lower.device, torch.float32)], [lower.detach()], [fresh])
        rest.copy_(fresh if elements is None else torch.where(elements.to(rest.device), fresh, rest))

    @torch.inference_mode(False)  # an evaluation may meet it first, and the weight is to train on
    @torch.no_grad()
    def take_float32(self, lower: Tensor) -> None:
        """Take over ``p.data = float32 values`` as the value. If ``dtype`` holds all of them, the rest stays."""
        value = lower.detach()
        lower.data = value.to(self.dtype)
        if not torch.equal(lower.detach().float(), value):
            self.put(lower, value)

    def clear_rest(self) -> None:
        """Set the rest to 0: the weight alone is the value."""
        self.loans.end(self)
        if self.rest is not None:
            self.rest.zero_()
        self.loans.lend_again(self)


def value_of(param: Tensor) -> Float32Value | None:
    """Return the float32 value of a parameter that is stored in lower precision, None for any other."""
    master = stored.get(param) if param.dtype in LOWER_PRECISION else None
    return None if master is None or master.dtype is not param.dtype else master


def own_stored_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Float32Value]]:
    """Yield (name, parameter, float32 value) for the module's own parameters that are stored in lower precision."""
    for name, param in module._parameters.items():
        if param is not None and (master := value_of(param)) is not None:
            yield name, param, master


def stored_weights(model: nn.Module) -> Iterator[tuple[nn.Parameter, Float32Value]]:
    """Yield (parameter, float32 value) for all parameters of the model that are stored in lower precision."""
    return ((param, master) for module in model.modules() for _, param, master in own_stored_weights(module))


#: The modules of models that store weights in lower precision, and the loans of their sessions.
members: weakref.WeakKeyDictionary[nn.Module, Loans] = weakref.WeakKeyDictionary()


def join(whole: nn.Module, _: str, part: Any) -> None:
    """Register lower-precision parameters that are added to an initialized model, as by a parametrization, with float32 values."""
    loans = members.get(whole) if members else None
    if loans is None:
        return
    for module in part.modules() if isinstance(part, nn.Module) else ():
        if not isinstance(module, torch.jit.ScriptModule):
            members.setdefault(module, loans)
            for name, param in module._parameters.items():
                join(module, name, param)
    if isinstance(part, nn.Parameter) and part.dtype in LOWER_PRECISION:
        stored.setdefault(part, Float32Value(loans, part.dtype))


register_module_module_registration_hook(join)
register_module_parameter_registration_hook(join)
