"""A small GPT at O1, as scripts grow: what make_recording.py records for the page "What is my model doing?".

It trains, and several of its lines cost more than they have to.
"""

import torch
import torch.nn.functional as F
from torch import nn

import ampkit

WIDTH, HEADS, LENGTH, VOCABULARY = 256, 4, 128, 1001


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def attend(self, q, k, v):
        # Left over from a NaN of last year.
        with torch.autocast(q.device.type, enabled=False):
            scores = q.float() @ k.float().transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
            mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
            return F.softmax(scores.masked_fill(mask, -torch.inf), dim=-1) @ v.float()

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = self.attend(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.project(y) * self.scale
        return x + self.down(F.softplus(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main():
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level="O1")
    for _ in range(6):
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        with ampkit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
