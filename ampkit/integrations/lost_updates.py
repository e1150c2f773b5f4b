"""`LostUpdates`: the share of updates that rounding loses, logged beside the loss; for any loop, at a level or without one.

It is `ampkit.check_updates` by samples: the same counts, of some elements, at every step. It takes any optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from ..insight.around_step import Named, named_params
from ..insight.updates import UpdateCheck, Weights
from ..registry import unwrapped, wrapper_of

#: Elements of a parameter that are looked at, the share of the time that this may take, and the number of parameters in the first
#: step, before it is known what one costs.
SAMPLE, BUDGET, FIRST = 2**11, 0.02, 1
_FRAMEWORKS = (
    ("transformers", "TrainerCallback"),
    ("lightning.pytorch", "Callback"),
    ("pytorch_lightning", "Callback"),
)
_BASES = tuple(base for name, kind in _FRAMEWORKS if (base := getattr(sys.modules.get(name), kind, None)) is not None)


class _Samples(UpdateCheck):
    """Looks at some parameters in each step, in turn, as many as fit into the budget."""

    def __init__(self, optimizer: Any, every: int, share: float, log: Callable[[dict[str, float]], Any]) -> None:
        self._log, self._named, self._next = log, list[Named](), 0
        self._begun, self._budget, self._cost = 0.0, 0.0, 0.0
        super().__init__(optimizer, every, share, "LostUpdates")

    def before(self) -> None:
        begun = perf_counter()
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != len(self._named):
            self._named = list(named_params(self.optimizer))
        self._seen += 1
        number = min(FIRST, len(self._named))
        if self._cost:  # seconds of a parameter; a step may have too little time for one, and leaves it to the next
            self._budget = min(self._budget + BUDGET * (begun - self._begun), self._cost * len(self._named))
            number = int(self._budget / self._cost)
            self._budget -= number * self._cost
        self._begun = begun
        chosen = [self._named[(self._next + i) % len(self._named)] for i in range(number)]
        self._next = (self._next + number) % max(1, len(self._named))
        self._weights = Weights(self.optimizer, SAMPLE, chosen) if chosen else None
        self._spent = perf_counter() - begun

    @torch.no_grad()
    def after(self) -> None:
        begun = perf_counter()
        found = self._weights.counts() if self._weights is not None else {}
        # By which torch.amp.GradScaler has a fused optimizer of torch skip on the device.
        flag = getattr(self.optimizer, "found_inf", None)
        if (wrapper := wrapper_of(self.optimizer)) is not None:
            flag = None if (found_inf := wrapper.findings.of_step) is None else found_inf.flag
        if flag is not None:
            found = {name: tuple(one * _is_taken(flag, one) for one in counts) for name, counts in found.items()}
        self._count(found)
        if found:
            self._cost = (self._spent + perf_counter() - begun) / len(found)
        self._weights = None
        if self._seen == 5 or self._seen % self._every == 0:
            self.report()

    def report(self) -> None:
        """Log, and warn once. Waits for the device."""
        if self._lost:
            self._log({"ampkit/lost_updates": self.share, "ampkit/lost_updates_worst": max(self.shares.values())})
            if not self._has_told:
                self._tell()

    @property
    def share(self) -> float:
        """Of all updates that were looked at, each tensor's by its size."""
        sizes = {name: param.numel() for name, param, _ in self._named}
        shares = self.shares
        return sum(shares[name] * sizes.get(name, 0) for name in shares) / max(
            1, sum(sizes.get(name, 0) for name in shares)
        )


def _is_taken(flag: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """1 where a step was taken, 0 where it was skipped, by a flag that may be on another device."""
    return (flag == 0).to(beside)


class LostUpdates(*_BASES):  # type: ignore[misc]
    """Logs ``ampkit/lost_updates``, the share of updates that rounding ate, and warns of tensors that lose more than ``share``.

    Logged are the share of all and that of the worst tensor, after five steps and at every ``every``-th. It looks at samples, a
    few parameters in turn, for 2% of the time and some 30 microseconds a step.

    >>> with LostUpdates(optimizer) as lost:                        # a loop; lost.share, and lost.shares by name
    ...     train()
    >>> LostUpdates(optimizer, log=accelerator.log)                 # Accelerate; after prepare()
    >>> trainer.add_callback(LostUpdates(log=trainer.log))          # transformers' Trainer
    >>> lightning.pytorch.Trainer(callbacks=[LostUpdates()])        # Lightning, imported before this

    Call it after `ampkit.initialize`, if the script has that. ``remove()`` ends it.
    """

    def __init__(
        self,
        optimizer: Any = None,
        *,
        log: Callable[[dict[str, float]], Any] = lambda values: None,
        every: int = 100,
        share: float = 0.5,
    ) -> None:
        super().__init__()
        if every < 1 or not 0 <= share <= 1:
            raise ValueError(f"LostUpdates: every={every}, share={share}; expected at least 1, and from 0 to 1.")
        self._log, self._every, self._share = log, every, share
        self.checks: list[_Samples] = []
        if optimizer is not None:
            self._begin(optimizer)

    def _begin(self, *optimizers: Any, log: Callable[[dict[str, float]], Any] | None = None) -> None:
        self.remove()
        self.checks = [_Samples(unwrapped(one), self._every, self._share, log or self._log) for one in optimizers]

    def remove(self) -> None:
        """Look at no further step. What was found stays."""
        for check in self.checks:
            check.remove()

    @property
    def shares(self) -> dict[str, float]:
        """By name. Waits for the device."""
        return {name: share for check in self.checks for name, share in check.shares.items()}

    @property
    def share(self) -> float:
        """Of all; of several optimizers the mean. Waits for the device."""
        return sum(check.share for check in self.checks) / max(1, len(self.checks))

    def __enter__(self) -> LostUpdates:
        return self

    def __exit__(self, *error: Any) -> None:
        self._end()

    def _end(self) -> None:
        self.remove()
        for check in self.checks:
            check.report()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # transformers calls every event
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    # transformers, and Lightning where it begins and ends

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if optimizer is not None:
            self._begin(optimizer)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        def log(values: dict[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

        self._begin(*trainer.optimizers, log=log)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._end()
