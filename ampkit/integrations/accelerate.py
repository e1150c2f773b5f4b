"""Accelerate: ``attach(accelerator)`` after `ampkit.initialize`, before or after ``accelerator.prepare``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from ..errors import ConfigurationError, NotInitializedError
from ..registry import current_session, wrapper_of
from ..session import Session
from . import clipping
from .grad_scaler import GradScaler

PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
"""The variable that an Accelerator without a given precision reads; ``TrainingArguments(bf16=True)`` sets it for good."""


def attach(accelerator: Any, session: Session | None = None) -> None:
    """Route ``backward``, clipping and the prepared optimizers of this ``Accelerator`` through ``session``, or the newest one.

    ``accelerator.optimizer_step_was_skipped`` then reports its skipped steps, and ``save_state`` and ``load_state`` hold its loss
    scale. The accelerator must have been made with ``mixed_precision="no"``: it would cast, scale and unscale a second time.

    Raises `NotInitializedError` before `ampkit.initialize`, and `ConfigurationError` for an accelerator with another
    ``mixed_precision``, or with a ``distributed_type`` that is neither one process nor DDP.
    """
    session = session or current_session()
    if session is None:
        raise NotInitializedError("attach(accelerator) was called before ampkit.initialize(model, optimizer).")
    refuse_unfit(accelerator)
    if not session.plan.enabled:
        return
    scaler = accelerator.scaler = GradScaler(accelerator.device.type, session=session)
    for prepared in accelerator._optimizers:
        if session.owns(prepared.optimizer):
            prepared.__setstate__({"scaler": scaler})  # looks up the optimizer's step() once more
    for name, method in (
        ("unscale_gradients", _unscale_gradients),
        ("clip_grad_norm_", _clip_grad_norm_),
        ("clip_grad_value_", _clip_grad_value_),
    ):
        setattr(accelerator, name, partial(method, accelerator))
        session.on_close(vars(accelerator).pop, name, None)
    session.on_close(_detach, accelerator, scaler)


def refuse_unfit(accelerator: Any) -> None:
    """Raise `ConfigurationError` for an accelerator that casts by itself, or is neither for one process nor for DDP."""
    if (precision := accelerator.mixed_precision) != "no":
        where = ""
        if os.environ.get(PRECISION_VARIABLE) == precision:
            where = (
                f" {PRECISION_VARIABLE}={precision} stands in the environment, where TrainingArguments({precision}=True) and "
                "accelerate launch leave it; an Accelerator goes by it that is not told otherwise."
            )
        raise ConfigurationError(
            f"The Accelerator was made with mixed_precision={precision!r}, and ampkit casts already.{where} Use "
            "Accelerator(mixed_precision='no'), also in the file of `accelerate config`; for transformers' Trainer leave bf16= and "
            "fp16= out of TrainingArguments."
        )
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ConfigurationError(
            f"attach(accelerator) is for one process and for DDP; this Accelerator is of distributed_type {kind}. Shard with "
            "ampkit.parallel.fully_shard instead, or leave ampkit out."
        )


def _detach(accelerator: Any, scaler: GradScaler) -> None:
    for holder in (accelerator, *accelerator._optimizers):
        if holder.scaler is scaler:
            holder.scaler = None


def _wrapped_optimizers(accelerator: Any) -> list[Any]:
    inner = [prepared.optimizer for prepared in accelerator._optimizers]
    return [optimizer for optimizer in inner if wrapper_of(optimizer) is not None]


def _unscale_gradients(accelerator: Any, optimizer: Any = None) -> None:
    chosen = optimizer if isinstance(optimizer, (tuple, list)) else [optimizer]
    for x in _wrapped_optimizers(accelerator) if optimizer is None else [getattr(x, "optimizer", x) for x in chosen]:
        if not accelerator.scaler.is_unscaled(x):
            accelerator.scaler.unscale_(x)


def _clip_grad_norm_(
    accelerator: Any, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
) -> torch.Tensor:
    accelerator.unscale_gradients()
    return clipping.clip_norm(_wrapped_optimizers(accelerator), parameters, max_norm, norm_type)


def _clip_grad_value_(accelerator: Any, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    accelerator.unscale_gradients()
    torch.nn.utils.clip_grad_value_(clipping.updated(_wrapped_optimizers(accelerator), parameters), clip_value)
