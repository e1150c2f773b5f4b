"""`Standstill`: the parameters that the first steps of a script have not changed, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import LOWER_PRECISION
from ..sharding import is_sharded, local
from .sites import Site, look
from .updates import SAMPLE, Weights, some
from .words import short

_MANY_LOST = 0.5
_ZERO = (
    "every gradient is 0: a factor of 0, a function that is flat there (round, a dead ReLU, a saturated sigmoid), or zero_grad() "
    "before step()"
)
_NO_RATE = "the learning rate is 0"


class Standstill:
    """An observer of backward passes and steps; afterwards `reasons` yields a sentence for each reason."""

    def __init__(self) -> None:
        self.cuts: dict[str, None] = {}  # lines that detach tensors from the graph, with their source
        #: Lost updates and all updates of each parameter, by optimizer class and dtype.
        self.lost: dict[tuple[str, torch.dtype], dict[Tensor, tuple[int, int]]] = {}
        self._why: dict[Tensor, list[str | None]] = {}  # at each step, the reason why it could not change
        self._had_gradient: set[Tensor] = set()
        self._ever_had: set[Tensor] = set()
        self._first: dict[Tensor, Tensor] = {}  # a sample of each parameter, before the first step
        self._current_why: dict[Tensor, str | None] = {}  # `_why` of this step
        self._backward = self._step = ""
        self._weights: Weights

    def cut(self, words: str, site: Site | None) -> None:
        """Note a line that detaches from the graph. Lines without the word (``scale_loss``) are skipped, but for ``no_grad()``."""
        if site is not None and (words == "no_grad()" or words.strip(".()") in site.source):
            self.cuts.setdefault(f"{words} at {site}: {site.source}")

    def backward_ends(self, params: Iterable[Tensor]) -> None:
        self._had_gradient = {param for param in params if param.grad is not None}
        self._ever_had |= self._had_gradient
        self._backward = str(look()[0])

    def step_begins(self, optimizer: Any, models: Sequence[nn.Module]) -> None:
        self._step = str(look()[0])
        for param in (param for model in models for param in model.parameters()):
            # A parameter class of a library, such as quantised weights, may have no readable elements.
            if param not in self._first and (type(param) is nn.Parameter or is_sharded(param)):
                self._first[param] = some(local(param.detach()), SAMPLE).clone()
        params = [(param, group) for group in optimizer.param_groups for param in group["params"]]
        self._current_why = {param: self._why_not(param, float(group.get("lr", 1.0))) for param, group in params}
        self._weights = Weights(optimizer, SAMPLE)

    def _why_not(self, param: Tensor, lr: float) -> str | None:
        if not param.requires_grad:
            return "requires_grad is False; requires_grad_(True) before the optimizer is made trains them"
        if lr == 0.0:
            return _NO_RATE
        if param.grad is None and param in self._had_gradient:
            return (
                f"gradients were cleared between backward() at {self._backward} and step() at {self._step}: zero_grad() belongs "
                "in front of backward()"
            )
        if param.grad is None:
            return "no gradient"
        return _ZERO if param.grad.layout is torch.strided and not bool((param.grad != 0).any()) else None

    def step_ends(self, optimizer: Any, is_taken: bool) -> None:
        self._had_gradient = set()
        for param, why in self._current_why.items():
            # A factor that starts at 0 has not changed in a skipped step: zero gradients of the other factor prove nothing.
            self._why.setdefault(param, []).append(why if is_taken or why is not _ZERO else None)
        if not is_taken:
            return
        counts = self._weights.counts()
        for weight in self._weights.list:
            if weight.name in counts:
                dtype = weight.param.dtype if weight.rest is None else torch.float32
                of_params = self.lost.setdefault((type(optimizer).__name__, dtype), {})
                lost, total = of_params.get(weight.param, (0, 0))
                of_params[weight.param] = lost + int(counts[weight.name][0]), total + int(counts[weight.name][1])

    def reasons(self, models: Sequence[nn.Module]) -> Iterator[str]:
        """Yield each reason in words, with names of parameters and the cure.

        Parameters that changed are left out, whatever changed them: a step over copies, or an averaged teacher. So are models that
        no optimizer has parameters of and no gradient reaches, as one that makes targets.
        """
        names = _names_in(models)
        for why, params in self._standing(models, names):
            shown = sorted(names.get(param) or f"a parameter of shape {tuple(param.shape)}" for param in params)
            if shown:
                yield f"{', '.join(shown[:4])}{', ...' * (len(shown) > 4)}: {why}"

    def _standing(self, models: Sequence[nn.Module], names: Any) -> Iterator[tuple[str, Iterable[Tensor]]]:
        in_use = {*self._why, *self._ever_had}
        trained = [model for model in models if self._why and not in_use.isdisjoint(model.parameters())]
        not_held = {param for model in trained for param in model.parameters() if param not in self._why}
        not_held = {param for param in not_held if not self._has_moved(param)}
        frozen = {param for param in not_held if not param.requires_grad}
        yield (
            "no optimizer that stepped holds them: make it over model.parameters() when all layers are there",
            not_held - frozen,
        )
        yield "requires_grad is False; requires_grad_(True) trains them", frozen
        for why in dict.fromkeys(why for whys in self._why.values() for why in whys if why is not None):
            always = {param for param, whys in self._why.items() if {*whys} == {why}}
            if why is _NO_RATE:
                since = {param for param, whys in self._why.items() if whys[-1] is _NO_RATE} - always
                yield f"{_NO_RATE} at the last of these steps: look at the scheduler", since
            if why == "no gradient":
                always = {param for param in always if not self._has_moved(param)}
                why = "no model has it, only the optimizer: was a layer replaced since, or the model copied?"
                yield why, always - names.keys()
                always &= names.keys()
                why = "no gradient reaches them: the loss does not use them, or"
                if not self.cuts:
                    why += " takes numbers from them: argmax(), .item(), torch.tensor(x)"
                else:
                    why += f" a line takes the graph away: {'; '.join(list(self.cuts)[:3])}"
            yield why, always
        for (_, dtype), counts in self.lost.items():
            # The gradient of a bias before a norm, which subtracts it, is nothing but rounding: only matrices count.
            many = [x for x, (lost, total) in counts.items() if x.dim() > 1 and lost > _MANY_LOST * total]
            if dtype not in LOWER_PRECISION:
                why = f"{short(dtype)} rounds their updates away, which are below 6e-8 of a weight: raise the learning rate"
                yield f"{why}, unless a warm-up does", many

    def _has_moved(self, param: Tensor) -> bool:
        first = self._first.get(param)
        return first is not None and not torch.equal(first, some(local(param.detach()), SAMPLE).to(first.dtype))

    def lost_in_lower_precision(self, models: Sequence[nn.Module]) -> Iterator[str]:
        names = _names_in(models)
        for (kind, dtype), counts in self.lost.items():
            shares = {param: lost / max(1, total) for param, (lost, total) in counts.items()}
            if dtype in LOWER_PRECISION:
                lost, total = map(sum, zip(*counts.values()))
                worst = max(shares, key=lambda param: shares[param])
                seen = (
                    f"{lost / max(1, total):.0%} of those seen, {shares[worst]:.0%} of {names.get(worst, 'a weight')!r}"
                )
                small = f"rounds small updates away: {seen if lost else 'as yet none of those seen'}"
                yield f"{kind} updates weights in {short(dtype)}, which {small}; O5 and O2 train them in float32"


def _names_in(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    named = [(number, *pair) for number, model in enumerate(models) for pair in model.named_parameters()]
    return {param: f"model {number}: " * (len(models) > 1) + name for number, name, param in named}
