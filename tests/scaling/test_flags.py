"""Overflow flags go with the gradients that a block made: to the step that would use them, and no further."""

import math
from functools import partial

import pytest
import torch
from helpers import STORED_BF16, at, backward
from torch import nn

import ampkit

X = torch.ones(1, 4)
BAD = math.inf

LEVELS = ["O1", "O2", STORED_BF16]
SCALES = [1024.0, ampkit.DynamicLossScale(init_scale=1024.0, growth_interval=1000)]
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=1.0),
    "AdamW": partial(torch.optim.AdamW, lr=0.5),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.5),
    "FusedAdam": partial(ampkit.optimizers.FusedAdam, lr=0.5),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.5, fused=True),
}
PRECISION = {"O1": "patch_torch_functions_type", "O2": "cast_model_type"}

# Each level at one of the scales.
each_level_once = pytest.mark.parametrize("level, scale", list(zip(LEVELS, SCALES * 2)))
# Each level at each scale with SGD, and each other optimizer once.
each_case = pytest.mark.parametrize(
    "level, scale, make",
    [
        *((level, scale, OPTIMIZERS["SGD"]) for level in LEVELS for scale in SCALES),
        *((level, 1024.0, OPTIMIZERS[name]) for level, name in zip(LEVELS * 2, list(OPTIMIZERS)[1:])),
    ],
)


class Two(nn.Module):
    """Two layers beside each other with weights of zero, so that steps of SGD leave the sum of their gradients, negated."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
        for param in self.parameters():
            nn.init.zeros_(param)

    def forward(self, x):
        return self.first(x).float() + self.second(x).float()


def made(level, scale, count=1, make=OPTIMIZERS["SGD"], sessions=1):
    """Return models and their optimizers, of one session or of a session each."""
    models = [Two() for _ in range(count)]
    optimizers = [make(model.parameters()) for model in models]
    precision = {PRECISION[level]: torch.float16} if level in PRECISION else {}
    settings = at(level, loss_scale=scale, verbosity=0, **precision)
    for first in range(0, count, count // sessions):
        those = slice(first, first + count // sessions)
        ampkit.initialize(models[those], optimizers[those], **settings)
    return [*models, *optimizers]


def loss_of(model, slope):
    """A loss whose gradient is ``slope`` for every weight."""
    return slope * model(X).sum()


def go(model, optimizers, slope, **flags):
    backward(loss_of(model, slope), optimizers, **flags)


def value(model):
    """Return the number that all weights are equal to."""
    (number,) = {number for p in model.parameters() for number in p.detach().float().unique().tolist()}
    return number


# Changes of gradients by a script, between block and step


def assign(model, gradient_of):
    for param in model.parameters():
        param.grad = gradient_of(param)


def repair(params):
    for param in params:
        param.grad.nan_to_num_(0.0, 0.0, 0.0)


def repair_after(look):
    """Repair the model's gradients after a look at those of the optimizer."""
    return lambda model, optimizer: (look(list(ampkit.master_params(optimizer))), repair(model.parameters()))


REPAIRS = {
    "in place": lambda model, optimizer: repair(model.parameters()),
    "through data": lambda model, optimizer: [p.grad.data.nan_to_num_(0.0, 0.0, 0.0) for p in model.parameters()],
    "of masters": lambda model, optimizer: repair(ampkit.master_params(optimizer)),
    "after a look at norms": repair_after(lambda params: [param.grad.float().norm() for param in params]),
    "after clipping": repair_after(lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0)),
    "the first replaced": lambda model, optimizer: (
        setattr(model.second.weight, "grad", torch.zeros_like(model.second.weight)),
        repair(model.parameters()),
    ),
}


@pytest.mark.parametrize("way", REPAIRS)
@each_level_once
def test_repaired_gradients_of_an_overflow_skip(level, scale, way):
    model, optimizer = made(level, scale)
    go(model, optimizer, BAD)
    REPAIRS[way](model, optimizer)
    optimizer.step()
    assert value(model) == 0.0 and ampkit.step_was_skipped(optimizer)
    optimizer.zero_grad()
    go(model, optimizer, 2.0)
    optimizer.step()
    assert value(model) == -2.0


