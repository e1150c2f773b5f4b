"""Methods of papers with a loop of their own: rewards, pairs of views, codes, projected and preconditioned gradients."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from . import ALL, learn, mlp, noise_of, regression, script, some_tokens, stepped, way_of


class Painter(nn.Module):
    """A generator that returns its picture and the latent behind it."""

    def __init__(self):
        super().__init__()
        self.mapping, self.painter = mlp(16, 64, 96), mlp(96, 64, 64, seed=1)

    def forward(self, noise):
        style = self.mapping(noise)
        return self.painter(style), style


@script(ALL)
def gan_with_path_length(run):
    generator, critic = Painter(), mlp(64, 96, 1, seed=2)
    of_generator, of_critic = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (generator, critic))
    way, noise, losses, mean = way_of(generator, critic), noise_of(3), [], 0.0
    run.begin([generator, critic], [of_generator, of_critic])
    for _ in range(5):
        with run.casts():
            picture, _ = generator(noise(24, 16))
            of_real, of_fake = critic(noise(24, 64).sin()).float(), critic(picture.detach()).float()
        losses.append((F.softplus(-of_real) + F.softplus(of_fake)).mean())
        run.learn(losses[-1], of_critic)
        with run.casts():
            picture, style = generator(noise(24, 16))
            of_fake = critic(picture).float()
        (slope,) = torch.autograd.grad((picture * noise(24, 64)).sum(), style, create_graph=True)
        lengths = slope.float().square().sum(1).sqrt()
        mean = mean + 0.1 * (lengths.mean().detach() - mean)
        losses.append(F.softplus(-of_fake).mean() + (lengths - mean).square().mean())
        run.learn(losses[-1], of_generator)
    return {"losses": losses, "weights": way()}


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


@script(ALL)
def reinforce_over_many_forwards(run):
    policy = mlp(8, 64, 96, 4, act=nn.ReLU)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.02)

    def loss_of(episode):
        terms = []
        for state, act, gain in zip(*some_steps(60, seed=episode)):
            with run.casts():
                scores = policy(state[None])
            terms.append(-scores.float().log_softmax(-1)[0, act] * gain)
        return torch.stack(terms).mean()

    return learn(run, policy, optimizer, loss_of, times=2)


@script(ALL)
def simclr(run):
    encoder, head = mlp(64, 96, 64), mlp(64, 64, 32, seed=1)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-3)
    noise = noise_of(10)

    def loss_of(_):
        x = noise(24, 64)
        views = torch.cat([x + 0.2 * noise(24, 64), x + 0.2 * noise(24, 64)])
        with run.casts():
            z = F.normalize(head(encoder(views).relu()).float(), dim=1)
            scores = (z @ z.T).float() / 0.5
        count = len(z) // 2
        scores = scores.masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e4)
        return F.cross_entropy(scores, torch.arange(2 * count).roll(count))

    return learn(run, [encoder, head], optimizer, loss_of, times=6)


def gradients_of(run, loss, model, optimizer):
    """Return the gradients of this loss alone, ``p.grad`` as it is."""
    optimizer.zero_grad()
    run.backward(loss, optimizer)
    return [p.grad for p in model.parameters()]


@script()
def svrg(run):
    model, optimizer, x, y = regression()
    snapshot = copy.deepcopy(model)
    of_snapshot = torch.optim.SGD(snapshot.parameters(), lr=0.1)
    way, losses = way_of(model), []
    run.begin([model, snapshot], [optimizer, of_snapshot])
    for _ in range(2):
        snapshot.load_state_dict(model.state_dict())
        full = [g.clone() for g in gradients_of(run, run.error(snapshot, x, y), snapshot, of_snapshot)]
        for part, wanted in zip(x.split(8), y.split(8)):
            gradients_of(run, run.error(snapshot, part, wanted), snapshot, of_snapshot)
            losses.append(run.error(model, part, wanted))
            gradients_of(run, losses[-1], model, optimizer)
            for p, old, mean in zip(model.parameters(), snapshot.parameters(), full):
                p.grad.data.sub_(old.grad.data).add_(mean)
            optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def galore(run):
    basis, mean = {}, {}

    def edit(model):
        p = model[0].weight
        if not basis:
            basis[p] = torch.linalg.svd(p.grad, full_matrices=False)[0][:, :2]
        low = basis[p].T @ p.grad
        mean[p] = mean[p].lerp(low, 0.5) if mean else low
        p.grad = basis[p] @ mean[p]

    return stepped(run, edit, rows=96)


@script()
def pcgrad(run):
    model, optimizer, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        with run.casts():
            output = model(x)
        of_tasks = [F.mse_loss(output[:, index].float(), y[:, index]) for index in range(2)]
        gradients = []
        for index, loss in enumerate(of_tasks):
            optimizer.zero_grad()
            with run.block(loss, optimizer) as scaled:
                scaled.backward(retain_graph=index == 0)
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        losses += of_tasks
        projected = [g.clone() for g in gradients]
        for one, other in ((0, 1), (1, 0)):
            inner = torch.dot(projected[one], gradients[other])
            if inner < 0:
                projected[one] -= inner * gradients[other] / gradients[other].norm() ** 2
        merged = torch.stack(projected).mean(0)
        for p, part in zip(model.parameters(), merged.split([p.numel() for p in model.parameters()])):
            p.grad = part.view_as(p)
        optimizer.step()
    return {"losses": losses, "weights": way()}


def orthogonal(g, steps=3):
    x = g / (g.norm() + 1e-7)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


@script()
def muon(run):
    model, x = mlp(64, 96, 64), noise_of(26)(128, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    y, way, losses, momentum = x.roll(1, 1).sin(), way_of(model), [], {}
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        gradients_of(run, losses[-1], model, optimizer)
        for p in model.parameters():
            if p.ndim == 2:
                momentum[p] = momentum.get(p, torch.zeros_like(p.grad)).mul_(0.9).add_(p.grad)
                p.grad.copy_(orthogonal(p.grad.add(momentum[p], alpha=0.9)))
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def asam(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses, state = way_of(model), [], {}
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], optimizer)
        with torch.no_grad():
            scales = [p.detach().abs().add_(0.01) for p in model.parameters()]
            for p, scale in zip(model.parameters(), scales):
                p.grad.mul_(scale)
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-16
            for p, scale in zip(model.parameters(), scales):
                state[p] = p.grad.mul_(scale).mul_(0.3 / norm)
                p.add_(state[p])
        optimizer.zero_grad()
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(state[p])
        optimizer.step()
        optimizer.zero_grad()
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
