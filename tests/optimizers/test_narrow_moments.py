"""Fused optimizers with moments in lower precision, and with parameters rounded at random: what they keep, save and learn."""

import copy
import math

import pytest
import torch
from helpers import STORED_BF16, assert_same, at, iterate_in_torch, random_batch, saved_and_loaded
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.kernels import moments
from ampkit.models import incoming
from ampkit.optimizers import FusedAdam, FusedSGD
from ampkit.plan import Plan

BF16 = torch.bfloat16
ADAM = dict(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
SGD = dict(lr=0.05, momentum=0.9, weight_decay=0.01)
MAKERS = {
    "FusedAdam": lambda p, **how: FusedAdam(p, **ADAM, **how),
    "FusedSGD": lambda p, **how: FusedSGD(p, **SGD, **how),
}
MOMENTS = {"FusedAdam": ("exp_avg", "exp_avg_sq"), "FusedSGD": ("momentum_buffer",)}
NARROW = pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
EVERY = pytest.mark.parametrize("name", MAKERS)


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 3))


def train(model, optimizer, steps, first=0):
    """Make a step on each of so many batches, which are functions of their number."""
    for step in range(first, first + steps):
        x, y = (values.to(model[0].weight.dtype) for values in random_batch(step, rows=8))
        iterate_in_torch(lambda x=x, y=y: F.mse_loss(model(x), y), optimizer)


