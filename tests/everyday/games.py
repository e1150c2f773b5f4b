"""Models that play against each other, averages of weights, learning to learn, rewards, and pairs of views."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from . import ALL, Writer, flat, learn, mlp, noise_of, regression, script, some_tokens, way_of

# -- several models that play against each other


@script(ALL)
def gan(run):
    generator, critic = mlp(16, 64, 96, 64), mlp(64, 96, 1, seed=1)
    of_generator, of_critic = (
        torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (generator, critic)
    )
    way, noise, losses = way_of(generator, critic), noise_of(2), []
    run.begin([generator, critic], [of_generator, of_critic])
    for _ in range(6):
        real = noise(32, 64).sin()
        with run.casts():
            fake = generator(noise(32, 16))
            of_real, of_fake = critic(real).float(), critic(fake.detach()).float()
        losses.append(F.softplus(-of_real).mean() + F.softplus(of_fake).mean())
        run.learn(losses[-1], of_critic)
        with run.casts():
            of_fake = critic(fake).float()
        losses.append(F.softplus(-of_fake).mean())
        run.learn(losses[-1], of_generator)
    return {"losses": losses, "weights": way()}


@script(ALL)
def critic_frozen_after_its_forward(run):
    """Run both backward passes after all forwards; the second one is for the generator alone."""
    generator, critic = mlp(16, 64, 96, 64), mlp(64, 96, 1, seed=1)
    of_generator, of_critic = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic))
    way, noise, losses = way_of(generator, critic), noise_of(2), []
    run.begin([generator, critic], [of_generator, of_critic])
    for _ in range(5):
        with run.casts():
            fake = generator(noise(32, 16))
            of_real, of_fake, for_generator = critic(noise(32, 64).sin()), critic(fake.detach()), critic(fake)
        losses.append((F.softplus(-of_real.float()) + F.softplus(of_fake.float())).mean())
        losses.append(F.softplus(-for_generator.float()).mean())
        run.backward(losses[-2], of_critic)
        critic.requires_grad_(False)
        run.backward(losses[-1], of_generator)
        critic.requires_grad_(True)
        for optimizer in (of_critic, of_generator):
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "weights": way()}


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


@script(ALL)
def wgan_with_a_gradient_penalty(run):
    generator, critic = mlp(16, 64, 96, 64), mlp(64, 96, 1, seed=1)
    of_generator, of_critic = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.0, 0.9)) for m in (generator, critic))
    way, noise, losses = way_of(generator, critic), noise_of(4), []
    run.begin([generator, critic], [of_generator, of_critic])
    for _ in range(4):
        for _ in range(2):
            real, share = noise(24, 64).sin(), noise(24, 1).sigmoid()
            with run.casts():
                fake = generator(noise(24, 16)).detach()
                between = (share * real + (1 - share) * fake).requires_grad_()
                scores = critic(between)
                gain = (critic(fake).float() - critic(real).float()).mean()
            (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
            losses.append(gain + 10 * (slope.float().norm(dim=1) - 1).square().mean())
            run.learn(losses[-1], of_critic)
        with run.casts():
            losses.append(-critic(generator(noise(24, 16))).float().mean())
        run.learn(losses[-1], of_generator)
    return {"losses": losses, "weights": way()}


# -- averages of weights


@script()
def average_by_deepcopy_and_lerp(run):
    model, optimizer, x, y = regression(make=torch.optim.AdamW, lr=2e-3)
    run.begin(model, optimizer)
    average, losses = copy.deepcopy(model).requires_grad_(False), []
    way, of_average = way_of(model), way_of(average)
    for _ in range(10):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters()):
                mean.lerp_(p, 0.1)
        losses.append(run.error(average, x, y))
    return {"losses": losses, "weights": way(), "averages": of_average()}


@script()
def averaged_model_of_torch(run):
    model, optimizer, x, y = regression(lr=0.1, momentum=0.9)
    run.begin(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    schedule, losses = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3), []
    way, of_average = way_of(model), way_of(average)
    for _ in range(10):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
        average.update_parameters(model)
        schedule.step()
    losses.append(run.error(average, x, y))
    return {"losses": losses, "weights": way(), "averages": of_average()}


@script(ALL)
def average_through_state_dict(run):
    model, optimizer, x, y = regression(make=torch.optim.AdamW, lr=2e-3)
    twin = copy.deepcopy(model)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    start = flat(average.values())
    for _ in range(10):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
        for name, value in model.state_dict().items():
            average[name].mul_(0.9).add_(value, alpha=0.1)
    twin.load_state_dict(average)
    losses.append(run.error(twin, x, y))
    return {"losses": losses, "weights": way(), "averages": [flat(average.values()) - start]}


# -- learning to learn


def tasks(count, seed=5):
    noise = noise_of(seed)
    for _ in range(count):
        x, direction = noise(24, 64), noise(64, 2)
        yield x[:12], x[12:], (x[:12] @ direction / 8).sin(), (x[12:] @ direction / 8).sin()


@script()
def maml(run):
    model, optimizer, _, _ = regression(make=torch.optim.Adam, lr=2e-3)

    def loss_of(index):
        total, batch = 0.0, list(tasks(2, index))
        for x, other_x, y, other_y in batch:
            fast = dict(model.named_parameters())
            for _ in range(2):
                with run.casts():
                    output = torch.func.functional_call(model, fast, (x,))
                slopes = torch.autograd.grad(F.mse_loss(output.float(), y), list(fast.values()), create_graph=True)
                fast = {name: value - 0.1 * slope for (name, value), slope in zip(fast.items(), slopes)}
            with run.casts():
                output = torch.func.functional_call(model, fast, (other_x,))
            total = total + F.mse_loss(output.float(), other_y) / len(batch)
        return total

    return learn(run, model, optimizer, loss_of, times=4)


# -- language models that are taught preferences, and reinforcement


@script(ALL)
def dpo_with_a_frozen_copy(run):
    policy = Writer()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    chosen, rejected = some_tokens(8, 12), some_tokens(8, 12, seed=8)

    def log_probability(model, tokens):
        with run.casts():
            scores = model(tokens[:, :-1])
        return scores.float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))

    def loss_of(_):
        with torch.no_grad():
            before = log_probability(reference, chosen) - log_probability(reference, rejected)
        margin = log_probability(policy, chosen) - log_probability(policy, rejected) - before
        return -F.logsigmoid(0.5 * margin).mean()

    return learn(run, [policy, reference], optimizer, loss_of, times=6, of=policy)


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


# -- pairs of views


def two_views(count, seed=10):
    noise = noise_of(seed)
    for _ in range(count):
        x = noise(24, 64)
        yield x + 0.2 * noise(24, 64), x + 0.2 * noise(24, 64)


@script()
def moco_with_a_queue(run):
    encoder = mlp(64, 96, 64)
    momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3, momentum=0.9)
    way, of_average, losses = way_of(encoder), way_of(momentum_encoder), []
    queue = F.normalize(noise_of(11)(64, 96), dim=0)
    views = list(two_views(6))
    run.begin([encoder, momentum_encoder], optimizer)
    for view, other_view in views:
        with torch.no_grad():
            for mean, p in zip(momentum_encoder.parameters(), encoder.parameters()):
                mean.data = mean.data * 0.9 + p.data * 0.1
        with run.casts():
            q = F.normalize(encoder(view).float(), dim=1)
            with torch.no_grad():
                k = F.normalize(momentum_encoder(other_view).float(), dim=1)
        positive, negative = torch.einsum("nc,nc->n", q, k)[:, None], torch.einsum("nc,ck->nk", q, queue.clone())
        scores = torch.cat([positive, negative], 1) / 0.2
        losses.append(F.cross_entropy(scores, torch.zeros(len(q), dtype=torch.long)))
        run.learn(losses[-1], optimizer)
        queue = torch.cat([queue[:, len(k) :], k.T], 1)
    return {"losses": losses, "weights": way(), "averages": of_average(), "queue": [queue]}


@script(ALL)
def simclr(run):
    encoder, head = mlp(64, 96, 64), mlp(64, 64, 32, seed=1)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-3)
    views = list(two_views(6))

    def loss_of(index):
        with run.casts():
            z = F.normalize(head(encoder(torch.cat(views[index])).relu()).float(), dim=1)
            scores = (z @ z.T).float() / 0.5
        count = len(z) // 2
        scores = scores.masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e4)
        return F.cross_entropy(scores, torch.arange(2 * count).roll(count))

    return learn(run, [encoder, head], optimizer, loss_of, len(views))
