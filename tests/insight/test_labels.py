"""Labels in torch.profiler: an iteration's ranges, in their order and inside of one another, and none without a profiler."""

import itertools

import pytest
import torch
from helpers import backward, initialize_quietly, net_with_norm, random_batch
from torch._dynamo.testing import CompileCounter
from torch.autograd import profiler
from torch.nn import functional as F

import ampkit


def iteration_at(level, **settings):
    model, optimizer = initialize_quietly(
        net_with_norm(), lambda params: torch.optim.SGD(params, 0.01), level, **settings
    )
    x, y = random_batch()

    def iteration():
        optimizer.zero_grad()
        backward(F.mse_loss(model(x), y), optimizer)
        ampkit.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    return iteration


def ranges_of(run):
    """(label, begin, end) of each of ampkit's ranges, by begin."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in found.events()]
    return sorted((span for span in spans if span[0].startswith("ampkit: ")), key=lambda span: span[1])


@pytest.mark.switch
@pytest.mark.parametrize("level, casts", [("O1", True), ("O2", False), ("O5", True)])
def test_an_iteration_has_its_ranges_in_order(level, casts):
    iteration = iteration_at(level)
    iteration()
    ranges = ranges_of(iteration)
    names = [name for name, _, _ in ranges]
    # Weights and biases of the two linear layers, each by itself or, from the second iteration on, in one go.
    assert (names.count("ampkit: cast weights") > 0) is casts and names.count("ampkit: cast weights") <= 4
    without_casts = [span for span in ranges if span[0] != "ampkit: cast weights"]
    labels = ["forward", *(["unscale"] if level != "O5" else []), "clip", "step"]  # O5's scale is 1
    assert [name for name, _, _ in without_casts] == [f"ampkit: {label}" for label in labels]
    assert all(before[2] <= after[1] for before, after in itertools.pairwise(without_casts))
    forward = without_casts[0]
    for name, begin, end in ranges:
        if name == "ampkit: cast weights":
            assert forward[1] <= begin <= end <= forward[2]


def test_no_range_is_made_without_a_profiler(monkeypatch):
    iteration, made = iteration_at("O1"), []

    class Noted(profiler.record_function):
        def __init__(self, name, args=None):
            made.append(name)
            super().__init__(name, args)

    monkeypatch.setattr(profiler, "record_function", Noted)
    iteration()
    assert not [name for name in made if name.startswith("ampkit: ")]
    ranges_of(iteration)
    assert {"ampkit: forward", "ampkit: unscale", "ampkit: clip", "ampkit: step"} <= set(made)


def test_compiled_code_is_not_compiled_anew_for_a_profiler():
    model, _ = initialize_quietly(net_with_norm(), lambda params: torch.optim.SGD(params, 0.01), "O2")
    x, _ = random_batch()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    compiled(x)
    before = counter.frame_count
    assert ranges_of(lambda: compiled(x)) == [] and counter.frame_count == before
