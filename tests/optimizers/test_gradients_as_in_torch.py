"""Changes of ``p.grad`` by a script after the `scale_loss` block count at the step, as in torch.

The judge is the same script in plain torch: its numbers are powers of two, which lower precision holds. Ways to write to gradients
are in test_writes.py.
"""

import functools

import pytest
import torch
from helpers import STORED_BF16, at, backward, backward_of_one_weight, initialize_quietly, one_weight
from torch import nn

import ampkit
from ampkit.optimizers import FusedSGD

EVERY_LEVEL = ("O0", "O1", "O2", STORED_BF16, "O4", "O5")
KINDS = pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])


class Plain:
    """A weight of 8 in plain torch, stepped with its gradient; `Prepared` is the same with ampkit."""

    def __init__(self, make_optimizer=torch.optim.SGD):
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, 8.0)
        self.weight, self.optimizer = self.model.weight, make_optimizer(self.model.parameters(), lr=1.0)
        self.step, self.seen = self.optimizer.step, []

    def masters(self):
        return list(self.model.parameters())

    def backward(self, slope, **flags):
        (self.model(torch.ones(1, 1)) * slope).sum().backward()

    def clip(self, bound):
        self.seen.append(nn.utils.clip_grad_norm_(self.model.parameters(), bound).item())

    def after(self, script):
        script(self)
        return [*self.seen, self.masters()[0].item()]


class Prepared(Plain):
    def __init__(self, make_optimizer, level):
        super().__init__(make_optimizer)
        ampkit.initialize(self.model, self.optimizer, **at(level, policy="apex", verbosity=0))
        self.step = self.optimizer.step

    def masters(self):
        return list(ampkit.master_params(self.optimizer))

    def backward(self, slope, **flags):
        backward(self.model(torch.ones(1, 1)).float().sum() * slope, self.optimizer, **flags)

    def clip(self, bound):
        self.seen.append(ampkit.clip_grad_norm_(self.optimizer, bound).item())


def steps_twice_and_adds_after_a_clipping(run):
    """Clip a gradient of 2 to 0.5, use it twice, and add 0.25 to it."""
    run.backward(2.0)
    run.clip(0.5)
    run.step()
    run.step()
    run.backward(0.25)
    run.seen.append(run.masters()[0].grad.item())
    run.step()


def puts_another_gradient_in_place_after_a_clipped_step(run):
    run.backward(2.0)
    run.clip(0.5)
    run.step()
    run.weight.grad = torch.full_like(run.weight, 2.0)
    run.step()


def clips_in_each_iteration(run, clear=lambda run: run.model.zero_grad()):
    for slope in (128.0, 1.0, 1.0):
        clear(run)
        run.backward(slope)
        run.clip(1.0)
        run.step()


def clips_in_each_iteration_and_clears_by_hand(run):
    clips_in_each_iteration(run, lambda run: setattr(run.weight, "grad", None))


def clips_without_a_block(run):
    for slope in (128.0, 1.0, 1.0):
        run.weight.grad = None
        (run.model(torch.ones(1, 1)) * slope).sum().backward()
        run.clip(1.0)
        run.step()


def edits_and_then_clips(run):
    run.backward(2.0)
    run.weight.grad.mul_(4.0)
    run.clip(1.0)
    run.step()


def clips_a_master_and_edits_its_weight(run):
    run.backward(0.25)
    nn.utils.clip_grad_norm_(run.masters(), 0.125)
    run.weight.grad *= 2
    run.step()


def puts_gradients_on_masters(run):
    for gradient in (torch.tensor([[0.5]]), None):
        run.optimizer.zero_grad()
        run.backward(0.25)
        for master in run.masters():
            master.grad = gradient
        run.step()


def takes_gradients_off_a_list_of_masters(run):
    listed = run.masters()
    run.backward(2.0)
    for master in listed:
        master.grad = None
    run.step()


def looks_at_masters_while_a_gradient_waits_at_its_scale(run):
    run.backward(0.25, delay_unscale=True)
    run.seen += [master.grad.item() for master in run.masters()]  # asking ends the delay
    run.step()


def keeps_a_list_of_masters(run):
    listed = run.masters()
    for _ in range(10):
        run.optimizer.zero_grad()
        run.backward(0.5)
        run.seen.append(listed[0].grad.item())
        nn.utils.clip_grad_norm_(listed, 0.25)
        run.step()
        run.seen.append(listed[0].item())


