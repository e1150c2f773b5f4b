"""Running statistics stay finite: non-finite ones go back to their last finite value, others stay as forwards have made them."""

import copy
import math
import threading

import pytest
import torch
from helpers import backward, in_threads, initialize_quietly, iterate, sgd
from torch import nn

import ampkit
from ampkit.optimizers import FusedSGD


class AddsUp(nn.Module):
    """A user's own norm, which makes new running statistics instead of writing to the old ones."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().float().mean(0)
            self.running_var = 0.9 * self.running_var + 0.1 * x.detach().float().var(0)
            self.count = self.count + 1
        return (x - self.running_mean) / (self.running_var + 1).sqrt()


class Net(nn.Sequential):
    """A model with every kind of running statistics, without parameters and without a momentum too; one norm is frozen."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.InstanceNorm2d(4, track_running_stats=True),
            nn.BatchNorm2d(4, affine=False, momentum=None),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.Flatten(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(64, 8)),
            nn.BatchNorm1d(8).eval(),
            nn.utils.spectral_norm(nn.Linear(8, 5)),
            AddsUp(5),
        )

    def forward(self, x):  # dynamo leaves forwards of torch.nn's own classes uncompiled when they come first
        return super().forward(x)


OPTIMIZERS = {
    "FusedSGD": lambda p: FusedSGD(p, lr=0.05, momentum=0.9),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
}
BAD = 2  # the index of the batch that overflows


def batches(count=5, bad=BAD):
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(3, 2, 6, 6, generator=generator) for _ in range(count)]
    if bad is not None:
        data[bad][0, 0, 0, 0] = math.inf
    return data


def loss_of(model, x):
    return model(x).float().square().mean()


def train(model, optimizer, data):
    for x in data:
        iterate(lambda x=x: loss_of(model, x), optimizer)


def train_plainly(plain, optimizer, data):
    """Train in plain torch without steps for batches that are not finite, and restore by hand what is not finite."""
    for x in data:
        before = buffers_of(plain)
        optimizer.zero_grad()
        loss_of(plain, x).backward()
        if x.isfinite().all():
            optimizer.step()
        for name, buffer in plain.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.where(buffer.isfinite(), buffer, before[name]))


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), (name, found[name], value)


def assert_finite(model):
    for name, buffer in model.named_buffers():
        assert buffer.isfinite().all(), (name, buffer)


def norms_of(buffers):
    """The statistics that a bad batch leaves nothing finite in: spectral norm's vectors depend on weights alone."""
    return {name: value for name, value in buffers.items() if name.endswith(("running_mean", "running_var"))}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_statistics_are_those_of_a_plain_model_that_is_put_right_by_hand(name):
    plain, model = Net(), Net()
    train_plainly(plain, OPTIMIZERS[name](plain.parameters()), batches())
    train(*initialize_quietly(model, OPTIMIZERS[name], "O0", loss_scale="dynamic"), batches())
    assert_same(model.state_dict(), plain.state_dict())
    assert_finite(model)
    assert int(model[1].num_batches_tracked) == int(model[10].count) == 5 and int(model[8].num_batches_tracked) == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_the_bad_channel_goes_back(name):
    norm = nn.BatchNorm1d(4)
    model, optimizer = initialize_quietly(nn.Sequential(norm, nn.Linear(4, 2)), OPTIMIZERS[name], "O1")
    before = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, [torch.tensor([[0.0, math.inf, 4.0, 8.0], [2.0, 1.0, 0.0, 8.0]])])
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.1, 0.0, 0.2, 0.8]))
    torch.testing.assert_close(norm.running_var, torch.tensor([1.1, 1.0, 1.7, 0.9]))
    assert int(norm.num_batches_tracked) == 1
    assert ampkit.step_was_skipped(optimizer) and all(map(torch.equal, before, model.parameters()))


class Adversaries(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, z):
        return self.critic(self.generator(z)).float().square().mean()


def test_a_block_keeps_the_statistics_finite_of_every_session_that_it_reaches():
    """The generator's loss runs through the critic of another session, which counts the batch and takes no step."""
    pair, optimizers = Adversaries(), []
    for part in (pair.generator, pair.critic):
        optimizers.append(initialize_quietly(part, OPTIMIZERS["SGD"], "O0", loss_scale="dynamic")[1])
    before, z = norms_of(buffers_of(pair)), torch.randn(5, 4)
    z[2, 1] = math.nan
    backward(pair.loss(z), optimizers[0])
    assert_same(norms_of(buffers_of(pair)), before)
    assert int(pair.critic[1].num_batches_tracked) == int(pair.generator[1].num_batches_tracked) == 1