def values_of(optimizer):
    """Every tensor that an optimizer keeps, and every parameter, in order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [x.clone() for p in params for x in (p.detach(), *optimizer.state[p].values())]


@EVERY
@NARROW
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_checkpoints_hold_moments_as_they_are_kept(name, state_dtype, dtype):
    """The seed comes with the checkpoint. Saving takes no memory, and what is loaded shares none with it."""
    model = small_model().to(dtype)
    optimizer = MAKERS[name](model.parameters(), state_dtype=state_dtype, seed=5)
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    for key, param in enumerate(model.parameters()):
        for what in MOMENTS[name]:
            assert saved["state"][key][what].data_ptr() == optimizer.state[param][what].data_ptr()
    other = copy.deepcopy(model)
    twin = MAKERS[name](other.parameters(), state_dtype=state_dtype, seed=6)
    before = values_of(optimizer)
    twin.load_state_dict(saved)
    assert_same(values_of(twin), before)
    train(other, twin, 3, first=3)
    assert_same(values_of(optimizer), before)
    train(model, optimizer, 3, first=3)
    assert_same(values_of(optimizer), values_of(twin))
    twin.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert_same(values_of(twin), values_of(optimizer))


@EVERY
@pytest.mark.parametrize("to", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
def test_moments_of_any_dtype_load_into_any_other(name, kept, to):
    model = small_model()
    optimizer, other = (MAKERS[name](model.parameters(), state_dtype=dtype) for dtype in (kept, to))
    train(model, optimizer, 3)
    other.load_state_dict(optimizer.state_dict())
    for param in model.parameters():
        for what in MOMENTS[name]:
            is_signed = what != "exp_avg_sq"
            before, after = (each.state[param][what] for each in (optimizer, other))
            value = moments.unpack(before, param.shape, is_signed) if kept == "int8" else before.float()
            expected = {"float32": value, "bfloat16": value.bfloat16(), "int8": moments.pack(value, is_signed)}[to]
            assert after.dtype is expected.dtype and torch.equal(after, expected)


@EVERY
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_hooks_of_loading_see_tensors_and_may_change_them(name, state_dtype, dtype):
    """A hook before finds each parameter's state by its name, as torch's documentation has it; one after doubles a moment."""
    model = small_model().to(dtype)
    optimizer = MAKERS[name](model.named_parameters(), state_dtype=state_dtype)
    train(model, optimizer, 3)
    other = small_model(1).to(dtype)
    loading = MAKERS[name](list(other.named_parameters())[::-1], state_dtype=state_dtype)
    moment, weight, loaded_weight = MOMENTS[name][0], model[0].weight, other[0].weight

    def find_by_name(_, saved):
        (group,), names = saved["param_groups"], loading.param_groups[0]["param_names"]
        numbers = dict(zip(group["param_names"], group["params"]))
        assert torch.equal(saved["state"][numbers["0.weight"]][moment], optimizer.state[weight][moment])
        return {**saved, "param_groups": [{**group, "params": [numbers[name] for name in names], "param_names": names}]}

    loading.register_load_state_dict_pre_hook(find_by_name)
    loading.register_load_state_dict_post_hook(lambda _: loading.state[loaded_weight][moment].mul_(2))
    loading.load_state_dict(optimizer.state_dict())
    optimizer.state[weight][moment].mul_(2)
    for param, loaded in zip(model.parameters(), other.parameters()):
        assert_same(optimizer.state[param], loading.state[loaded])


@pytest.mark.parametrize("to", ["float32", "int8"])
def test_moments_of_a_tensor_of_another_size_are_refused(to):
    """257 elements are 260 bytes of codes and two scales, 256 are 256 and one."""
    optimizer, other = (
        FusedAdam([nn.Parameter(torch.ones(n))], state_dtype=dtype) for n, dtype in ((257, "int8"), (256, to))
    )
    for each in (optimizer, other):
        each.param_groups[0]["params"][0].grad = torch.ones_like(each.param_groups[0]["params"][0])
        each.step()
    before = values_of(other)
    with pytest.raises(ValueError, match=r"'exp_avg' has 268 bytes, .* shape \(256,\) needs 260"):
        other.load_state_dict(optimizer.state_dict())
    assert_same(values_of(other), before)


@EVERY
@NARROW
@pytest.mark.parametrize(
    "level, dtype", [("O1", BF16), ("O3", torch.float32), (STORED_BF16, torch.float32), ("O5", BF16)]
)
def test_moments_stay_narrow_where_a_session_begins_and_ends(name, state_dtype, level, dtype):
    def dtypes():
        return {v.dtype for state in optimizer.state.values() for k, v in state.items() if k not in ("step", "rest")}

    model = small_model().to(dtype)
    optimizer = MAKERS[name](model.parameters(), state_dtype=state_dtype)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    stored = dtypes()
    assert stored == {torch.uint8 if state_dtype == "int8" else BF16}
    for _ in range(2):
        model, optimizer = ampkit.initialize(model, optimizer, **at(level, verbosity=0))
        train(model, optimizer, 1)
        assert dtypes() == stored
    ampkit.close()
    assert dtypes() == stored


def test_state_goes_to_torch_and_comes_back():
    """By way of an optimizer with float32 moments, whose state is torch's."""
    model = small_model()
    optimizer, restored = (FusedAdam(model.parameters(), **ADAM, state_dtype="int8") for _ in range(2))
    train(model, optimizer, 3)
    between, reference = FusedAdam(model.parameters(), **ADAM), torch.optim.AdamW(model.parameters(), **ADAM)
    between.load_state_dict(optimizer.state_dict())
    reference.load_state_dict(between.state_dict())
    for param in model.parameters():
        packed = optimizer.state[param]["exp_avg_sq"]
        assert torch.equal(reference.state[param]["exp_avg_sq"], moments.unpack(packed, param.shape, False))
    restored.load_state_dict(reference.state_dict())
    assert_same(values_of(restored), values_of(optimizer))


def test_numbers_hang_on_the_seed_and_on_nothing_that_runs_beside():
    def trained(seed):
        model = small_model()
        optimizer = FusedAdam(model.parameters(), **ADAM, state_dtype="int8", seed=seed)
        torch.manual_seed(seed)
        train(model, optimizer, 3)
        return values_of(optimizer)

    assert_same(trained(1), trained(1))
    assert not all(torch.equal(a, b) for a, b in zip(trained(1), trained(2)))