SCRIPTS = [
    *(steps_twice_and_adds_after_a_clipping, puts_another_gradient_in_place_after_a_clipped_step),
    *(clips_in_each_iteration, clips_in_each_iteration_and_clears_by_hand, clips_without_a_block, edits_and_then_clips),
    *(clips_a_master_and_edits_its_weight, puts_gradients_on_masters, takes_gradients_off_a_list_of_masters),
    *(looks_at_masters_while_a_gradient_waits_at_its_scale, keeps_a_list_of_masters),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("level", EVERY_LEVEL)
@KINDS
def test_a_script_sees_and_learns_what_it_does_in_torch(make_optimizer, level, script):
    expected = Plain().after(script)
    assert Prepared(make_optimizer, level).after(script) == pytest.approx(expected, rel=1e-5)


def two_weights(make_optimizer, level):
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.constant_(model.weight, 1.0)
    return initialize_quietly(models, functools.partial(make_optimizer, lr=1.0), level, policy="apex")


@pytest.mark.parametrize("delays", [(False,), (False, True, False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_is_float32_where_its_weights_precision_cannot_hold_it(dtype, delays):
    model, optimizer = one_weight(0.0, opt_level="O2", cast_model_type=dtype, loss_scale=2.0**16)
    for delay in delays:
        backward_of_one_weight(model, optimizer, 2.0**-30, delay_unscale=delay)
    assert model.weight.grad.item() == len(delays) * 2.0**-30
    assert model.weight.grad.dtype is (torch.float32 if dtype is torch.float16 else torch.bfloat16)
    optimizer.step()
    assert next(ampkit.master_params(optimizer)).item() == -len(delays) * 2.0**-30


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
def test_an_optimizer_that_the_block_did_not_name_steps_all_the_same(level, delay):
    """GradScaler's idiom: one backward pass, several steps."""
    models, optimizers = two_weights(torch.optim.SGD, level)
    backward(models[1](models[0](torch.ones(1, 1))).float().sum() / 4, optimizers[0], delay_unscale=delay)
    if not delay:
        assert [model.weight.grad.item() for model in models] == [0.25, 0.25]
    for optimizer in optimizers:
        optimizer.step()
    assert [next(ampkit.master_params(optimizer)).item() for optimizer in optimizers] == [0.75, 0.75]


def test_an_overflow_in_what_the_block_did_not_name_skips_that_step_and_moves_no_scale():
    models, optimizers = two_weights(torch.optim.SGD, "O2")
    first, second = (model(torch.ones(1, 1)).float().sum() for model in models)
    backward(first / 4 + second * float("inf"), optimizers[0])
    for optimizer in optimizers:
        optimizer.step()
    assert [ampkit.step_was_skipped(optimizer) for optimizer in optimizers] == [False, True]
    assert [model.weight.item() for model in models] == [0.75, 1.0]
    assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 1}


@KINDS
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_judges_what_its_own_backward_pass_made(level, make_optimizer):
    """A model that two optimizers update: the second steps with its own block's gradient, whatever the first block made."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizers = [make_optimizer(model.parameters(), lr=1.0) for _ in range(2)]
    ampkit.initialize(model, optimizers, opt_level=level, num_losses=2, policy="apex", verbosity=0)
    for index, slope in enumerate((float("inf"), 0.25)):
        backward(model(torch.ones(1, 1)).float().sum() * slope, optimizers[index], loss_id=index)
    for optimizer in optimizers:
        optimizer.step()
    assert [ampkit.step_was_skipped(optimizer) for optimizer in optimizers] == [True, False]
    assert model.weight.item() == 0.75
    assert [entry["loss_scale"] for entry in ampkit.state_dict().values()] == [2.0**15, 2.0**16]


def test_writing_after_clip_grad_norm_is_an_error():
    model, optimizer = one_weight(make_optimizer=FusedSGD, opt_level="O2")
    backward_of_one_weight(model, optimizer, 0.25)
    ampkit.clip_grad_norm_(optimizer, 0.125)
    model.weight.grad *= 2
    with pytest.raises(ampkit.ConfigurationError, match="Clip last"):
        optimizer.step()


@KINDS
@pytest.mark.parametrize("named", ["one for both", "both", "the first"])
@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
def test_clearing_inside_the_block_clears(level, named, make_optimizer):
    """``p.grad = None`` by hand: what earlier blocks left there is gone too, but not where the backward pass did not come."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, 1.0)
    groups = [model.parameters()] if named == "one for both" else [layer.parameters() for layer in model]
    optimizers = [make_optimizer(params, lr=1.0) for params in groups]
    ampkit.initialize(model, optimizers, **at(level, policy="apex", verbosity=0))
    of_block = optimizers[:1] if named == "the first" else optimizers
    for clears in (False, True):
        outputs = (model[0] if clears else model)(torch.ones(1, 1).to(model[0].weight.dtype))
        with ampkit.scale_loss(outputs.float().sum() / 4, of_block) as scaled_loss:
            scaled_loss.backward()
            if clears:
                model[0].weight.grad = None
    assert model[0].weight.grad is None
    assert model[1].weight.grad.item() == 0.25, "the second block did not reach it"
    for optimizer in optimizers:
        optimizer.step()
    assert [layer.weight.item() for layer in model] == [1.0, 0.75]


@pytest.mark.parametrize("way", ["no backward", "autograd.grad"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_without_a_backward_pass_leaves_what_earlier_blocks_made(level, way):
    model, optimizer = one_weight(opt_level=level)
    backward_of_one_weight(model, optimizer, 0.25)
    with ampkit.scale_loss(model(torch.ones(1, 1)).float().sum(), optimizer) as scaled:
        if way == "autograd.grad":
            torch.autograd.grad(scaled, [model.weight])
    assert model.weight.grad.item() == 0.25


@pytest.mark.parametrize("base", [torch.optim.SGD, FusedSGD])
def test_a_zero_grad_that_the_script_has_written_is_called(base):
    class Counting(base):
        cleared = 0

        def zero_grad(self, *args, **kwargs):
            Counting.cleared += 1
            super().zero_grad(*args, **kwargs)

    model, optimizer = one_weight(make_optimizer=Counting, opt_level="O2")
    backward_of_one_weight(model, optimizer, 0.25)
    optimizer.zero_grad()
    assert Counting.cleared == 1 and model.weight.grad is None


def test_clipping_float32_gradients_is_seen_and_may_be_followed_by_writes():
    model, optimizer = one_weight(0.0, FusedSGD, opt_level="O1")
    backward_of_one_weight(model, optimizer, 128.0)
    ampkit.clip_grad_norm_(optimizer, 1.0)
    assert abs(model.weight.grad.item() - 1.0) < 1e-5
    model.weight.grad.clamp_(-0.5, 0.5)
    optimizer.step()
    assert model.weight.item() == -0.5


@pytest.mark.parametrize("level", ["O1", "O2"])
@KINDS
def test_a_skipped_step_leaves_gradients_in_their_flat_buffer(make_optimizer, level):
    model, optimizer = one_weight(0.0, make_optimizer, opt_level=level)
    flat = torch.zeros(1, dtype=model.weight.dtype)
    model.weight.grad = flat.view(1, 1)
    for slope in (float("inf"), 0.25, 0.25):
        flat.zero_()
        backward_of_one_weight(model, optimizer, slope)
        flat.mul_(0.5)
        optimizer.step()
    assert next(ampkit.master_params(optimizer)).item() == -0.25


def test_a_block_that_is_refused_leaves_every_optimizer_as_it_was():
    models, optimizers = two_weights(torch.optim.SGD, "O2")
    for model, optimizer in zip(models, optimizers):
        backward_of_one_weight(model, optimizer, 0.25)
    ampkit.clip_grad_norm_(optimizers[1], 1.0)
    models[1].weight.grad *= 2
    with pytest.raises(ampkit.ConfigurationError, match="was written to after"):
        with ampkit.scale_loss(models[0](torch.ones(1, 1)).float().sum(), optimizers):
            pass
    assert [model.weight.grad.item() for model in models] == [0.25, 0.5]
    models[1].weight.grad = None
    backward_of_one_weight(models[0], optimizers[0], 0.25)  # neither is still open
    assert models[0].weight.grad.item() == 0.5


def test_clipping_float16_gradients_below_its_range():
    model, optimizer = one_weight(0.0, FusedSGD, opt_level="O2", cast_model_type=torch.float16, loss_scale=2.0**16)
    backward_of_one_weight(model, optimizer, 2.0**-20)
    assert ampkit.clip_grad_norm_(optimizer, 2.0**-21).item() == 2.0**-20
    optimizer.step()
    assert -(2.0**-21) < next(ampkit.master_params(optimizer)).item() < 0.0
