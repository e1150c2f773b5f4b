"""Scripts as people write them, each in float32, under torch.autocast and at a level.

A row of the table is a function that trains a few iterations, and returns what it has found by name: losses, the way that weights
have gone, gradients. For each of them the level may be twice as far from float32 as torch.autocast is. Matrices of 64 x 96
are among the weights, so that at O5 gradients come narrow.
"""

import contextlib
import copy
import functools
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.casting.narrow_gradients import stored_gradient

FLOAT32_WEIGHTS = ("O1", "O4", "O5")
ALL = (*FLOAT32_WEIGHTS, "O2")  # for scripts that do not look at weights or gradients themselves


@pytest.fixture(autouse=True)
def closed():
    yield
    ampkit.close()
    left_on = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)  # not for the next row
    assert not left_on


#: name: (function of a `Run`, its levels).
SCRIPTS = {}


def script(levels=FLOAT32_WEIGHTS):
    """Puts a function into the table, by its name."""

    def put(function):
        SCRIPTS[function.__name__.replace("_", " ")] = function, levels
        return function

    return put


class Run:
    """What a script needs of a level: ``fp32``, ``autocast`` or one of ampkit's."""

    def __init__(self, level):
        self.level, self.is_ours = level, level in ALL

    def begin(self, models, optimizers=None, **settings):
        """Initialize in place."""
        if self.is_ours:
            ampkit.initialize(models, optimizers, opt_level=self.level, verbosity=0, **settings)

    def casts(self):
        return torch.autocast("cpu", torch.bfloat16) if self.level == "autocast" else contextlib.nullcontext()

    def no_casts(self):
        return ampkit.disable_casts() if self.is_ours else contextlib.nullcontext()

    def block(self, loss, optimizers, **flags):
        return ampkit.scale_loss(loss, optimizers, **flags) if self.is_ours else contextlib.nullcontext(loss)

    def backward(self, loss, optimizers, **flags):
        with self.block(loss, optimizers, **flags) as scaled:
            scaled.backward()

    def gradients(self, loss, model, optimizer):
        """Those of this loss alone, ``p.grad`` as it is."""
        optimizer.zero_grad()
        self.backward(loss, optimizer)
        return [p.grad for p in model.parameters()]

    def learn(self, loss, optimizer):
        optimizer.zero_grad()
        self.backward(loss, optimizer)
        optimizer.step()

    def error(self, model, x, y):
        with self.casts():
            output = model(x)
        return F.mse_loss(output.float(), y)


def flat(values):
    return torch.cat([torch.as_tensor(value).detach().double().flatten() for value in values])


def way_of(*models):
    """A function of nothing: how far the float32 values of these models' parameters have gone since."""

    def values():
        states = [(model.state_dict(), [name for name, _ in model.named_parameters()]) for model in models]
        return flat(state[name] for state, names in states for name in names)

    start = values()
    return lambda: [values() - start]


def mlp(*sizes, act=nn.Tanh, seed=0):
    torch.manual_seed(seed)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), act())]
    return nn.Sequential(*layers[:-1])


def regression(rows=32, seed=1, lr=0.1, make=torch.optim.SGD, **settings):
    """A model with a large matrix, its optimizer, inputs and targets."""
    model = mlp(64, 96, 2)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    return model, make(model.parameters(), lr=lr, **settings), x, y


def stepped(run, edit, times=8, lr=0.05, momentum=0.9, **settings):
    """Iterations with an edit of the gradients before each step; ``edit(model)`` may return what is to be kept of it."""
    model, optimizer, x, y = regression(lr=lr, momentum=momentum, **settings)
    way, losses, kept = way_of(model), [], []
    run.begin(model, optimizer)
    for _ in range(times):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        kept += edit(model) or ()
        optimizer.step()
    found = {"losses": losses, "weights": way(), "gradients": [p.grad for p in model.parameters()]}
    return found | {"kept": kept} if kept else found


