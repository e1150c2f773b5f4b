"""Kinds of networks, of layers and of weights."""

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from . import ALL, Writer, mlp, noise_of, regression, script, some_tokens, way_of

# -- fields, codes and variational models


class Field(nn.Module):
    """Colours along rays, from cameras whose poses are learned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(13)
        self.turns, self.shifts = nn.Embedding(6, 3), nn.Parameter(torch.zeros(6, 3))
        nn.init.zeros_(self.turns.weight)
        self.net = mlp(39, 96, 64, 4, act=nn.ReLU)

    def forward(self, cameras, directions):
        x, y, z = self.turns(cameras).unbind(-1)
        zero = torch.zeros_like(x)
        skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).view(-1, 3, 3)
        directions = (torch.matrix_exp(skew) * directions[:, None]).sum(-1)
        depths = torch.linspace(0.5, 2.0, 6)
        points = self.shifts[cameras][:, None] + depths[:, None] * directions[:, None]
        angles = points[..., None] * 2.0 ** torch.arange(6)
        features = torch.cat([points, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)
        *colours, density = self.net(features).float().unbind(-1)
        opacity = 1 - torch.exp(-F.softplus(density) * 0.3)
        passed = torch.cumprod(torch.cat([torch.ones(len(opacity), 1), 1 - opacity[:, :-1]], 1), 1)
        return (torch.stack(colours, -1).sigmoid() * (opacity * passed)[..., None]).sum(1)


@script()
def field_with_learned_cameras(run):
    model = Field()
    groups = [{"params": model.net.parameters()}, {"params": [model.turns.weight, model.shifts], "lr": 1e-3}]
    optimizer = torch.optim.Adam(groups, lr=2e-3)
    noise, losses = noise_of(14), []
    way, of_turns, of_shifts = way_of(model.net), way_of(model.turns), model.shifts.detach().clone()
    run.begin(model, optimizer)
    for index in range(8):
        cameras, directions = some_tokens(48, seed=index, tokens=6), F.normalize(noise(48, 3), dim=1)
        wanted = (3 * directions + cameras[:, None] / 3).sin() / 2 + 0.5
        with run.casts():
            colours = model(cameras, directions)
        losses.append(F.mse_loss(colours, wanted))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way(), "turns": of_turns(), "shifts": [model.shifts.double() - of_shifts]}


class Codes(nn.Module):
    """A table of codes, in buffers, that follow the averages of what they stand for."""

    def __init__(self):
        super().__init__()
        table = 0.3 * noise_of(15)(16, 32)
        self.register_buffer("table", table)
        self.register_buffer("counts", torch.ones(16))
        self.register_buffer("sums", table.clone())

    def forward(self, z):
        flat_z = z.detach().float()
        apart = flat_z.square().sum(1, keepdim=True) - 2 * flat_z @ self.table.T + self.table.square().sum(1)
        chosen = F.one_hot(apart.argmin(1), 16).type_as(flat_z)
        codes = chosen @ self.table
        if self.training:
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.T @ flat_z, alpha=0.1)
            self.table.copy_(self.sums / (self.counts + 1e-5)[:, None])
        return z + (codes.float() - z).detach(), F.mse_loss(z.float(), codes.float().detach())


class CodedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.codes = mlp(64, 96, 32), mlp(32, 96, 64, seed=1), Codes()

    def forward(self, x):
        codes, commitment = self.codes(self.encoder(x))
        return self.decoder(codes), commitment


@script(ALL)
def vq_vae_with_averaged_codes(run):
    model = CodedAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    centres = 2 * noise_of(16)(8, 64)
    way, noise, losses = way_of(model), noise_of(17), []
    run.begin(model, optimizer)
    for index in range(6):
        x = centres[some_tokens(48, seed=index, tokens=8)] + 0.1 * noise(48, 64)
        with run.casts():
            output, commitment = model(x)
        losses.append(F.mse_loss(output.float(), x) + 0.25 * commitment.float())
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way(), "codes": [model.codes.table]}


# -- sequences


@script(ALL)
def tied_table_and_head(run):
    model, way, losses = Writer(tied=True), None, []
    way = way_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run.begin(model, optimizer)
    for index in range(8):
        tokens = some_tokens(8, 12, seed=index).sort(1).values
        with run.casts():
            scores = model(tokens[:, :-1])
        losses.append(F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten()))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(20)
        self.recurrent, self.head = nn.LSTM(48, 96, batch_first=True), nn.Linear(96, 2)

    def forward(self, x, state=None):
        output, state = self.recurrent(x, state)
        return self.head(output), state


def truncated(run):
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = noise_of(21)(8, 30, 48)
    y = x[..., :2].cumsum(1).sin()
    way, losses, state = way_of(model), [], None
    run.begin(model, optimizer)
    for part, wanted in zip(x.split(5, 1), y.split(5, 1)):
        with run.casts():
            output, state = model(part, state)
        losses.append(F.mse_loss(output.float(), wanted))
        run.learn(losses[-1], optimizer)
        state = tuple(each.detach() for each in state)
    return {"losses": losses, "weights": way()}


@script(ALL)
def lstm_in_chunks(run):
    # torch.autocast asks oneDNN for an LSTM in bfloat16 also where it has none, and raises.
    with torch.backends.mkldnn.flags(enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return truncated(run)


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
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=times)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for index in range(times):
        tokens = some_tokens(8, 13, seed=index).sort(1).values
        with run.casts():
            scores = model(tokens[:, :-1])
        losses.append(F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {"losses": losses, "weights": way()}


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


@script(ALL)
def letters_by_ctc(run):
    torch.manual_seed(53)
    model = nn.Sequential(
        nn.Conv1d(32, 64, 5, padding=2), nn.GroupNorm(4, 64), nn.GELU(), nn.Conv1d(64, 20, 5, padding=2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x, letters = noise_of(54)(6, 32, 24), 1 + some_tokens(6, 5, tokens=19)
    way, losses, lengths = way_of(model), [], (torch.full((6,), 24), torch.full((6,), 5))
    run.begin(model, optimizer)
    for _ in range(6):
        with run.casts():
            scores = model(x)
        losses.append(F.ctc_loss(scores.float().permute(2, 0, 1).log_softmax(-1), letters, *lengths))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


def with_made_weights(run, make):
    model, _, x, y = regression()
    model[0] = make(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


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
    found = trained(run, model, x, x.sin(), lr=0.5)
    return {"losses": found["losses"], "weights": found["weights"]}


@script(ALL)
def weight_norm_of_fixed_length(run):
    return with_one_half_frozen(run, "weight_g")


@script(ALL)
def weight_norm_of_fixed_direction(run):
    return with_one_half_frozen(run, "weight_v")


def four_micro_batches(run, backward):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer, loss_scale=1.0)
    for _ in range(5):
        for index, (part, wanted) in enumerate(zip(x.split(8), y.split(8))):
            losses.append(run.error(model, part, wanted) / 4)
            backward(losses[-1], optimizer, index)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": way()}


@script(ALL)
def four_micro_batches_in_blocks(run):
    return four_micro_batches(run, lambda loss, optimizer, index: run.backward(loss, optimizer))


@script(ALL)
def four_micro_batches_unscaled_late(run):
    flags = {"delay_unscale": True}
    return four_micro_batches(
        run, lambda loss, optimizer, index: run.backward(loss, optimizer, **(flags if index < 3 else {}))
    )


@script(ALL)
def four_micro_batches_without_blocks(run):
    return four_micro_batches(run, lambda loss, optimizer, index: loss.backward())


# -- kinds of weights and of layers


def trained(run, model, x, y, lr=0.1, times=8, momentum=0.0, **found):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(times):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {"losses": losses, "weights": way(), "gradients": gradients}


class Slimmable(nn.Module):
    """Uses a part of its weights by turns."""

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
    x = noise_of(36)(32, 64)
    found = trained(run, Slimmable(), x, x.sin(), lr=0.5)
    return {"losses": found["losses"], "weights": found["weights"]}


class Experts(nn.Module):
    """Of eight experts in one parameter, each row goes to two."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(37)
        self.gate = nn.Linear(64, 8)
        self.up, self.down = nn.Parameter(torch.randn(8, 64, 48) / 8), nn.Parameter(torch.randn(8, 48, 64) / 7)

    def forward(self, x):
        chosen = (x.abs() * 1e3).long()[
            :, :2
        ] % 8  # by a hash: a choice by rounded scores would be another now and then
        chances = self.gate(x).float().softmax(-1).gather(1, chosen)
        output = torch.zeros_like(x)
        for index in range(8):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                found = F.gelu(x[rows] @ self.up[index]) @ self.down[index]
                output = output.index_add(0, rows, (found.float() * chances[rows, place, None]).to(output.dtype))
        return output


