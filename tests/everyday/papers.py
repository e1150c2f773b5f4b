"""Methods of papers with a loop of their own: rewards, rays of learned cameras, codes."""

import torch
from torch import nn
from torch.nn import functional as F

from . import ALL, mlp, noise_of, script, some_tokens, way_of


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(8, 64, 96, act=nn.ReLU)
        self.actor, self.critic = nn.Linear(96, 4), nn.Linear(96, 1)

    def forward(self, state):
        hidden = self.body(state).relu()
        return self.actor(hidden).float(), self.critic(hidden).float().squeeze(-1)


def some_steps(count, seed=9):
    """Return states, acts and returns of a game that somebody has played."""
    noise = noise_of(seed)
    states = noise(count, 8)
    return states, some_tokens(count, seed=seed, tokens=4), states[:, 0] + 0.3 * noise(count)


@script(ALL)
def ppo(run):
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    states, acts, returns = some_steps(64)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    with torch.no_grad(), run.casts():
        scores, values = model(states)
    before, gains = scores.log_softmax(-1).gather(1, acts[:, None]).squeeze(1), returns - values
    for batch in (*torch.arange(64).split(16), *torch.arange(64).flip(0).split(16)):
        with run.casts():
            scores, values = model(states[batch])
        chances = torch.distributions.Categorical(logits=scores)
        ratio = (chances.log_prob(acts[batch]) - before[batch]).exp()
        gain = gains[batch]
        bounded = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        loss = -bounded.mean() + 0.5 * F.mse_loss(values, returns[batch]) - 0.01 * chances.entropy().mean()
        optimizer.zero_grad()
        run.backward(loss, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss)
    return {"losses": losses, "weights": way()}


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
