"""Kinds of networks, of layers and of weights."""

import functools
import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from . import ALL, Writer, learn, mlp, noise_of, regression, script, some_tokens

# -- sequences


def of_next_tokens(run, model, tokens):
    """Return the loss of a language model, of tokens in ascending order."""
    tokens = tokens.sort(1).values
    with run.casts():
        scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())


@script(ALL)
def tied_table_and_head(run):
    model = Writer(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return learn(run, model, optimizer, lambda index: of_next_tokens(run, model, some_tokens(8, 12, seed=index)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(20)
        self.recurrent, self.head = kind(48, 96, batch_first=True), nn.Linear(96, 2)

    def forward(self, x, state=None):
        output, state = self.recurrent(x, state)
        return self.head(output), state


def detached(state):
    return state.detach() if isinstance(state, torch.Tensor) else tuple(each.detach() for each in state)


def truncated(run, kind):
    model = Recurrent(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = noise_of(21)(8, 30, 48)
    y = x[..., :2].cumsum(1).sin()
    parts, states = list(zip(x.split(5, 1), y.split(5, 1))), [None]

    def loss_of(index):
        part, wanted = parts[index]
        with run.casts():
            output, state = model(part, states[-1])
        states.append(detached(state))
        return F.mse_loss(output.float(), wanted)

    return learn(run, model, optimizer, loss_of, len(parts))


@script(ALL)
def rnn_in_chunks(run):
    return truncated(run, nn.RNN)


@script(ALL)
def lstm_in_chunks(run):
    # torch.autocast asks oneDNN for an LSTM in bfloat16 also where it has none, and raises.
    with torch.backends.mkldnn.flags(enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return truncated(run, nn.LSTM)


class Block(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, through=None):
        super().__init__()
        torch.manual_seed(22)
        self.table, self.places = nn.Embedding(64, 64), nn.Parameter(0.02 * torch.randn(16, 64))
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(64)
        self.head, self.through = nn.Linear(64, 64, bias=False), through

    def forward(self, tokens):
        x = self.table(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x) if self.through is None else self.through(block, x)
        return self.head(self.norm(x))


def write_on(run, model, times=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=times + 1)

    def loss_of(index):
        if index > 0:
            schedule.step()
        return of_next_tokens(run, model, some_tokens(8, 13, seed=index))

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return learn(run, model, optimizer, loss_of, times, edit=clip)


@script(ALL)
def small_transformer(run):
    return write_on(run, Transformer())


@script(ALL)
def recomputed_blocks(run):
    return write_on(run, Transformer(functools.partial(checkpoint, use_reentrant=False)))


@script(ALL)
def recomputed_blocks_reentrant(run):
    return write_on(run, Transformer(functools.partial(checkpoint, use_reentrant=True)))


# -- images, and layers whose weights are made


def with_made_weights(run, make):
    model, _, x, y = regression()
    model[0] = make(model[0])
    return learn(run, model, torch.optim.SGD(model.parameters(), lr=0.1), lambda _: run.error(model, x, y))


@script(ALL)
def spectral_norm(run):
    return with_made_weights(run, parametrizations.spectral_norm)


@script(ALL)
def weight_norm(run):
    return with_made_weights(run, parametrizations.weight_norm)


def with_one_half_frozen(run, half):
    """The older weight norm keeps a length and a direction; DINO trains directions alone."""
    model, x = mlp(64, 96, 64), noise_of(55)(32, 64)
    nn.utils.weight_norm(model[2]).get_parameter(half).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return learn(run, model, optimizer, lambda _: run.error(model, x, x.sin()))


@script(ALL)
def weight_norm_of_fixed_length(run):
    return with_one_half_frozen(run, "weight_g")


@script(ALL)
def weight_norm_of_fixed_direction(run):
    return with_one_half_frozen(run, "weight_v")


def four_micro_batches(run, backward):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)

    def losses_of(_):
        for part, wanted in zip(x.split(8), y.split(8)):
            yield run.error(model, part, wanted) / 4

    return learn(run, model, optimizer, losses_of, times=5, backward=backward, loss_scale=1.0)


@script(ALL)
def four_micro_batches_in_blocks(run):
    return four_micro_batches(run, run.backward)


@script(ALL)
def four_micro_batches_unscaled_late(run):
    delays = itertools.cycle([True, True, True, False])
    return four_micro_batches(
        run, lambda loss, optimizer: run.backward(loss, optimizer, **({"delay_unscale": True} if next(delays) else {}))
    )


@script(ALL)
def four_micro_batches_without_blocks(run):
    return four_micro_batches(run, lambda loss, optimizer: loss.backward())


# -- kinds of weights and of layers


def trained(run, model, x, y, lr=0.1, momentum=0.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    found = learn(run, model, optimizer, lambda _: run.error(model, x, y))
    return found | {"gradients": [p.grad for p in model.parameters() if p.grad is not None]}


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(34)
        self.weight = nn.Parameter(torch.randn(96, 64) / 8)

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t())


@script()
def tied_autoencoder(run):
    x = noise_of(35)(32, 64)
    return trained(run, TiedAutoencoder(), x, x.sin(), lr=0.5)


class Slimmable(nn.Module):
    """A model that uses a part of its weights by turns."""

    def __init__(self):
        super().__init__()
        self.up, self.down = mlp(64, 96)[0], mlp(96, 64, seed=1)[0]

    def forward(self, x):
        return sum(
            F.linear(F.relu(F.linear(x, self.up.weight[:k], self.up.bias[:k])), self.down.weight[:, :k], self.down.bias)
            for k in (32, 64, 96)
        )


@script(ALL)
def parts_of_weights(run):
    model, x = Slimmable(), noise_of(36)(32, 64)
    return learn(run, model, torch.optim.SGD(model.parameters(), lr=0.5), lambda _: run.error(model, x, x.sin()))


@script()
def encoder_of_torch(run):
    torch.manual_seed(39)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = noise_of(40)(4, 8, 64)
    return trained(run, model, x, x.roll(1, 1), lr=0.5)


@script()
def channels_last(run):
    torch.manual_seed(43)
    model = nn.Sequential(nn.Conv2d(16, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 16, 3, padding=1))
    model = model.to(memory_format=torch.channels_last)
    x = noise_of(44)(4, 16, 8, 8).to(memory_format=torch.channels_last)
    return trained(run, model, x, x.sin(), momentum=0.9)


@script(ALL)
def adversarial_training(run):
    model, optimizer, x, y = regression(lr=0.05)

    def loss_of(_):
        nearby = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run.error(model, nearby, y), nearby)
        return run.error(model, x + 0.1 * slope / slope.norm(dim=1, keepdim=True), y)

    return learn(run, model, optimizer, loss_of, times=6)


@script(ALL)
def prompt_for_a_frozen_model(run):
    model = Transformer().requires_grad_(False)
    prompt = nn.Parameter(0.1 * noise_of(47)(70, 64))
    optimizer = torch.optim.AdamW([prompt], lr=1e-2)
    start, tokens = prompt.detach().clone(), some_tokens(4, 12)

    def loss_of(_):
        with run.casts():
            x = torch.cat([prompt.expand(4, -1, -1), model.table(tokens)], 1)
            for block in model.blocks:
                x = block(x)
            scores = model.head(model.norm(x[:, 70:-1]))
        return F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())

    found = learn(run, model, optimizer, loss_of, times=5)
    return {"losses": found["losses"], "weights": [prompt.detach() - start]}
