"""Changes of ``p.grad`` by a script after the `scale_loss` block count at the step, as in torch.

Each way is an ordinary line of a training script. The judges are the same script in float32, and in mixed precision written
by hand in plain torch: ampkit may be no further from the first than the second is.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from helpers import STORED_BF16, Operators, at, backward, backward_of_one_weight, initialize_quietly, one_weight
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.apex.optimizers import FusedLAMB
from ampkit.optimizers import FusedAdam, FusedSGD

STEPS = 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 8, generator=generator)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2], x[:, 3].sin(), x.sum(1)], 1)


def noise_like(p, step):
    return 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1100 + step)).to(p.grad)


# Changes to the gradient of each parameter.
EDITS = {
    "halved": lambda p, step: p.grad.mul_(0.5),
    "halved through data": lambda p, step: p.grad.data.mul_(0.5),
    "clamped": lambda p, step: p.grad.clamp_(-0.02, 0.02),
    "copied": lambda p, step: p.grad.copy_(p.grad.sign() * 0.01),
    "replaced": lambda p, step: setattr(p, "grad", p.grad * 3),
    "with noise": lambda p, step: p.grad.add_(noise_like(p, step)),
}


def each(edit):
    return lambda model, step: [edit(p, step) for p in model.parameters()]


# What is done to those of a model.
WAYS = {
    **{name: each(edit) for name, edit in EDITS.items()},
    "clipped": lambda model, step: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    "with a penalty": lambda model, step: (0.1 * sum(p.float().square().sum() for p in model.parameters())).backward(),
    "with one zeroed": lambda model, step: model[2].weight.grad.zero_(),
    "with one removed": lambda model, step: setattr(model[2].weight, "grad", None),
}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3),
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, lr=3e-3, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=3e-3),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.02),
}
SETTINGS = {
    "O1": dict(opt_level="O1"),
    "O2 dynamic": dict(opt_level="O2"),
    "O2 static": dict(opt_level="O2", loss_scale=128.0),
    "O2 without a scale": at(STORED_BF16),
    "O5": dict(opt_level="O5"),
    "O2 float16": dict(opt_level="O2", cast_model_type=torch.float16),
}


def train(model, optimizer, backward, way, blocks, before_step=lambda: None, after_step=lambda: None):
    for step in range(STEPS):
        for p in model.parameters():
            p.grad = None
        for block in range(blocks):
            x, y = batch(step * blocks + block)
            backward(lambda x=x, y=y: F.mse_loss(model(x.to(model[0].weight.dtype)).float(), y) / blocks)
        way(model, step)
        before_step()
        optimizer.step()
        after_step()


@functools.cache  # the same for all settings
def in_float32(make_optimizer, way, blocks=1):
    model = net()
    train(model, make_optimizer(model.parameters()), lambda loss: loss().backward(), way, blocks)
    return flat(model.parameters())


def by_hand(make_optimizer, way, settings, blocks=1):
    """Train in that mixed precision by plain torch: autocast, or a cast model and float32 masters updated from its gradients."""
    dtype = None if settings["opt_level"] in ("O1", "O5") else settings.get("cast_model_type", torch.bfloat16)
    return in_mixed_precision(make_optimizer, way, dtype, blocks)


@functools.cache
def in_mixed_precision(make_optimizer, way, dtype, blocks):
    model = net()
    if dtype is None:

        def backward(loss):
            with torch.autocast("cpu", torch.bfloat16):
                value = loss()
            value.backward()

        train(model, make_optimizer(model.parameters()), backward, way, blocks)
        return flat(model.parameters())
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(dtype)
    scale = 2.0**16 if dtype is torch.float16 else 1.0

    def backward(loss):
        (loss() * scale).backward()
        for p in model.parameters():
            p.grad /= scale

    def to_masters():
        for p, master in zip(model.parameters(), masters):
            master.grad = None if p.grad is None else p.grad.float()

    @torch.no_grad()
    def to_model():
        for p, master in zip(model.parameters(), masters):
            p.copy_(master)

    train(model, make_optimizer(masters), backward, way, blocks, to_masters, to_model)
    return flat(masters)


def with_ampkit(make_optimizer, way, settings, blocks=1):
    model = net()
    optimizer = make_optimizer(model.parameters())
    ampkit.initialize(model, optimizer, verbosity=0, **settings)

    def backward(loss):
        with ampkit.scale_loss(loss(), optimizer) as scaled_loss:
            scaled_loss.backward()

    train(model, optimizer, backward, way, blocks)
    ampkit.close()
    return flat(model.parameters())


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def turns(optimizers, blocks):
    """Each way at each setting, with the optimizers in turn."""
    pairs = itertools.product(enumerate(WAYS), enumerate(SETTINGS))
    return [(way, optimizers[(i + j) % len(optimizers)], setting, blocks) for (i, way), (j, setting) in pairs]


@pytest.mark.parametrize(
    "way, optimizer, setting, blocks", [*turns(list(OPTIMIZERS), 1), *turns(["SGD", "FusedAdam"], 3)]
)
def test_what_is_done_to_gradients_counts_as_in_torch(way, optimizer, setting, blocks):
    arguments = OPTIMIZERS[optimizer], WAYS[way]
    expected = in_float32(*arguments, blocks)
    ours = (with_ampkit(*arguments, SETTINGS[setting], blocks) - expected).norm()
    by_hands = (by_hand(*arguments, SETTINGS[setting], blocks) - expected).norm()
    # Over several blocks ampkit adds up in float32, which may be nearer or, by chance, a little further.
    assert ours <= (1.01 if blocks == 1 else 1.5) * by_hands


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_is_float32_where_its_weights_precision_cannot_hold_it(dtype):
    model, optimizer = one_weight(0.0, opt_level="O2", cast_model_type=dtype, loss_scale=2.0**16)
    backward_of_one_weight(model, optimizer, 2.0**-30)
    assert model.weight.grad.item() == 2.0**-30
    assert model.weight.grad.dtype is (torch.float32 if dtype is torch.float16 else torch.bfloat16)
    optimizer.step()
    assert next(ampkit.master_params(optimizer)).item() == -(2.0**-30)


def test_zeros_that_are_written_to_a_float16_weights_gradient_count():
    model, optimizer = one_weight(0.0, opt_level="O2", cast_model_type=torch.float16, loss_scale=2.0**16)
    for zeroes in (False, True):  # the second step adds nothing
        optimizer.zero_grad()
        backward_of_one_weight(model, optimizer, 2.0**-30)
        if zeroes:
            model.weight.grad.zero_()
        optimizer.step()
        assert next(ampkit.master_params(optimizer)).item() == -(2.0**-30)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
def test_an_optimizer_that_the_block_did_not_name_steps_all_the_same(level, delay):
    """GradScaler's idiom: one backward pass, several steps."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.constant_(model.weight, 1.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    ampkit.initialize(models, optimizers, **at(level, policy="apex", verbosity=0))
    backward(models[1](models[0](torch.ones(1, 1))).float().sum() / 4, optimizers[0], delay_unscale=delay)
    if not delay:
        assert [model.weight.grad.item() for model in models] == [0.25, 0.25]
    for optimizer in optimizers:
        optimizer.step()
    assert [next(ampkit.master_params(optimizer)).item() for optimizer in optimizers] == [0.75, 0.75]


