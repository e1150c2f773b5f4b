"""Ways in which scripts write to weights, to float32 values that are handed out, and to gradients: what the float32 value is then.

What torch's float32 would hold afterwards is there EXACT, or to HALF a unit of the last place of what was written. Nothing that a
row leaves alone may change by a bit, and a step without a gradient changes nothing.
"""

import copy
import functools
import gc
import weakref

import pytest
import torch
from helpers import (
    STORED_BF16,
    assert_same,
    at,
    backward,
    in_threads,
    initialize_quietly,
    iterate,
    random_batch,
    values_of,
)
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.apex.optimizers import FusedLAMB
from ampkit.optimizers import FusedAdam, FusedSGD

EXACT, HALF = "exact", "half"
F32 = torch.float32
SETTINGS = {
    "O2": dict(opt_level="O2"),
    "bfloat16": at(STORED_BF16),
    "float16": dict(opt_level="O2", cast_model_type=torch.float16, loss_scale=128.0),
}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.02),
}
# Each setting, and each optimizer.
PAIRS = [("O2", "FusedSGD"), ("O2", "SGD"), ("bfloat16", "AdamW"), ("float16", "FusedAdam")]
each_pair = pytest.mark.parametrize("setting, optimizer", PAIRS)


def prepared(setting, optimizer="FusedSGD"):
    """A model whose float32 values lower precision cannot hold, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3))
    settings = dict(SETTINGS[setting])
    model, optimizer = initialize_quietly(model, OPTIMIZERS[optimizer], settings.pop("opt_level"), **settings)
    x, y = random_batch(1)
    iterate(lambda: F.mse_loss(model(x).float(), y), optimizer, times=3)
    optimizer.zero_grad()
    return model, optimizer


def bits(tensor):
    """The weights' memory as a numpy array; torch does not see writes to it."""
    return tensor.detach().view(torch.int16).numpy()


def mask_of(p):
    return (torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) > 0.5).float()


# Weights: the numbers in them afterwards are their values. An assigned float32 tensor is the float32 value. Elements that hold the
# number that they held before have the float32 value that they had, to the last bit.


WRITTEN = {
    "in place": lambda p: p.mul_(1.5),
    "through data": lambda p: p.data.mul_(1.5),
    "copied from float32": lambda p: p.copy_(torch.full(p.shape, 0.1)),
    "assigned": lambda p: setattr(p, "data", p.data * 1.5),
    "assigned float32": lambda p: setattr(p, "data", torch.linspace(-1, 1, p.numel()).reshape(p.shape) / 3),
    "assigned float32 that lower precision holds": lambda p: setattr(p, "data", torch.full(p.shape, 0.5)),
    "by numpy": lambda p: bits(p).__setitem__(slice(None), bits(torch.full(p.shape, 0.3, dtype=p.dtype))),
    "by set": lambda p: p.set_(torch.full(p.shape, 0.3, dtype=p.dtype)),
    "by init": lambda p: nn.init.constant_(p, 0.1),
    "by foreach": lambda p: torch._foreach_mul_([p], 1.5),
    "in another thread": lambda p: in_threads(lambda: p.data.mul_(1.5)),
    "in shared memory": lambda p: (p.data.share_memory_(), p.data.mul_(1.5)),
    "clamped to a point": lambda p: p.data.clamp_(0.25, 0.25),
    # Masks, of elements that stay as they were.
    "masked": lambda p: p.mul_(mask_of(p).to(p.dtype)),
    "masked through data": lambda p: p.data.mul_(mask_of(p).to(p.dtype)),
    "masked in float32": lambda p: setattr(p, "data", p.data * mask_of(p)),
    "mask filled": lambda p: p.data.masked_fill_(mask_of(p) == 0, 0.0),
    "mask by index": lambda p: p.__setitem__(mask_of(p) == 0, 0.0),
    # Adaptive sharpness-aware minimization comes back by arithmetic, which torch rounds in lower precision too.
    "asam": lambda p: p.add_(torch.full_like(p, 0.01)).sub_(torch.full_like(p, 0.01)),
}


