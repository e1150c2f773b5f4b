"""Float32 values of lower-precision weights: state_dict() has them, what is loaded is there, and resuming is bit for bit."""

import copy

import pytest
import torch
from helpers import (
    FUSED_SETTINGS,
    STORED_BF16,
    RowClassifier,
    assert_same,
    at,
    backward,
    backward_of_one_weight,
    fused_class,
    initialize_quietly,
    iterate,
    iterate_in_torch,
    net_with_norm,
    one_weight,
    random_batch,
    saved_and_loaded,
    values_of,
)
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.apex.optimizers import FusedAdagrad
from ampkit.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.switch

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


def with_masters(level=STORED_BF16, make=OPTIMIZERS["SGD"], seed=0, **settings):
    torch.manual_seed(seed)
    return initialize_quietly(RowClassifier(), make, level, **settings)


def fit_batch(model, optimizer, seed=1):
    x, y = random_batch(seed, rows=6, inputs=4, outputs=1)
    return iterate(lambda: F.mse_loss(model(x).float(), y), optimizer)


def master_of(model, optimizer, name):
    index = [n for n, _ in model.named_parameters()].index(name)
    return list(ampkit.master_params(optimizer))[index]


# state_dict() has the float32 values


@pytest.mark.parametrize("level", ("O2", STORED_BF16))
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_state_dict_is_what_master_params_are_bit_for_bit(level, optimizer_name):
    model, optimizer = with_masters(level, OPTIMIZERS[optimizer_name])
    for seed in range(3):
        fit_batch(model, optimizer, seed)
    state = model.state_dict()
    for name, param in model.named_parameters():
        master = master_of(model, optimizer, name)
        assert torch.equal(state[name], master) and state[name].dtype is torch.float32
        assert torch.equal(param, master.to(param.dtype))
    assert not torch.equal(state["first.weight"], state["first.weight"].bfloat16().float())
    for part in ("first", "norm", "frozen"):
        of_part = {name.removeprefix(f"{part}."): value for name, value in state.items() if name.startswith(f"{part}.")}
        assert_same(model.get_submodule(part).state_dict(), of_part)


# Writing


LOADS = {
    "whole": lambda model, tenth: model.load_state_dict({**model.state_dict(), "first.weight": tenth}),
    "partial": lambda model, tenth: model.load_state_dict({"first.weight": tenth}, strict=False),
    "of a submodule": lambda model, tenth: model.first.load_state_dict(
        {"weight": tenth, "bias": model.first.state_dict()["bias"]}
    ),
    "double": lambda model, tenth: model.load_state_dict(
        {name: value.double() for name, value in {**model.state_dict(), "first.weight": tenth}.items()}
    ),
}


@pytest.mark.parametrize("level", ("O2", STORED_BF16))
@pytest.mark.parametrize("way", LOADS)
def test_what_is_loaded_reaches_masters_and_model(level, way):
    model, optimizer = with_masters(level)
    fit_batch(model, optimizer)
    tenth = torch.full((6, 4), 0.1)
    expected = values_of(model) | {"first.weight": tenth}
    LOADS[way](model, tenth)
    assert torch.equal(master_of(model, optimizer, "first.weight"), tenth)
    model.eval()(torch.ones(2, 4))
    assert torch.equal(model.first.weight, tenth.bfloat16())
    assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_load_state_dict_that_assigns_is_refused_and_changes_nothing(level):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ampkit.initialize(model, opt_level=level, verbosity=0)
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    for part in (model, nn.ModuleList([model])):
        loaded = {name: value + 1 for name, value in part.state_dict().items()}
        with pytest.raises(ampkit.ConfigurationError, match="Leave assign=True out"):
            part.load_state_dict(loaded, assign=True)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert_same(model.state_dict(), before)
    ampkit.close()
    model.load_state_dict(before, assign=True)


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
def test_load_state_dict_that_assigns_works_over_float32_weights(level):
    model = nn.Linear(2, 2)
    ampkit.initialize(model, opt_level=level, verbosity=0)
    model.load_state_dict({"weight": torch.eye(2), "bias": torch.ones(2)}, assign=True)
    assert model(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("level", ("O2", STORED_BF16, "O5"))
def test_optimizer_load_state_dict_takes_the_state_of_plain_torch(level, optimizer_name):
    plain = RowClassifier()
    plain_optimizer = OPTIMIZERS[optimizer_name](plain.parameters())
    for p in plain.parameters():
        p.grad = torch.full_like(p, 0.3)
    plain_optimizer.step()
    saved = copy.deepcopy(plain_optimizer.state_dict())
    model, optimizer = with_masters(level, OPTIMIZERS[optimizer_name])
    optimizer.load_state_dict(saved)
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters() if p in optimizer.state}
    loaded = optimizer.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    for index, state in saved["state"].items():
        assert_same({key: loaded["state"][index][key] for key in state}, state)
    fit_batch(model, optimizer)


