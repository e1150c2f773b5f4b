"""`Trainer`: trains the model of a factory in a single way, in a process of its own, and returns plain numbers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import math
import operator
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from ... import api
from ...casting.engine import active_casting
from ...casting.tensors import map_tensors, tensors_in
from ..updates import Weights
from .ways import AUTOCAST, Way, fused, fused_in_words, optimizers_for

_BATCHES = 32  # are kept, and used in turn
_STEPS_FOR_PEAK = 3  # the first
_STEPS_FOR_UPDATES = 5  # the last


class Trainer:
    """A trainer in a worker: call `start` or `examine`, and then `turn`. ``threads`` is torch's number of CPU threads."""

    def __init__(self, located: Any, way: Way, threads: int) -> None:
        torch.set_num_threads(threads)
        self.way, self._factory = way, load(*located)

    def start(self) -> dict[str, Any]:
        self._make()
        original = self.optimizer
        optimizers = optimizers_for(original)
        self._prepare(self.way)
        return {
            "model": type(self.model).__name__,
            "optimizer": type(original).__name__,
            "optimizers": optimizers,
            "fused": fused_in_words(original, self.model) if "fused" in optimizers else None,
            "parameters": sum(param.numel() for param in self.model.parameters()),
            "samples": len(next(tensors_in(self.batches[0][0]))),
            "device": self.device.type,
            "takes_bfloat16": self.device.type != "cuda" or torch.cuda.is_bf16_supported(),
            "free_bytes": self._free_bytes(),
        }

    def turn(self, steps: int) -> float:
        batches = [self._on_device(next(self._next_batches)) for _ in range(steps)]
        self._synchronize()
        start = time.perf_counter()
        for batch in batches:
            self._step(batch)
        self._synchronize()
        return (time.perf_counter() - start) / steps

    def examine(self, steps: int) -> dict[str, Any]:
        losses: list[float] = []
        skipped, lost, total = 0, 0, 0
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        with profile(profile_memory=True) as measured:
            self._make()
            self._prepare(self.way)
            while len(losses) < min(steps, _STEPS_FOR_PEAK):
                skipped += self._noted_step(losses)
        peak_bytes = _peak_bytes(measured, self.device)
        while len(losses) < steps:
            weights = Weights(self.optimizer) if len(losses) >= steps - _STEPS_FOR_UPDATES else None
            is_skipped = self._noted_step(losses)
            skipped += is_skipped
            for of_param, of_all in () if weights is None or is_skipped else weights.counts().values():
                lost, total = lost + int(of_param), total + int(of_all)
        share = lost / total if total else math.nan
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # leave the memory to other processes
        return {"losses": losses, "skipped": skipped, "lost_updates": share, "peak_bytes": peak_bytes}

    def _make(self) -> None:
        self.model: Any = None  # freed before another is made
        self.optimizer: Any = None
        torch.manual_seed(0)
        self.model, self.optimizer, self.batches, self._loss_fn = checked(self._factory())
        self.device = next(self.model.parameters()).device
        self._next_batches = itertools.cycle(self.batches)
        torch.manual_seed(0)

    def _prepare(self, way: Way) -> None:
        """Set up the way: autocast region, optimizer and session; a GradScaler for torch.autocast in float16, as torch advises."""
        kind, is_autocast = self.device.type, way.level == AUTOCAST
        self._scaler = torch.amp.GradScaler(kind, enabled=is_autocast and way.dtype == "float16")
        self._region = functools.partial(torch.autocast, kind, getattr(torch, way.dtype)) if is_autocast else None
        if way.optimizer != "given":
            self.optimizer = fused(self.optimizer, **({"state_dtype": "int8"} if way.optimizer == "int8" else {}))
        self._is_initialized = bool(way.settings)
        if way.settings:
            self.model, self.optimizer = api.initialize(self.model, self.optimizer, verbosity=0, **way.settings)
            # The factory bound the function before it was patched; the loop of a script would look it up anew.
            casting = active_casting()
            self._loss_fn = (casting and casting.wrapper_of(self._loss_fn)) or self._loss_fn

    # A step

    def _on_device(self, batch: Any) -> Any:
        return map_tensors(batch, lambda tensor: tensor.to(self.device))

    def _step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if self._region is None else self._region():
            args = args if isinstance(args, (tuple, list)) else [args]
            loss: Tensor = self._loss_fn(self.model(*args, **kwargs), targets)
        if self._is_initialized:
            with api.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            self._scaler.scale(loss).backward()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return loss.detach()

    def _noted_step(self, losses: list[float]) -> bool:
        """Run a step, append its loss to ``losses``, and return whether it was skipped."""
        scale = self._scaler.get_scale()
        losses.append(float(self._step(self._on_device(next(self._next_batches)))))
        return api.step_was_skipped(self.optimizer) or self._scaler.get_scale() < scale

    # The device

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _free_bytes(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        is_known = "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ())
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if is_known else None


def _peak_bytes(measured: profile, device: torch.device) -> int | None:
    """Return the peak memory of new tensors on ``device``; None if torch does not count it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    events = [event for event in measured.kineto_results.events() if event.name() == "[memory]"]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    peak = max(itertools.accumulate(change for _, change in changes), default=0)
    return peak if device.type == "cpu" else None


# The factory


def located(factory: Callable[[], Any] | str) -> tuple[str, str]:
    """Return the script or module and the name with which another process can `load` the factory."""
    if isinstance(factory, str):
        place, _, name = factory.rpartition(":")
        if not place or not name:
            expected = "'script.py:factory' or 'package.module:factory'"
            raise ValueError(f"tune: {factory!r} names no factory: expected {expected}.")
        if place.endswith(".py") and not os.path.exists(place):
            raise FileNotFoundError(f"tune: there is no {place!r} here.")
        return os.path.abspath(place) if place.endswith(".py") else place, name
    refuse_no_factory(factory, "it")
    name, place = getattr(factory, "__qualname__", str(factory)), factory.__module__
    spec = getattr(sys.modules.get(place), "__spec__", None)  # None for a script
    if spec is not None:
        place = spec.name  # also for ``python -m package.module``
    elif place == "__main__":
        place = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "")
    if "<" in name or (spec is None and not os.path.isfile(place)):
        raise ValueError(
            f"tune runs the factory in processes of its own, and {name} cannot be imported. "
            "Write it to a file, as a function at the top level, and pass that function or 'file.py:function'."
        )
    return place, name


def load(place: str, name: str) -> Callable[[], Any]:
    if os.path.isabs(place):
        sys.path.insert(0, os.path.dirname(place))
        loader = importlib.machinery.SourceFileLoader("_tuned", place)  # scripts may have any extension
        spec: Any = importlib.util.spec_from_loader("_tuned", loader)
        module = sys.modules["_tuned"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    try:
        factory: Callable[[], Any] = operator.attrgetter(name)(module)
    except AttributeError:
        raise NoFactory(f"{os.path.basename(place)} has no {name!r}. {_EXPECTED}") from None
    refuse_no_factory(factory, f"{name!r} of {os.path.basename(place)}")
    return factory


class NoFactory(TypeError):
    """An error for an argument of `tune` that is no factory."""


_EXPECTED = "tune expects a factory, a function without arguments: def factory(): ...; return model, optimizer, batches, loss_fn"


def refuse_no_factory(found: Any, name: str) -> None:
    """Raise `NoFactory` for an object that cannot be called, and for a model."""
    kind = type(found).__name__
    if isinstance(found, nn.Module) or not callable(found):
        raise NoFactory(f"{name} is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}. {_EXPECTED}")


def checked(made: Any) -> tuple[nn.Module, Any, list[Any], Callable[..., Tensor]]:
    """Return (model, optimizer, first batches, loss_fn) from the result of a factory. Raises TypeError for other results."""
    kinds = [type(x).__name__ for x in made] if isinstance(made, tuple) else type(made).__name__
    if not (isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], nn.Module) and callable(made[3])):
        raise TypeError(f"the factory returned {kinds}; expected (model, optimizer, batches, loss_fn).")
    model, optimizer, batches, loss_fn = made
    if lower := {param.dtype for param in model.parameters() if param.is_floating_point()} - {torch.float32}:
        raise TypeError(
            f"the factory's model has weights in {lower.pop()}; expected float32, which all is compared with."
        )
    kept = list(itertools.islice(batches, _BATCHES))
    if not kept or any(not isinstance(batch, (tuple, list)) or len(batch) != 2 for batch in kept):
        raise TypeError(f"the factory's batches are {kept and type(kept[0])}; expected pairs, (inputs, targets).")
    return model, optimizer, kept, loss_fn
