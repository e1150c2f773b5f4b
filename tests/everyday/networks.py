"""Kinds of networks, of layers and of weights."""

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from . import ALL, Writer, learn, mlp, noise_of, regression, script, some_tokens, way_of

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
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=times)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for index in range(times):
        losses.append(of_next_tokens(run, model, some_tokens(8, 13, seed=index)))
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


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(24)
        self.down1, self.down2, self.middle = self.block(3, 16), self.block(16, 32), self.block(32, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.join2, self.join1, self.head = self.block(64, 32), self.block(32, 16), nn.Conv2d(16, 2, 1)

    @staticmethod
    def block(inputs, outputs):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.join2(torch.cat([self.up2(self.middle(F.max_pool2d(two, 2))), two], 1))
        return self.head(self.join1(torch.cat([self.up1(x), one], 1)))


@script(ALL)
def unet_with_batch_norm(run):
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    noise = noise_of(25)

    def loss_of(_):
        x = noise(6, 3, 16, 16)
        with run.casts():
            scores = model(x)
        return F.cross_entropy(scores.float(), (F.avg_pool2d(x, 3, 1, 1)[:, 0] > 0).long())

    found = learn(run, model, optimizer, loss_of, times=4)
    model.eval()
    with torch.no_grad(), run.casts():
        return found | {"picture": [model(noise(2, 3, 16, 16)).float()]}


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


class Tables(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(41)
        self.one, self.bag = nn.Embedding(200, 32, padding_idx=0, **settings), nn.EmbeddingBag(200, 32, mode="mean")
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
def sparse_gradients_of_a_table(run):
    tokens, y = some_tokens(16, 30, tokens=200).sort(1).values, noise_of(42)(16, 2)
    model = Tables(sparse=True)
    optimizers = [torch.optim.SparseAdam([model.one.weight], lr=1e-3)]
    optimizers.append(torch.optim.Adam([p for p in model.parameters() if p is not model.one.weight], lr=1e-3))
    way, losses = way_of(model), []
    run.begin(model, optimizers)
    for _ in range(6):
        losses.append(run.error(model, tokens, y))
        for optimizer in optimizers:
            optimizer.zero_grad()
        run.backward(losses[-1], optimizers)
        for optimizer in optimizers:
            optimizer.step()
    return {"losses": losses, "weights": way(), "gradients": [p.grad.to_dense() for p in model.parameters()]}


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
    start, losses, tokens = prompt.detach().clone(), [], some_tokens(4, 12)
    run.begin(model, optimizer)
    for _ in range(5):
        with run.casts():
            x = torch.cat([prompt.expand(4, -1, -1), model.table(tokens)], 1)
            for block in model.blocks:
                x = block(x)
            scores = model.head(model.norm(x[:, 70:-1]))
        losses.append(F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten()))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": [prompt.detach() - start]}


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