def noise_of(seed):
    """A function of shapes: the same numbers in the same order each time."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


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


@script()
def critic_frozen_after_its_forward(run):
    """Both backward passes come after all forwards; the second one is for the generator alone."""
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
    """Returns its picture and the latent behind it."""

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


class AverageInBuffers(nn.Module):
    """As diffusion models have it, with names without dots, and `type_as` before each update."""

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.decay = decay
        self.names = {name: name.replace(".", "") for name, p in model.named_parameters() if p.requires_grad}
        for name, p in model.named_parameters():
            self.register_buffer(self.names[name], p.clone().detach().data)

    def forward(self, model):
        shadow, values = dict(self.named_buffers()), dict(model.named_parameters())
        with torch.no_grad():
            for name, buffer in self.names.items():
                shadow[buffer] = shadow[buffer].type_as(values[name])
                shadow[buffer].sub_((1 - self.decay) * (shadow[buffer] - values[name]))

    def copy_to(self, model):
        for name, p in model.named_parameters():
            p.data.copy_(getattr(self, self.names[name]).data)


@script()
def average_in_buffers(run):
    model, optimizer, x, y = regression(make=torch.optim.AdamW, lr=2e-3)
    way, average, losses = way_of(model), AverageInBuffers(model), []
    start = flat(average.buffers())
    run.begin(model, optimizer)
    for _ in range(10):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
        average(model)
    kept = [p.data.clone() for p in model.parameters()]
    average.copy_to(model)
    losses.append(run.error(model, x, y))
    for p, values in zip(model.parameters(), kept):
        p.data.copy_(values)
    losses.append(run.error(model, x, y))
    return {"losses": losses, "weights": way(), "averages": [flat(average.buffers()) - start]}


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
    way, losses = way_of(model), []
    tasks_of = [list(tasks(2, seed)) for seed in range(4)]
    run.begin(model, optimizer)
    for batch in tasks_of:
        total = 0.0
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
        losses.append(total)
        run.learn(total, optimizer)
    return {"losses": losses, "weights": way()}


@script()
def reptile(run):
    model, optimizer, _, _ = regression(lr=0.1)
    way, losses = way_of(model), []
    tasks_of = list(tasks(4))
    run.begin(model, optimizer)
    for x, _, y, _ in tasks_of:
        before = copy.deepcopy(model.state_dict())
        for _ in range(3):
            losses.append(run.error(model, x, y))
            run.learn(losses[-1], optimizer)
        after = model.state_dict()
        model.load_state_dict({name: value + 0.5 * (after[name] - value) for name, value in before.items()})
    return {"losses": losses, "weights": way()}


# -- language models that are taught preferences, and reinforcement


class Writer(nn.Module):
    def __init__(self, tokens=64, width=64, tied=False):
        super().__init__()
        torch.manual_seed(6)
        self.embed, self.mix, self.back = nn.Embedding(tokens, width), nn.Linear(width, 96), nn.Linear(96, width)
        self.head = nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.back(torch.tanh(self.mix(x))))


def some_tokens(*shape, seed=7, tokens=64):
    return torch.randint(tokens, shape, generator=torch.Generator().manual_seed(seed))


@script(ALL)
def dpo_with_a_frozen_copy(run):
    policy = Writer()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    chosen, rejected, way, losses = some_tokens(8, 12), some_tokens(8, 12, seed=8), way_of(policy), []
    run.begin([policy, reference], optimizer)

    def log_probability(model, tokens):
        with run.casts():
            scores = model(tokens[:, :-1])
        return scores.float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))

    for _ in range(6):
        with torch.no_grad():
            before = log_probability(reference, chosen) - log_probability(reference, rejected)
        margin = log_probability(policy, chosen) - log_probability(policy, rejected) - before
        losses.append(-F.logsigmoid(0.5 * margin).mean())
        run.learn(losses[-1], optimizer)
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
    """States, acts and returns of a game that somebody has played."""
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
    way, losses = way_of(policy), []
    run.begin(policy, optimizer)
    for episode in range(2):
        states, acts, returns = some_steps(60, seed=episode)
        terms = []
        for state, act, gain in zip(states, acts, returns):
            with run.casts():
                scores = policy(state[None])
            terms.append(-scores.float().log_softmax(-1)[0, act] * gain)
        losses.append(torch.stack(terms).mean())
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


@script(ALL)
def dqn_with_a_target_network(run):
    network = mlp(8, 64, 96, 4, act=nn.ReLU)
    target = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.RMSprop(network.parameters(), lr=5e-4)
    way, losses = way_of(network), []
    run.begin(network, optimizer)
    for index in range(9):
        states, acts, rewards = some_steps(32, seed=index)
        following = some_steps(32, seed=index + 50)[0]
        with torch.no_grad(), run.casts():
            goal = rewards + 0.9 * target(following).float().amax(1)
        with run.casts():
            values = network(states).float().gather(1, acts[:, None]).squeeze(1)
        losses.append(F.smooth_l1_loss(values, goal))
        run.learn(losses[-1], optimizer)
        if index % 3 == 2:
            target.load_state_dict(network.state_dict())
    return {"losses": losses, "weights": way()}


@script(ALL)
def a2c(run):
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for index in range(6):
        states, acts, rewards = some_steps(20, seed=index)
        found = []
        for state in states.split(4):  # environments side by side
            with run.casts():
                found.append(model(state))
        scores, values = (torch.cat(each) for each in zip(*found))
        gains = rewards - values
        chances = torch.distributions.Categorical(logits=scores)
        losses.append(
            (-chances.log_prob(acts) * gains.detach() + 0.5 * gains.square()).mean() - 0.01 * chances.entropy().mean()
        )
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        ampkit.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
    return {"losses": losses, "weights": way()}


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
    for one, other in views:
        with torch.no_grad():
            for mean, p in zip(momentum_encoder.parameters(), encoder.parameters()):
                mean.data = mean.data * 0.9 + p.data * 0.1
        with run.casts():
            q = F.normalize(encoder(one).float(), dim=1)
            with torch.no_grad():
                k = F.normalize(momentum_encoder(other).float(), dim=1)
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
    way, losses = way_of(encoder, head), []
    run.begin([encoder, head], optimizer)
    for views in two_views(6):
        with run.casts():
            z = F.normalize(head(encoder(torch.cat(views)).relu()).float(), dim=1)
            scores = (z @ z.T).float() / 0.5
        count = len(z) // 2
        scores = scores.masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e4)
        losses.append(F.cross_entropy(scores, torch.arange(2 * count).roll(count)))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


@script()
def byol(run):
    online, predictor = mlp(64, 96, 64), mlp(64, 96, 64, seed=1)
    target = copy.deepcopy(online)
    target.requires_grad_(False)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.2, momentum=0.9)
    way, of_average, losses = way_of(online, predictor), way_of(target), []
    run.begin([online, predictor, target], optimizer)
    for views in two_views(6):
        loss = 0.0
        for one, other in (views, views[::-1]):
            with run.casts():
                predicted = predictor(online(one))
                with torch.no_grad():
                    wanted = target(other)
            loss = loss + 2 - 2 * F.cosine_similarity(predicted.float(), wanted.float()).mean()
        losses.append(loss)
        run.learn(loss, optimizer)
        for mean, p in zip(target.parameters(), online.parameters()):
            mean.data.mul_(0.9).add_(0.1 * p.data)
    return {"losses": losses, "weights": way(), "averages": of_average()}


@script(ALL)
def distillation_from_a_frozen_teacher(run):
    teacher = mlp(64, 96, 96, 10, seed=3).eval().requires_grad_(False)
    student = mlp(64, 96, 10)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    way, noise, losses = way_of(student), noise_of(12), []
    run.begin([student, teacher], optimizer)
    for _ in range(8):
        x = 2 * noise(32, 64)
        with run.casts():
            with torch.no_grad():
                wanted = teacher(x)
            found = student(x)
        soft = F.kl_div(
            (found.float() / 2).log_softmax(-1), (3 * wanted.float() / 2).softmax(-1), reduction="batchmean"
        )
        losses.append(4 * soft + 0.1 * F.cross_entropy(found.float(), wanted.argmax(-1)))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


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


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(64, 96, 32), mlp(16, 96, 64, seed=1)

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + (0.5 * log_variance).exp() * noise
        return self.decoder(z), mean, log_variance


@script(ALL)
def vae(run):
    model = Variational()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    way, noise, losses = way_of(model), noise_of(18), []
    run.begin(model, optimizer)
    for _ in range(8):
        x = noise(32, 64).sin()
        with run.casts():
            output, mean, log_variance = (each.float() for each in model(x, noise(32, 16)))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        losses.append(F.mse_loss(output, x, reduction="sum") / len(x) + divergence)
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


# -- loops that write weights between two forwards


@script()
def sam(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
            before = [p.data.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(p.grad * (0.1 / (norm + 1e-12)).to(p))
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        for p, values in zip(model.parameters(), before):
            p.data = values
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


@script()
def sgld(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, noise, losses = way_of(model), noise_of(19), []
    run.begin(model, optimizer)
    for _ in range(10):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
        for p in model.parameters():
            p.data.add_(noise(*p.shape), alpha=3e-4)
    return {"losses": losses, "weights": way()}


class Adapted(nn.Module):
    """Low-rank adapters over a frozen layer."""

    def __init__(self, base, rank=48):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


@script(ALL)
def low_rank_adapters_over_a_frozen_base(run):
    base = mlp(64, 96, 96, 2)
    model = nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in base))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    _, _, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


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
    way, losses, state = way_of(model), [], None
    run.begin(model, optimizer)
    for part, wanted in zip(x.split(5, 1), y.split(5, 1)):
        with run.casts():
            output, state = model(part, state)
        losses.append(F.mse_loss(output.float(), wanted))
        run.learn(losses[-1], optimizer)
        state = detached(state)
    return {"losses": losses, "weights": way()}


@script(ALL)
def rnn_in_chunks(run):
    return truncated(run, nn.RNN)


@script(ALL)
def lstm_in_chunks(run):
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
def mixup(run):
    model = mlp(64, 96, 96, 10, act=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    way, noise, losses = way_of(model), noise_of(23), []
    run.begin(model, optimizer)
    for index in range(8):
        labels, order = some_tokens(32, seed=index, tokens=10), torch.arange(32).roll(index + 1)
        x = noise(32, 64) + F.one_hot(labels, 64)
        share = (index + 1) / 10
        with run.casts():
            scores = model(share * x + (1 - share) * x[order]).float()
        losses.append(share * F.cross_entropy(scores, labels) + (1 - share) * F.cross_entropy(scores, labels[order]))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


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
    way, noise, losses = way_of(model), noise_of(25), []
    run.begin(model, optimizer)
    for _ in range(4):
        x = noise(6, 3, 16, 16)
        with run.casts():
            scores = model(x)
        losses.append(F.cross_entropy(scores.float(), (F.avg_pool2d(x, 3, 1, 1)[:, 0] > 0).long()))
        run.learn(losses[-1], optimizer)
    model.eval()
    with torch.no_grad(), run.casts():
        picture = model(noise(2, 3, 16, 16)).float()
    return {"losses": losses, "weights": way(), "picture": [picture]}


class TwoTowers(nn.Module):
    """Pictures and words, a learned temperature, and the loss inside of `forward`."""

    def __init__(self):
        super().__init__()
        self.pictures, self.words = mlp(64, 96, 32), mlp(48, 96, 32, seed=1)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, y):
        x, y = F.normalize(self.pictures(x), dim=-1), F.normalize(self.words(y), dim=-1)
        scores = self.scale.exp() * x @ y.t()
        labels = torch.arange(len(x))
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


@script(ALL)
def two_towers_with_a_temperature(run):
    model, noise = TwoTowers(), noise_of(48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = noise(32, 64)
    y, way, losses = x[:, :48] + 0.1 * noise(32, 48), way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        with run.casts():
            losses.append(model(x, y).float())
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


class Angles(nn.Module):
    """Scores are angles between features and normalized weights, with a margin."""

    def __init__(self):
        super().__init__()
        self.body, self.weight = mlp(64, 96), nn.Parameter(noise_of(49)(48, 96))

    def forward(self, x, labels):
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight)).float().clamp(-0.99, 0.99)
        one_hot = F.one_hot(labels, 48).bool()
        return 8 * torch.where(one_hot, torch.cos(cosine.acos() + 0.3), cosine)


@script(ALL)
def angles_with_a_margin(run):
    model = Angles()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    way, noise, losses, labels = way_of(model), noise_of(50), [], some_tokens(32, tokens=48)
    x = noise(32, 64)
    run.begin(model, optimizer)
    for _ in range(6):
        with run.casts():
            scores = model(x, labels)
        losses.append(F.cross_entropy(scores.float(), labels))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.body = mlp(32, 64, 64, act=nn.SiLU), mlp(128, 96, 64, seed=1, act=nn.SiLU)

    def forward(self, x, times):
        angles = times[:, None] * torch.exp(-torch.arange(16) / 2)
        return self.body(torch.cat([x, self.time(torch.cat([angles.sin(), angles.cos()], 1))], 1))


@script(ALL)
def diffusion(run):
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    way, noise, losses = way_of(model), noise_of(51), []
    run.begin(model, optimizer)
    for index in range(8):
        times, x, added = some_tokens(32, seed=index, tokens=1000), noise(32, 64).sin(), noise(32, 64)
        share = kept[times][:, None]
        with run.casts():
            found = model(share.sqrt() * x + (1 - share).sqrt() * added, times.float())
        losses.append(F.mse_loss(found.float(), added))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


class Scan(nn.Module):
    """A state space, step by step, with learned decays."""

    def __init__(self):
        super().__init__()
        self.into, self.out, self.decays = mlp(48, 96)[0], mlp(96, 48)[0], nn.Parameter(torch.linspace(1, 5, 96))
        self.norm = nn.Parameter(torch.ones(96))

    def forward(self, x):
        drive, state, states = self.into(x), torch.zeros(len(x), 96), []
        for step in drive.unbind(1):
            state = state * torch.sigmoid(self.decays) + step
            states.append(state)
        h = torch.stack(states, 1)
        return self.out(h * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm)


@script(ALL)
def scan_with_learned_decays(run):
    model, x = Scan(), noise_of(52)(8, 40, 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    y, way, losses = x.cumsum(1).sin(), way_of(model), []
    run.begin(model, optimizer)
    for _ in range(5):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


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


@script()
def ewc(run):
    model, optimizer, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    importance = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row, wanted in zip(x.split(4), y.split(4)):
        optimizer.zero_grad()
        run.backward(run.error(model, row, wanted), optimizer)
        for name, p in model.named_parameters():
            importance[name] += p.grad.data.clone().pow(2) / 8
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(6):
        penalty = sum((importance[name] * (p - start[name]) ** 2).sum() for name, p in model.named_parameters())
        losses.append(run.error(model, x.flip(1), y.flip(0)) + 100 * penalty)
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way(), "importance": importance.values()}


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


# -- what scripts make of gradients


@script()
def running_average_of_gradients(run):
    model, optimizer, x, y = regression(lr=0.02)
    run.begin(model, optimizer)
    average = None
    for _ in range(80):
        gradients = run.gradients(run.error(model, x, y), model, optimizer)
        if average is None:
            average = [gradient.clone() for gradient in gradients]
        for mean, p in zip(average, model.parameters()):
            mean.mul_(0.999).add_(p.grad, alpha=0.001)
        optimizer.step()
    return {"averages": average}


@script()
def average_by_lerp_with_casts_off(run):
    average = {}

    def edit(model):
        with run.no_casts(), torch.no_grad():
            for p in model.parameters():
                average.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.01)

    return stepped(run, edit, times=30) | {"averages": average.values()}


@script()
def svrg(run):
    model, optimizer, x, y = regression()
    snapshot = copy.deepcopy(model)
    of_snapshot = torch.optim.SGD(snapshot.parameters(), lr=0.1)
    way, losses = way_of(model), []
    run.begin([model, snapshot], [optimizer, of_snapshot])
    for _ in range(2):
        snapshot.load_state_dict(model.state_dict())
        full = [g.clone() for g in run.gradients(run.error(snapshot, x, y), snapshot, of_snapshot)]
        for part, wanted in zip(x.split(8), y.split(8)):
            run.gradients(run.error(snapshot, part, wanted), snapshot, of_snapshot)
            losses.append(run.error(model, part, wanted))
            run.gradients(losses[-1], model, optimizer)
            for p, old, mean in zip(model.parameters(), snapshot.parameters(), full):
                p.grad.data.sub_(old.grad.data).add_(mean)
            optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def momentum_by_hand(run):
    model, _, x, y = regression()
    way, losses, velocity = way_of(model), [], {}
    run.begin(model)
    for _ in range(15):
        model.zero_grad()
        losses.append(run.error(model, x, y))
        losses[-1].backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                velocity[name] = 0.9 * velocity.get(name, 0.0) + p.grad
                p -= 0.02 * velocity[name]
    return {"losses": losses, "weights": way(), "velocity": velocity.values()}


class Centred(torch.optim.Optimizer):
    """An optimizer with state like the gradients: RMSprop with a mean, as people write it."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["mean"].mul_(0.99).add_(grad, alpha=0.01)
                state["square"].mul_(0.999).addcmul_(grad, grad, value=0.001)
                p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-2), value=-group["lr"])