CLEARS = {
    "by the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "by the optimizer in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer: model.zero_grad(),
    "by the model in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(param, "grad", None) for param in model.parameters()],
    "by other zeros": lambda model, optimizer: assign(model, lambda param: torch.zeros_like(param)),
}


@pytest.mark.parametrize("way", CLEARS)
@each_level_once
def test_cleared_gradients_take_their_overflow_along(level, scale, way):
    model, optimizer = made(level, scale)
    go(model, optimizer, BAD)
    CLEARS[way](model, optimizer)
    go(model, optimizer, 2.0)
    optimizer.step()
    assert value(model) == -2.0 and not ampkit.step_was_skipped(optimizer)


@each_level_once
def test_only_the_first_layers_gradients_overflow_and_the_script_drops_them(level, scale):
    model, optimizer = made(level, scale)
    backward((BAD * model.first(X).float() + 2.0 * model.second(X).float()).sum(), optimizer)
    model.first.weight.grad = None
    optimizer.step()
    assert not ampkit.step_was_skipped(optimizer)
    assert model.first.weight.eq(0.0).all() and model.second.weight.eq(-2.0).all()


# Gradients that are not finite when a block adds to them
STOOD_THERE = {
    "assigned": lambda model, optimizer: assign(model, lambda param: torch.full_like(param, BAD)),
    "of a pass outside of blocks": lambda model, optimizer: loss_of(model, BAD).backward(),
    "written after a block": lambda model, optimizer: (
        go(model, optimizer, 1.0),
        model.second.weight.grad.fill_(math.nan),
    ),
    "sums in the place of a block's": lambda model, optimizer: (
        go(model, optimizer, BAD),
        assign(model, lambda param: param.grad + 1.0),
    ),
}


@pytest.mark.parametrize("way", STOOD_THERE)
@each_level_once
def test_a_step_looks_at_what_stood_there_before_its_block(level, scale, way):
    model, optimizer = made(level, scale)
    STOOD_THERE[way](model, optimizer)
    go(model, optimizer, 2.0)
    optimizer.step()
    assert value(model) == 0.0 and ampkit.step_was_skipped(optimizer)


@each_case
def test_a_second_step_after_a_skip_moves_nothing(level, scale, make):
    model, optimizer = made(level, scale, make=make)
    go(model, optimizer, BAD)
    for _ in range(3):
        optimizer.step()
        assert value(model) == 0.0 and ampkit.step_was_skipped(optimizer)
    repair(model.parameters())
    optimizer.step()
    assert value(model) == 0.0
    go(model, optimizer, 2.0)  # without zero_grad: zeros are in the place of what was refused
    assert all(param.grad.eq(2.0).all() for param in model.parameters())
    optimizer.step()
    assert value(model) != 0.0 and not ampkit.step_was_skipped(optimizer)


def left_early(model, optimizer):
    for _ in range(1):
        with ampkit.scale_loss(loss_of(model, 1.0), optimizer):
            continue


