"""`LostUpdates`: the share of updates that rounding loses, logged beside the loss; for any loop, with or without a session.

It samples what `ampkit.check_updates` counts in full: some elements, at every step. It takes any optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from ..insight.steps import UpdateCheck
from ..insight.updates import Named, Weights, named_params
from ..registry import unwrapped, wrapper_of

#: The sampled elements of a parameter, the share of the time that sampling may take, and the number of parameters in the first
#: step, when the cost of one parameter is not yet known.
SAMPLE, BUDGET, FIRST = 2**11, 0.02, 1
_FRAMEWORKS = (
    ("transformers", "TrainerCallback"),
    ("lightning.pytorch", "Callback"),
    ("pytorch_lightning", "Callback"),
)
_BASES = tuple(base for name, kind in _FRAMEWORKS if (base := getattr(sys.modules.get(name), kind, None)) is not None)


class _Samples(UpdateCheck):
    """An `UpdateCheck` that samples some parameters in each step, in turn: as many as fit into the time budget."""

    def __init__(self, optimizer: Any, every: int, share: float, log: Callable[[dict[str, float]], Any]) -> None:
        self._log, self._named, self._next = log, list[Named](), 0
        self._begun, self._budget, self._cost = 0.0, 0.0, 0.0
        super().__init__(optimizer, every, share, "LostUpdates")

    @contextmanager
    def around(self) -> Iterator[None]:
        begun = perf_counter()
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != len(self._named):
            self._named = list(named_params(self.optimizer))
        self._seen += 1
        number = min(FIRST, len(self._named))
        if self._cost:  # seconds per parameter; a step without time for one leaves its time to the next
            self._budget = min(self._budget + BUDGET * (begun - self._begun), self._cost * len(self._named))
            number = int(self._budget / self._cost)
            self._budget -= number * self._cost
        self._begun = begun
        chosen = [self._named[(self._next + i) % len(self._named)] for i in range(number)]
        self._next = (self._next + number) % max(1, len(self._named))
        weights = Weights(self.optimizer, SAMPLE, chosen) if chosen else None
        spent = perf_counter() - begun
        yield
        begun = perf_counter()
        with torch.no_grad():
            self._note(weights.counts() if weights is not None else {}, spent, begun)

    def _note(self, counts: dict[str, tuple[torch.Tensor, torch.Tensor]], spent: float, begun: float) -> None:
        # torch.amp.GradScaler sets this flag; torch's fused optimizers then skip the step on the device.
        flag = getattr(self.optimizer, "found_inf", None)
        if (wrapper := wrapper_of(self.optimizer)) is not None:
            flag = None if (found_inf := wrapper.findings.of_step) is None else found_inf.flag
        if flag is not None:
            is_taken = flag == 0  # on the device
            counts = {name: tuple(x * is_taken.to(x) for x in pair) for name, pair in counts.items()}
        self._count(counts)
        if counts:
            self._cost = (spent + perf_counter() - begun) / len(counts)
        if self._seen == 5 or self._seen % self._every == 0:
            self.report()

    def report(self) -> None:
        """Log the shares, and warn once. Waits for the device."""
        if self._lost:
            self._log({"ampkit/lost_updates": self.share, "ampkit/lost_updates_worst": max(self.shares.values())})
            if not self._has_told:
                self._tell()

    @property
    def share(self) -> float:
        """The share of sampled updates that were lost, with each parameter weighted by its size."""
        shares = self.shares
        sizes = {name: param.numel() for name, param, _ in self._named if name in shares}
        return sum(shares[name] * size for name, size in sizes.items()) / max(1, sum(sizes.values()))


class LostUpdates(*_BASES):  # type: ignore[misc]
    """A monitor of the share of updates that rounding loses; it warns of tensors that lose more than ``share``.

    It logs ``ampkit/lost_updates`` (all tensors) and ``ampkit/lost_updates_worst`` after five steps and at every ``every``-th. It
    samples a few parameters in turn, for 2% of the time and some 30 microseconds a step.

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
        self.checks = [_Samples(unwrapped(x), self._every, self._share, log or self._log) for x in optimizers]

    def remove(self) -> None:
        """Stop observing steps. The shares so far stay available."""
        for check in self.checks:
            check.remove()

    @property
    def shares(self) -> dict[str, float]:
        """The share of lost updates of each tensor, by name. Waits for the device."""
        return {name: share for check in self.checks for name, share in check.shares.items()}

    @property
    def share(self) -> float:
        """The share of lost updates of all tensors; with several optimizers their mean. Waits for the device."""
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

    # Events of transformers and of Lightning

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