def learned_by(run, make, times=12, **settings):
    model, optimizer, x, y = regression(make=make, **settings)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(times):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


@script(ALL)
def own_optimizer_with_state_like_gradients(run):
    return learned_by(run, Centred, times=30, lr=0.05)


class WatchingSGD(torch.optim.SGD):
    """Adds something of its own to torch's step: a slow average of gradients, amplified."""

    @torch.no_grad()
    def step(self, closure=None):
        self.averages = getattr(self, "averages", {})
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.averages.setdefault(p, torch.zeros_like(p.grad))
                mean.lerp_(p.grad, 0.01)
                p.grad.add_(mean, alpha=2.0)
        return super().step(closure)


@script()
def subclass_that_adds_to_the_step(run):
    return learned_by(run, WatchingSGD, times=20, lr=0.05)


@script()
def hooks_before_and_after_the_step(run):
    model, optimizer, x, y = regression()
    way, losses, average, norms = way_of(model), [], {}, []

    def before(optimizer, args, kwargs):
        for p in model.parameters():
            average.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.01)
            p.grad.mul_(0.9)

    def after(optimizer, args, kwargs):
        norms.append(torch.stack([p.grad.square().sum() for p in model.parameters()]).sum())

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    run.begin(model, optimizer)
    for _ in range(15):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way(), "averages": average.values(), "norms": norms}