def test_forwards_in_eval_mode_change_nothing_and_those_without_gradients_stay():
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O0", loss_scale="dynamic")
    good, bad = batches(2, 1)
    before = buffers_of(model)
    model.eval()
    loss_of(model, good)
    loss_of(model, bad)
    assert_same(buffers_of(model), before)
    model.train()
    with torch.no_grad():  # as swa_utils.update_bn does
        model(good)
        updated = norms_of(buffers_of(model))
        model(bad)
    model.eval()
    loss_of(model, good)
    assert_same(norms_of(buffers_of(model)), updated)
    assert not torch.equal(updated["1.running_mean"], before["1.running_mean"])
    model.train()
    train(model, optimizer, [bad])
    assert_same(norms_of(buffers_of(model)), updated)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_forward_in_eval_mode_is_finite_after_a_bad_batch_whose_step_the_script_left_out(level):
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], level)
    good, bad = batches(2, 1)
    train(model, optimizer, [good])
    before = norms_of(buffers_of(model))
    assert not loss_of(model, bad).isfinite()
    model.eval()
    assert loss_of(model, good).isfinite()
    assert_same(norms_of(buffers_of(model)), before)


PARTS = {
    "parts": lambda model, x: model.critic(model.generator(x)),
    "a method": lambda model, x: model.loss(x),
}


