"""Ordinary models and training scripts, written for float32: at a level they run as they are, and train as in float32.

A row of the table is a forward with the parts of its model, the batches that it is given, the script that computes the loss,
and how far from float32's its buffers may end. Expected values are plain torch's.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampkit

LEVELS = ("O1", "O2", "O5")
#: Settings that have a level compute in float16, where it can.
IN_FLOAT16 = {
    "O1": dict(patch_torch_functions_type=torch.float16),
    "O2": dict(cast_model_type=torch.float16),
}
SEEDS, STEPS = (0, 1), 20
# The allowed distance of losses from float32's, relative to its mean loss: this far, or twice as far as torch.autocast's.
TOLERANCE, TIMES_AUTOCAST = 0.02, 2

adamw = functools.partial(torch.optim.AdamW, lr=3e-3)


def regression(model, x, y):
    return F.mse_loss(model(x), y)


def classification(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def own_loss(model, *batch):
    return model(*batch)[0]


class Parts(nn.Module):
    """A module of modules and parameters, and buffers, which are passed as tensors."""

    def __init__(self, **parts: Any):
        super().__init__()
        for name, part in parts.items():
            if type(part) is torch.Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


@dataclass(frozen=True)
class Idiom:
    make_model: Callable[[], nn.Module]
    data: Callable[[torch.Generator], tuple]
    script: Callable[..., torch.Tensor] = regression
    make_optimizer: Callable[..., torch.optim.Optimizer] = adamw
    #: The allowed distance from float32, by the name of a buffer; 0 for a buffer that no rounding of activations reaches.
    buffers: Mapping[str, float] = field(default_factory=dict)


IDIOMS: dict[str, Idiom] = {}


def idiom(parts: Callable[..., dict], *row, variants: Mapping[str, Any] | None = None, **settings):
    """Enter the forward that follows into the table: once for each of the variants, which ``parts`` is called with."""

    def enter(forward):
        model_class = type(forward.__name__, (Parts,), {"forward": forward})
        for name, variant in (variants or {"": None}).items():
            given = () if variants is None else (variant,)
            make_model = functools.partial(lambda given: model_class(**parts(*given)), given)
            IDIOMS[f"{forward.__name__} {name}".strip().replace("_", " ")] = Idiom(make_model, *row, **settings)
        return forward

    return enter


def run(
    row: Idiom, seed: int, level: str | None = None, region=contextlib.nullcontext, adapt=None, steps=STEPS, **settings
):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = row.make_model()
    optimizer = row.make_optimizer(model.parameters())
    if level is not None:
        model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
    called, losses = (adapt or (lambda model: model))(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        with region():
            loss = row.script(called, *row.data(generator))
        with contextlib.nullcontext(loss) if level is None else ampkit.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    buffers = {name: model.get_buffer(name).detach().double() for name in row.buffers}
    ampkit.close()
    return torch.tensor(losses, dtype=torch.float64), buffers


def distance(found, wanted):
    found, wanted = torch.stack(found), torch.stack(wanted)
    return ((found - wanted).abs().mean() / wanted.abs().mean()).item()


# Inputs of the models. Batches are new in each step, and the same for the same seed.


def drawn(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(generator, rows=64):
    x = torch.randn(rows, 16, generator=generator)
    return x, torch.sin(x @ drawn(16, 4) / 4) + x[:, :4].abs()


def sequences(generator):
    x = torch.randn(16, 12, 16, generator=generator)
    return x, x.cumsum(1) / torch.arange(1.0, 13).sqrt()[:, None]


def long_sequences(generator):
    x = torch.randn(2, 300, 16, generator=generator)
    return x, x


def tokens(generator):
    ids = torch.randint(20, (16, 1), generator=generator)
    for _ in range(12):
        ids = torch.cat([ids, (3 * ids[:, -1:] + 1) % 20], 1)
    return ids[:, :-1], ids[:, 1:]


def last_token(generator):
    x, y = tokens(generator)
    return x, y[:, -1]


def signals(generator):
    x = torch.randn(16, 4, 32, generator=generator).cumsum(-1) / 4
    return x, x.roll(1, -1)


def observations(generator):
    """Small whole numbers, whose means no precision rounds."""
    x = torch.randint(4, (16, 16), generator=generator).float()
    return x, x[:, :4] - x[:, 4:8]


def two_layers(hidden=32, **others):
    return dict(inner=nn.Linear(16, hidden), outer=nn.Linear(hidden, 4), **others)


def mlp(*sizes):
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers[:-1])


# Masks and attention.


def decoder(**others):
    return dict(embed=nn.Embedding(20, 16), qkv=nn.Linear(16, 48), head=nn.Linear(16, 20), **others)


def self_attention(qkv, mask=0.0):
    q, k, v = qkv.chunk(3, dim=-1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores + mask, dim=-1) @ v


FILLS = {"of -inf": -math.inf, "of finfo.min": torch.finfo(torch.float32).min}


@idiom(lambda fill: decoder(fill=fill), tokens, classification, variants=FILLS)
def additive_mask_in_forward(self, ids):
    x = self.embed(ids)
    mask = torch.triu(torch.full((ids.shape[1], ids.shape[1]), self.fill), diagonal=1)
    return self.head(x + self_attention(self.qkv(x), mask))


@idiom(decoder, tokens, classification)
def scaled_dot_product_attention_with_a_mask(self, ids):
    x = self.embed(ids)
    q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
    mask = torch.zeros(12, 12).masked_fill(torch.ones(12, 12).triu(1) > 0, -math.inf)
    return self.head(x + F.scaled_dot_product_attention(q, k, v, mask).squeeze(1))


# Positions and times.


def projections():
    """Keys and queries that point one way, so that what turns them tells positions apart; values are equal to the input."""
    parts = dict(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16))
    nn.init.constant_(parts["qkv"].bias[:32], 4.0)
    nn.init.eye_(parts["qkv"].weight[32:])
    nn.init.eye_(parts["out"].weight)
    return parts


@idiom(projections, long_sequences)
def rotary_in_forward(self, x):
    frequencies = 1 / 10 ** (torch.arange(0, 16, 2).float() / 16)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    q, k, v = self.qkv(x).chunk(3, dim=-1)
    q, k = (part * cos + torch.cat([-part[..., 8:], part[..., :8]], -1) * sin for part in (q, k))
    return self.out(self_attention(torch.cat([q, k, v], -1)))


# Recurrence.


@idiom(lambda: dict(cell=nn.GRUCell(16, 32), out=nn.Linear(32, 16)), sequences)
def cell_into_zeros(self, x):
    hidden, outputs = torch.zeros(len(x), 32), torch.zeros(x.shape)
    for i in range(x.shape[1]):
        hidden = self.cell(x[:, i], hidden)
        outputs[:, i] = self.out(hidden)
    return outputs


# Float32 that a forward makes, beside weights.


@idiom(lambda: dict(w=nn.Parameter(drawn(20, 16) / 4), head=nn.Linear(16, 20)), tokens, classification)
def one_hot(self, ids):
    return self.head(torch.relu(F.one_hot(ids, 20).float() @ self.w))


@idiom(lambda: dict(router=nn.Linear(16, 4), experts=nn.ModuleList(mlp(16, 16, 4) for _ in range(4))), vectors)
def mixture_of_experts(self, x):
    weights, chosen = torch.topk(F.softmax(self.router(x), dim=-1), 2)
    weights, out = weights / weights.sum(-1, keepdim=True), torch.zeros(len(x), 4)
    for i, expert in enumerate(self.experts):
        rows, place = torch.where(chosen == i)
        out.index_add_(0, rows, weights[rows, place, None] * expert(x[rows]))
    return out


# Numbers of a wide range.


@idiom(lambda: dict(lift=nn.Conv1d(4, 8, 1), weight=nn.Parameter(drawn(8, 4, 9, 2) / 8)), signals)
def fourier_layer(self, x):
    spectrum = torch.fft.rfft(self.lift(x))[..., :9]
    mixed = torch.einsum("bim,iom->bom", spectrum, torch.view_as_complex(self.weight))
    return torch.fft.irfft(mixed, n=x.size(-1))


def priced(generator):
    """Flats of one building: prices near 300,000 that differ by a hundredth."""
    x, y = vectors(generator)
    return x, 3e5 + 2e3 * y[:, 0]


@idiom(lambda: dict(net=mlp(16, 32, 1), mean=torch.tensor(3e5), std=torch.tensor(2e3)), priced, own_loss)
def house_prices(self, x, price):
    predicted = self.net(x).squeeze(1)
    return F.mse_loss(predicted, (price - self.mean) / self.std), predicted * self.std + self.mean


# Buffers that count and average.


@idiom(lambda: dict(step=torch.tensor(240.0), net=mlp(16, 4), skip=nn.Linear(16, 4)), vectors, buffers={"step": 0})
def step_counter(self, x):
    self.step += 1
    weight = torch.clamp((self.step - 240) / 30, max=1.0)
    return weight * self.net(x) + (1 - weight) * self.skip(x)


@idiom(
    lambda: dict(mean=torch.zeros(16), var=torch.ones(16), count=torch.tensor(1e-4), policy=mlp(16, 32, 4)),
    observations,
    buffers={"mean": 0, "var": 0, "count": 0},
)
def running_mean_of_observations(self, x):
    total, delta = self.count + len(x), x.mean(0) - self.mean
    spread = self.var * self.count + (x - x.mean(0)).square().sum(0) + delta**2 * self.count * len(x) / total
    self.mean, self.var, self.count = self.mean + delta * len(x) / total, spread / total, total
    return self.policy((x - self.mean) / torch.sqrt(self.var + 1e-8))


# Parameters that are no layer's, and layers that are not quite their own.


@idiom(lambda: {name: nn.utils.spectral_norm(layer) for name, layer in two_layers().items()}, vectors)
def old_spectral_norm(self, x):
    return self.outer(F.leaky_relu(self.inner(x)))


@idiom(
    lambda: dict(bag=nn.EmbeddingBag(20, 16, mode="sum", sparse=True, max_norm=0.5), head=nn.Linear(16, 20)),
    *(last_token, classification),
    make_optimizer=functools.partial(torch.optim.SGD, lr=0.3),
)
def weighted_bags_of_bounded_rows(self, ids):
    weights = torch.linspace(0.5, 1.5, ids.shape[1]).expand(ids.shape)
    return self.head(self.bag(ids, per_sample_weights=weights))


@idiom(lambda: two_layers(g=nn.Parameter(torch.ones(32))), vectors)
def rms_norm_by_hand(self, x):
    x = self.inner(x)
    return self.outer(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g)


# The tests.


@functools.cache
def references(name):
    """The runs in float32, and the distance of those under torch.autocast; 0 where it does not run."""
    wanted = [run(IDIOMS[name], seed) for seed in SEEDS]
    try:
        autocast = [run(IDIOMS[name], seed, region=lambda: torch.autocast("cpu", torch.bfloat16))[0] for seed in SEEDS]
    except RuntimeError:
        return wanted, 0.0
    return wanted, distance(autocast, [losses for losses, _ in wanted])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_trains_as_in_float32(name, level):
    wanted, of_autocast = references(name)
    found = [run(IDIOMS[name], seed, level) for seed in SEEDS]
    apart = distance([losses for losses, _ in found], [losses for losses, _ in wanted])
    assert apart <= max(TOLERANCE, TIMES_AUTOCAST * of_autocast)
    for (_, buffers), (_, expected) in zip(found, wanted):
        for buffer, tolerance in IDIOMS[name].buffers.items():
            assert (buffers[buffer] - expected[buffer]).norm() <= tolerance * expected[buffer].norm(), buffer


COMPILED = [
    "additive mask in forward of -inf",
    "rotary in forward",
    "one hot",
    "house prices",
    "rms norm by hand",
]


@pytest.mark.parametrize("name, level", list(zip(COMPILED, itertools.cycle(LEVELS))))
def test_compiled_idiom_trains_as_in_float32(name, level):
    torch.compiler.reset()
    wanted, of_autocast = references(name)
    found, _ = run(IDIOMS[name], 0, level, adapt=functools.partial(torch.compile, backend="aot_eager"))
    assert distance([found], [wanted[0][0]]) <= max(TOLERANCE, TIMES_AUTOCAST * of_autocast)


@pytest.mark.parametrize("level", [level for level in LEVELS if level in IN_FLOAT16])
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_takes_a_step_in_float16(name, level):
    losses, _ = run(IDIOMS[name], 0, level, steps=1, **IN_FLOAT16[level])
    assert losses.isfinite().all()