@script()
def closure_that_looks_at_gradients(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, average = way_of(model), {}
    run.begin(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = run.error(model, x, y)
        run.backward(loss, optimizer)
        for p in model.parameters():
            average.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.01)
            p.grad.add_(average[p], alpha=2.0)
        return loss

    losses = [optimizer.step(closure) for _ in range(12)]
    return {"losses": losses, "weights": way(), "averages": average.values()}


@script()
def lbfgs(run):
    model, _, x, y = regression()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4)
    way, losses = way_of(model), []
    run.begin(model, optimizer, loss_scale=1.0)

    def closure():
        optimizer.zero_grad()
        loss = run.error(model, x, y)
        run.backward(loss, optimizer)
        return loss

    losses += [optimizer.step(closure) for _ in range(3)]
    return {"losses": losses, "weights": way()}


# -- gradients in buckets, and of other models


@script()
def flat_buckets(run):
    def edit(model):
        bucket = torch.cat([p.grad.view(-1) for p in model.parameters()])
        bucket /= bucket.norm().clamp(min=0.2)
        begin = 0
        for p in model.parameters():
            p.grad.copy_(bucket[begin : begin + p.numel()].view_as(p))
            begin += p.numel()
        return [bucket]

    return stepped(run, edit)


def in_one_buffer(run, backward):
    """All gradients are views of one buffer, which is cleared and clipped as a whole."""
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses, begin = way_of(model), [], 0
    run.begin(model, optimizer)
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p in model.parameters():
        p.grad = buffer[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    norms = []
    for _ in range(8):
        buffer.zero_()
        losses.append(run.error(model, x, y))
        backward(losses[-1], optimizer)
        norms.append(buffer.norm())
        buffer.mul_(0.3 / norms[-1].clamp(min=0.3))
        optimizer.step()
    return {"losses": losses, "weights": way(), "norms": norms}


@script()
def gradients_in_one_buffer(run):
    return in_one_buffer(run, run.backward)


@script()
def gradients_in_one_buffer_without_blocks(run):
    return in_one_buffer(run, lambda loss, optimizer: loss.backward())


@script()
def coalesced_as_for_all_reduce(run):
    def edit(model):
        buckets = {}
        for p in model.parameters():
            buckets.setdefault(p.grad.type(), []).append(p.grad.data)
        for grads in buckets.values():
            coalesced = torch._utils._flatten_dense_tensors(grads)
            coalesced /= 3
            for grad, reduced in zip(grads, torch._utils._unflatten_dense_tensors(coalesced, grads)):
                grad.copy_(reduced)
        return [len(buckets)]

    return stepped(run, edit)


@script()
def pcgrad(run):
    model, optimizer, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        with run.casts():
            output = model(x)
        of_tasks = [F.mse_loss(output[:, index].float(), y[:, index]) for index in range(2)]
        found = []
        for index, loss in enumerate(of_tasks):
            optimizer.zero_grad()
            with run.block(loss, optimizer) as scaled:
                scaled.backward(retain_graph=index == 0)
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        losses += of_tasks
        projected = [g.clone() for g in found]
        for one, other in ((0, 1), (1, 0)):
            inner = torch.dot(projected[one], found[other])
            if inner < 0:
                projected[one] -= inner * found[other] / found[other].norm() ** 2
        merged = torch.stack(projected).mean(0)
        for p, part in zip(model.parameters(), merged.split([p.numel() for p in model.parameters()])):
            p.grad = part.view_as(p)
        optimizer.step()
    return {"losses": losses, "weights": way()}


def handed_over(run, hand_over, set_to_none=True):
    worker, own, x, y = regression()
    shared = copy.deepcopy(worker)
    way, losses = way_of(shared), []
    run.begin(worker, own)
    optimizer = torch.optim.Adam(shared.parameters(), lr=1e-3)
    for _ in range(8):
        worker.load_state_dict(shared.state_dict())
        own.zero_grad(set_to_none=set_to_none)
        losses.append(run.error(worker, x, y))
        run.backward(losses[-1], own)
        for theirs, mine in zip(shared.parameters(), worker.parameters()):
            hand_over(theirs, mine)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def gradients_handed_over(run):
    def hand_over(theirs, mine):
        theirs.grad = mine.grad

    return handed_over(run, hand_over)


@script()
def gradients_handed_over_by_the_private_name(run):
    def hand_over(theirs, mine):
        theirs._grad = mine.grad

    return handed_over(run, hand_over)


@script()
def gradients_shared_once(run):
    """Zeroed in place from then on: both models keep the same gradients."""

    def hand_over(theirs, mine):
        if theirs.grad is None:
            theirs._grad = mine.grad

    return handed_over(run, hand_over, set_to_none=False)


@script()
def gradients_given_to_a_deep_copy(run):
    """A look ahead: a copy of the model steps with its gradients, the model with those of the copy."""
    model, optimizer, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        run.gradients(losses[-1], model, optimizer)
        ahead = copy.deepcopy(model)
        for theirs, mine in zip(ahead.parameters(), model.parameters()):
            theirs.grad = copy.deepcopy(mine.grad)
        torch.optim.SGD(ahead.parameters(), lr=0.2).step()
        ahead.zero_grad()
        losses.append(run.error(ahead, x, y))
        losses[-1].backward()
        for theirs, mine in zip(ahead.parameters(), model.parameters()):
            mine.grad.add_(theirs.grad).div_(2)
        optimizer.step()
    return {"losses": losses, "weights": way()}


# -- steps made of gradients


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


class Projected(torch.optim.Optimizer):
    """GaLore as a class."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad, self.state[p]
                if p.numel() >= 4096:
                    if state.setdefault("step", 0) % 4 == 0:
                        state["basis"] = torch.linalg.svd(grad, full_matrices=False)[0][:, :2]
                    low = state["basis"].t() @ grad
                    state["mean"] = state.setdefault("mean", torch.zeros_like(low)).mul(0.5).add(low, alpha=0.5)
                    state["step"] += 1
                    grad = state["basis"] @ state["mean"]
                p.add_(grad, alpha=-group["lr"])


@script()
def galore_as_a_class(run):
    return learned_by(run, Projected, times=8, rows=96)


@script()
def galore_as_a_class_beside_the_session(run):
    """Its optimizer is not given to initialize."""
    model, optimizer, x, y = regression(rows=96, make=Projected)
    way, losses = way_of(model), []
    run.begin(model)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        losses[-1].backward()
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
        run.gradients(losses[-1], model, optimizer)
        for p in model.parameters():
            if p.ndim == 2:
                momentum[p] = momentum.get(p, torch.zeros_like(p.grad)).mul_(0.9).add_(p.grad)
                p.grad.copy_(orthogonal(p.grad.add(momentum[p], alpha=0.9)))
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def sign_sgd(run):
    def edit(model):
        for p in model.parameters():
            p.grad = torch.sign(p.grad)

    found = stepped(run, edit, times=5, lr=1e-3, momentum=0)
    return {"losses": found["losses"], "weights": found["weights"]}


@script()
def lars_by_hand(run):
    @torch.no_grad()
    def edit(model):
        rates = []
        for p in model.parameters():
            rates.append(0.02 * p.norm() / (p.grad.norm() + 1e-4 * p.norm() + 1e-8))
            p.grad.add_(p, alpha=1e-4).mul_(rates[-1])
        return rates

    return stepped(run, edit, lr=1.0)


@script()
def centralized_gradients(run):
    def edit(model):
        for p in model.parameters():
            if p.grad.dim() > 1:
                p.grad.data.add_(-p.grad.data.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))

    return stepped(run, edit)


@script()
def noise_on_gradients(run):
    torch.manual_seed(27)

    def edit(model):
        for p in model.parameters():
            p.grad += 1e-3 * torch.randn_like(p.grad)

    return stepped(run, edit)


def clipped(run, clip):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.1)
    way, losses, norms = way_of(model), [], []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        norms.append(clip(model, optimizer))
        optimizer.step()
    return {"losses": losses, "weights": way(), "norms": norms}


@script(ALL)
def clipping_by_norm(run):
    return clipped(run, lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))


@script(ALL)
def clipping_by_norm_of_the_optimizer(run):
    return clipped(run, lambda model, optimizer: ampkit.clip_grad_norm_(optimizer, 0.3))


@script()
def clipping_by_total_norm(run):
    def clip(model, optimizer):
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norm)
        return norm

    return clipped(run, clip)


@script()
def clipping_by_value(run):
    def clip(model, optimizer):
        torch.nn.utils.clip_grad_value_(model.parameters(), 5e-3)
        return torch.stack([p.grad.abs().sum() for p in model.parameters()]).sum()

    return clipped(run, clip)


@script()
def clipping_by_hand(run):
    def clip(model, optimizer):
        norm = sum(p.grad.data.norm(2).item() ** 2 for p in model.parameters()) ** 0.5
        for p in model.parameters():
            p.grad.data.mul_(min(1.0, 0.3 / norm))
        return norm

    return clipped(run, clip)


# -- gradients of samples


@script()
def private_sgd_in_a_loop(run):
    model, optimizer, x, y = regression(rows=12, lr=0.2)
    way, noise, losses = way_of(model), noise_of(28), []
    run.begin(model, optimizer)
    for _ in range(3):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for row, wanted in zip(x, y):
            losses.append(run.error(model, row[None], wanted[None]))
            run.gradients(losses[-1], model, optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            losses.append(norm)
            for total, p in zip(sums, model.parameters()):
                total.add_(p.grad)
        for total, p in zip(sums, model.parameters()):
            p.grad = (total + 0.01 * noise(*p.shape)) / len(x)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def private_sgd_by_vmap(run):
    model, optimizer, x, y = regression(rows=12, lr=0.2)
    way, losses = way_of(model), []
    run.begin(model, optimizer)

    def error(params, row, wanted):
        with run.casts():
            output = torch.func.functional_call(model, params, (row[None],))
        return (output.float() - wanted).square().mean()

    for _ in range(3):
        params = {name: p.detach() for name, p in model.named_parameters()}
        per_sample, errors = torch.func.vmap(torch.func.grad_and_value(error), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
        factors = (0.5 / norms).clamp(max=1.0)
        for name, p in model.named_parameters():
            p.grad = (per_sample[name] * factors.view(-1, *[1] * p.ndim)).mean(0)
        optimizer.step()
        losses += [errors, norms]
    return {"losses": losses, "weights": way()}


@script()
def fisher_diagonal(run):
    model, optimizer, x, y = regression(rows=48)
    run.begin(model, optimizer)
    fisher = {name: torch.zeros_like(p.data) for name, p in model.named_parameters()}
    for row, wanted in zip(x, y):
        model.zero_grad()
        run.backward(run.error(model, row[None], wanted[None]), optimizer)
        for name, p in model.named_parameters():
            fisher[name].add_(p.grad.detach() ** 2 / len(x))
    return {"fisher": fisher.values()}


# -- more of torch.autograd


@script()
def product_of_hessian_and_vector(run):
    model, _, x, y = regression()
    run.begin(model)
    params = list(model.parameters())
    vector = [noise_of(29)(*p.shape) for p in params]
    losses, found = [], []
    for _ in range(3):
        losses.append(run.error(model, x, y))
        slopes = torch.autograd.grad(losses[-1], params, create_graph=True)
        inner = sum((slope * v).sum() for slope, v in zip(slopes, vector))
        found = torch.autograd.grad(inner, params)
        norm = torch.stack([each.norm() for each in found]).norm()
        vector = [each / norm for each in found]
    return {"losses": losses, "gradients": slopes, "products": found}


@script()
def product_of_hessian_and_vector_by_backward(run):
    """As `hutchinson` estimates do: backward with a graph, then of the gradients."""
    model, _, x, y = regression()
    run.begin(model)
    params = list(model.parameters())
    run.error(model, x, y).backward(create_graph=True)
    slopes = [p.grad for p in params]
    vector = [noise_of(30)(*p.shape).sign() for p in params]
    found = torch.autograd.grad(slopes, params, grad_outputs=vector)
    first = flat(slopes)
    for p in params:
        p.grad = None
    return {"gradients": [first], "products": found}


@script()
def gradnorm_of_two_tasks(run):
    model, optimizer, x, y = regression()
    shares = nn.Parameter(torch.ones(2))
    of_shares = torch.optim.SGD([shares], lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        with run.casts():
            output = model(x)
        tasks = torch.stack([F.mse_loss(output[:, index].float(), 3 * index + y[:, index]) for index in range(2)])
        norms = torch.stack(
            [
                torch.autograd.grad(share * task, model[0].weight, retain_graph=True, create_graph=True)[0].norm()
                for share, task in zip(shares, tasks)
            ]
        )
        (shares.grad,) = torch.autograd.grad((norms - norms.mean().detach()).abs().sum(), shares, retain_graph=True)
        losses += [tasks, norms]
        run.learn((shares.detach() * tasks).sum(), optimizer)
        of_shares.step()
    return {"losses": losses, "weights": way(), "shares": [shares]}


@script()
def gradients_of_autograd_grad_assigned(run):
    model, optimizer, x, y = regression()
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        for p, slope in zip(model.parameters(), torch.autograd.grad(losses[-1], list(model.parameters()))):
            p.grad = slope
        optimizer.step()
    return {"losses": losses, "weights": way()}


def two_losses(run, model, x, y):
    with run.casts():
        output = model(x)
    return F.mse_loss(output.float(), y), (output.float() - y).abs().mean()


@script(ALL)
def backward_of_several_losses(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses += two_losses(run, model, x, y)
        optimizer.zero_grad()
        torch.autograd.backward(losses[-2:], [torch.tensor(1.0), torch.tensor(0.5)])
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script(ALL)
def one_graph_goes_backward_twice(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses += two_losses(run, model, x, y)
        optimizer.zero_grad()
        for loss, flag in zip(losses[-2:], (True, False)):
            with run.block(loss, optimizer) as scaled:
                scaled.backward(retain_graph=flag)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def one_loss_goes_backward_twice(run):
    model, optimizer, x, y = regression(lr=0.05)
    run.begin(model, optimizer)
    loss = run.error(model, x, y)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    twice = flat(p.grad for p in model.parameters())
    loss.backward()
    return {"twice": [twice], "thrice": [p.grad for p in model.parameters()]}


def kept_alias(run, backward):
    """Who keeps ``p.grad`` sees what the next backward passes add."""
    model, optimizer, x, y = regression(lr=0.05)
    run.begin(model, optimizer)
    parts = list(zip(x.split(8), y.split(8)))
    backward(run.error(model, *parts[0]), optimizer)
    aliases = [p.grad for p in model.parameters()]
    first = flat(aliases)
    for part in parts[1:]:
        backward(run.error(model, *part), optimizer)
    return {"first": [first], "aliases": aliases, "gradients": [p.grad for p in model.parameters()]}


@script()
def alias_kept_over_a_second_backward(run):
    return kept_alias(run, lambda loss, optimizer: loss.backward())


@script()
def alias_kept_over_a_second_block(run):
    return kept_alias(run, run.backward)


def penalized(run, backward, where):
    """One of four micro-batches has a penalty on the weights themselves."""
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        for index, part in enumerate(zip(x.split(8), y.split(8))):
            loss = run.error(model, *part) / 4
            if index == where:
                loss = loss + 0.02 * sum((p**2).sum() for p in model.parameters())
            backward(loss, optimizer)
            losses.append(loss)
        optimizer.step()
    return {"losses": losses, "weights": way(), "gradients": [p.grad for p in model.parameters()]}


@script()
def penalty_in_the_first_micro_batch(run):
    return penalized(run, run.backward, 0)


@script()
def penalty_in_the_third_micro_batch(run):
    return penalized(run, run.backward, 2)


@script()
def penalty_in_the_third_micro_batch_without_blocks(run):
    return penalized(run, lambda loss, optimizer: loss.backward(), 2)


@script()
def long_accumulation(run):
    """A sum of 200 terms, of which bfloat16 would lose the last ones."""
    model, optimizer, x, y = regression()
    run.begin(model, optimizer)
    for index in range(200):
        loss = run.error(model, x[index % 4 :: 4], y[index % 4 :: 4] + 1)
        loss.backward()
    return {"gradients": [p.grad for p in model.parameters()]}


@script()
def layer_used_many_times(run):
    """One layer, 200 times in one graph."""
    torch.manual_seed(31)
    model = nn.Sequential(nn.Linear(96, 96), nn.Tanh())
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), noise_of(32)(200, 4, 96) + 1
    run.begin(model, optimizer)
    total = 0.0
    for part in x:
        with run.casts():
            total = total + (model(part).float() - 1).square().mean()
    run.backward(total, optimizer)
    return {"losses": [total], "gradients": [p.grad for p in model.parameters()]}


# -- hooks, and gradients that a script puts in or takes out


@script()
def gradients_taken_out_and_put_in(run):
    times = itertools.count()

    def edit(model):
        params, kept, way = list(model.parameters()), [p.grad for p in model.parameters()], next(times) % 4
        for p in params:
            p.grad = None
        for p, grad in zip(params, kept):
            if way == 0:
                p.grad = grad
            elif way == 1:
                p.grad = grad.clone()
            elif way == 2:
                del p.grad
                p.grad = (grad.double() / grad.double().norm() / 10).to(p.dtype)

    return stepped(run, edit, times=11)


def pruned(run, prune, edit=lambda masks: None):
    """``prune(masks)`` is called before initialize; half of the weights are to stay 0."""
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    masks = {p: (noise_of(33)(*p.shape) > 0).float() for p in (model[0].weight, model[2].weight)}
    with torch.no_grad():
        for p, mask in masks.items():
            p.mul_(mask)
    way, losses = way_of(model), []
    prune(masks)
    run.begin(model, optimizer, loss_scale=1.0)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        edit(masks)
        optimizer.step()
    return {"losses": losses, "weights": way(), "zeros": [(p == 0).sum() for p in masks]}


@script()
def mask_by_a_hook(run):
    def prune(masks):
        for p, mask in masks.items():
            p.register_hook(lambda grad, mask=mask: grad * mask)

    return pruned(run, prune)


@script()
def mask_on_gradients(run):
    def edit(masks):
        for p, mask in masks.items():
            p.grad.mul_(mask)

    return pruned(run, lambda masks: None, edit)


@script()
def hook_that_comes_and_goes(run):
    model, optimizer, x, y = regression()
    seen, losses, way = [], [], way_of(model)
    run.begin(model, optimizer, loss_scale=1.0)
    for index in range(9):
        losses.append(run.error(model, x, y))
        handles = []
        if index % 3 == 1:
            for p in model.parameters():
                handles.append(p.register_hook(lambda grad: seen.append(grad.clone()) or grad * 0.5))
        run.learn(losses[-1], optimizer)
        for handle in handles:
            handle.remove()
    return {"losses": losses, "weights": way(), "seen": sorted(seen, key=torch.numel)}


@script()
def hook_put_on_between_passes_over_one_graph(run):
    model, optimizer, x, y = regression()
    run.begin(model, optimizer)
    loss = run.error(model, x, y)
    loss.backward(retain_graph=True)
    for p in model.parameters():
        p.register_hook(lambda grad: 1e-3 * grad)
    for _ in range(60):
        loss.backward(retain_graph=True)
    return {"gradients": [p.grad for p in model.parameters()]}


class Halves(torch.autograd.Function):
    """A product with one of two weights: the other gets no gradient."""

    @staticmethod
    def forward(ctx, x, one, other, index):
        ctx.save_for_backward(x, (one, other)[index])
        ctx.index = index
        return x @ (one, other)[index].t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        slope = grad.t() @ x
        return grad @ weight, *((slope, None) if ctx.index == 0 else (None, slope)), None


@script()
def function_that_leaves_a_weight_out(run):
    _, _, x, y = regression()
    model = nn.ModuleList([nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False), mlp(96, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        for index, part in enumerate(zip(x.split(16), y.split(16))):
            with run.casts():
                output = model[2](torch.tanh(Halves.apply(part[0], model[0].weight, model[1].weight, index)))
            losses.append(F.mse_loss(output.float(), part[1]))
            run.backward(losses[-1], optimizer)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def hooks_of_accumulators(run):
    """As distributed optimizers have them."""
    model, optimizer, x, y = regression(lr=0.05)
    accumulators, losses, way = [], [], way_of(model)
    run.begin(model, optimizer, loss_scale=1.0)
    average = {p: torch.zeros_like(p) for p in model.parameters()}

    def look(p, *_):
        average[p].lerp_(p.grad, 0.01)

    for p in model.parameters():
        accumulators.append(p.expand_as(p).grad_fn.next_functions[0][0])
        accumulators[-1].register_hook(functools.partial(look, p))
    for _ in range(10):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way(), "averages": average.values()}


@script()
def hooks_after_accumulation(run):
    model, optimizer, x, y = regression()
    average, losses, way = {}, [], way_of(model)

    def hook(p):
        average.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.01)
        p.grad.clamp_(-0.01, 0.01)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    run.begin(model, optimizer, loss_scale=1.0)
    for _ in range(12):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    averages = [average[p] for p in model.parameters()]
    return {"losses": losses, "weights": way(), "averages": averages}


@script(("O4", "O5"))
def steps_in_hooks(run):
    model, _, x, y = regression()
    optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}
    losses, way = [], way_of(model)
    run.begin(model, list(optimizers.values()))

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], list(optimizers.values()))
    return {"losses": losses, "weights": way()}


@script(("O4", "O5"))
def steps_in_hooks_without_initialize(run):
    """The model alone is given to initialize."""
    model, _, x, y = regression()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    losses, way = [], way_of(model)
    run.begin(model)

    def hook(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        losses[-1].backward()
    return {"losses": losses, "weights": way()}


# -- optimizers of torch, given to initialize or not


def adamw(run, settings, when, whose):
    model, _, x, y = regression()
    other = mlp(4, 2)
    way, losses, optimizer = way_of(model), [], None
    if when == "before":
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, **settings)
    if whose == "the same model":
        run.begin(model)
    else:
        run.begin(other, torch.optim.SGD(other.parameters(), lr=0.1))
    if when == "after":
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, **settings)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return {"losses": losses, "weights": way()}


ADAMW = {"foreach": {"foreach": True}, "fused": {"fused": True}, "one by one": {"foreach": False}}

for kind, when, whose in itertools.product(ADAMW, ("before", "after"), ("the same model", "another model")):
    name = f"adamw {kind} made {when} over {whose}"
    SCRIPTS[name] = functools.partial(adamw, settings=ADAMW[kind], when=when, whose=whose), FLOAT32_WEIGHTS

for kind, settings in ADAMW.items():
    SCRIPTS[f"adamw {kind} given"] = functools.partial(learned_by, make=torch.optim.AdamW, lr=2e-3, **settings), ALL


@script()
def adafactor(run):
    return learned_by(run, torch.optim.Adafactor, lr=5e-3)


@script()
def grad_scaler_that_is_off(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(scaler.scale(losses[-1]), optimizer)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return {"losses": losses, "weights": way()}


# -- gradients that are looked at


@script()
def gradients_read_by_numpy_in_another_thread(run):
    def edit(model):
        norms = []
        thread = threading.Thread(target=lambda: norms.extend((p.grad.numpy() ** 2).sum() for p in model.parameters()))
        thread.start()
        thread.join()
        return norms

    return stepped(run, edit)


@script()
def gradients_read_by_four_threads_at_once(run):
    def edit(model):
        norms = [None] * 4

        def look(index):
            norms[index] = sum((p.grad**2).sum() for p in model.parameters())

        threads = [threading.Thread(target=look, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return norms

    return stepped(run, edit)


@script()
def views_of_gradients_by_numpy(run):
    def edit(model):
        for p in model.parameters():
            view = p.grad.numpy()
            view *= 0.5

    return stepped(run, edit)


@script()
def views_of_gradients_by_dlpack(run):
    def edit(model):
        for p in model.parameters():
            torch.from_dlpack(p.grad).mul_(0.5)

    return stepped(run, edit)


def logged(run, mode=contextlib.nullcontext, every=1):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses, log = way_of(model), [], []
    run.begin(model, optimizer)
    for index in range(9):
        for part in zip(x.split(16), y.split(16)):
            losses.append(run.error(model, *part))
            run.backward(losses[-1], optimizer)
            if index % every == 0:
                with mode():
                    log.append(sum(p.grad.pow(2).sum().item() for p in model.parameters()) ** 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)
    return {"losses": losses, "weights": way(), "log": log}


@script()
def log_of_squares(run):
    return logged(run)


@script()
def log_of_squares_now_and_then(run):
    return logged(run, every=3)


@script()
def log_of_squares_in_inference_mode(run):
    return logged(run, torch.inference_mode, every=3)


@script()
def validation_in_inference_mode(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for index in range(8):
        with torch.inference_mode():
            losses.append(run.error(model, x.flip(0), y.flip(0)).clone())
        losses.append(run.error(model, x, y))
        with torch.inference_mode():
            losses.append(run.error(model, x.flip(1), y).clone())
        run.backward(losses[-2], optimizer)
        with torch.inference_mode():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 4 == 1)
    return {"losses": losses, "weights": way()}


def closed_on_the_way(run, mode):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(4):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    losses.append(run.error(model, x, y))
    optimizer.zero_grad()
    run.backward(losses[-1], optimizer)
    with mode():
        ampkit.close()
    average = [torch.zeros_like(p).lerp_(p.grad, 0.1) for p in model.parameters()]
    optimizer.step()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return {"losses": losses, "weights": way(), "averages": average, "gradients": [p.grad for p in model.parameters()]}


@script()
def gradients_read_after_close(run):
    return closed_on_the_way(run, contextlib.nullcontext)


@script()
def gradients_read_after_close_in_inference_mode(run):
    return closed_on_the_way(run, torch.inference_mode)


# -- kinds of weights and of layers, and what else touches gradients


def trained(run, model, x, y, lr=0.1, times=8, momentum=0.0, **found):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(times):
        losses.append(run.error(model, x, y))
        run.learn(losses[-1], optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {"losses": losses, "weights": way(), "gradients": gradients}


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


@script(ALL)
def adversarial_training(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        nearby = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run.error(model, nearby, y), nearby)
        losses.append(run.error(model, x + 0.1 * slope / slope.norm(dim=1, keepdim=True), y))
        run.learn(losses[-1], optimizer)
    return {"losses": losses, "weights": way()}


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


@script()
def layers_frozen_by_turns(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.05)
    way, losses, seen = way_of(model), [], []
    run.begin(model, optimizer)
    for index in range(9):
        for p in model[0].parameters():
            p.requires_grad_(index % 3 != 2)
        losses.append(run.error(model, x, y))
        if index % 3 == 2:  # what is left there from before
            seen += [p.grad.abs() for p in model[0].parameters()]
        for p in model[2].parameters():
            p.grad = None
        run.backward(losses[-1], optimizer)
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "weights": way(), "seen": seen}


@script()
def head_replaced_on_the_way(run):
    model, optimizer, x, y = regression(lr=0.05)
    losses = []
    run.begin(model, optimizer)
    for index in range(8):
        if index == 4:
            model[2] = mlp(96, 64, 2, seed=1)
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})
            way = way_of(model)
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        run.backward(losses[-1], optimizer)
        for p in model.parameters():
            p.grad.clamp_(-0.02, 0.02)
        optimizer.step()
    return {"losses": losses, "weights": way()}


@script()
def gradients_one_step_late(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses, late = way_of(model), [], None
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        fresh = run.gradients(losses[-1], model, optimizer)
        if late is not None:
            for p, grad in zip(model.parameters(), late):
                p.grad = grad
            optimizer.step()
        late = fresh
    return {"losses": losses, "weights": way()}


@script()
def gradients_in_lists(run):
    def edit(model):
        grads = [p.grad for p in model.parameters()]
        norms = torch._foreach_norm(grads)
        torch._foreach_mul_(grads, 0.5)
        torch._foreach_add_(grads, [p.detach() for p in model.parameters()], alpha=1e-3)
        torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(grads) * 1.5, grads)
        return norms

    return stepped(run, edit)


@script()
def adaptive_clipping(run):
    def edit(model):
        for p in (model[0].weight, model[2].weight):
            bound = 0.02 * p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3)
            norm = p.grad.detach().norm(dim=1, keepdim=True)
            p.grad.detach().copy_(torch.where(norm > bound, p.grad * (bound / norm.clamp(min=1e-6)), p.grad))

    return stepped(run, edit, lr=0.1)


@script(("O4", "O5"))
def clipping_inside_of_the_block(run):
    model, optimizer, x, y = regression(momentum=0.9, lr=0.1)
    way, losses, norms = way_of(model), [], []
    run.begin(model, optimizer)
    for _ in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        with run.block(losses[-1], optimizer) as scaled:
            scaled.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
    return {"losses": losses, "weights": way(), "norms": norms}


@script()
def two_threads_go_backward_at_once(run):
    model, _, x, y = regression(rows=96)
    run.begin(model)
    losses = [run.error(model, *part) for part in zip(x.split(4), y.split(4))]

    def work(mine):
        for loss in mine:
            loss.backward()

    threads = [threading.Thread(target=work, args=(losses[index::2],)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"gradients": [p.grad for p in model.parameters()]}


@script()
def backward_to_some_inputs(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for index in range(8):
        losses.append(run.error(model, x, y))
        optimizer.zero_grad()
        with run.block(losses[-1], optimizer) as scaled:
            scaled.backward(inputs=list(model[index % 2 * 2].parameters()), retain_graph=True)
        run.backward(losses[-1] / 2, optimizer)
        optimizer.step()
    return {"losses": losses, "weights": way(), "gradients": [p.grad for p in model.parameters()]}


@script()
def anomalies_looked_for(run):
    model, optimizer, x, y = regression(lr=0.05)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for index in range(6):
        with torch.autograd.set_detect_anomaly(index % 2 == 1):
            for part in zip(x.split(16), y.split(16)):
                losses.append(run.error(model, *part))
                run.backward(losses[-1], optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 3 == 0)
    return {"losses": losses, "weights": way()}


class Climbing(torch.optim.Optimizer):
    """SAM as a class around another optimizer, as it goes from repository to repository."""

    def __init__(self, params, base, rho=0.1, **settings):
        super().__init__(params, dict(rho=rho, **settings))
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]), p=2)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)).to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


@script()
def sam_as_a_class(run):
    model, _, x, y = regression()
    optimizer = Climbing(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    way, losses = way_of(model), []
    run.begin(model, optimizer)
    for _ in range(6):
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], optimizer)
        optimizer.first_step()
        losses.append(run.error(model, x, y))
        run.backward(losses[-1], optimizer)
        optimizer.second_step()
    return {"losses": losses, "weights": way()}


# -- the table


@functools.cache
def found_by(name, level):
    """What a script finds, by the name of what it is."""
    found = SCRIPTS[name][0](Run(level))
    ampkit.close()
    return {what: flat(values) for what, values in found.items()}


def distances(name, level):
    exact, found = found_by(name, "fp32"), found_by.__wrapped__(name, level)
    assert found.keys() == exact.keys()
    return {what: ((found[what] - exact[what]).norm() / exact[what].norm()).item() for what in exact}


@functools.cache
def distances_of_autocast(name):
    return distances(name, "autocast")


ROWS = [(name, level) for name, (_, levels) in SCRIPTS.items() for level in levels]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize(("name", "level"), ROWS, ids=lambda value: value.replace(" ", "-"))
def test_script_learns_what_it_learns_in_float32_at_most_twice_as_far_from_it_as_under_autocast(name, level):
    of_autocast, of_level = distances_of_autocast(name), distances(name, level)
    assert max(of_autocast.values()) < 0.2, "too far for a measure"
    too_far = {
        what: (of_level[what], of_autocast[what])
        for what in of_level
        if not of_level[what] <= 2 * of_autocast[what] + 0.005
    }
    assert not too_far


@pytest.mark.compiled("wrappers")
def test_large_matrices_of_the_scripts_have_narrow_gradients_at_o5():
    model, optimizer, x, y = regression()
    Run("O5").begin(model, optimizer)
    Run("O5").backward(Run("O5").error(model, x, y), optimizer)
    assert [stored_gradient(p).dtype for p in model.parameters()] == [torch.bfloat16, *3 * [torch.float32]]