def assert_within(actual, expected, bound, dtype):
    """EXACT: bit for bit, but for float16's 2^-40 below 2^-14. HALF: of the last place that ``dtype`` has there."""
    if bound is EXACT:
        limit = torch.where(expected.abs() < 2.0**-14, 2.0**-40, 0.0) if dtype is torch.float16 else 0.0
    else:
        unit = torch.exp2(torch.frexp(expected).exponent.float() - (11 if dtype is torch.float16 else 8))
        limit = unit / 2
    assert ((actual.double() - expected.double()).abs() <= limit).all(), (actual - expected).abs().max()


def assert_step_without_gradients_changes_nothing(model, optimizer):
    before = values_of(model)
    for p in model.parameters():
        p.grad = None
    optimizer.step()
    after = values_of(model)
    assert all(torch.equal(after[name], value) or value.isnan().any() for name, value in before.items())


@each_pair
@pytest.mark.parametrize("way", WRITTEN)
def test_what_is_written_to_a_weight_is_its_value(way, setting, optimizer):
    model, optimizer = prepared(setting, optimizer)
    before, dtype = values_of(model), model[2].weight.dtype
    for _ in range(3 if way.startswith("mask") else 1):  # in every iteration, as pruning does
        held = model[2].weight.detach().clone()
        with torch.no_grad():
            WRITTEN[way](model[2].weight)
            expected = model[2].weight.detach().float().clone()
        model(torch.ones(2, 6))
        assert model[2].weight.dtype is dtype and torch.equal(model[2].weight, expected.to(dtype))
        after, is_kept = values_of(model)["2.weight"], model[2].weight == held
        if way == "assigned float32":
            assert_within(after, expected, EXACT, dtype)
        else:
            assert_within(after[~is_kept], expected[~is_kept], HALF, dtype)
            assert torch.equal(after[is_kept], before["2.weight"][is_kept])
        before["2.weight"] = after
        assert_same(model.state_dict(), before)
    assert not way.startswith("mask") or is_kept.all()
    assert_step_without_gradients_changes_nothing(model, optimizer)
    x, y = random_batch(2)
    iterate(lambda: F.mse_loss(model(x).float(), y), optimizer)
    assert all(value.isfinite().all() for value in values_of(model).values())