def test_an_overflow_in_what_the_block_did_not_name_skips_that_step_and_moves_no_scale():
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    ampkit.initialize(models, optimizers, opt_level="O2", policy="apex", verbosity=0)
    first, second = (model(torch.ones(1, 1)).float().sum() for model in models)
    before = [model.weight.item() for model in models]
    backward(first + second * float("inf"), optimizers[0])
    for optimizer in optimizers:
        optimizer.step()
    assert [ampkit.step_was_skipped(optimizer) for optimizer in optimizers] == [False, True]
    assert models[0].weight.item() != before[0] and models[1].weight.item() == before[1]
    assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 1}


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_the_backward_pass_did_not_reach_costs_no_operator(level, make_optimizer):
    """The discriminator's optimizer in the generator's block: two models that are trained in turns."""
    counts = []
    for number in (1, 2):
        models = [nn.Linear(1, 1, bias=False) for _ in range(number)]
        optimizers = [make_optimizer(model.parameters(), lr=1.0) for model in models]
        ampkit.initialize(models, optimizers, opt_level=level, policy="apex", verbosity=0)
        for optimizer, model in zip(optimizers, models):
            backward_of_one_weight(model, optimizer, 0.25)
        gradients = [model.weight.grad for model in models]
        loss = models[0](torch.ones(1, 1)).float().sum()
        with Operators() as operators, ampkit.scale_loss(loss, optimizers[0]) as scaled_loss:
            scaled_loss.backward()
        counts.append(len(operators.names))
        assert [model.weight.grad.item() for model in models] == [1.25, 0.25][:number]
        assert models[-1].weight.grad is gradients[-1] or number == 1
        ampkit.close()
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gradient_that_a_block_did_not_come_to_is_gone_once_it_is_cleared(level):
    """Two heads, of which a block reaches one: the other's gradient is set aside during the block, and put back."""
    heads = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    heads.forward = lambda x: [head(x).float().sum() for head in heads]
    heads, optimizer = initialize_quietly(heads, lambda p: torch.optim.SGD(p, lr=1.0), level, policy="apex")
    for loss_of in (sum, lambda outputs: outputs[0]):
        backward(loss_of(heads(torch.ones(1, 1))) / 4, optimizer)
    assert [head.weight.grad.item() for head in heads] == [0.5, 0.25]
    for head in heads:
        head.weight.grad = None
    backward(sum(heads(torch.ones(1, 1))) / 4, optimizer)
    assert [head.weight.grad.item() for head in heads] == [0.25, 0.25]


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
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