BETWEEN = {
    "nothing": lambda first, second: None,
    "a block left early": lambda first, second: left_early(*first),
    "a block of the other": lambda first, second: go(*second, 1.0),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("sessions", [1, 2])
@each_level_once
def test_momentum_moves_nothing_at_a_second_step_after_a_skip(level, scale, sessions, between):
    make = partial(torch.optim.SGD, lr=1.0, momentum=0.5)
    model, other, optimizer, of_other = made(level, scale, count=2, make=make, sessions=sessions)
    go(model, optimizer, 2.0)
    optimizer.step()
    optimizer.zero_grad()
    go(model, optimizer, BAD)
    optimizer.step()
    BETWEEN[between]((model, optimizer), (other, of_other))
    optimizer.step()
    assert value(model) == -2.0


@each_level_once
def test_an_overflow_in_one_layer_stays_when_another_gets_its_first_gradient(level, scale):
    model, optimizer = made(level, scale)
    go(model.second, optimizer, BAD)
    loss_of(model.first, 2.0).backward()
    repair(model.parameters())
    optimizer.step()
    assert value(model) == 0.0


BY_HAND = {
    "assigned": lambda param, gradient: setattr(param, "grad", gradient),
    "in place": lambda param, gradient: param.grad.copy_(gradient),
    "through data": lambda param, gradient: param.grad.data.copy_(gradient),
}


@pytest.mark.parametrize("way", BY_HAND)
@each_case
def test_gradients_that_no_block_has_made_are_judged_by_their_own_values(level, scale, make, way):
    """As of torch.autograd.grad and torch.func.grad, without a zero_grad() in between."""
    model, optimizer = made(level, scale, make=make)
    assign(model, torch.zeros_like)
    for slope, expected in ((1.0, False), (BAD, True), (1.0, False)):
        before = value(model)
        for param in model.parameters():
            BY_HAND[way](param, torch.full_like(param, slope))
        optimizer.step()
        assert ampkit.step_was_skipped(optimizer) is expected
        assert (value(model) == before) is expected


@pytest.mark.compiled("wrappers")  # a float32 gradient is put on a weight in lower precision
@each_level_once
def test_gradients_put_back_after_zero_grad_are_judged_by_their_own_values(level, scale):
    model, optimizer = made(level, scale)
    for slope, expected in ((BAD, 0.0), (2.0, -2.0)):
        go(model, optimizer, slope)
        kept = [param.grad for param in model.parameters()]
        optimizer.zero_grad()
        for param, gradients in zip(model.parameters(), kept):
            param.grad = gradients
        optimizer.step()
        assert value(model) == expected and ampkit.step_was_skipped(optimizer) is (slope == BAD)


ADDS = {
    "in place": lambda param, buffer: param.grad.add_(buffer),
    "through data": lambda param, buffer: param.grad.data.add_(buffer),
    "copied over": lambda param, buffer: param.grad.copy_(param.grad + buffer),
    "replaced": lambda param, buffer: setattr(param, "grad", param.grad + buffer),
    "data replaced": lambda param, buffer: setattr(param.grad, "data", param.grad.data + buffer),
}


@pytest.mark.parametrize("way", ADDS)
@each_level_once
def test_a_buffer_that_is_not_finite_skips_the_step(level, scale, way):
    model, optimizer = made(level, scale)
    go(model, optimizer, 2.0)
    for param in model.parameters():
        ADDS[way](param, torch.full_like(param.grad, math.nan))
    optimizer.step()
    assert value(model) == 0.0 and ampkit.step_was_skipped(optimizer)


@each_level_once
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("bad_task", [None, 0, 1])
def test_gradients_of_several_tasks_are_combined_as_in_pcgrad(level, scale, named, bad_task):
    """A block for each task; the gradients of each are kept, and the step uses their sum."""
    model, head, optimizer, of_head = made(level, scale, count=2)
    optimizers = [optimizer, of_head] if named else of_head
    kept = []
    for task, slope in enumerate((2.0, 4.0)):
        optimizer.zero_grad()
        of_head.zero_grad()
        slope = BAD if task == bad_task else slope
        backward(loss_of(model, slope) + loss_of(head, 1.0), optimizers)
        kept.append([param.grad.clone() for param in model.parameters()])
    for param, *gradients in zip(model.parameters(), *kept):
        param.grad = sum(gradients)
    optimizer.step()
    of_head.step()
    assert value(model) == (-6.0 if bad_task is None else 0.0)
    # The last block alone has made the gradients of the head, and an overflow in one that it does not name is not its own.
    assert value(head) == (0.0 if bad_task == 1 and named else -1.0)


@each_case
@pytest.mark.parametrize("sessions", [1, 2])
def test_a_discriminator_that_steps_every_second_iteration_loses_no_clean_step(level, scale, make, sessions):
    g, d, of_g, of_d = made(level, scale, count=2, make=make, sessions=sessions)
    moves = []
    for index in range(6):
        of_g.zero_grad()
        slope = BAD if index in (1, 2) else 1.0
        backward(loss_of(g, slope) + loss_of(d, slope), of_g)
        of_g.step()
        of_d.zero_grad()
        if index % 2:
            before = value(d)
            go(d, of_d, 2.0)
            of_d.step()
            moves.append(value(d) < before)
    assert moves == [True, True, True]


@each_level_once
@pytest.mark.parametrize("clips", [False, True], ids=["as they are", "clipped"])
@pytest.mark.parametrize("end", ["close", "initialize"])
def test_an_end_before_the_step_leaves_no_inf_in_gradients(level, scale, end, clips):
    model, optimizer = made(level, scale)
    go(model, optimizer, BAD)
    if clips:
        ampkit.clip_grad_norm_(optimizer, 1.0)
    if end == "close":
        ampkit.close()
    else:
        ampkit.initialize(model, optimizer, opt_level="O4", verbosity=0)
    assert all(param.grad is None or param.grad.isfinite().all() for param in model.parameters())
    optimizer.step()
    assert value(model) == 0.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("other_leaves", [False, True])
def test_blocks_left_without_a_backward_pass_count_for_nothing(level, other_leaves):
    """With hysteresis 2 the second overflow in a row halves the scale, and a block without a pass is no clean iteration."""
    rule = ampkit.DynamicLossScale(init_scale=1024.0, hysteresis=2, growth_interval=3)
    model, optimizer = made(level, rule)
    scales = []
    for slope in (BAD, None, BAD, None, 1.0, None, 1.0, None, 1.0):
        optimizer.zero_grad()
        for _ in range(1):
            with ampkit.scale_loss(loss_of(model, slope or 1.0), optimizer) as scaled:
                if slope is None and other_leaves:
                    continue
                if slope is None:
                    break
                scaled.backward()
            optimizer.step()
        scales.append(ampkit.loss_scale(optimizer))
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0, 512.0, 512.0, 1024.0]
    assert value(model) == -3.0