# Freezing and unfreezing


@pytest.mark.parametrize("make", (torch.optim.Adam, FusedAdam))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("forward_first", (False, True))
def test_a_new_layer_that_is_added_to_the_optimizer_trains_in_float32(dtype, forward_first, make):
    """A head that is exchanged in mid-training. In lower precision Adam divides by 0 in float16, and small steps are lost."""
    model, optimizer = with_masters("O2", lambda params: make(params, lr=1e-4), cast_model_type=dtype)
    fit_batch(model, optimizer)
    model.last = nn.Linear(model.last.in_features, model.last.out_features).to(dtype)
    before = model.last.weight.detach().float()
    if forward_first:
        model(torch.ones(2, 4))
    optimizer.add_param_group({"params": model.last.parameters()})
    optimizer.zero_grad()
    fit_batch(model, optimizer)
    master = model.state_dict()["last.weight"]
    assert master.dtype is torch.float32
    # Adam's first step is lr for every element that has a gradient.
    assert torch.allclose((master - before).abs(), torch.full_like(before, 1e-4), rtol=0.05)
    assert {float(optimizer.state[p]["step"]) for p in model.last.parameters()} == {1.0}
    assert torch.equal(model.last.weight, master.to(dtype))


# Gradients


def test_gradients_from_before_initialize_are_kept():
    model = RowClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(3, 4)).sum().backward()
    expected = {n: (p if p.grad is None else p - p.grad).detach().clone() for n, p in model.named_parameters()}
    ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.step()
    assert_same(model.state_dict() | expected, model.state_dict())


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_two_optimizers_that_share_parameters_share_their_float32_values(make):
    model = RowClassifier()
    slow, fast = make(model.parameters(), lr=0.5), make(model.last.parameters(), lr=2.0)
    ampkit.initialize(model, [slow, fast], **at(STORED_BF16, verbosity=0))
    before = model.state_dict()["last.bias"].clone()
    backward(model(torch.ones(3, 4)).sum(), [slow, fast])
    slow.step()
    fast.step()
    # The gradient of a sum over 3 rows with respect to the bias is 3.
    assert torch.equal(model.state_dict()["last.bias"], before - 0.5 * 3 - 2.0 * 3)
    assert torch.equal(model.last.bias, model.state_dict()["last.bias"].bfloat16())
    expected = copy.deepcopy(model.state_dict())
    ampkit.close()
    assert_same(model.state_dict(), expected)
    assert model.last.weight.grad.dtype is torch.float32
    assert fast.param_groups[0]["params"][0] is model.last.weight is slow.param_groups[0]["params"][-2]


# Resuming, and the baseline


def fused(name):
    return lambda params: fused_class(name)(params, **FUSED_SETTINGS[name])


def narrow(kind, **how):
    return lambda params: kind(params, lr=0.01, **how)


# Each level, and each optimizer; and what is loaded is loaded after `initialize`, or before it.
RESUMED = [
    *((level, OPTIMIZERS["AdamW"], {}, "after") for level in (*LEVELS, STORED_BF16)),
    *((level, OPTIMIZERS["SGD"], {}, "before") for level in (*LEVELS, STORED_BF16)),
    *(
        ("O2", make, {}, "after")
        for make in (OPTIMIZERS["SGD"], OPTIMIZERS["fused AdamW"], *map(fused, FUSED_SETTINGS))
    ),
    ("O2", narrow(FusedAdam, state_dtype="int8"), {}, "after"),
    ("O2", narrow(FusedSGD, momentum=0.9, state_dtype="bfloat16"), {"cast_model_type": torch.float16}, "after"),
]


