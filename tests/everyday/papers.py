"""A method of a paper with state of its own: codes that follow averages."""

import torch
from torch import nn
from torch.nn import functional as F

from . import ALL, mlp, noise_of, script, some_tokens, way_of


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