@each_level_once
def test_a_block_left_early_keeps_gradients_and_their_flag(level, scale):
    model, optimizer = made(level, scale)
    for slope, expected in ((2.0, -2.0), (BAD, -2.0)):
        optimizer.zero_grad()
        go(model, optimizer, slope)
        left_early(model, optimizer)
        repair(model.parameters())
        optimizer.step()
        assert value(model) == expected


# At a static scale of 1

# torch's own step of float32 weights is left alone at O0
AT_ONE = [("O0", "FusedAdam"), *((level, name) for level in ("O4", "O5") for name in ("SGD", "AdamW", "FusedAdam"))]


@pytest.mark.parametrize("level, name", AT_ONE)
@pytest.mark.parametrize(
    "bad, order, clears",  # together, or each after its step
    [(0, (0, 1, 2), True), (1, (2, 1, 0), False), (2, (1, 2, 0), True), (2, (0, 1, 2), False)],
)
def test_at_scale_1_optimizers_named_together_skip_together(level, name, bad, order, clears):
    both = made(level, None, count=3, make=OPTIMIZERS[name])
    models, optimizers = both[:3], both[3:]
    for is_bad in (False, True, False):
        before = [value(model) for model in models]
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss_of(model, BAD if is_bad and index == bad else 1.0) for index, model in enumerate(models)]
        backward(sum(losses), optimizers)
        for index in order:
            optimizers[index].step()
            if clears:
                optimizers[index].zero_grad()
        assert [value(model) < was for model, was in zip(models, before)] == [not is_bad] * 3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("blocks_before", [0, 1, 2])
def test_what_a_block_finds_for_a_delayed_check_skips_whatever_blocks_came_before(level, blocks_before):
    model, optimizer = made(level, 1024.0)
    for slope, delayed in (*[(1.0, False)] * blocks_before, (1.0, True), (BAD, False)):
        go(model, optimizer, slope, delay_overflow_check=delayed)
    repair(model.parameters())
    optimizer.step()
    assert ampkit.step_was_skipped(optimizer)