def test_a_parameter_that_is_left_out_of_some_steps_keeps_its_numbers():
    """The random numbers of a parameter depend on its place and its count, not on which other parameters have a gradient."""

    def trained(freezes):
        model = small_model()
        optimizer = FusedAdam(model.parameters(), **ADAM, state_dtype="int8")
        first = next(iter(model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            for i, param in enumerate(model.parameters()):
                param.grad = torch.full_like(param, 0.1 * (i + 1)) + torch.arange(param.numel()).view_as(param) / 100
            if freezes:
                first.grad = None
            optimizer.step()
        return [x for param in list(model.parameters())[1:] for x in (param.detach(), *optimizer.state[param].values())]

    assert_same(trained(True), trained(False))


REFUSED = [
    (dict(state_dtype="int4"), "state_dtype is 'int4'; expected one of 'float32', 'bfloat16', 'int8'"),
    (dict(state_dtype=torch.float16), "state_dtype is torch.float16"),
    (dict(rounding="up"), "rounding is 'up'; expected one of 'nearest', 'stochastic'"),
    *((dict(seed=seed), "seed is .*; expected a whole number") for seed in (-1, 0.5, 2**63, None, True)),
]


@EVERY
@pytest.mark.parametrize("settings, said", REFUSED, ids=str)
def test_what_is_asked_for_and_does_not_exist_is_refused(name, settings, said):
    with pytest.raises(ValueError, match=said):
        MAKERS[name]([nn.Parameter(torch.ones(3))], **settings)


def test_parameters_that_are_not_bfloat16_are_not_rounded_at_random():
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"rounding='stochastic' is for parameters in bfloat16.*\(3,\) is float16"):
        FusedAdam([param], rounding="stochastic").step()


def test_torchs_name_of_the_dtype_is_accepted():
    params = [nn.Parameter(torch.ones(3))]
    assert FusedAdam(params, state_dtype=torch.int8).storage == FusedAdam(params, state_dtype="int8").storage


def test_checkpoints_of_plain_optimizers_hold_no_seed():
    assert "seed" not in FusedAdam([nn.Parameter(torch.ones(3))]).state_dict()["param_groups"][0]


@pytest.mark.parametrize("level", [None, "O3"])
def test_stochastic_rounding_takes_steps_that_nearest_loses(level):
    """Steps of 2^-10 downwards from 1, where neighbours in bfloat16 are 2^-8 apart and to nearest nothing ever moves."""
    for rounding, expected in (("nearest", 1.0), ("stochastic", 1.0 - 256 * 2**-10)):
        model = nn.Linear(64, 64, bias=False, dtype=BF16)
        param = nn.init.ones_(model.weight)
        optimizer = FusedSGD([param], lr=2**-10, rounding=rounding, rests=False)
        if level is not None:
            ampkit.initialize(model, optimizer, opt_level=level, cast_model_type=BF16, verbosity=0)
        for _ in range(256):
            param.grad = torch.ones_like(param)
            optimizer.step()
        # A walk of 256 steps, each at most half of 2^-8 off as a standard deviation; the mean of 4096 of them, five times.
        bound = 5 * math.sqrt(256) * 2**-9 / math.sqrt(4096)
        assert abs(param.double().mean().item() - expected) <= (bound if rounding == "stochastic" else 0.0)


def test_narrow_moments_stay_narrow_where_sharded_parameters_become_float32(monkeypatch):
    model = nn.Linear(8, 8).to(BF16)
    optimizer = FusedAdam(model.parameters(), **ADAM, state_dtype="bfloat16")
    model(torch.ones(1, 8, dtype=BF16)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(incoming, "fsdp_modules", lambda model: [model])
    incoming.Incoming().widen([model], [optimizer], Plan(verbosity=0))
    assert model.weight.dtype is torch.float32
    assert optimizer.state[model.weight]["exp_avg_sq"].dtype is BF16