@pytest.mark.parametrize("moment", ["before the parts run", "before the step"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop, FusedSGD])
def test_assigned_float32_values_that_no_forward_of_the_model_meets_count(make, moment):
    """A line search restores weights between backward and step; the parts of a container are called alone."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Identity())
    plain, x = nn.Linear(3, 2, bias=False), torch.ones(1, 3)
    values = torch.tensor([[0.1, 0.2, 0.3], [1.1, 1.2, 1.3]])
    model, optimizer = initialize_quietly(model, lambda params: make(params, lr=0.25), "O2")
    plain_optimizer = (torch.optim.RMSprop if make is torch.optim.RMSprop else torch.optim.SGD)(
        plain.parameters(), lr=0.25
    )
    plain.weight.data = values.clone()
    plain(x).sum().backward()
    plain_optimizer.step()
    if moment == "before the parts run":
        model[0].weight.data = values.clone()
    backward(model[0](x).float().sum(), optimizer)
    if moment == "before the step":
        model[0].weight.data = values.clone()
    optimizer.step()
    torch.testing.assert_close(model.state_dict()["0.weight"], plain.weight.detach(), rtol=0, atol=1e-6)
    assert model[0].weight.dtype is torch.bfloat16


# Put back: bit for bit.


def changed(p):
    p.data.mul_(3.0).add_(1.0)


def taken(p):
    return p.data.clone()


# A copy of a weight, a write, and a way of restoring the copy.
PUT_BACK = {
    "copied": (lambda p: p.detach().clone(), changed, lambda p, kept: p.copy_(kept)),
    "copied to data": (taken, changed, lambda p, kept: p.data.copy_(kept)),
    # FGM and AWP, which attack a weight for one backward pass.
    "assigned": (taken, changed, lambda p, kept: setattr(p, "data", kept)),
    "after an assignment": (
        lambda p: p.data,
        lambda p: setattr(p, "data", torch.randn(p.shape).to(p.dtype)),
        lambda p, kept: setattr(p, "data", kept),
    ),
    "set": (taken, changed, lambda p, kept: p.set_(kept)),
    "by numpy": (
        lambda p: (bits(p), bits(p).copy()),
        lambda p: bits(p).fill(0),
        lambda p, kept: kept[0].__setitem__(slice(None), kept[1]),  # to the memory as it was taken before
    ),
    # Numbers that lower precision holds, assigned as float32.
    "in float32": (lambda p: p.data.float().clone(), changed, lambda p, kept: setattr(p, "data", kept)),
    "after zeros": (taken, lambda p: p.data.zero_(), lambda p, kept: p.data.copy_(kept)),
    "after infinities": (taken, lambda p: p.data.fill_(float("inf")), lambda p, kept: p.data.copy_(kept)),
    "in another thread": (taken, changed, lambda p, kept: in_threads(lambda: p.data.copy_(kept))),
}


def evaluated(model):
    with torch.no_grad():
        model(torch.ones(2, 6))


def written_to_again(model):
    """Two averages, the second one written twice."""
    for write in (changed, lambda p: p.data.copy_(p.detach().clone()), changed):
        evaluated(model)
        for p in model.parameters():
            if p.dim() == 2:
                write(p)
    evaluated(model)


@pytest.mark.parametrize(
    "setting, meanwhile",
    [
        *((setting, evaluated) for setting in SETTINGS),
        *(("O2", meanwhile) for meanwhile in (written_to_again, copy.deepcopy, lambda model: None)),
    ],
)
@pytest.mark.parametrize("way", PUT_BACK)
def test_what_is_put_back_is_back_to_the_last_bit(way, setting, meanwhile):
    (keep, write, put_back), (model, optimizer) = PUT_BACK[way], prepared(setting)
    before = values_of(model)
    for _ in range(2):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        kept = [keep(p) for p in matrices]
        for p in matrices:
            write(p)
        meanwhile(model)
        with torch.no_grad():
            for p, values in zip(matrices, kept):
                put_back(p, values)
        evaluated(model)
    assert_same(model.state_dict(), before)
    assert_step_without_gradients_changes_nothing(model, optimizer)


@pytest.mark.parametrize("setting", SETTINGS)
def test_lower_precision_values_that_are_loaded_again_bring_float32_values_back(setting):
    model, _ = prepared(setting)
    before = values_of(model)
    backup = {name: p.detach().clone() for name, p in model.named_parameters()}
    for factor in (2, 1):
        model.load_state_dict({name: value * factor for name, value in backup.items()})
        evaluated(model)
    assert_same(model.state_dict(), before)


# Float32 values that ampkit returns: exact. The values of a state_dict() are copies.


LENT = {
    "in place": lambda value: value.mul_(1.3),
    "through data": lambda value: value.data.mul_(1.3),
    "by copy": lambda value: value.copy_(value.detach() * 1.3),
    "by numpy": lambda value: value.detach().numpy().__imul__(torch.tensor(1.3).numpy()),
    "in part": lambda value: value.detach()[0].mul_(1.3),
    "in another thread": lambda value: in_threads(lambda: value.detach().mul_(1.3)),
}


@each_pair
@pytest.mark.parametrize("way", LENT)
def test_what_is_written_to_master_params_is_taken_over(way, setting, optimizer):
    model, optimizer = prepared(setting, optimizer)
    dtype = model[0].weight.dtype
    expected = values_of(model)
    with torch.no_grad():
        for value in (*expected.values(), *ampkit.master_params(optimizer)):
            LENT[way](value)
    model(torch.ones(2, 6))
    for name, value in values_of(model).items():
        assert_within(value, expected[name], EXACT, dtype)


def test_writes_to_a_list_of_masters_are_seen_by_whoever_asks_next():
    """An average swapped in for a validation, and out again."""
    model, optimizer = prepared("bfloat16")
    x, before = torch.randn(5, 6), values_of(model)
    with torch.no_grad():
        masters, outputs = list(ampkit.master_params(optimizer)), model(x)
        for factor, now in ((0.5, 0.5), (2.0, 1.0)):
            torch._foreach_mul_(masters, factor)
            assert torch.equal(model(x), outputs) is (now == 1.0)
            assert_same(model.state_dict(), {name: value * now for name, value in before.items()})
        vector = nn.utils.parameters_to_vector(masters)
        nn.utils.vector_to_parameters(vector * 2, masters)  # which assigns ``.data``
        assert_same(model.state_dict(), {name: value * 2 for name, value in before.items()})


def test_what_is_loaded_is_newer_than_what_was_written_to_a_list_of_masters():
    model, optimizer = prepared("bfloat16")
    state, masters = values_of(model), list(ampkit.master_params(optimizer))
    with torch.no_grad():
        torch._foreach_mul_(masters, 0.5)
    model.load_state_dict(state)
    evaluated(model)
    del masters
    assert_same(model.state_dict(), state)


def test_masters_that_were_kept_over_close_write_nowhere():
    model, optimizer = prepared("bfloat16")
    kept = list(ampkit.master_params(optimizer))
    ampkit.close()
    expected = values_of(model)
    with torch.no_grad():
        kept[0].zero_()
    del kept
    gc.collect()
    assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("value", (0.0, float("inf"), float("nan"), 1.0))
@pytest.mark.parametrize("setting", ["bfloat16", "float16"])
def test_a_write_to_one_element_of_a_loan_leaves_the_others(setting, value):
    """Other elements may hold anything meanwhile: an element that is put back has its float32 value again."""
    model, optimizer = prepared(setting)
    expected, kept = values_of(model), model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.fill_(value)
        evaluated(model)
        next(iter(ampkit.master_params(optimizer)))[0, 0] = 1.5
        evaluated(model)
        model[0].weight.copy_(kept)
    expected["0.weight"][0, 0] = model.state_dict()["0.weight"][0, 0]  # of two writes
    assert_same(model.state_dict(), expected)


STATE_DICTS = {
    "whole": lambda model: model.state_dict(),
    "keep_vars": lambda model: model.state_dict(keep_vars=True),
    "of parts": lambda model: {f"{n}.{key}": v for n, m in model.named_children() for key, v in m.state_dict().items()},
}


@pytest.mark.parametrize("setting", ["O2", "float16"])
@pytest.mark.parametrize("saved", STATE_DICTS)
def test_what_is_written_to_a_state_dict_counts_once_it_is_loaded(saved, setting):
    model, optimizer = prepared(setting)
    before = values_of(model)
    state = STATE_DICTS[saved](model)
    stored = [name for name, p in model.named_parameters() if p.dtype is not F32]
    for name in stored:
        state[name].data.mul_(1.3)
    evaluated(model)
    assert_step_without_gradients_changes_nothing(model, optimizer)
    assert_same(model.state_dict(), before)
    with torch.no_grad():
        model[2].weight.fill_(0.5)  # which is not refused: nothing compares it with the state_dict
    model.load_state_dict(state)
    evaluated(model)
    for name, value in values_of(model).items():
        expected = before[name] * 1.3 if name in stored else before[name]
        assert_within(value, expected, EXACT, model[2].weight.dtype)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_state_dict_is_not_kept_and_has_one_tensor_for_tied_weights(keep_vars):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    initialize_quietly(model, OPTIMIZERS["SGD"], "O2")
    earlier, state = (model.state_dict(keep_vars=keep_vars) for _ in range(2))
    first, second = state.values()
    assert first is second and isinstance(first, nn.Parameter) is keep_vars
    assert first is not model[0].weight and first is not earlier["0.weight"]
    gone = weakref.ref(first)
    del state, first, second
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("setting", SETTINGS)
def test_reading_float32_values_writes_nothing(setting):
    """Also where a weight is 0 for a while, so that its rest has no effect."""
    model, optimizer = prepared(setting)
    before = values_of(model)
    backup = model[2].weight.data.clone()
    model[2].weight.data.zero_()
    handed = [model.state_dict(), list(ampkit.master_params(optimizer)), copy.deepcopy(model)]
    assert not handed[0]["2.weight"].any()
    model.state_dict()
    evaluated(model)
    model[2].weight.data.copy_(backup)
    assert_same(model.state_dict(), before)


# Gradients: the step uses the current ``p.grad``. A plain SGD step of rate 1 moves by the gradient.


GRADIENTS = {
    "in place": lambda p: p.grad.mul_(0.5),
    "through data": lambda p: p.grad.data.mul_(0.5),
    "assigned": lambda p: setattr(p, "grad", p.grad * 0.5),
    "assigned in its weight's dtype": lambda p: setattr(p, "grad", p.grad.to(p.dtype) * 0.5),
    "clamped": lambda p: p.grad.clamp_(-0.01, 0.01),
    "copied": lambda p: p.grad.copy_(p.grad.sign() * 0.01),
    "clipped": lambda p: nn.utils.clip_grad_norm_([p], 0.1),
    "zeroed": lambda p: p.grad.zero_(),
    "removed from biases": lambda p: setattr(p, "grad", None if p.dim() == 1 else p.grad),
    "of another loss": lambda p: (p.float() * 0.25).sum().backward(),
    "in another thread": lambda p: in_threads(lambda: p.grad.mul_(0.5)),
    "by foreach": lambda p: torch._foreach_mul_([p.grad], 0.5),
}


@pytest.mark.parametrize(
    "setting, make, blocks",
    [
        *(("O2", FusedSGD, 3), ("O2", torch.optim.SGD, 1), ("bfloat16", torch.optim.SGD, 3), ("float16", FusedSGD, 1)),
        *(("O1", torch.optim.SGD, 3), ("O5", FusedSGD, 1)),
        *(("O1", "AdamW", 1), ("O2", "AdamW(fused)", 3), ("bfloat16", "FusedLAMB", 1), ("float16", "FusedAdam", 1)),
        *(("O5", "AdamW(fused)", 1), ("O5", "FusedAdam", 3)),
    ],
)
@pytest.mark.parametrize("way", GRADIENTS)
def test_what_is_written_to_a_gradient_is_stepped_with(way, setting, make, blocks):
    """By plain SGD, which moves by the gradient, EXACT; by others as over float32 parameters with these gradients."""
    model = nn.Linear(6, 3)
    settings = dict(SETTINGS.get(setting, {"opt_level": setting}))
    make = OPTIMIZERS[make] if isinstance(make, str) else functools.partial(make, lr=1.0)
    model, optimizer = initialize_quietly(model, make, settings.pop("opt_level"), **settings)
    twins = [nn.Parameter(value) for value in values_of(model).values()]
    reference = make(twins)
    for step in range(2):
        optimizer.zero_grad()
        for seed in range(blocks):
            x, y = random_batch(seed + 10 * step)
            backward(F.mse_loss(model(x).float(), y), optimizer)
        for p, twin in zip(model.parameters(), twins):
            GRADIENTS[way](p)
            twin.grad = None if p.grad is None else p.grad.float().clone()
        optimizer.step()
        reference.step()
        for value, twin in zip(values_of(model).values(), twins):
            if isinstance(make, functools.partial):
                assert_within(value, twin.detach(), EXACT, model.weight.dtype)
            else:
                torch.testing.assert_close(value, twin.detach(), rtol=1e-5, atol=2e-6)