def test_the_gradient_of_a_master_is_that_of_its_weight():
    model, optimizer = one_weight(opt_level="O2")
    backward_of_one_weight(model, optimizer, 0.25)
    master = next(ampkit.master_params(optimizer))
    assert master.grad is model.weight.grad and master.grad.dtype is torch.float32
    nn.utils.clip_grad_norm_([master], 0.125)
    model.weight.grad *= 2
    optimizer.step()
    assert abs(next(ampkit.master_params(optimizer)).item() - 0.75) < 1e-5


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
def test_a_gradient_that_is_put_on_a_master_is_stepped_with(make_optimizer):
    model, optimizer = one_weight(make_optimizer=make_optimizer, opt_level="O2")
    for gradient, expected in ((torch.tensor([[0.5]]), 0.5), (None, 0.5)):
        optimizer.zero_grad()
        backward_of_one_weight(model, optimizer, 0.25)
        for master in ampkit.master_params(optimizer):
            master.grad = gradient
        optimizer.step()
        assert next(ampkit.master_params(optimizer)).item() == expected


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_list_of_masters_that_a_script_keeps_is_current_in_ten_iterations(make_optimizer, dtype):
    """Ten gradients of 1/2 that are clipped to 1/4 in the list: values and gradients are those of each iteration."""
    model, optimizer = one_weight(0.0, make_optimizer, opt_level="O2", cast_model_type=dtype)
    params = list(ampkit.master_params(optimizer))
    for step in range(10):
        optimizer.zero_grad()
        assert params[0].grad is None
        backward_of_one_weight(model, optimizer, 0.5)
        assert params[0].grad.item() == 0.5
        nn.utils.clip_grad_norm_(params, 0.25)
        optimizer.step()
        assert abs(params[0].item() + 0.25 * (step + 1)) < 1e-4
        assert next(ampkit.master_params(optimizer)) is params[0]


def test_writing_after_clip_grad_norm_is_an_error():
    model, optimizer = one_weight(make_optimizer=FusedSGD, opt_level="O2")
    backward_of_one_weight(model, optimizer, 0.25)
    ampkit.clip_grad_norm_(optimizer, 0.125)
    model.weight.grad *= 2
    with pytest.raises(ampkit.ConfigurationError, match="Clip last"):
        optimizer.step()


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
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


@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
def test_a_clipping_holds_for_every_step_over_the_same_gradients_and_for_what_is_added(make_optimizer, level):
    """torch's clipping writes to ``p.grad``: a gradient of 2 is clipped to 0.5, used twice, and 0.25 is added to it."""
    model, optimizer = one_weight(8.0, make_optimizer=make_optimizer, opt_level=level)
    backward_of_one_weight(model, optimizer, 2.0)
    assert ampkit.clip_grad_norm_(optimizer, 0.5).item() == 2.0
    values = []
    for _ in range(2):
        optimizer.step()
        values.append(next(ampkit.master_params(optimizer)).item())
    backward_of_one_weight(model, optimizer, 0.25)
    assert next(ampkit.master_params(optimizer)).grad.item() == pytest.approx(0.75, rel=1e-5)
    optimizer.step()
    values.append(next(ampkit.master_params(optimizer)).item())
    assert values == pytest.approx([7.5, 7.0, 6.25], rel=1e-5)


@pytest.mark.parametrize("level", ["O2", STORED_BF16, "O5"])
def test_gradients_put_in_place_after_a_clipped_step_are_not_clipped(level):
    model, optimizer = one_weight(8.0, make_optimizer=FusedSGD, opt_level=level)
    backward_of_one_weight(model, optimizer, 2.0)
    ampkit.clip_grad_norm_(optimizer, 0.5)
    optimizer.step()
    model.weight.grad = torch.full_like(model.weight, 2.0)
    optimizer.step()
    assert next(ampkit.master_params(optimizer)).item() == pytest.approx(5.5, rel=1e-5)


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


