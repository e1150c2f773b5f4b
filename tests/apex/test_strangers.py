"""Scripts of the kinds that public repositories wrote for ``apex.amp``: at O1 and at O2 they train as without amp.

A row of the table is a script, which gets ``amp`` and a level and returns its losses. Each is run with the drop-in; without
amp, in float32; and without amp under ``torch.autocast``, in the precision that the levels use.
"""

import contextlib
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import saved_and_loaded
from torch import nn
from torch.nn.utils import clip_grad_norm_

LEVELS = ("O1", "O2")
SEEDS = (0, 1)
# How far the losses may be from float32's, relative to its mean loss: that far, or twice as far as torch.autocast's.
TOLERANCE, TIMES_AUTOCAST = 0.01, 2
# To which part of those of the first steps the losses of the last steps must have come.
LEARNED = 0.9

# A step that is skipped for its overflow would put the losses one step apart.
SETTINGS = dict(verbosity=0, max_loss_scale=2.0**10)

SCRIPTS = {}


def script(run):
    SCRIPTS[run.__name__.replace("_", " ")] = run
    return run


class NoAmp:
    """What a script has in place of ``apex.amp`` where amp was taken out of it."""

    class LossScaler:
        def __init__(self, scale):
            self._loss_scale = 1.0

        def loss_scale(self):
            return self._loss_scale

    def __init__(self):
        self.scaler = self

    def initialize(self, models, optimizers=None, **settings):
        return models if optimizers is None else (models, optimizers)

    def scale_loss(self, loss, optimizers, **settings):
        return contextlib.nullcontext(loss)

    def master_params(self, optimizer):
        return (param for group in optimizer.param_groups for param in group["params"])

    def disable_casts(self):
        return torch.autocast("cpu", enabled=False)

    def float_function(self, function):
        return function

    def register_float_function(self, module, name):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def drawn(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(count, channels=3):
    """Noisy images of four classes."""
    y = torch.randint(4, (count,))
    return torch.randn(count, channels, 6, 6) + drawn(4, channels, 6, 6)[y] / 2, y


def backward(amp, loss, optimizer, **settings):
    with amp.scale_loss(loss, optimizer, **settings) as scaled_loss:
        scaled_loss.backward()


# Models that grow, and are initialized again.


class Grown(nn.Module):
    """A network that works at twice the resolution after each `extend`; what the new layers add is faded in."""

    def __init__(self):
        super().__init__()
        self.transition = 1.0
        self.blocks = nn.ModuleList()

    def extend(self):
        self.blocks.append(nn.Conv2d(8, 8, 3, padding=1))


class Generator(Grown):
    def __init__(self):
        super().__init__()
        self.from_rgb = nn.Conv2d(3, 8, 1)
        self.to_rgb = nn.ModuleList([nn.Conv2d(8, 3, 1)])

    def extend(self):
        super().extend()
        self.to_rgb.append(nn.Conv2d(8, 3, 1))

    def new_parameters(self):
        return [*self.blocks[-1].parameters(), *self.to_rgb[-1].parameters()]

    def forward(self, x):
        x = F.leaky_relu(self.from_rgb(F.avg_pool2d(x, 2 ** len(self.blocks)) if self.blocks else x), 0.2)
        before = self.to_rgb[0](x)
        for block, to_rgb in zip(self.blocks, self.to_rgb[1:]):
            x = F.interpolate(x, scale_factor=2)
            x = F.leaky_relu(block(x), 0.2)
            after = to_rgb(x)
            before = F.interpolate(before, scale_factor=2) * (1 - self.transition) + after * self.transition
        return before


class Discriminator(Grown):
    def __init__(self):
        super().__init__()
        self.from_rgb = nn.ModuleList([nn.Conv2d(3, 8, 1)])
        self.out = nn.Linear(8 * 4 * 4, 1)

    def extend(self):
        super().extend()
        self.from_rgb.append(nn.Conv2d(3, 8, 1))

    def forward(self, x):
        y = F.leaky_relu(self.from_rgb[-1](x), 0.2)
        for depth in reversed(range(len(self.blocks))):
            y = F.avg_pool2d(F.leaky_relu(self.blocks[depth](y), 0.2), 2)
            x = F.avg_pool2d(x, 2)
            y = y * self.transition + F.leaky_relu(self.from_rgb[depth](x), 0.2) * (1 - self.transition)
        return self.out(y.flatten(1))


@script
def progressively_grown_gan(amp, level):
    """GANs that are grown while they train get layers and optimizers and are initialized again, as is a running average of the
    generator; their gradient penalty has a loss scaler of the script's own.
    """
    # hukkelas/DeepPrivacy

    @amp.float_function
    def gradient_penalty(real, fake, discriminator, loss_scaler):
        epsilon = torch.rand(len(real), 1, 1, 1).to(fake.dtype)
        mixed = epsilon * real.to(fake.dtype) + (1 - epsilon) * fake.detach()
        mixed.requires_grad = True
        logits = discriminator(mixed).sum() * loss_scaler.loss_scale()
        (grad,) = torch.autograd.grad(logits, mixed, torch.ones(logits.shape).to(fake.dtype), create_graph=True)
        grad = grad.view(len(mixed), -1) / loss_scaler.loss_scale()
        return ((grad.norm(p=2, dim=1) - 1) ** 2).to(fake.dtype)

    def initialize(generator, discriminator):
        g_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.0, 0.99))
        d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-3, betas=(0.0, 0.99))
        return amp.initialize([generator, discriminator], [g_optimizer, d_optimizer], opt_level=level, **SETTINGS)

    generator, discriminator, average = Generator(), Discriminator(), Generator()
    average.load_state_dict(generator.state_dict())
    average = amp.initialize(average, None, opt_level=level, **SETTINGS)
    (generator, discriminator), (g_optimizer, d_optimizer) = initialize(generator, discriminator)
    penalty_scaler = amp.scaler.LossScaler(2**14)
    losses, size = [], 4
    for step in range(24):
        if step == 8:
            for model in (generator, discriminator, average):
                model.extend()
            for ours, theirs in zip(average.new_parameters(), generator.new_parameters()):
                ours.data.copy_(theirs.data)
            average = amp.initialize(average, None, opt_level=level, **SETTINGS)
            (generator, discriminator), (g_optimizer, d_optimizer) = initialize(generator, discriminator)
            size = 8
        for model in (generator, discriminator, average):
            model.transition = min(1.0, max(0.1, (step - 8) / 8))
        condition = torch.randn(4, 3, size, size)
        real = torch.tanh(1 + condition - condition.mean((2, 3), keepdim=True))
        fake = generator(condition)
        distance = (discriminator(real) - discriminator(fake.detach())).squeeze(1)
        d_loss = -distance
        d_loss += gradient_penalty(real, fake, discriminator, penalty_scaler) * 10
        d_loss = d_loss.mean()
        d_optimizer.zero_grad()
        backward(amp, d_loss, d_optimizer)
        d_optimizer.step()
        l1 = F.l1_loss(fake, real)
        g_loss = l1 - 0.05 * discriminator(fake).mean()
        d_optimizer.zero_grad()
        g_optimizer.zero_grad()
        backward(amp, g_loss, g_optimizer)
        g_optimizer.step()
        for ours, theirs in zip(average.parameters(), generator.parameters()):
            ours.data = 0.7 * ours + 0.3 * theirs.float()
        with torch.no_grad():
            of_average = F.l1_loss(average(condition), real)
        losses.append(l1.item() + of_average.item() + 0.1 * abs(d_loss.item()))
    return losses


