"""The ways of training that the tasks compare, and one loop for all of them."""

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from bfloat16_products import fast_enough

import ampkit
from ampkit.optimizers import AdamW

BF16 = torch.bfloat16


class Precision(NamedTuple):
    """A row of a table: the model's stored dtype, the way of computing in bfloat16, and the AdamW that steps."""

    stored: torch.dtype = torch.float32
    level: str | None = None
    autocast: bool = False
    make: Callable = torch.optim.AdamW


def _int8(params, **settings):
    return AdamW(params, state_dtype="int8", **settings)


PRECISIONS = {
    "float32": Precision(),
    "torch.autocast": Precision(autocast=True),
    "O1": Precision(level="O1"),
    "O2": Precision(level="O2"),
    "O5": Precision(level="O5"),
    "O5, int8 moments": Precision(level="O5", make=_int8),
    "ampkit.optimizers.AdamW, int8 moments": Precision(stored=BF16, make=_int8),
    "torch.optim.AdamW in bfloat16": Precision(stored=BF16),
}


class Training:
    """A model that learns in one precision: a loss for each step, and evaluation in the same precision."""

    def __init__(self, precision, model, steps, lr, warm_up=0.05, **settings):
        self.precision, self.steps, self.lr, self.warm_up = precision, steps, lr, max(1, round(warm_up * steps))
        self.model = model.to(precision.stored)
        self.optimizer = precision.make(self.model.parameters(), lr=lr, **settings)
        if precision.level:
            chosen = {"O1": "patch_torch_functions_type", "O2": "cast_model_type"}.get(precision.level)
            more = {chosen: BF16, "loss_scale": 1.0} if chosen else {}
            self.model, self.optimizer = ampkit.initialize(
                self.model, self.optimizer, opt_level=precision.level, verbosity=0, **more
            )

    def compute(self, function):
        """The tensor that ``function(model)`` returns, in float32."""
        with torch.autocast("cpu", BF16) if self.precision.autocast else contextlib.nullcontext():
            return function(self.model).float()

    def learn(self, loss_at):
        """The losses of all steps. ``loss_at(step)`` returns the inputs of a step, and its loss as a function of the outputs."""
        losses = []
        self.model.train()
        for step in range(self.steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * rate(step, self.steps, self.warm_up)
            inputs, criterion = loss_at(step)
            self.optimizer.zero_grad()
            loss = criterion(self.compute(lambda model, inputs=inputs: model(inputs)))
            if self.precision.level:
                with ampkit.scale_loss(loss, self.optimizer) as scaled:
                    scaled.backward()
            else:
                loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def outputs(self, batches):
        """The outputs for all ``batches``, in float32, one after the other."""
        self.model.eval()
        return torch.cat([self.compute(lambda model, x=x: model(x)) for x in batches])


def rate(step, steps, warm_up):
    """The learning rate: up in a line for ``warm_up`` steps, then down to 0 in a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2


@contextlib.contextmanager
def alone(seed, threads=1):
    """A run from ``seed``, on one thread: the same numbers each time. Afterwards no session is left."""
    before = torch.get_num_threads()
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    try:
        with fast_enough():
            yield
    finally:
        ampkit.close()
        torch.set_num_threads(before)
