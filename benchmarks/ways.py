"""The ways of training that bench.py compares, in the same verbs: float32, torch.autocast with GradScaler, ampkit's levels.

Torch's own optimizers are the fused ones throughout, the fastest that torch has.
"""

import contextlib

import torch

import ampkit
from ampkit.optimizers import FusedAdam, FusedSGD

# name: (torch's class, ampkit's, arguments of both, further arguments of ampkit's). FusedSGD clears gradients as torch does, not by
# zeros as Apex did: these keep the gradients' memory through the forward pass.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, FusedSGD, dict(lr=1e-2, momentum=0.9, weight_decay=1e-4), dict(set_grad_none=True)),
    "adam": (torch.optim.Adam, FusedAdam, dict(lr=2e-4, betas=(0.5, 0.999)), dict(adam_w_mode=False)),
    "adamw": (torch.optim.AdamW, FusedAdam, dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1), {}),
}
# name: (the way of computing in lower precision, whether the optimizer is ampkit's)
WAYS = {
    "float32": (None, False),
    "autocast": ("autocast", False),
    "O1": ("O1", False),
    "O1, fused": ("O1", True),
    "O2": ("O2", False),
    "O2, fused": ("O2", True),
    "O5": ("O5", False),
    "O5, fused": ("O5", True),
}


def make(name, case, dtype):
    kind, fused = WAYS[name]
    torchs, ours, settings, besides = OPTIMIZERS[case.optimizer]
    if fused:
        optimizers = [ours(model.parameters(), **settings, **besides) for model in case.models]
    else:
        optimizers = [torchs(model.parameters(), fused=True, **settings) for model in case.models]
    if kind is None:
        return Float32(case.models, optimizers)
    if kind == "autocast":
        return Autocast(case.models, optimizers, dtype)
    return Level(kind, case.models, optimizers, dtype, case.losses)


class Float32:
    def __init__(self, models, optimizers):
        self.models, self.optimizers = models, optimizers

    def compile(self):
        self.models = [torch.compile(model, fullgraph=True) for model in self.models]

    def region(self):
        return contextlib.nullcontext()

    def backward(self, loss, optimizer, loss_id, last=True):
        loss.backward()

    def step(self, optimizer):
        optimizer.step()

    def end(self):
        """End the iteration, after all optimizers have made their step."""


class Autocast(Float32):
    def __init__(self, models, optimizers, dtype):
        super().__init__(models, optimizers)
        self.device_type = next(models[0].parameters()).device.type
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(self.device_type)

    def region(self):
        return torch.autocast(self.device_type, self.dtype)

    def backward(self, loss, optimizer, loss_id, last=True):
        self.scaler.scale(loss).backward()

    def step(self, optimizer):
        self.scaler.step(optimizer)

    def end(self):
        self.scaler.update()


class Level(Float32):
    def __init__(self, level, models, optimizers, dtype, losses):
        setting = {"O1": "patch_torch_functions_type", "O2": "cast_model_type"}.get(level)  # O5 is bfloat16
        chosen = {setting: dtype} if setting else {}
        super().__init__(
            *ampkit.initialize(models, optimizers, opt_level=level, num_losses=losses, verbosity=0, **chosen)
        )
        # At O1 gradients are float32, and add up exactly enough at their scale; at O2 and O5 every block adds to float32 sums.
        self.delays = level == "O1"

    def backward(self, loss, optimizer, loss_id, last=True):
        with ampkit.scale_loss(loss, optimizer, loss_id, delay_unscale=self.delays and not last) as scaled:
            scaled.backward()
