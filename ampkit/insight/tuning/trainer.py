"""`Trainer`: trains the model of a factory in a single way, in a process of its own, and returns plain numbers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from ... import api
from ...casting.engine import active_casting
from ...casting.tensors import map_tensors, tensors_in
from ..updates import Weights
from .factory import checked, load
from .ways import AUTOCAST, Way, fused, fused_in_words, optimizers_for

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
        with _Peak() as peak:
            self._make()
            self._prepare(self.way)
            while len(losses) < min(steps, _STEPS_FOR_PEAK):
                skipped += self._noted_step(losses)
            peak.device = self.device
        while len(losses) < steps:
            weights = Weights(self.optimizer) if len(losses) >= steps - _STEPS_FOR_UPDATES else None
            skipped += self._noted_step(losses)
            for of_param, of_all in weights.lost().values() if weights is not None else ():
                lost, total = lost + int(of_param), total + int(of_all)
        share = lost / total if total else math.nan
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # leave the memory to other processes
        return {"losses": losses, "skipped": skipped, "lost_updates": share, "peak_bytes": peak.bytes}

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
        is_known = hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if is_known else None


class _Peak:
    """A context that measures ``bytes``, the peak memory of new tensors on ``device``; None if torch does not count it."""

    bytes: int | None = None
    device = torch.device("cpu")

    def __enter__(self) -> _Peak:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
        elif self.device.type == "cpu":
            events = self._profile.kineto_results.events()
            changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
            self.bytes = max(itertools.accumulate(change for _, change in changes), default=0)