@pytest.mark.parametrize("level, make, settings, when", RESUMED)
def test_save_load_continue_equals_not_having_stopped(level, make, settings, when):
    model, optimizer = with_masters(level, make, **settings)
    for seed in range(4):
        fit_batch(model, optimizer, seed)
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict(), ampkit.state_dict()])
    on = [fit_batch(model, optimizer, seed) for seed in range(4, 8)]
    final, scalers = copy.deepcopy(model.state_dict()), ampkit.state_dict()
    ampkit.close()

    model = RowClassifier()
    optimizer = make(model.parameters())
    if when == "after":
        model, optimizer = with_masters(level, make, seed=9, **settings)
        fit_batch(model, optimizer, 9)
    for one, state in zip((model, optimizer), saved):
        one.load_state_dict(state)
    if when == "before":
        ampkit.initialize(model, optimizer, **at(level, verbosity=0))
    ampkit.load_state_dict(saved[2])
    assert [fit_batch(model, optimizer, seed) for seed in range(4, 8)] == on
    assert_same(model.state_dict(), final)
    assert ampkit.state_dict() == scalers


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_o0_equals_plain_torch_bit_for_bit(optimizer_name):
    plain = RowClassifier()
    plain_optimizer = OPTIMIZERS[optimizer_name](plain.parameters())
    model, optimizer = with_masters("O0", OPTIMIZERS[optimizer_name])
    for seed in range(5):
        x, y = random_batch(seed, rows=6, inputs=4, outputs=1)
        loss = iterate_in_torch(lambda x=x, y=y: F.mse_loss(plain(x), y), plain_optimizer)
        assert fit_batch(model, optimizer, seed) == loss
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_optimizer_state_follows_the_level_through_all_of_them(optimizer_name):
    model, optimizer = initialize_quietly(net_with_norm(4, 8, 2), OPTIMIZERS[optimizer_name], "O0")
    for level in ("O3", "O2", "O3", "O1", "O3"):
        fit_batch(model, optimizer)
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    fit_batch(model, optimizer)
    lower = [state for p, state in optimizer.state.items() if p.dtype is torch.bfloat16]
    assert lower and {v.dtype for state in lower for k, v in state.items() if k != "step"} == {torch.bfloat16}
    ampkit.close()
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("make_optimizer", [torch.optim.Adagrad, FusedAdagrad])
def test_a_cell_that_is_run_again_trains_as_at_first(make_optimizer, level):
    """Adagrad makes its sums when it is built: over weights that are still in lower precision from the last run."""
    model = nn.Linear(2, 2)
    start = copy.deepcopy(model.state_dict())

    def sums_of_a_cell(level):
        optimizer = make_optimizer(model.parameters(), lr=0.1)
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
        model.load_state_dict(start)
        for x in (1.0, 3.0, 2.0):  # sums that bfloat16 would round
            iterate(lambda x=x: model(torch.full((1, 2), x)).float().square().sum() / 7, optimizer)
        return {index: state["sum"].clone() for index, state in optimizer.state_dict()["state"].items()}

    first, _, again = (sums_of_a_cell(one) for one in (level, "O2", level))
    assert_same(again, first)


def test_other_memory_for_the_same_weights_loses_nothing():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    model, optimizer = initialize_quietly(model, OPTIMIZERS["AdamW"], STORED_BF16)
    inputs = torch.randn(2, 3, 3, 3)
    iterate(lambda: model(inputs).square().mean(), optimizer)
    before = copy.deepcopy(model.state_dict())
    model.to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert_same(model.state_dict(), before)
    iterate(lambda: model(inputs).square().mean(), optimizer)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_blocks_are_added_in_float32():
    """1 and then thirty-two times 2^-9 in bfloat16 stay 1; in float32 they are 1.0625."""
    model, optimizer = one_weight(make_optimizer=FusedSGD, opt_level=STORED_BF16)
    optimizer.param_groups[0]["lr"] = 2.0**-10
    for slope in (1.0, *[2.0**-9] * 32):
        backward_of_one_weight(model, optimizer, slope)
    optimizer.step()
    assert model.state_dict()["weight"].item() == 1.0 - 1.0625 * 2.0**-10
