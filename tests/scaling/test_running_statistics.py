"""A skipped step leaves no trace in running statistics: they are those of a run that never saw the batch."""

import math
import threading

import pytest
import torch
import torch.distributed as dist
from helpers import Operators, backward, initialize_quietly
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.iteration.running_statistics import Snapshot
from ampkit.optimizers import FusedSGD
from ampkit.parallel import convert_syncbn_model


class AddsUp(nn.Module):
    """A norm of somebody's own, which makes new running statistics instead of writing to the old ones."""

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
    """Every kind of running statistics, without parameters of its own and without a momentum too; one norm is frozen."""

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


def train(model, optimizer, data, **flags):
    """One step for each batch, or for each list of micro-batches."""
    for batch in data:
        optimizer.zero_grad()
        for x in batch if isinstance(batch, list) else [batch]:
            backward(loss_of(model, x), optimizer, **flags)
        optimizer.step()


def train_plainly(model, optimizer, data):
    for x in data:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


def without(data, index=BAD):
    return data[:index] + data[index + 1 :]


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), (name, found[name], value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_statistics_are_those_of_a_plain_model_that_never_saw_the_batch(name):
    plain, model = Net(), Net()
    train_plainly(plain, OPTIMIZERS[name](plain.parameters()), without(batches()))
    train(*initialize_quietly(model, OPTIMIZERS[name], "O0", loss_scale="dynamic"), batches())
    assert_same(model.state_dict(), plain.state_dict())
    assert int(model[1].num_batches_tracked) == 4 and all(
        value.isfinite().all() for value in plain.state_dict().values()
    )


@pytest.mark.parametrize("make", [OPTIMIZERS["FusedSGD"], OPTIMIZERS["SGD"]], ids=["fused", "SGD"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_statistics_at_every_level(level, make):
    found = []
    for data in (without(batches()), batches()):
        model, optimizer = initialize_quietly(Net(), make, level, loss_scale=128.0)
        train(model, optimizer, data)
        found.append(buffers_of(model))
        ampkit.close()
    assert_same(found[1], found[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_accumulation_goes_back_to_before_the_first_micro_batch(name, bad):
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS[name], "O2", loss_scale="dynamic")
    train(model, optimizer, batches(1, None))
    before = buffers_of(model)
    train(model, optimizer, [batches(3, bad)])
    assert_same(buffers_of(model), before)
    train(model, optimizer, [batches(3, None)])
    assert int(model[1].num_batches_tracked) == 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skip_of_one_optimizer_restores_what_it_owns(name):
    """As a GAN trains: the generator runs in the discriminator's iterations too."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    both = OPTIMIZERS[name](generator.parameters()), OPTIMIZERS[name](critic.parameters())
    models, (for_generator, for_critic) = ampkit.initialize(
        [generator, critic], list(both), opt_level="O2", verbosity=0, num_losses=2, loss_scale="dynamic"
    )
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))

    def iterate(optimizer, loss_id, factor):
        for one in (for_generator, for_critic):
            one.zero_grad()
        backward(critic(generator(z)).float().mean() * factor, optimizer, loss_id=loss_id)
        optimizer.step()

    at_first = [buffers_of(model) for model in models]
    iterate(for_critic, 0, math.inf)
    assert_same(buffers_of(critic), at_first[1])
    assert int(generator[1].num_batches_tracked) == 1
    iterate(for_critic, 0, 1.0)
    taken = buffers_of(critic)
    assert int(critic[1].num_batches_tracked) == 1 and int(generator[1].num_batches_tracked) == 2
    iterate(for_generator, 1, math.inf)  # back to before its first forward since its last step
    assert_same(buffers_of(generator), at_first[0])
    assert int(critic[1].num_batches_tracked) == 2
    iterate(for_critic, 0, math.inf)  # what the generator's iteration did to the critic goes too
    assert_same(buffers_of(critic), taken)


def test_two_optimizers_of_one_model_have_each_a_copy_of_their_own():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    first, second = (torch.optim.SGD(norm.parameters(), lr=0.1) for norm in model)
    ampkit.initialize(model, [first, second], opt_level="O0", loss_scale="dynamic", num_losses=2, verbosity=0)
    x = torch.randn(5, 4)
    backward(loss_of(model, x), first, loss_id=0)
    first.step()
    second.zero_grad()
    backward(loss_of(model, x) * math.inf, second, loss_id=1)
    second.step()  # back to before both forwards; the first optimizer's norm keeps what they did
    assert [int(norm.num_batches_tracked) for norm in model] == [2, 0]


@pytest.mark.parametrize("layers", [1, 8])
def test_choosing_on_the_device_takes_four_operators_however_many_layers(layers):
    """Means, variances and counters, which are of another dtype."""
    norms = [nn.BatchNorm1d(4) for _ in range(layers)]
    snapshot = Snapshot([(norm._buffers, name) for norm in norms for name in norm._buffers])
    for skipped in (torch.zeros(()), torch.ones(())):
        snapshot.take()
        for norm in norms:
            norm(torch.ones(2, 4))
        with Operators() as operators:
            snapshot.put_back(skipped)
        assert len(operators.names) == 4
        assert {int(norm.num_batches_tracked) for norm in norms} == {1}
        assert all(torch.allclose(norm.running_mean, torch.full((4,), 0.1)) for norm in norms)


def test_what_no_optimizer_owns_belongs_to_the_one_of_the_block():
    teacher, students = nn.BatchNorm1d(6), nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
    optimizers = [torch.optim.SGD(student.parameters(), lr=0.1) for student in students]
    ampkit.initialize([teacher, *students], optimizers, opt_level="O0", loss_scale="dynamic", num_losses=2, verbosity=0)
    x = torch.ones(3, 6)
    for factor, count in ((math.inf, 0), (1.0, 1)):
        backward(students[1](teacher(x)).sum() * factor, optimizers[1], loss_id=1)
        optimizers[0].step()  # not of the block
        optimizers[1].step()
        assert int(teacher.num_batches_tracked) == count


def test_forwards_in_eval_mode_and_without_gradients_count_for_nothing():
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O0", loss_scale="dynamic")
    good, bad = batches(2, 1)
    model.eval()
    loss_of(model, good)
    model.train()
    with torch.no_grad():  # as swa_utils.update_bn does
        model(good)
    updated = buffers_of(model)
    model.eval()
    loss_of(model, good)
    model.train()
    train(model, optimizer, [bad])
    assert_same(buffers_of(model), updated)
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("name", ["SGD", "fused AdamW"])  # steps of the fused ones count as writes to the weights
def test_a_kept_graph_still_runs_backward_after_a_skipped_step(name):
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS[name], "O0", loss_scale="dynamic")
    (x,) = batches(1, None)
    twin = Net()
    loss_of(twin, x).backward()
    before = buffers_of(model)
    loss = loss_of(model, x)
    with ampkit.scale_loss(loss * math.inf, optimizer) as scaled:
        scaled.backward(retain_graph=True)
    optimizer.step()
    assert_same(buffers_of(model), before)
    optimizer.zero_grad()
    backward(loss, optimizer)  # batch norm has saved its running statistics in there
    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, wanted.grad)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def test_a_forward_that_is_computed_again_in_the_backward_pass():
    """It moves the statistics twice, in plain torch too; a skipped step takes both back."""
    plain, model = Checkpointed(), Checkpointed()
    train_plainly(plain, OPTIMIZERS["SGD"](plain.parameters()), without(batches()))
    train(*initialize_quietly(model, OPTIMIZERS["SGD"], "O0", loss_scale="dynamic"), batches())
    assert_same(model.state_dict(), plain.state_dict())
    assert int(model.net[1].num_batches_tracked) == 8


@pytest.mark.parametrize("compile_first", [True, False])
@pytest.mark.parametrize("name", ["FusedSGD", "SGD"])
def test_a_compiled_model(name, compile_first):
    """The graph updates the statistics; the copy is made outside of it, for the first trace as for each later call."""
    model = Net()
    train(*initialize_quietly(model, OPTIMIZERS[name], "O0", loss_scale=128.0), batches(2, None))
    wanted = buffers_of(model)
    ampkit.close()
    model = Net()
    compiled = torch.compile(model, backend="aot_eager") if compile_first else None
    model, optimizer = initialize_quietly(model, OPTIMIZERS[name], "O0", loss_scale=128.0)
    compiled = compiled or torch.compile(model, backend="aot_eager")
    good = batches(2, None)
    bad = good[0] * math.inf
    train(compiled, optimizer, [bad, good[0], bad, good[1]])
    assert int(model[1].num_batches_tracked) == 2
    torch.testing.assert_close(buffers_of(model), wanted)


@pytest.mark.parametrize("name", ["FusedSGD", "SGD"])
def test_synchronised_batch_norm(name, tmp_path, monkeypatch):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)  # the path over processes
    try:
        plain, model = convert_syncbn_model(Net()), convert_syncbn_model(Net())
        train_plainly(plain, OPTIMIZERS[name](plain.parameters()), without(batches()))
        train(*initialize_quietly(model, OPTIMIZERS[name], "O0", loss_scale="dynamic"), batches())
    finally:
        dist.destroy_process_group()
    assert isinstance(model[1], ampkit.parallel.SyncBatchNorm) and int(model[1].num_batches_tracked) == 4
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["FusedSGD", "SGD"])
def test_buffers_that_were_taken_away_or_changed_size_are_left_alone(name):
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS[name], "O0", loss_scale="dynamic")
    before = buffers_of(model)
    (bad,) = batches(1, 0)
    loss = loss_of(model, bad)
    model[1].num_batches_tracked = None
    model[4].running_mean = torch.full((7,), 7.0)
    backward(loss, optimizer)
    optimizer.step()
    after = buffers_of(model)
    assert model[1].num_batches_tracked is None and torch.equal(after.pop("4.running_mean"), torch.full((7,), 7.0))
    assert_same(after, {name: value for name, value in before.items() if name in after})


def test_a_model_moved_between_forward_and_step_is_restored_where_it_is():
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O0", loss_scale="dynamic")
    before = buffers_of(model)
    (bad,) = batches(1, 0)
    backward(loss_of(model, bad), optimizer)
    for module in model.modules():  # as Module.to() does: other tensors in their places
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    optimizer.step()
    assert_same(buffers_of(model), before)


def test_what_was_loaded_after_a_forward_stays():
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O2", loss_scale="dynamic")
    good, bad = batches(2, 1)
    loss_of(model, good)  # a trial run, whose step never comes
    loaded = {
        name: value + 1 if value.dtype is torch.int64 else value * 1.5 for name, value in Net().state_dict().items()
    }
    model.load_state_dict(loaded)
    before = buffers_of(model)
    train(model, optimizer, [bad])
    assert_same(buffers_of(model), before)


def test_an_overflow_in_a_closure():
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O0", loss_scale=128.0)
    before = buffers_of(model)
    (bad,) = batches(1, 0)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, bad)
        backward(loss, optimizer)
        return loss

    optimizer.step(closure)
    assert_same(buffers_of(model), before)


def test_a_norm_that_came_after_initialize():
    model, optimizer = initialize_quietly(Net(), OPTIMIZERS["SGD"], "O0", loss_scale="dynamic")
    good, bad = batches(2, 1)
    train(model, optimizer, [good])
    model[2] = nn.BatchNorm2d(4, affine=False)
    before = buffers_of(model)
    train(model, optimizer, [bad])
    assert_same(buffers_of(model), before)


def test_a_forward_under_a_transform_or_a_tracer_is_not_looked_at():
    model, _ = initialize_quietly(nn.Sequential(nn.Linear(3, 3), AddsUp(3)), OPTIMIZERS["SGD"], "O0", loss_scale=64.0)
    x = torch.randn(4, 3)
    params = {name: value.detach() for name, value in model.named_parameters()}
    buffers = {name: torch.stack([value, value]) for name, value in model.named_buffers()}
    both = torch.func.vmap(lambda own: torch.func.functional_call(model, (params, own), (x,)))(buffers)
    assert torch.equal(both[0], both[1])
    assert "aten::copy_" not in str(torch.jit.trace(model, (x,), check_trace=False).inlined_graph)


@pytest.mark.parametrize("freezes", [False, True], ids=["trained critic", "frozen critic"])
@pytest.mark.parametrize("settings", [{"loss_scale": "dynamic"}, {"loss_scale": 1.0, "check_gradients": True}])
def test_a_generators_bad_batch_is_not_left_in_its_critics_statistics(settings, freezes):
    """What it leaves there would be NaN for good, and show in eval() alone."""
    generator = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    critic = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    models = [generator, critic]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    ampkit.initialize(models, optimizers, opt_level="O1", verbosity=0, **settings)
    backward(critic(torch.randn(6, 4)).float().square().mean(), optimizers[1])
    optimizers[1].step()
    before = [value.clone() for value in (*critic.state_dict().values(), *generator.state_dict().values())]
    critic.requires_grad_(not freezes)
    backward(critic(generator(torch.full((6, 3), math.nan))).float().square().mean(), optimizers[0])
    optimizers[0].step()
    assert critic[1].running_var.isfinite().all()
    after = (*critic.state_dict().values(), *generator.state_dict().values())
    assert all(map(torch.equal, before, after))
    # A finite forward stays, as with any other optimizer's loss.
    backward(critic(generator(torch.randn(6, 3))).float().mean() * math.inf, optimizers[0])
    optimizers[0].step()
    assert critic[1].num_batches_tracked == 2 and generator[1].num_batches_tracked == 0


def test_a_skip_leaves_statistics_alone_that_another_thread_trains():
    def pair():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        return ampkit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)

    bad, others, has_run, may_end = torch.full((6, 3), math.nan), [], threading.Event(), threading.Event()

    def beside():
        others.append(pair()[0])
        others[0](bad)  # its own step is the one to put this back
        has_run.set()
        may_end.wait(60)

    thread = threading.Thread(target=beside)
    thread.start()
    assert has_run.wait(60)
    try:
        model, optimizer = pair()
        backward(model(bad).float().mean(), optimizer)
        optimizer.step()
        assert model[1].running_mean.eq(0).all() and others[0][1].running_mean.isnan().all()
    finally:
        may_end.set()
        thread.join()


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD], ids=["raised in the step", "raised in the next block"])
def test_the_error_that_ends_a_training_leaves_statistics_that_can_be_saved(make):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = make(model.parameters(), lr=0.1)
    bounds = dict(min_loss_scale=1.0, max_loss_scale=1.0)
    ampkit.initialize(model, optimizer, opt_level="O1", verbosity=0, **bounds)
    with pytest.raises(ampkit.LossScaleError):
        for _ in range(52):
            optimizer.zero_grad()
            backward(model(torch.full((6, 3), math.nan)).float().mean(), optimizer)
            optimizer.step()
    assert model[1].num_batches_tracked == 0 and model[1].running_mean.eq(0).all()
