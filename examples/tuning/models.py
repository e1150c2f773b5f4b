"""Factories for `ampkit tune`: a ResNet-18 on scikit-learn's digits, and an LSTM and a small GPT on a text.

$ ampkit tune examples/tuning/models.py:resnet
$ ampkit tune examples/tuning/models.py:lstm --seconds 30
$ ampkit tune examples/tuning/models.py:gpt --json gpt.json

A factory returns (model, optimizer, batches, loss_fn): what a training script has when its loop begins.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def resnet():
    """torchvision's ResNet-18, on scans of 8 x 8 pixels brought to 32 x 32."""
    import torchvision
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=32)
    scans = TensorDataset(images.expand(-1, 3, -1, -1), torch.tensor(digits.target))
    model = torchvision.models.resnet18(num_classes=10).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    return model, optimizer, DataLoader(scans, batch_size=32, shuffle=True), F.cross_entropy


class Lstm(nn.Module):
    """An LSTM of two layers over bytes."""

    def __init__(self, width=128):
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(256, width), nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])


def lstm():
    model = Lstm().to(DEVICE)
    return model, torch.optim.Adam(model.parameters(), lr=2e-3), text(length=32, count=16), next_byte


class Gpt(nn.Module):
    """A causal Transformer over bytes."""

    def __init__(self, width=192, layers=4, heads=6, length=128):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions.weight[:length]
        return self.head(self.norm(self.blocks(x, mask, is_causal=True)))


def gpt():
    model = Gpt().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return model, optimizer, text(length=128, count=4), next_byte


def text(length, count):
    """Batches of the source of torch.nn.Module, byte by byte: (bytes, those that follow each)."""
    content = torch.tensor(list(inspect.getsource(nn.Module).encode()))
    pieces = content[: len(content) // (length + 1) * (length + 1)].view(-1, length + 1)
    return DataLoader(TensorDataset(pieces[:, :-1], pieces[:, 1:]), batch_size=count, shuffle=True)


def next_byte(logits, following):
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())