@script()
def mixture_of_experts(run):
    x = noise_of(38)(32, 64)
    return trained(run, Experts(), x, x.sin(), lr=1.0, times=5)


@script()
def encoder_of_torch(run):
    torch.manual_seed(39)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = noise_of(40)(4, 8, 64)
    return trained(run, model, x, x.roll(1, 1), lr=0.5)


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(41)
        self.one, self.bag = nn.Embedding(200, 32, padding_idx=0), nn.EmbeddingBag(200, 32, mode="mean")
        self.mix = mlp(64, 96, 2)

    def forward(self, tokens):
        return self.mix(torch.cat([self.one(tokens).mean(1) + self.one(tokens[:, 3]), self.bag(tokens)], 1))


@script()
def tables_of_words(run):
    tokens, y = some_tokens(16, 30, tokens=200).sort(1).values, noise_of(42)(16, 2)
    tokens[:, ::4] = 7
    tokens[:, :3] = 0
    return trained(run, Tables(), tokens, y, lr=0.05)


@script()
def channels_last(run):
    torch.manual_seed(43)
    model = nn.Sequential(nn.Conv2d(16, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 16, 3, padding=1))
    model = model.to(memory_format=torch.channels_last)
    x = noise_of(44)(4, 16, 8, 8).to(memory_format=torch.channels_last)
    return trained(run, model, x, x.sin(), momentum=0.9)


class Quantized(nn.Linear):
    """Computes with weights of a few values; gradients go straight through."""

    def forward(self, x):
        step = self.weight.detach().abs().max() / 7
        return F.linear(x, self.weight + ((self.weight / step).round() * step - self.weight).detach(), self.bias)


@script()
def weights_rounded_straight_through(run):
    torch.manual_seed(45)
    x = noise_of(46)(32, 64)
    return trained(run, nn.Sequential(Quantized(64, 96), nn.Tanh(), Quantized(96, 64)), x, x.sin(), lr=0.5, times=4)
