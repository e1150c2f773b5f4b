"""Bytes that autograd keeps for the backward pass at O1, beside torch.autocast: of every storage but the parameters."""

import pytest
import torch
import torch.nn.functional as F
from everyday import Run
from everyday.networks import Block
from helpers import ResNet, o1, others_slow
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from ampkit.casting.cpp_wrappers import library


def gpt():
    table, head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
    return nn.Sequential(table, Block(), Block(), nn.LayerNorm(64), head, nn.Flatten(0, 1))


# A model, its input, its loss, and what it may keep as a part of what it keeps under torch.autocast. Without the wrappers in C++
# query, key and value have casts of their own, as under torch.autocast.
CASES = {
    "transformer block": (Block, lambda: torch.randn(2, 64, 64), lambda y: y.square().mean(), 0.95),
    "gpt": (gpt, lambda: torch.arange(256).view(4, 64), lambda y: F.cross_entropy(y, torch.arange(256)), 0.95),
    "convolutions": (
        ResNet,
        lambda: torch.randn(8, 3, 8, 8),
        lambda y: F.cross_entropy(y, torch.arange(8) % 4),
        1.0,
    ),
    "lstm": (
        lambda: nn.LSTM(32, 64, num_layers=2, batch_first=True),
        lambda: torch.randn(4, 16, 32),
        lambda y: F.cross_entropy(y[0][:, -1], torch.arange(4)),
        1.0,
    ),
}


@pytest.fixture(autouse=True)
def without_onednn_where_it_has_no_bfloat16():
    """torch.autocast runs an LSTM by oneDNN even on processors on which oneDNN has no bfloat16, and raises."""
    with torch.backends.mkldnn.flags(enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        yield


def bytes_saved(model, x, loss_of):
    parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
    alive, sizes = [], {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive.append(storage)  # so that no other storage comes to lie at its address
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model(x))
    return sum(sizes.values())


@pytest.mark.parametrize("case", CASES)
def test_no_more_is_kept_than_under_autocast(case, in_python):
    make, inputs, loss_of, part = CASES[case]
    model, x = make(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = bytes_saved(model, x, loss_of)
    with o1(in_python=in_python):
        at_o1 = bytes_saved(model, x, loss_of)
    shares = not in_python and library is not None
    assert 0 < at_o1 <= (part if shares or case == "gpt" else 1.0) * under_autocast


# -- what is alive at once in a training step


def peak_bytes(step):
    """The most bytes that tensors made in ``step()`` take at one time, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    alive, peak = 0, 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("case", others_slow("transformer block", of=CASES))
def test_a_training_step_needs_no_more_memory_than_under_autocast(case):
    make, inputs, loss_of, _ = CASES[case]

    def peak(run):
        model, x = make(), inputs()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        run.begin(model, optimizer)

        def step():
            optimizer.zero_grad()
            with run.casts():
                loss = loss_of(model(x))
            run.backward(loss, optimizer)
            optimizer.step()

        for _ in range(2):
            step()  # state of the optimizer is made
        return min(peak_bytes(step) for _ in range(3))  # libraries make buffers of their own now and then

    under_autocast = peak(Run("autocast"))
    assert 0 < peak(Run("O1")) <= 1.02 * under_autocast
