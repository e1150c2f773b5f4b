"""Random training scripts, at each level against plain float32, bit for bit.

Weights, inputs and rates are small integers and powers of two, so that bfloat16 holds every product and sum exactly. A gradient
that is dropped, counted twice or at another scale, a write that is lost, a cast that is stale: each shows as another number, and
rounding shows as none. `Inexact` finds the iteration in which numbers outgrow bfloat16, and the comparison ends there.

A script is a model, an optimizer and a list of events, all drawn from a seed; `play` runs it at a level, or without ampkit. To add
an event, write a function of the script's `Run` and put it into `BETWEEN` (iterations) or `BEFORE_STEP`.
"""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from helpers import STORED_BF16, at, saved_and_loaded
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.optimizers import FusedSGD

WIDTH = 4


def integers(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).float() * torch.randint(0, 2, shape, generator=generator)


class Inexact(TorchDispatchMode):
    """A mode that notes the first operator that reads or makes a number which bfloat16 cannot hold."""

    found = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.found is None and "empty" not in str(function):
            for one in torch.utils._pytree.tree_leaves((args, result)):
                if isinstance(one, torch.Tensor) and one.dtype is torch.float32 and one.dim():
                    if not torch.equal(one.bfloat16().float(), one):
                        self.found = str(function)
        return result


# Parts of models, from [batch, WIDTH] to the same.


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH, bias=False))

    def forward(self, x):
        return x + self.inner(x)


class Checkpointed(Residual):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x.unsqueeze(1)).sum(1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        indices = x.detach().sum(1).long().remainder(WIDTH)
        return self.out(x) + self.embedding(indices).to(x.dtype)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, WIDTH, nonlinearity="relu", batch_first=True)

    def forward(self, x):
        return self.rnn(x.view(-1, 2, 2))[0][:, -1]


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.zeros(WIDTH, WIDTH)), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x @ self.weight + x * self.scale


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def parametrized():
    return parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Symmetric())


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x):
        shifted = self.linear(x + self.last)
        if self.training:
            self.last.copy_(x.detach()[0])
        return shifted


PARTS = [Residual, Checkpointed, Convolution, Tied, Recurrent, Products, parametrized, Shifted]
OPTIMIZERS = [
    lambda params: torch.optim.SGD(params, lr=0.5),
    lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5),
    lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, nesterov=True, foreach=False),
    lambda params: torch.optim.SGD(params, lr=0.5, weight_decay=0.5, fused=True),
    lambda params: FusedSGD(params, lr=0.5, momentum=0.5, set_grad_none=True),
]


class Run:
    def __init__(self, draw, settings):
        self.with_ampkit = settings is not None
        self.seen, self.kept = [], None
        parts = [draw.choice(PARTS)() for _ in range(draw.choice([1, 2]))]
        self.model = nn.Sequential(*parts, nn.Linear(WIDTH, WIDTH))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(integers(p.shape, draw.randrange(10**6)))
        self.optimizer = draw.choice(OPTIMIZERS)(list(self.model.parameters()))
        if self.with_ampkit:
            ampkit.initialize(self.model, self.optimizer, verbosity=0, **settings)

    def backward(self, draw, **passed):
        x, target = integers((3, WIDTH), draw.randrange(10**6)), integers((3, WIDTH), draw.randrange(10**6))
        loss = draw.choice([lambda y: (y * target).sum(), lambda y: F.relu(1 - y * target).sum()])(self.model(x))
        with ampkit.scale_loss(loss, self.optimizer) if self.with_ampkit else nullcontext(loss) as scaled:
            scaled.backward(**passed)

    def some_parameter(self, draw):
        return draw.choice(list(self.model.parameters()))


def evaluates(run, draw):
    run.model.eval()
    with draw.choice([torch.no_grad, torch.inference_mode])():
        run.seen.append(run.model(integers((3, WIDTH), draw.randrange(10**6))).float().clone())
    run.model.train()


def copies_the_model(run, draw):
    run.seen += [values.clone() for values in copy.deepcopy(run.model).state_dict().values()]


def loads_its_own_state(run, draw):
    states = saved_and_loaded([run.model.state_dict(), run.optimizer.state_dict()])
    for one, state in zip((run.model, run.optimizer), states):
        one.load_state_dict(state)


def loads_other_weights(run, draw):
    names = [name for name, _ in run.model.named_parameters()][: draw.choice([1, 99])]
    state = run.model.state_dict()
    run.model.load_state_dict(
        {name: integers(state[name].shape, draw.randrange(10**6)) for name in names}, strict=False
    )


def rewinds(run, draw):
    if run.kept is None:
        run.kept = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])
    else:
        run.model.load_state_dict(run.kept[0])
        run.optimizer.load_state_dict(run.kept[1])