@pytest.mark.parametrize("scale", [1.0, "dynamic"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("call", PARTS)
def test_parts_and_methods_that_a_script_calls_without_their_model(call, level, scale):
    model, optimizer = initialize_quietly(Adversaries(), OPTIMIZERS["FusedSGD"], level, loss_scale=scale)
    x, before = torch.arange(12.0).reshape(3, 4), buffers_of(model)
    for batch, blocks in ((x * math.inf, True), (x, True), *([(x * math.inf, False)] * (scale == 1.0))):
        optimizer.zero_grad()
        loss = PARTS[call](model, batch).float().square().mean()
        if blocks:
            backward(loss, optimizer)
        else:
            loss.backward()
        assert_finite(model) if blocks else None
        optimizer.step()
        assert_finite(model)
        moved = not torch.equal(model.critic[1].running_mean, before["critic.1.running_mean"])
        assert moved == (batch is x or not blocks)


@pytest.mark.parametrize("name", ["SGD", "fused AdamW"])  # steps of the fused ones count as writes to the weights
def test_a_kept_graph_still_runs_backward_after_a_skipped_step(name):
    x, bad = torch.randn(5, 4), torch.full((5, 4), math.nan)
    trained, beside = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.BatchNorm1d(4)
    twin = copy.deepcopy(trained)
    twin(x).square().mean().backward()
    model = nn.ModuleList([trained, beside])
    _, optimizer = initialize_quietly(model, OPTIMIZERS[name], "O0", loss_scale="dynamic")
    beside(bad)
    loss = trained(x).square().mean()
    with ampkit.scale_loss(loss * math.inf, optimizer) as scaled:
        scaled.backward(retain_graph=True)
    assert beside.running_mean.eq(0).all()  # and with it all statistics were written to
    optimizer.step()
    optimizer.zero_grad()
    backward(loss, optimizer)  # batch norm has saved its running statistics in there
    for mine, wanted in zip(trained.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, wanted.grad)


def test_a_compiled_model():
    """The graph updates the statistics; they are checked outside of it, for the first trace as for each later call."""
    good = batches(2, None)
    bad = good[0] * math.inf
    data = [bad, good[0], bad, good[1]]
    plain, model = Net(), Net()
    train_plainly(plain, OPTIMIZERS["FusedSGD"](plain.parameters()), data)
    compiled = torch.compile(model, backend="aot_eager")
    model, optimizer = initialize_quietly(model, OPTIMIZERS["FusedSGD"], "O0", loss_scale=128.0)
    train(compiled, optimizer, data)
    assert int(model[1].num_batches_tracked) == 4
    torch.testing.assert_close(buffers_of(model), buffers_of(plain))


def test_a_model_without_memory_gets_its_statistics_later():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    ampkit.initialize(model, opt_level="O5", loss_scale="dynamic", verbosity=0)
    model.to_empty(device="cpu")
    for part in model:
        part.reset_parameters()
    model(torch.tensor([[1.0, 2.0], [3.0, math.inf]]))
    assert not model[1].running_mean.isfinite().all()
    model.eval()(torch.zeros(1, 2))
    assert model[1].running_mean.eq(0.0).all() and model[1].running_var.eq(1.0).all()


def test_buffers_that_were_taken_away_or_changed_size_are_left_alone():
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O0", loss_scale="dynamic")
    before = norms_of(buffers_of(model))
    (bad,) = batches(1, 0)
    loss = loss_of(model, bad)
    model[3].running_var = model[1].num_batches_tracked = None
    model[4].running_mean = torch.full((7,), 7.0)
    backward(loss, optimizer)
    optimizer.step()
    assert model[1].num_batches_tracked is None
    before["4.running_mean"] = torch.full((7,), 7.0)
    del before["3.running_var"]
    assert_same(norms_of(buffers_of(model)), before)


@pytest.mark.parametrize("move", [torch.Tensor.clone, lambda x: x.double() if x.is_floating_point() else x])
def test_a_model_moved_between_forward_and_step_is_put_right_where_it_is(move):
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O0", loss_scale="dynamic")
    before = norms_of(buffers_of(model))
    (bad,) = batches(1, 0)
    backward_of = loss_of(model, bad)
    for module in model.modules():  # as Module.to() does: other tensors in their places
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else move(buffer)
    backward(backward_of, optimizer)
    optimizer.step()
    assert_same(norms_of(buffers_of(model)), {name: move(value) for name, value in before.items()})


def load(model):
    model.load_state_dict(
        {name: value + 1 if value.dtype is torch.int64 else value * 1.5 for name, value in Net().state_dict().items()}
    )


def reset(model):
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()


def fill(model):
    for buffer in model.buffers():
        buffer.fill_(3)


@pytest.mark.parametrize("write", [load, reset, fill])
@pytest.mark.parametrize("trial", ["none", "good", "bad"])
def test_what_was_written_after_a_forward_stays(write, trial):
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O2", loss_scale="dynamic")
    good, bad = batches(2, 1)
    train(model, optimizer, [good])
    if trial != "none":  # a forward whose step never comes
        loss_of(model, good if trial == "good" else bad)
    write(model)
    written = norms_of(buffers_of(model))
    if write is reset:
        written = {name: value for name, value in written.items() if value.isfinite().all()}  # AddsUp is not torch's
    count = int(model[1].num_batches_tracked)
    train(model, optimizer, [bad])
    assert_same({name: model.get_buffer(name) for name in written}, written)
    assert len(written) == 10 - 2 * (write is reset and trial == "bad")
    assert int(model[1].num_batches_tracked) == count + 1
    assert_finite(model)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_norm_that_came_after_initialize(leaves_out):
    """With ``leaves_out`` the last forward has left non-finite statistics when the norm comes."""
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O0", loss_scale="dynamic")
    good, bad = batches(2, 1)
    train(model, optimizer, [good])
    before = norms_of(buffers_of(model))
    if leaves_out:
        loss_of(model, bad)
    model[2] = nn.BatchNorm2d(4, affine=False)
    train(model, optimizer, [bad])
    assert_same(
        norms_of(buffers_of(model)), {"2.running_mean": torch.zeros(4), "2.running_var": torch.ones(4), **before}
    )
    assert int(model[2].num_batches_tracked) == 1


def test_a_forward_under_a_transform_or_a_tracer_is_not_looked_at():
    model, _ = initialize_quietly(nn.Sequential(nn.Linear(3, 3), AddsUp(3)), OPTIMIZERS["SGD"], "O0", loss_scale=64.0)
    x = torch.randn(4, 3)
    params = {name: value.detach() for name, value in model.named_parameters()}
    buffers = {name: torch.stack([value, value]) for name, value in model.named_buffers()}
    both = torch.func.vmap(lambda own: torch.func.functional_call(model, (params, own), (x,)))(buffers)
    assert torch.equal(both[0], both[1])
    assert "aten::copy_" not in str(torch.jit.trace(model, (x,), check_trace=False).inlined_graph)


def test_a_skip_leaves_statistics_alone_that_another_thread_trains():
    def pair():
        return initialize_quietly(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), sgd, "O1")

    def beside():
        model, _optimizer = pair()
        model(bad)  # its own step is the one to put this back
        barrier.wait()
        barrier.wait()
        assert model[1].running_mean.isnan().all()

    def train():
        barrier.wait()
        model, optimizer = pair()
        backward(model(bad).float().mean(), optimizer)
        optimizer.step()
        assert model[1].running_mean.eq(0).all()
        barrier.wait()

    bad, barrier = torch.full((6, 3), math.nan), threading.Barrier(2, timeout=60)
    in_threads(beside, train)


@pytest.mark.parametrize(
    "make", [torch.optim.RMSprop, FusedSGD], ids=["raised in the step", "raised in the next block"]
)
def test_the_error_that_ends_a_training_leaves_statistics_that_can_be_saved(make):
    model, bounds = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), dict(min_loss_scale=1.0, max_loss_scale=1.0)
    model, optimizer = initialize_quietly(model, lambda p: make(p, lr=0.1), "O1", **bounds)
    count = 0
    with pytest.raises(ampkit.LossScaleError):
        while count < 52:
            count += 1
            iterate(lambda: model(torch.full((6, 3), math.nan)).float().mean(), optimizer)
    assert model[1].num_batches_tracked == count
    assert model[1].running_mean.eq(0).all() and model[1].running_var.eq(1).all()
