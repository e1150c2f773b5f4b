"""Models that play against each other, and pairs of views."""

import copy

import torch
from torch.nn import functional as F

from . import ALL, learn, mlp, noise_of, script, way_of

# -- several models that play against each other


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


# -- pairs of views


@script()
def moco_with_a_queue(run):
    encoder = mlp(64, 96, 64)
    average, noise = copy.deepcopy(encoder).requires_grad_(False), noise_of(10)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3, momentum=0.9)
    of_average, queue = way_of(average), [F.normalize(noise_of(11)(64, 96), dim=0)]

    def loss_of(_):
        x = noise(24, 64)
        view, other_view = x + 0.2 * noise(24, 64), x + 0.2 * noise(24, 64)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), encoder.parameters()):
                mean.data = mean.data * 0.9 + p.data * 0.1
        with run.casts():
            q = F.normalize(encoder(view).float(), dim=1)
            with torch.no_grad():
                k = F.normalize(average(other_view).float(), dim=1)
        positive, negative = torch.einsum("nc,nc->n", q, k)[:, None], torch.einsum("nc,ck->nk", q, queue[-1].clone())
        queue.append(torch.cat([queue[-1][:, len(k) :], k.T], 1))
        return F.cross_entropy(torch.cat([positive, negative], 1) / 0.2, torch.zeros(len(q), dtype=torch.long))

    found = learn(run, [encoder, average], optimizer, loss_of, times=6, of=encoder)
    return found | {"averages": of_average(), "queue": queue[-1:]}