def writes_to_a_weight(run, draw):
    p = run.some_parameter(draw)
    with torch.no_grad():
        draw.choice([p.neg_, p.zero_, p.data.neg_, lambda: p.data.clamp_(-1, 1), lambda: p.view(-1)[0].fill_(1)])()


def puts_a_tensor_in_a_weights_place(run, draw):
    p = run.some_parameter(draw)
    p.data = integers(p.shape, draw.randrange(10**6)).to(draw.choice([p.dtype, torch.float32]))


def evaluates_with_other_weights(run, draw):
    originals = [p.detach().clone() for p in run.model.parameters()]
    with torch.no_grad():
        for p in run.model.parameters():
            p.fill_(1)
        run.seen.append(run.model(integers((3, WIDTH), draw.randrange(10**6))).float())
        for p, values in zip(run.model.parameters(), originals):
            p.copy_(values)


def freezes_or_unfreezes(run, draw):
    p = run.some_parameter(draw)
    p.requires_grad_(not p.requires_grad)
    run.model[-1].requires_grad_(True)


def hooks_a_weight(run, draw):
    p = run.some_parameter(draw)
    if p.requires_grad:
        p.register_hook(lambda gradient: gradient * 2)


def hooks_the_step(run, draw):
    run.optimizer.register_step_pre_hook(lambda *_: halves_gradients(run, draw))


def changes_the_rate(run, draw):
    for group in run.optimizer.param_groups:
        group["lr"] /= 2


def closes_and_begins_again(run, draw):
    level = draw.choice(["O1", "O2", "O5"])
    if run.with_ampkit:
        ampkit.close()
        ampkit.initialize(run.model, run.optimizer, opt_level=level, verbosity=0)


def halves_gradients(run, draw):
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def puts_gradients_in_place(run, draw):
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 2


def clears_a_gradient(run, draw):
    run.some_parameter(draw).grad = None


def clamps_gradients(run, draw):
    nn.utils.clip_grad_value_(run.model.parameters(), 1.0)


def adds_another_loss(run, draw):
    run.backward(draw)


def adds_a_loss_for_some(run, draw):
    run.backward(draw, inputs=[p for p in run.model.parameters() if p.requires_grad][-2:])


def adds_a_penalty_without_a_block(run, draw):
    sum(p.float().square().sum() / 2 for p in run.model.parameters() if p.requires_grad).backward()


BETWEEN = [
    *(evaluates, copies_the_model, loads_its_own_state, loads_other_weights, rewinds, writes_to_a_weight),
    *(puts_a_tensor_in_a_weights_place, evaluates_with_other_weights, freezes_or_unfreezes, hooks_a_weight),
    *(hooks_the_step, changes_the_rate, closes_and_begins_again),
]
BEFORE_STEP = [
    *(evaluates, loads_its_own_state, halves_gradients, puts_gradients_in_place, clears_a_gradient, clamps_gradients),
    *(adds_another_loss, adds_a_loss_for_some, adds_a_penalty_without_a_block),
]


def play(seed, settings=None, judge=None):
    """Return what three iterations of this script see, each with its events' names; without ``settings``, in plain float32.

    ``judge`` (`Inexact`) ends the run with the iteration before the one in which it finds something.
    """
    draw = random.Random(seed)
    run = Run(draw, settings)
    iterations = []
    for _ in range(3):
        run.seen, names = [], []
        with judge or nullcontext():
            for table, times in ((BETWEEN, draw.choice([0, 1, 2])), (None, 1), (BEFORE_STEP, draw.choice([0, 1, 2]))):
                for _ in range(times):
                    happens = draw.choice(table) if table else None
                    names.append(happens.__name__ if happens else "backward")
                    if happens is None and draw.random() < 0.8:
                        draw.choice([run.optimizer.zero_grad, run.model.zero_grad])()
                    (happens or Run.backward)(run, draw)
        if judge is not None and judge.found:
            break
        run.optimizer.step()
        run.seen += [values.clone() for values in run.model.state_dict().values()]
        iterations.append((names, run.seen))
    ampkit.close()
    return iterations


LEVELS = [at(level) for level in ("O1", "O2", STORED_BF16, "O5")]


def compared(seed):
    expected, count = play(seed, judge=Inexact()), 0
    for settings in LEVELS:
        for number, ((names, want), (_, seen)) in enumerate(zip(expected, play(seed, settings))):
            for wanted, value in zip(want, seen, strict=True):
                assert torch.equal(value.float(), wanted), (seed, settings, number, names, value, wanted)
            count += 1
    return count


@pytest.mark.parametrize(
    "seeds", [range(70, 80), *(pytest.param(range(at, at + 150), marks=pytest.mark.slow) for at in (100, 250))]
)
def test_random_scripts_train_as_in_float32_bit_for_bit(seeds):
    assert sum(map(compared, seeds)) > 4 * len(seeds)  # of 3 iterations at 3 levels: most are exact
