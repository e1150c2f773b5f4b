"""Trains a library's model by plain float32, by torch.autocast and by our levels, from the same weights on the same batches.

What is asserted is how far a loss curve is from float32's, not where it goes: rounding decides that, and two correct ways to round
are about as far from each other as each from float32. So that rounding is not amplified to chaos, learning rates are small, and
Adam's epsilon hides gradients that are zero but for rounding (of the keys' biases, say, to which softmax is blind); an average over
seeds and steps does the rest.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import ampkit

LEVELS = ("O1", "O2", "O5")
SEEDS, STEPS = (0, 1), 20
#: How far losses may be from float32's, relative to its mean loss: that far, or half as far again as torch.autocast's. Weights
#: without the rests of their rounding (O3) are further off.
TOLERANCE, TIMES_AUTOCAST = 0.001, 1.5
#: How far running statistics may be from float32's, in standard deviations of what they are of, where autocast's are closer.
STATISTICS_TOLERANCE = 0.02
IN_BFLOAT16 = {"O1": {"patch_torch_functions_type": torch.bfloat16}, "O2": {"cast_model_type": torch.bfloat16}}


class Run(NamedTuple):
    losses: torch.Tensor
    buffers: dict[str, torch.Tensor]
    #: The dtypes of parameters and of floating buffers, after each step of the session.
    parameters_in: set[torch.dtype]
    buffers_in: set[torch.dtype]


def initialize(way: str, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Initialize at an opt level, in bfloat16; ``"autocast"`` and ``"float32"`` leave the model as it is."""
    if way in LEVELS:
        ampkit.initialize(model, *optimizers, opt_level=way, verbosity=0, **IN_BFLOAT16.get(way, {}))


def region(way: str) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16) if way == "autocast" else contextlib.nullcontext()


def train(
    way: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, dict], torch.Tensor],
    batches: list[dict],
) -> Run:
    initialize(way, model, optimizer)
    run = Run([], {}, set(), set())
    for batch in batches:
        optimizer.zero_grad()
        with region(way):
            loss = loss_of(model, batch)
        with ampkit.scale_loss(loss, optimizer) if way in LEVELS else contextlib.nullcontext(loss) as scaled:
            scaled.backward()
        optimizer.step()
        run.losses.append(loss.item())
        run.parameters_in.update(param.dtype for param in model.parameters())
        run.buffers_in.update(buffer.dtype for buffer in model.buffers() if buffer.is_floating_point())
    ampkit.close()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    return run._replace(losses=torch.tensor(run.losses, dtype=torch.float64), buffers=buffers)


def distance(found: list[Run], wanted: list[Run]) -> float:
    """The mean absolute difference between the losses of all seeds, relative to the mean of the wanted losses."""
    found, wanted = (torch.stack([run.losses for run in runs]) for runs in (found, wanted))
    return ((found - wanted).abs().mean() / wanted.abs().mean()).item()


def distance_of_statistics(runs: list[Run], wanted: list[Run]) -> float:
    """The mean over layers and seeds: of means in standard deviations, and of variances in variances."""
    off = []
    for run, exact in zip(runs, wanted):
        for name, mean in exact.buffers.items():
            if name.endswith("running_mean"):
                of_var = name.removesuffix("mean") + "var"
                var = exact.buffers[of_var]
                off.append(((run.buffers[name] - mean) / var.sqrt()).square().mean().sqrt().item())
                off.append(((run.buffers[of_var] - var) / var).square().mean().sqrt().item())
    return sum(off) / max(len(off), 1)


def assert_as_close_to_float32_as_autocast(
    make_model: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, dict], torch.Tensor],
    task: Callable[[torch.Generator], dict],
    rate: float,
) -> None:
    """Assert that losses and running statistics stay as close; every other buffer is float32's, bit for bit."""
    runs = {way: [] for way in ("float32", "autocast", *LEVELS)}
    for seed in SEEDS:
        for way, made in runs.items():
            generator = torch.Generator().manual_seed(seed)
            batches = [task(generator) for _ in range(STEPS)]
            torch.manual_seed(seed)
            model = make_model().train()
            optimizer = torch.optim.Adam(model.parameters(), rate, eps=1e-5)
            made.append(train(way, model, optimizer, loss_of, batches))
    wanted, autocast = runs["float32"], runs["autocast"]
    losses = torch.stack([run.losses for run in wanted])
    assert losses[:, -5:].mean() < 0.95 * losses[:, :5].mean()  # it learns: many times as much as may be off
    of_autocast, statistics_of_autocast = distance(autocast, wanted), distance_of_statistics(autocast, wanted)
    assert of_autocast > 1e-5  # far above what float32 itself rounds
    for level in LEVELS:
        at_level = runs[level]
        assert distance(at_level, wanted) <= max(TOLERANCE, TIMES_AUTOCAST * of_autocast), level
        statistics = distance_of_statistics(at_level, wanted)
        assert statistics <= max(STATISTICS_TOLERANCE, TIMES_AUTOCAST * statistics_of_autocast), level
        for run, exact in zip(at_level, wanted):
            assert (torch.bfloat16 in run.parameters_in) == (level == "O2")
            assert run.buffers_in <= {torch.float32}
            assert run.buffers.keys() == exact.buffers.keys()
            for name, buffer in exact.buffers.items():
                if not name.endswith(("running_mean", "running_var")):
                    assert torch.equal(run.buffers[name], buffer), (level, name)
