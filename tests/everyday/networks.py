"""Kinds of networks, of layers and of weights."""

import torch
from torch import nn
from torch.nn import functional as F

from . import ALL, learn, mlp, noise_of, script, some_tokens

# -- sequences


def of_next_tokens(run, model, tokens):
    """Return the loss of a language model, of tokens in ascending order."""
    tokens = tokens.sort(1).values
    with run.casts():
        scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    """A pre-norm block with separate projections for query, key and value."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y, layers = self.norm1(x), (self.query, self.key, self.value)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(22)
        self.table, self.places = nn.Embedding(64, 64), nn.Parameter(0.02 * torch.randn(16, 64))
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(64)
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, tokens):
        x = self.table(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@script(ALL)
def small_transformer(run):
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=6)

    def loss_of(index):
        if index > 0:
            schedule.step()
        return of_next_tokens(run, model, some_tokens(8, 13, seed=index))

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return learn(run, model, optimizer, loss_of, times=5, edit=clip)


# -- layers whose weights are made


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
def channels_last(run):
    torch.manual_seed(43)
    model = nn.Sequential(nn.Conv2d(16, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 16, 3, padding=1))
    model = model.to(memory_format=torch.channels_last)
    x = noise_of(44)(4, 16, 8, 8).to(memory_format=torch.channels_last)
    return trained(run, model, x, x.sin(), momentum=0.9)