@script
def unfrozen_layers(amp, level):
    """Scripts that fine-tune train a head, unfreeze the layers below, and initialize the same model with another optimizer."""
    # NVIDIA/apex, issue 643

    def optimizer_of(model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9, nesterov=True)

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    )
    net[0].requires_grad_(False)
    net, optimizer = amp.initialize(net, optimizer_of(net), opt_level=level, **SETTINGS)
    losses = []
    for step in range(30):
        if step == 10:
            net.requires_grad_(True)
            net, optimizer = amp.initialize(net, optimizer_of(net), opt_level=level, **SETTINGS)
        x, y = images(16)
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        backward(amp, loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


# Gradients of gradients.


@script
def gradient_alignment(amp, level):
    """Fast adversarial training with aligned gradients differentiates through gradients of inputs, which it takes of the
    scaled loss and divides by the scale, and is evaluated with casts switched off.
    """
    # tml-epfl/understanding-fast-adv-training

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    )
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
        optimizer.zero_grad()
        backward(amp, loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    with amp.disable_casts():
        model.eval()
        x, y = images(16, 1)
        robust = F.cross_entropy(model(attacked(x, y)), y)
    assert robust.item() < losses[0]
    return losses


@script
def normalized_gradients_of_tasks(amp, level):
    """Multi-task training that balances gradients keeps the graph of the scaled loss, and takes the gradient of each task's
    loss with respect to a layer, whose norm trains the weights of tasks.
    """

    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())
            self.heads = nn.ModuleList(nn.Linear(16, 2) for _ in range(3))

        def forward(self, x):
            x = self.trunk(x)
            return [head(x) for head in self.heads]

    model, weights = Tasks(), nn.Linear(3, 1, bias=False)
    nn.init.ones_(weights.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    of_weights = torch.optim.Adam(weights.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **SETTINGS)
    losses, base = [], None
    for _ in range(30):
        x = torch.randn(32, 8)
        found = model(x)
        terms = [F.mse_loss(y, (i + 1) * (x @ drawn(8, 2, seed=i) / 8)) for i, y in enumerate(found)]
        weighted = [torch.mul(weights.weight[0][i], term) for i, term in enumerate(terms)]
        loss = torch.div(sum(weighted), 3)
        base = base or [term.item() for term in weighted]
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        layer = list(model.parameters())[2]
        grads = [torch.autograd.grad(term, layer, retain_graph=True, create_graph=True)[0] for term in weighted]
        norms = [torch.norm(grad, 2) for grad in grads]
        rates = [term / first for term, first in zip(weighted, base)]
        wanted = [(sum(norms) / 3 * (rate / (sum(rates) / 3)) ** 0.5).detach() for rate in rates]
        of_weights.zero_grad()
        (0.1 * sum(F.l1_loss(norm, goal) for norm, goal in zip(norms, wanted))).backward()
        of_weights.step()
        optimizer.step()
        with torch.no_grad():
            weights.weight.clamp_(min=0.0)
            weights.weight.div_(weights.weight.mean())
        losses.append(sum(term.item() for term in terms))
    return losses


# Parts of models.


class Encoder(nn.Module):
    """Frames of speech, by the nearest entry of a codebook that follows them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(4, 16, 3, padding=1, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 8, 1)
        )
        self.register_buffer("codebook", drawn(8, 8))
        self.register_buffer("sums", drawn(8, 8))
        self.register_buffer("counts", torch.ones(8))

    def forward(self, mels):
        z = self.conv(mels).transpose(1, 2)
        flat = z.detach().reshape(-1, 8)
        distances = torch.addmm(
            self.codebook.pow(2).sum(1) + flat.pow(2).sum(1, keepdim=True), flat, self.codebook.t(), alpha=-2.0
        )
        codes = F.one_hot(distances.argmin(-1), 8).float()
        quantized = F.embedding(distances.argmin(-1), self.codebook).view_as(z)
        if self.training:
            self.counts = 0.9 * self.counts + 0.1 * codes.sum(0)
            self.sums = 0.9 * self.sums + 0.1 * torch.matmul(codes.t(), flat)
            self.codebook = self.sums / (self.counts + 1e-5).unsqueeze(-1)
        loss = 0.25 * F.mse_loss(z, quantized.detach())
        quantized = z + (quantized - z).detach()
        share = codes.mean(0)
        return quantized, loss, torch.exp(-torch.sum(share * torch.log(share + 1e-10)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.speakers = nn.Embedding(2, 4)
        self.samples = nn.Embedding(12, 8)
        self.conditioning = nn.GRU(12, 8, batch_first=True, bidirectional=True)
        self.rnn = nn.GRU(24, 16, batch_first=True)
        self.out = nn.Linear(16, 12)

    def forward(self, samples, z, speakers):
        speakers = self.speakers(speakers).unsqueeze(1).expand(-1, z.size(1), -1)
        z, _ = self.conditioning(torch.cat((z, speakers), dim=-1))
        z = F.interpolate(z.transpose(1, 2), scale_factor=2).transpose(1, 2)
        x, _ = self.rnn(torch.cat((self.samples(samples), z), dim=2))
        return self.out(F.relu(x))


@script
def vector_quantized_speech(amp, level):
    """Autoencoders of speech initialize an encoder and a decoder by one optimizer, feed the decoder what is wanted of it, clip
    master gradients, and go on from a checkpoint of them all.
    """
    # bshall/ZeroSpeech

    def build():
        encoder, decoder = Encoder(), Decoder()
        optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
        (encoder, decoder), optimizer = amp.initialize([encoder, decoder], optimizer, opt_level=level, **SETTINGS)
        return encoder, decoder, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [20], gamma=0.5)

    encoder, decoder, optimizer, scheduler = build()
    losses = []
    for step in range(30):
        if step == 12:
            kept = [encoder, decoder, optimizer, scheduler, amp]
            state = [saved_and_loaded(part.state_dict()) for part in kept]
            encoder, decoder, optimizer, scheduler = build()
            for part, saved in zip((encoder, decoder, optimizer, scheduler, amp), state):
                part.load_state_dict(saved)
        tone = torch.randint(12, (8, 1))
        audio = (tone + torch.arange(13) * (1 + tone % 2)) % 12
        mels = torch.stack([audio[:, :12:2].float().mul(0.5 + i).sin() for i in range(4)], 1)
        optimizer.zero_grad()
        z, vq_loss, perplexity = encoder(mels)
        output = decoder(audio[:, :-1], z, tone[:, 0] % 2)
        loss = F.cross_entropy(output.transpose(1, 2), audio[:, 1:]) + vq_loss
        backward(amp, loss, optimizer)
        clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        scheduler.step()
        assert 1 <= perplexity.item() <= 8.1
        losses.append(loss.item())
    return losses


@script
def parts_of_a_detector(amp, level):
    """Scripts name the encoder and the decoder of a larger model, whose other layers stay as they are, and call methods of the
    whole.
    """

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            self.bridge = nn.Parameter(torch.eye(8) + 0.1 * drawn(8, 8))
            self.decoder = nn.ModuleDict({"mask": nn.Conv2d(8, 1, 3, padding=1), "box": nn.Conv2d(8, 4, 1)})
            self.norm = nn.GroupNorm(2, 8)

        def features(self, x):
            return self.norm(torch.einsum("bchw,cd->bdhw", self.encoder(x), self.bridge))

        def predict(self, x):
            x = self.features(x)
            return {name: head(x) for name, head in self.decoder.items()}

    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts, optimizer = amp.initialize(
        [model.encoder, *model.decoder.values()], optimizer, opt_level=level, keep_batchnorm_fp32=None, **SETTINGS
    )
    assert parts[0] is model.encoder
    losses = []
    for _ in range(30):
        x = torch.randn(4, 3, 6, 6)
        mask = (x.sum(1, keepdim=True) > 0).float()
        box = torch.cat([x.amax(1, keepdim=True), x], 1)
        found = model.predict(x)
        terms = [F.binary_cross_entropy_with_logits(found["mask"], mask), F.smooth_l1_loss(found["box"], box)]
        optimizer.zero_grad()
        backward(amp, sum(terms), optimizer)
        clip_grad_norm_(amp.master_params(optimizer), 0.5)
        optimizer.step()
        losses.append(sum(terms).item())
    return losses


@script
def old_model_beside_the_new(amp, level):
    """Scripts that learn classes one after another initialize the old model together with the new, which alone has an
    optimizer, and add a penalty on weights in a block of its own.
    """
    # fcdl94/MiB

    def build(classes):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.01), nn.Conv2d(8, classes, 1)
        )

    old, new = build(3), build(5)
    state = {name: value for name, value in old.state_dict().items() if not name.startswith("3.")}
    new.load_state_dict(state, strict=False)
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    [new, old], optimizer = amp.initialize([new, old], optimizer, opt_level=level, **SETTINGS)
    old.requires_grad_(False).eval()
    before = {name: param.detach().clone().float() for name, param in new.named_parameters()}
    importance = {name: torch.zeros_like(param) for name, param in before.items()}
    losses = []
    for _ in range(30):
        x = torch.randn(4, 3, 6, 6)
        labels = torch.einsum("bchw,cd->bdhw", x, drawn(3, 5)).argmax(1)
        with torch.no_grad():
            wanted = old(x)
        outputs = new(x)
        distilled = -(torch.softmax(wanted, 1) * torch.log_softmax(outputs[:, :3], 1)).mean()
        loss = F.cross_entropy(outputs, labels, reduction="none").mean() + distilled
        optimizer.zero_grad()
        backward(amp, loss, optimizer)
        penalty = 0.0
        for name, param in new.named_parameters():
            importance[name] = 0.9 * importance[name] + 0.1 * param.grad.detach().float() ** 2
            penalty = penalty + 10 * (importance[name] * (param - before[name]) ** 2).sum()
        backward(amp, penalty, optimizer)
        optimizer.step()
        losses.append((loss + penalty).item())
    return losses


# Cameras.


class Field(nn.Module):
    """Density, and a color by direction, at points in space."""

    def __init__(self, outputs):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(27, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))

    def forward(self, points):
        angles = points[..., None] * (2.0 ** torch.arange(4)) * math.pi / 2
        encoded = torch.cat([points, torch.sin(angles).flatten(-2), torch.cos(angles).flatten(-2)], -1)
        return self.net(encoded)


def weights_along(density, lengths):
    """Of the samples on each ray: how much of its light ends there."""
    widths = torch.cat([lengths[:, 1:] - lengths[:, :-1], torch.full_like(lengths[:, :1], 1e10)], -1)
    opacity = 1.0 - torch.exp(-F.softplus(density) * widths)
    through = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1.0 - opacity + 1e-10], -1), -1)[:, :-1]
    return opacity * through


@script
def radiance_field(amp, level):
    """Radiance fields sample points on rays of posed cameras by a proposal network, render them, compare predicted normals with
    the density's gradient, and clip the gradients of a list of parameters that was made before amp was there.
    """
    # Enigmatisms/NeRF

    field, proposal = Field(7), Field(1)
    grad_vars = list(field.parameters()) + list(proposal.parameters())
    optimizer = torch.optim.Adam(grad_vars, lr=1e-2)
    [field, proposal], optimizer = amp.initialize([field, proposal], optimizer, opt_level=level, **SETTINGS)
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    through_pixels = torch.stack([(columns - 2) / 3.0, (rows - 2) / 3.0, torch.ones(4, 4)], -1).view(-1, 3)
    losses = []
    for _ in range(30):
        angle = torch.rand(()) * 6.28
        cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros(()), torch.ones(())
        rotation = torch.stack([cos, zero, sin, zero, one, zero, -sin, zero, cos]).view(3, 3)
        origin = rotation @ torch.tensor([0.0, 0.0, -2.0])
        directions = torch.sum(through_pixels.unsqueeze(-2) * rotation, -1)
        target = torch.sigmoid(directions * 2)

        lengths = torch.linspace(1.0, 3.0, 8).expand(16, 8) + torch.rand(16, 8) * 0.2
        coarse = proposal(origin + directions[:, None] * lengths[..., None])[..., 0]
        of_proposal = weights_along(coarse, lengths)
        cdf = torch.cumsum((of_proposal + 1e-3).detach(), -1)
        chosen = torch.searchsorted(cdf / cdf[:, -1:], torch.rand(16, 6).contiguous()).clamp(max=7)
        fine_lengths = torch.sort(torch.gather(lengths, 1, chosen) + torch.rand(16, 6) * 0.2, -1)[0]
        points = origin + directions[:, None] * fine_lengths[..., None]
        points.requires_grad = True
        found = field(points)
        rgb, normal, density = torch.sigmoid(found[..., :3]), found[..., 3:6], found[..., 6]
        (slope,) = torch.autograd.grad(density, points, torch.ones_like(density), retain_graph=True)
        slope = slope / torch.maximum(slope.norm(dim=-1, keepdim=True), torch.full((1,), 1e-5))
        weights = weights_along(density, fine_lengths)
        rendered = torch.sum(weights[..., None] * rgb, -2)
        normal = normal / (normal.norm(dim=-1, keepdim=True) + 1e-7)
        of_normals = torch.mean(weights.detach() * (1.0 + torch.sum(slope * normal, -1)))
        of_bounds = F.mse_loss(of_proposal.sum(-1), weights.sum(-1).detach())
        loss = F.mse_loss(rendered, target) + of_bounds + 0.1 * of_normals
        optimizer.zero_grad()
        backward(amp, loss, optimizer)
        clip_grad_norm_(grad_vars, 0.02)
        optimizer.step()
        losses.append(loss.item())
    return losses


def pictures_of_a_plane(count, size=8):
    """From two cameras, with their matrices: each pixel's brightness is its place on a plane at a depth of its own."""
    depth = 2.0 + torch.rand(count, 1, 1)
    intrinsics = torch.tensor([[6.0, 0, 3.5], [0, 6.0, 3.5], [0, 0, 1]]).repeat(count, 1, 1)
    shift = 0.3 * torch.randn(count)
    rows, columns = torch.meshgrid(torch.arange(float(size)), torch.arange(float(size)), indexing="ij")
    pictures = []
    for offset in (torch.zeros(count), shift):
        x = (columns - 3.5) / 6 * depth + offset.view(-1, 1, 1)
        y = ((rows - 3.5) / 6 * depth).expand_as(x)
        pictures.append(torch.stack([torch.sin(2 * x), torch.cos(2 * y), torch.sin(x + y)], 1))
    return pictures[0], pictures[1], depth[:, None].expand(-1, 1, size, size), intrinsics, shift, (rows, columns)


@script
def depth_and_motion(amp, level):
    """Monocular depth without labels keeps its networks in a dict, lifts pixels by inverse intrinsics and depth, moves them by
    a predicted rotation, and samples the other picture where they fall.
    """

    models = {
        "encoder": nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ELU()),
        "depth": nn.Sequential(nn.Conv2d(8, 1, 3, padding=1), nn.Sigmoid()),
        "pose": nn.Sequential(nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 6)),
    }
    parameters = [param for model in models.values() for param in model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    initialized, optimizer = amp.initialize(list(models.values()), optimizer, opt_level=level, **SETTINGS)
    models = dict(zip(models, initialized))
    batches, losses = [pictures_of_a_plane(6) for _ in range(2)], []
    for step in range(30):
        target, source, _, intrinsics, shift, (rows, columns) = batches[step % 2]
        disparity = models["depth"](models["encoder"](target))
        depth = 1 / (0.2 + 0.4 * disparity)
        motion = 0.01 * models["pose"](torch.cat([target, source], 1)).view(-1, 2, 3)
        axis_angle, translation = motion.unbind(1)
        angle = torch.norm(axis_angle, 2, 1, True)
        axis = axis_angle / (angle + 1e-7)
        cross = torch.zeros(6, 3, 3)
        for (i, j), k in {(2, 1): 0, (0, 2): 1, (1, 0): 2}.items():
            cross[:, i, j], cross[:, j, i] = axis[:, k], -axis[:, k]
        sin, cos = torch.sin(angle)[..., None], torch.cos(angle)[..., None]
        rotation = torch.eye(3) + sin * cross + (1 - cos) * torch.bmm(cross, cross)
        moved = torch.cat([rotation, (translation * 10 + F.pad(shift[:, None], (0, 2)))[..., None]], 2)
        pixels = torch.stack([columns, rows, torch.ones(8, 8)]).view(1, 3, -1).expand(6, -1, -1)
        points = torch.matmul(torch.inverse(intrinsics), pixels) * depth.view(6, 1, -1)
        points = torch.cat([points, torch.ones(6, 1, 64)], 1)
        projected = torch.bmm(torch.matmul(intrinsics, moved), points)
        grid = projected[:, :2] / (projected[:, 2:] + 1e-7)
        grid = (grid / 7 * 2 - 1).view(6, 2, 8, 8).permute(0, 2, 3, 1)
        warped = F.grid_sample(source, grid, padding_mode="border", align_corners=True)
        error = torch.sqrt((warped - target) ** 2 + 1e-3).mean()
        smoothness = (disparity[..., 1:] - disparity[..., :-1]).abs().mean()
        loss = error + 1e-2 * smoothness + 0.1 * ((depth - 2.5) ** 2).mean()
        optimizer.zero_grad()
        backward(amp, loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


# Losses, and functions of one's own.


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
    for step in range(64):
        task = ("mlm", "itm")[step // 2 % 2]
        ids = (torch.randint(12, (8, 1)) + 5 * torch.arange(6)) % 12
        masked = torch.zeros_like(ids, dtype=torch.bool)
        masked[:, 3] = True
        batch = {"input_ids": ids.masked_fill(masked, 0), "masked": masked, "labels": ids, "matches": ids[:, 0] % 2}
        loss = model(batch, task).mean()
        delay_unscale = (step + 1) % 2 != 0
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
                group["lr"] = 1e-2 * min(1, (step + 1) / 8)
            clip_grad_norm_(amp.master_params(optimizer), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(both.values()) / len(both))
    return losses


@script
def windows_of_ones_own(amp, level):
    """Layers with kernels of their own decorate the forward and the backward pass of an autograd function as float functions."""
    # lioutasb/TaLKConvolutions

    class Windows(torch.autograd.Function):
        """Means over the last steps, as many as ``reach`` says, by a cumulative sum."""

        @staticmethod
        @amp.float_function
        def forward(ctx, x, reach, longest):
            assert level != "O1" or x.dtype is reach.dtype is torch.float32
            totals = F.pad(x.float().cumsum(1), (0, 0, 1, 0))
            ends = torch.arange(1.0, x.size(1) + 1).view(1, -1, 1)
            starts = (ends - 1 - reach * longest).clamp(min=0)
            low = starts.floor().long()
            share = starts - low
            ctx.save_for_backward(x, low, share)
            ctx.longest = longest
            below, above = (totals.gather(1, i.expand_as(x)) for i in (low, low + 1))
            return (totals[:, 1:] - below * (1 - share) - above * share) / (longest + 1)

        @staticmethod
        @amp.float_function
        def backward(ctx, grad):
            x, low, share = ctx.saved_tensors
            assert level != "O1" or grad.dtype is torch.float32
            grad = grad.contiguous().float() / (ctx.longest + 1)
            of_totals = F.pad(grad, (0, 0, 1, 0))
            of_totals = of_totals.scatter_add(1, low.expand_as(x), -grad * (1 - share))
            of_totals = of_totals.scatter_add(1, (low + 1).expand_as(x), -grad * share)
            of_x = of_totals.flip(1).cumsum(1).flip(1)[:, 1:]
            step = x.float().gather(1, low.expand_as(x))
            of_reach = (grad * step).sum(-1, keepdim=True) * ctx.longest * (low + share > 0)
            return of_x.to(x.dtype), of_reach.to(x.dtype), None

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.inward, self.reach, self.out = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 4)

        def forward(self, x):
            x = self.inward(x)
            return self.out(Windows.apply(x, torch.sigmoid(self.reach(x)), 3))

    model = Layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **SETTINGS)
    losses = []
    for _ in range(30):
        x = torch.randn(8, 10, 4)
        loss = F.mse_loss(model(x), (F.pad(x, (0, 0, 2, 0))[:, :-2] + x) / 2)
        optimizer.zero_grad()
        backward(amp, loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


@script
def speech_recognition(amp, level):
    """Speech recognition computes spectra with casts switched off, packs sequences of several lengths, and decorates the
    method that computes the loss.
    """

    class Featurizer(nn.Module):
        def forward(self, signal):
            with contextlib.nullcontext() if level == "O2" else amp.disable_casts():
                spectra = torch.stft(signal.float(), 16, 8, window=torch.hann_window(16), return_complex=True)
                spectra = torch.log(torch.view_as_real(spectra).pow(2).sum(-1) + 2**-24)
                mean, std = spectra.mean(2, keepdim=True), spectra.std(2, keepdim=True)
                return (spectra - mean) / (std + 1e-5)

    class Recognizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(9, 16, 3, padding=1, bias=False), nn.BatchNorm1d(16), nn.Hardtanh(0, 20)
            )
            self.rnn = nn.LSTM(16, 8, bidirectional=True)
            self.out = nn.Linear(16, 5)

        def forward(self, x, lengths):
            x = self.conv(x).permute(2, 0, 1)
            x, _ = self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths))
            x, _ = nn.utils.rnn.pad_packed_sequence(x)
            return self.out(x)

        @amp.float_function
        def loss(self, x, y, x_lengths, y_lengths):
            assert level is None or x.dtype is torch.float32
            return F.ctc_loss(F.log_softmax(x, -1), y, x_lengths, y_lengths, reduction="mean")

    featurizer, model = Featurizer(), Recognizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **SETTINGS)
    losses = []
    for _ in range(30):
        words = torch.randint(1, 5, (6, 3))
        pitches = words.repeat_interleave(32, 1)[:, :88]
        signal = torch.sin(0.6 * pitches * torch.arange(88)) + 0.1 * torch.randn(6, 88)
        lengths = torch.tensor([12, 12, 12, 11, 11, 10])
        found = model(featurizer(signal), lengths)
        loss = model.loss(found, words, lengths, torch.full((6,), 3))
        optimizer.zero_grad()
        backward(amp, loss, optimizer)
        clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@script
