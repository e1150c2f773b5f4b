"""Scripts of the kinds that public repositories wrote for ``apex.amp``: at O1 and at O2 they train as without amp.

A row of the table is a script, which gets ``amp`` and a level and returns its losses. Each is run with the drop-in; without
amp, in float32; and without amp under ``torch.autocast``, in the precision that the levels use.
"""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

LEVELS = ("O1", "O2")
SEEDS = (0, 1)
# The allowed distance of losses from float32's, relative to its mean loss: this far, or twice as far as torch.autocast's.
TOLERANCE, TIMES_AUTOCAST = 0.01, 2
# The fraction of the first steps' losses that the losses of the last steps must have reached.
LEARNED = 0.9

# A step that is skipped for its overflow would put the losses one step apart.
SETTINGS = dict(verbosity=0, max_loss_scale=2.0**10)

SCRIPTS = {}


def script(run):
    SCRIPTS[run.__name__.replace("_", " ")] = run
    return run


class NoAmp:
    """A stand-in for ``apex.amp`` in a script that amp was taken out of."""

    def initialize(self, models, optimizers=None, **settings):
        return models if optimizers is None else (models, optimizers)

    def scale_loss(self, loss, optimizers, **settings):
        return contextlib.nullcontext(loss)

    def master_params(self, optimizer):
        return (param for group in optimizer.param_groups for param in group["params"])

    def disable_casts(self):
        return torch.autocast("cpu", enabled=False)

    def register_float_function(self, module, name):
        pass


def drawn(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(count, channels=3):
    """Noisy images of four classes."""
    y = torch.randint(4, (count,))
    return torch.randn(count, channels, 6, 6) + drawn(4, channels, 6, 6)[y] / 2, y


def classifier(channels):
    conv, norm = nn.Conv2d(channels, 8, 3, bias=False), nn.BatchNorm2d(8)
    return nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))


def step(amp, loss, optimizer, clip=None):
    """An iteration's end as most scripts write it; returns the loss."""
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    if clip is not None:
        clip_grad_norm_(amp.master_params(optimizer), clip)
    optimizer.step()
    return loss.item()


# Gradients of gradients.


@script
def gradient_alignment(amp, level):
    """Fast adversarial training with aligned gradients differentiates through gradients of inputs, which it takes of the
    scaled loss and divides by the scale, and is evaluated with casts switched off.
    """
    # tml-epfl/understanding-fast-adv-training

    model = classifier(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    amp.register_float_function(torch, "batch_norm")
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **SETTINGS)

    def input_gradient(x, y, delta):
        delta.requires_grad = True
        loss = F.cross_entropy(model(x + delta), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            grad = torch.autograd.grad(scaled_loss, delta, create_graph=True)[0]
            grad /= scaled_loss / loss
        return grad

    def attacked(x, y):
        delta = torch.zeros_like(x, requires_grad=True)
        loss = F.cross_entropy(model(x + delta), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            delta.grad.mul_(loss.item() / scaled_loss.item())
        return (x + 0.2 * delta.grad / delta.grad.abs().max()).detach()

    losses = []
    for _ in range(24):
        x, y = images(16, 1)
        grad = input_gradient(x, y, torch.zeros_like(x))
        delta = 0.1 * torch.tanh(100 * grad.detach())
        loss = F.cross_entropy(model(x + delta), y)
        other = input_gradient(x, y, torch.empty_like(x).uniform_(-0.3, 0.3))
        norms = [g.pow(2).sum((1, 2, 3), keepdim=True) ** 0.5 for g in (grad, other)]
        cosine = torch.sum(grad / norms[0] * (other / norms[1]), (1, 2, 3))
        loss += 0.5 * (1.0 - cosine.mean())
        losses.append(step(amp, loss, optimizer))
    with amp.disable_casts():
        model.eval()
        x, y = images(16, 1)
        robust = F.cross_entropy(model(attacked(x, y)), y)
    assert robust.item() < losses[0]
    return losses


# Losses.


@script
def tasks_with_scalers_of_their_own(amp, level):
    """Pretraining on several tasks has a loss scaler for each, accumulates gradients that stay scaled until the last, rewrites
    them inside of that block as an all-reduce does, and steps once before it has any.
    """
    # ChenRocks/UNITER

    from apex.normalization import FusedLayerNorm

    class Pretrained(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(12, 16), FusedLayerNorm(16, eps=1e-12)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, activation="gelu", batch_first=True)
            self.word, self.pair = nn.Linear(16, 12), nn.Linear(16, 2)

        def forward(self, batch, task):
            hidden = self.layer(self.norm(self.embed(batch["input_ids"])))
            if task == "mlm":
                chosen = hidden[batch["masked"].unsqueeze(-1).expand_as(hidden)].contiguous().view(-1, 16)
                return F.cross_entropy(self.word(chosen), batch["labels"][batch["masked"]], reduction="none")
            return F.cross_entropy(self.pair(hidden[:, 0]), batch["matches"], reduction="none")

    model = Pretrained()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98))
    scalers = {"mlm": 0, "itm": 1}
    model, optimizer = amp.initialize(model, optimizer, num_losses=len(scalers), opt_level=level, **SETTINGS)
    optimizer.zero_grad()
    optimizer.step()
    losses, both = [], {}
    for index in range(64):
        task = ("mlm", "itm")[index // 2 % 2]
        ids = (torch.randint(12, (8, 1)) + 5 * torch.arange(6)) % 12
        masked = torch.zeros_like(ids, dtype=torch.bool)
        masked[:, 3] = True
        batch = {"input_ids": ids.masked_fill(masked, 0), "masked": masked, "labels": ids, "matches": ids[:, 0] % 2}
        loss = model(batch, task).mean()
        delay_unscale = (index + 1) % 2 != 0
        with amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale, loss_id=scalers[task]) as scaled_loss:
            scaled_loss.backward()
            if not delay_unscale:
                grads = [p.grad.data for p in model.parameters() if p.requires_grad and p.grad is not None]
                flat = torch.cat([grad.view(-1) for grad in grads])
                flat.div_(2)
                for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads])):
                    grad.view(-1).copy_(mean)
        both[task] = loss.item()
        if not delay_unscale:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1, (index + 1) / 8)
            clip_grad_norm_(amp.master_params(optimizer), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(both.values()) / len(both))
    return losses


# The tests.


def run(name, seed, amp, level=None):
    torch.manual_seed(seed)
    return torch.tensor(SCRIPTS[name](amp, level), dtype=torch.float64)


def distance(found, wanted):
    """The mean absolute difference between the losses of all seeds, relative to the mean of the wanted losses."""
    found, wanted = torch.stack(found), torch.stack(wanted)
    return ((found - wanted).abs().mean() / wanted.abs().mean()).item()


@functools.cache
def references(name):
    """Return the runs in float32, and the distance of the runs under torch.autocast."""
    wanted = [run(name, seed, NoAmp()) for seed in SEEDS]
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        autocast = [run(name, seed, NoAmp()) for seed in SEEDS]
    return wanted, distance(autocast, wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_as_in_float32(amp, name, level):
    wanted, of_autocast = references(name)
    found = [run(name, seed, amp, level) for seed in SEEDS]
    assert all(scaler.loss_scale() == SETTINGS["max_loss_scale"] for scaler in amp._amp_state.loss_scalers)
    assert 0 < distance(found, wanted) <= max(TOLERANCE, TIMES_AUTOCAST * of_autocast)
    for losses in (torch.stack(wanted), torch.stack(found)):
        quarter = losses.shape[1] // 4
        assert losses[:, -quarter:].mean() < LEARNED * losses[:, :quarter].mean()
