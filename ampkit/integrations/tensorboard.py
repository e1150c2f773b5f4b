"""TensorBoard scalars: the loss scale, skipped steps and the norm of unscaled gradients, from `ampkit.on_step`."""

from __future__ import annotations

from typing import Any

from ..insight.steps import AroundStep, StepReport, on_step


def log(writer: Any, optimizer: Any, *, every: int = 1, prefix: str = "ampkit") -> AroundStep:
    """Write scalars after every ``every``-th step; ``remove()`` of what is returned ends it.

    ``writer`` is a ``torch.utils.tensorboard.SummaryWriter``, or anything with its ``add_scalar(tag, value, step)``. Written are
    ``ampkit/loss_scale``, ``ampkit/skipped`` (0 or 1) and ``ampkit/grad_norm``. Raises what `ampkit.on_step` raises.

    >>> ampkit.integrations.tensorboard.log(SummaryWriter(), optimizer, every=10)
    """

    def write(report: StepReport) -> None:
        values = {"loss_scale": report.loss_scale, "skipped": float(report.skipped), "grad_norm": report.grad_norm}
        for name, value in values.items():
            writer.add_scalar(f"{prefix}/{name}", value, report.step)

    return on_step(optimizer, write, every=every)