def sigmoid_before_its_loss(amp, level):
    """Segmentation with a sigmoid in the model registers it as a float function, for a cross entropy that wants float32."""
    amp.register_float_function(torch, "sigmoid")
    amp.register_float_function(F, "softmax")

    class Segmentation(nn.Module):
        def __init__(self):
            super().__init__()
            self.rgb, self.depth = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(1, 8, 3, padding=1)
            self.gate, self.out = nn.Conv2d(16, 2, 1), nn.Conv2d(8, 1, 1)

        def forward(self, image, depth):
            rgb, depth = torch.relu(self.rgb(image)), torch.relu(self.depth(depth))
            gate = F.softmax(self.gate(torch.cat([rgb, depth], 1)), dim=1)
            return torch.sigmoid(self.out(rgb * gate[:, :1] + depth * gate[:, 1:]))

    model = Segmentation()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **SETTINGS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda step: (1 - step / 40) ** 0.9)
    losses = []
    for _ in range(30):
        image, depth = torch.randn(4, 3, 6, 6), torch.randn(4, 1, 6, 6)
        wanted = (image[:, :1] + depth > 0).float()
        optimizer.zero_grad()
        found = model(image, depth)
        overlap = 1 - (2 * (found * wanted).sum() + 1) / (found.sum() + wanted.sum() + 1)
        loss = nn.BCELoss()(found, wanted) + overlap
        backward(amp, loss, optimizer)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


# The tests.


def run(name, seed, amp, level=None):
    torch.manual_seed(seed)
    return torch.tensor(SCRIPTS[name](amp, level), dtype=torch.float64)


def distance(found, wanted):
    """Between the losses of all seeds: the mean absolute difference, relative to the mean of the wanted ones."""
    found, wanted = torch.stack(found), torch.stack(wanted)
    return ((found - wanted).abs().mean() / wanted.abs().mean()).item()


@functools.cache
def references(name):
    """The runs in float32, and the distance of those under torch.autocast."""
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