@pytest.mark.parametrize("clear", ["model", "by hand"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", STORED_BF16, "O4", "O5"])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
def test_clipping_ends_with_the_step(make_optimizer, level, clear):
    model, optimizer = one_weight(0.0, make_optimizer, opt_level=level)
    norms = []
    for slope in (128.0, 1.0, 1.0):
        if clear == "model":
            model.zero_grad()
        else:
            model.weight.grad = None
        backward_of_one_weight(model, optimizer, slope)
        norms.append(ampkit.clip_grad_norm_(optimizer, 1.0).item())
        optimizer.step()
    assert norms == [128.0, 1.0, 1.0]
    assert abs(next(ampkit.master_params(optimizer)).item() + 3.0) < 1e-5


@pytest.mark.parametrize("level", [STORED_BF16, "O5"])
def test_clipping_ends_with_the_step_without_a_block_too(level):
    model, optimizer = one_weight(0.0, FusedSGD, opt_level=level)
    for slope in (128.0, 1.0, 1.0):
        model.weight.grad = None
        (model(torch.ones(1, 1)).float().sum() * slope).backward()
        ampkit.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    assert abs(next(ampkit.master_params(optimizer)).item() + 3.0) < 1e-5


def test_clipping_float32_gradients_is_seen_and_may_be_followed_by_writes():
    model, optimizer = one_weight(0.0, FusedSGD, opt_level="O1")
    backward_of_one_weight(model, optimizer, 128.0)
    ampkit.clip_grad_norm_(optimizer, 1.0)
    assert abs(model.weight.grad.item() - 1.0) < 1e-5
    model.weight.grad.clamp_(-0.5, 0.5)
    optimizer.step()
    assert model.weight.item() == -0.5


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, FusedSGD])
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


def test_looking_at_masters_while_gradients_wait_at_their_scale_changes_nothing():
    model, optimizer = one_weight(opt_level="O2")
    backward(model(torch.ones(1, 1)).float().sum() / 4, optimizer, delay_unscale=True)
    assert [p.grad.item() for p in ampkit.master_params(optimizer)] == [0.25]  # asking ends the delay
    optimizer.step()
    assert next(ampkit.master_params(optimizer)).item() == 0.75


def test_a_block_that_is_refused_leaves_every_optimizer_as_it_was():
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    ampkit.initialize(models, optimizers, opt_level="O2", policy="apex", verbosity=0)
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


def test_what_float16_cannot_hold_unscaled_outlives_a_delayed_block_too():
    model, optimizer = one_weight(0.0, opt_level="O2", cast_model_type=torch.float16, loss_scale=2.0**16)
    backward_of_one_weight(model, optimizer, 2.0**-30)
    backward(model(torch.ones(1, 1)).float().sum() * 2.0**-30, optimizer, delay_unscale=True)
    backward_of_one_weight(model, optimizer, 2.0**-30)
    optimizer.step()
    assert next(ampkit.master_params(optimizer)).item() == -3 * 2.0**-30


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gradient_that_waits_at_its_scale_is_brought_to_the_next_ones(level):
    """An overflow halves the scale of the first loss; the blocks after it are at 2^15 and 2^16."""
    model, optimizer = one_weight(0.0, opt_level=level, num_losses=2)
    for loss_id, slope, delay in ((0, float("inf"), False), (0, 0.25, True), (1, 0.25, False)):
        if delay:
            optimizer.zero_grad()
        backward(model(torch.ones(1, 1)).float().sum() * slope, optimizer, loss_id=loss_id, delay_unscale=delay)
    scales = [ampkit.current_session().scaling.scaler(loss_id).loss_scale for loss_id in range(2)]
    assert scales == [2.0**15, 2.0**16] and model.weight.grad.item() == 0.5


def test_clipping_float16_gradients_below_its_range():
    model, optimizer = one_weight(0.0, FusedSGD, opt_level="O2", cast_model_type=torch.float16, loss_scale=2.0**16)
    backward_of_one_weight(model, optimizer, 2.0**-20)
    assert ampkit.clip_grad_norm_(optimizer, 2.0**-21).item() == 2.0**-20
    optimizer.step()
    assert -(2.0**-21) < next(ampkit.master_params(optimizer)).item() < 0.0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("named", ["one", "both"])
def test_a_pass_to_some_inputs_leaves_what_others_have_accumulated(level, named):
    """``backward(inputs=...)`` ends before parameters that the graph leads to: the gradients are 2 and 2 + 2."""

    def train(level):
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        for p in (first.weight, second.weight):
            nn.init.ones_(p)
        optimizers = [torch.optim.SGD([layer.weight], lr=1.0) for layer in (first, second)]
        if level is not None:
            ampkit.initialize([first, second], optimizers, opt_level=level, verbosity=0)
        x = torch.ones(1, 2)
        for inputs in (None, [second.weight]):
            loss = second(first(x)).sum()
            of = optimizers if named == "both" else optimizers[1]
            with contextlib.nullcontext(loss) if level is None else ampkit.scale_loss(loss, of) as scaled:
                scaled.backward(inputs=inputs)
        return [layer.weight.grad.float() for layer in (first, second)]

    expected = train(None)
    assert expected[0].unique().item() == 2.0 and expected[1].unique().item() == 4.0
    for gradient, want in zip(train(level), expected, strict=True):
        assert torch.equal(gradient, want)
