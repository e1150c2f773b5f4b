"""The models that bench.py trains, with their batches and optimizers, and what one training step of each is.

A step is written once, in the verbs of a way of training (ways.py): a region around the forward pass, `backward`, `step`. It tells
`mark` when a phase is over.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    """An MLP of linear layers so narrow that overhead decides."""

    def __init__(self, width=64, layers=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Block(nn.Module):
    """A pre-norm Transformer block with separate projections for query, key and value."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Causal blocks between an embedding and a head."""

    def __init__(self, width=512, layers=6, heads=8, length=256, vocabulary=1000):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


class Bert(nn.Module):
    """torch's own encoder, post-norm, which sees all tokens; no dropout, so that the ways of training see the same numbers."""

    def __init__(self, width=256, layers=6, heads=4, length=128, vocabulary=4000):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.norm(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return self.head(self.encoder(x)).flatten(0, 1)


class Lstm(nn.Module):
    """Two layers, whose last output is classified."""

    def __init__(self, inputs=128, width=256):
        super().__init__()
        self.lstm, self.head = nn.LSTM(inputs, width, num_layers=2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def generator(noise, width):
    """Noise to images of 64 pixels."""
    widths = [noise, 8 * width, 4 * width, 2 * width, width]
    layers = []
    for index, (before, after) in enumerate(itertools.pairwise(widths)):
        stride, padding = (1, 0) if index == 0 else (2, 1)
        layers += [nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(width):
    """Images of 64 pixels to a logit each."""
    widths = [width, 2 * width, 4 * width, 8 * width]
    layers = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0))


@dataclass
class Case:
    """Models, each with an optimizer ("sgd", "adam" or "adamw", see ways.py), and what they learn from."""

    about: str
    models: list[nn.Module]
    optimizer: str
    batches: list[tuple[torch.Tensor, torch.Tensor]]  # the micro-batches of a step
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    losses: int = field(default=1, init=False)

    def to(self, device):
        self.models = [model.to(device) for model in self.models]
        self.batches = [tuple(tensor.to(device) for tensor in batch) for batch in self.batches]

    def step(self, way, mark):
        """Train on the micro-batches; return the mean of their losses."""
        (model,), (optimizer,) = way.models, way.optimizers
        optimizer.zero_grad()
        mark("step")
        total = 0.0
        for index, (x, y) in enumerate(self.batches, start=1):
            with way.region():
                loss = self.loss(model(x), y) / len(self.batches)
            total = total + loss.detach()
            mark("forward")
            way.backward(loss, optimizer, 0, last=index == len(self.batches))
            mark("backward")
        way.step(optimizer)
        way.end()
        mark("step")
        return total


class Gan(Case):
    """A discriminator and a generator: two optimizers, three losses."""

    losses = 3

    def step(self, way, mark):
        (judge, draw), (of_judge, of_draw) = way.models, way.optimizers
        ((real, noise),) = self.batches
        of_judge.zero_grad()
        mark("step")
        with way.region():
            loss = self.loss(judge(real), torch.ones(len(real), device=real.device))
        mark("forward")
        way.backward(loss, of_judge, 0)
        mark("backward")
        with way.region():
            fake = draw(noise)
            loss = self.loss(judge(fake.detach()), torch.zeros(len(real), device=real.device))
        mark("forward")
        way.backward(loss, of_judge, 1)
        mark("backward")
        way.step(of_judge)
        of_draw.zero_grad()
        mark("step")
        with way.region():
            loss = self.loss(judge(fake), torch.ones(len(real), device=real.device))
        mark("forward")
        way.backward(loss, of_draw, 2)
        mark("backward")
        way.step(of_draw)
        way.end()
        mark("step")
        return loss.detach()


# The models by their names; models of a real size are for GPUs.
NAMES = {"resnet18": "ResNet-18", "gpt": "GPT", "bert": "BERT-like", "lstm": "LSTM", "dcgan": "DCGAN", "mlp": "MLP"}
LARGE = {"resnet50": "ResNet-50", "gpt2": "GPT-2 small"}


def make(name, accumulate=1, short=False):
    """The case of that name, of ``accumulate`` micro-batches; with ``short`` it is small, to see that it runs."""
    torch.manual_seed(0)
    many = range(accumulate)
    if name == "mlp":
        model, rows = Mlp(), 8 if short else 32
        batches = [(torch.randn(rows, 64), torch.randn(rows, 64)) for _ in many]
        return Case(f"12 linear layers of width 64, {rows} rows", [model], "sgd", batches, nn.MSELoss())
    if name == "gpt2":
        width, layers, length, count = (64, 2, 32, 2) if short else (768, 12, 1024, 4)
        model = Gpt(width, layers, width // 64, length, 1000 if short else 50257)
        tokens = [torch.randint(1000, (count, length + 1)) for _ in many]
        batches = [(both[:, :-1], both[:, 1:].flatten()) for both in tokens]
        about = f"{layers} blocks of width {width}, {count} x {length} tokens"
        return Case(about, [model], "adamw", batches, nn.CrossEntropyLoss())
    if name == "resnet50":
        import torchvision

        size, count = (32, 4) if short else (224, 64)
        model = torchvision.models.resnet50().to(memory_format=torch.channels_last)
        images = [torch.randn(count, 3, size, size).to(memory_format=torch.channels_last) for _ in many]
        batches = [(x, torch.randint(1000, (count,))) for x in images]
        return Case(f"{count} images of {size} pixels, channels last", [model], "sgd", batches, nn.CrossEntropyLoss())
    if name == "resnet18":
        import torchvision

        size, count = (32, 4) if short else (64, 32 if accumulate == 1 else 16)
        model = torchvision.models.resnet18(num_classes=10)
        batches = [(torch.randn(count, 3, size, size), torch.randint(10, (count,))) for _ in many]
        return Case(f"{count} images of {size} pixels", [model], "sgd", batches, nn.CrossEntropyLoss())
    if name == "gpt":
        width, layers, length, count = (64, 2, 32, 2) if short else (512, 6, 256, 2 if accumulate == 1 else 1)
        model = Gpt(width, layers, length=length)
        tokens = [torch.randint(1000, (count, length + 1)) for _ in many]
        batches = [(both[:, :-1], both[:, 1:].flatten()) for both in tokens]
        about = f"{layers} blocks of width {width}, {count} x {length} tokens"
        return Case(about, [model], "adamw", batches, nn.CrossEntropyLoss())
    if name == "bert":
        width, layers, length, count = (64, 2, 32, 2) if short else (256, 6, 128, 8)
        model = Bert(width, layers, length=length)
        batches = [(torch.randint(4000, (count, length)), torch.randint(4000, (count * length,))) for _ in many]
        about = f"torch's encoder, {layers} layers of width {width}, {count} x {length} tokens"
        return Case(about, [model], "adamw", batches, nn.CrossEntropyLoss())
    if name == "lstm":
        width, length, count = (32, 8, 4) if short else (256, 64, 16)
        batches = [(torch.randn(count, length, 128), torch.randint(10, (count,))) for _ in many]
        about = f"two layers of width {width}, {count} x {length} vectors of 128"
        return Case(about, [Lstm(width=width)], "adam", batches, nn.CrossEntropyLoss())
    if name == "dcgan":
        assert accumulate == 1
        width, noise, count = (8, 16, 4) if short else (32, 100, 16)
        batches = [(torch.randn(count, 3, 64, 64), torch.randn(count, noise, 1, 1))]
        models = [discriminator(width), generator(noise, width)]
        about = f"{count} images of 64 pixels, two models with an optimizer each, three losses"
        return Gan(about, models, "adam", batches, F.binary_cross_entropy_with_logits)
    raise ValueError(f"no model is called {name!r}")
