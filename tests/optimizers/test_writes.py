"""Ways in which scripts write to weights, to float32 values that are handed out, and to gradients: what the float32 value is then.

A row has the way, what torch's float32 would hold afterwards, and its bound: EXACT, or HALF a unit of the last place of what was
written. Nothing that a row leaves alone may change by a bit, and a step without a gradient changes nothing.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
from helpers import STORED_BF16, at, initialize_quietly, iterate, random_batch
from torch import nn
from torch.nn import functional as F

import ampkit
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
}


def prepared(setting, optimizer="FusedSGD"):
    """A model whose values are no numbers of lower precision any more, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3))
    settings = dict(SETTINGS[setting])
    model, optimizer = initialize_quietly(model, OPTIMIZERS[optimizer], settings.pop("opt_level"), **settings)
    x, y = random_batch(1)
    iterate(lambda: F.mse_loss(model(x).float(), y), optimizer, times=3)
    optimizer.zero_grad()
    return model, optimizer


def float32_values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# Weights. Each way returns what is to be in "2.weight": float32, as torch would have it.


def bits(tensor):
    """The weights' memory as numpy sees it, which torch does not hear of."""
    return tensor.detach().view(torch.int16).numpy()


def in_place(p):
    with torch.no_grad():
        p.mul_(1.5)
    return p.detach().float()


def through_data(p):
    p.data.mul_(1.5)
    return p.detach().float()


def copied_from_float32(p):
    with torch.no_grad():
        p.copy_(torch.full(p.shape, 0.1))
    return p.detach().float()


def assigned(p):
    p.data = p.data * 1.5
    return p.detach().float()


def assigned_float32(p):
    p.data = torch.linspace(-1, 1, p.numel()).reshape(p.shape) / 3
    return p.detach().clone()


def assigned_float32_that_lower_precision_holds(p):
    p.data = torch.full(p.shape, 0.5)
    return p.detach().clone()


def by_numpy(p):
    bits(p)[:] = bits(torch.full(p.shape, 0.3, dtype=p.dtype))
    return p.detach().float()


def by_set(p):
    with torch.no_grad():
        p.set_(torch.full(p.shape, 0.3, dtype=p.dtype))
    return p.detach().float()


def by_init(p):
    nn.init.constant_(p, 0.1)
    return p.detach().float()


def by_foreach(p):
    with torch.no_grad():
        torch._foreach_mul_([p], 1.5)
    return p.detach().float()


def in_another_thread(p):
    thread = threading.Thread(target=lambda: p.data.mul_(1.5))
    thread.start()
    thread.join()
    return p.detach().float()


def in_shared_memory(p):
    p.data.share_memory_()
    p.data.mul_(1.5)
    return p.detach().float()


def clamped_to_a_point(p):
    p.data.clamp_(0.25, 0.25)
    return p.detach().float()


def asam(p):
    """Adaptive sharpness-aware minimization goes up and comes back by arithmetic, which torch rounds in lower precision too."""
    with torch.no_grad():
        step = torch.full_like(p, 0.01)
        p.add_(step)
        p.sub_(step)
    return p.detach().float()


WRITTEN = {
    in_place: HALF,
    through_data: HALF,
    copied_from_float32: HALF,
    assigned: HALF,
    assigned_float32: EXACT,
    assigned_float32_that_lower_precision_holds: HALF,
    by_numpy: HALF,
    by_set: HALF,
    by_init: HALF,
    by_foreach: HALF,
    in_another_thread: HALF,
    in_shared_memory: HALF,
    clamped_to_a_point: HALF,
    asam: HALF,
}


def assert_within(found, expected, bound, dtype):
    """EXACT: bit for bit, but for float16's 2^-40 below 2^-14. HALF: of the last place that ``dtype`` has there."""
    if bound is EXACT:
        limit = torch.where(expected.abs() < 2.0**-14, 2.0**-40, 0.0) if dtype is torch.float16 else 0.0
    else:
        unit = torch.exp2(torch.frexp(expected).exponent.float() - (11 if dtype is torch.float16 else 8))
        limit = unit / 2
    assert ((found.double() - expected.double()).abs() <= limit).all(), (found - expected).abs().max()


def assert_step_without_gradients_changes_nothing(model, optimizer):
    before = float32_values(model)
    for p in model.parameters():
        p.grad = None
    optimizer.step()
    after = float32_values(model)
    assert all(torch.equal(after[name], value) or value.isnan().any() for name, value in before.items())


@pytest.mark.parametrize(
    "setting, optimizer",
    [*((setting, "FusedSGD") for setting in SETTINGS), ("O2", "SGD"), ("bfloat16", "AdamW"), ("float16", "FusedAdam")],
)
@pytest.mark.parametrize("way", WRITTEN, ids=lambda way: way.__name__)
def test_what_is_written_to_a_weight_is_its_value(way, setting, optimizer):
    model, optimizer = prepared(setting, optimizer)
    before, dtype = float32_values(model), model[2].weight.dtype
    expected = way(model[2].weight)
    model(torch.ones(2, 6))
    assert model[2].weight.dtype is dtype and torch.equal(model[2].weight, expected.to(dtype))
    after = float32_values(model)
    assert_within(after.pop("2.weight"), expected, WRITTEN[way], dtype)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert_step_without_gradients_changes_nothing(model, optimizer)
    x, y = random_batch(2)
    iterate(lambda: F.mse_loss(model(x).float(), y), optimizer)
    assert all(value.isfinite().all() for value in float32_values(model).values())


# Masks: what is kept is kept to the last bit, what is masked is 0.


def masked_in_place(p, mask):
    with torch.no_grad():
        p.mul_(mask.to(p.dtype))


def masked_through_data(p, mask):
    p.data.mul_(mask.to(p.dtype))


def masked_by_a_float32_mask(p, mask):
    p.data = p.data * mask


def masked_fill(p, mask):
    p.data.masked_fill_(mask == 0, 0.0)


def masked_by_index(p, mask):
    with torch.no_grad():
        p[mask == 0] = 0.0


@pytest.mark.parametrize("optimizer", ["SGD", "FusedAdam"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "way", [masked_in_place, masked_through_data, masked_by_a_float32_mask, masked_fill, masked_by_index]
)
def test_masked_weights_are_zero_and_the_others_as_they_were(way, setting, optimizer):
    model, optimizer = prepared(setting, optimizer)
    mask = (torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    expected = float32_values(model)["2.weight"] * mask
    for _ in range(3):  # in every iteration, as pruning does
        way(model[2].weight, mask)
        model(torch.ones(2, 6))
    assert torch.equal(float32_values(model)["2.weight"], expected)
    assert_step_without_gradients_changes_nothing(model, optimizer)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("setting", SETTINGS)
def test_infinities_and_nans_that_are_written_are_that(setting, value):
    model, _ = prepared(setting)
    before = float32_values(model)["2.weight"]
    model[2].weight.data[0].fill_(value)
    after = float32_values(model)["2.weight"]
    assert torch.equal(after[1:], before[1:])
    assert after[0].isnan().all() if value != value else (after[0] == value).all()


# Put back: bit for bit.


def changed(p):
    p.data.mul_(3.0).add_(1.0)


def back_by_copy(p):
    backup = p.detach().clone()
    changed(p)
    yield
    with torch.no_grad():
        p.copy_(backup)


def back_by_copy_to_data(p):
    backup = p.data.clone()
    changed(p)
    yield
    p.data.copy_(backup)


def back_by_assignment(p):
    """FGM and AWP, which attack a weight for one backward pass."""
    backup = p.data.clone()
    changed(p)
    yield
    p.data = backup


def back_after_an_assignment(p):
    backup = p.data
    p.data = torch.randn(p.shape).to(p.dtype)
    yield
    p.data = backup


def back_by_set(p):
    backup = p.data.clone()
    changed(p)
    yield
    with torch.no_grad():
        p.set_(backup)


def back_by_numpy(p):
    memory = bits(p)
    backup = memory.copy()
    memory[:] = 0
    yield
    memory[:] = backup


def back_in_float32(p):
    """What lower precision holds, assigned as float32."""
    backup = p.data.float().clone()
    changed(p)
    yield
    p.data = backup


def back_after_zeros(p):
    backup = p.data.clone()
    p.data.zero_()
    yield
    p.data.copy_(backup)


def back_after_infinities(p):
    backup = p.data.clone()
    p.data.fill_(float("inf"))
    yield
    p.data.copy_(backup)


def back_in_another_thread(p):
    backup = p.data.clone()
    changed(p)
    yield
    thread = threading.Thread(target=lambda: p.data.copy_(backup))
    thread.start()
    thread.join()


PUT_BACK = [
    back_by_copy,
    back_by_copy_to_data,
    back_by_assignment,
    back_after_an_assignment,
    back_by_set,
    back_by_numpy,
    back_in_float32,
    back_after_zeros,
    back_after_infinities,
    back_in_another_thread,
]


def evaluated(model):
    with torch.no_grad():
        model(torch.ones(2, 6))


def saved(model):
    copy.deepcopy(model.state_dict())


def trained_on(model):
    model(torch.ones(2, 6)).float().sum().backward()
    model.zero_grad()


@pytest.mark.parametrize(
    "setting, meanwhile",
    [
        *((setting, evaluated) for setting in SETTINGS),
        *(("O2", meanwhile) for meanwhile in (saved, trained_on, copy.deepcopy, lambda model: None)),
    ],
)
@pytest.mark.parametrize("way", PUT_BACK)
def test_what_is_put_back_is_back_to_the_last_bit(way, setting, meanwhile):
    model, optimizer = prepared(setting)
    before = float32_values(model)
    for _ in range(2):
        steps = [way(p) for name, p in model.named_parameters() if name.endswith("weight") and p.dim() == 2]
        for step in steps:
            next(step)
        meanwhile(model)
        for step in steps:
            assert next(step, "done") == "done"
        evaluated(model)
    after = float32_values(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert_step_without_gradients_changes_nothing(model, optimizer)


def by_loading_lower_precision(model):
    backup = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict({name: value * 2 for name, value in backup.items()})
    evaluated(model)
    model.load_state_dict(backup)


def by_loading_float32(model):
    backup = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value * 1.3 for name, value in backup.items()})
    evaluated(model)
    model.load_state_dict(backup)


def by_vectors(model):
    backup = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(backup * 2, model.parameters())
    evaluated(model)
    nn.utils.vector_to_parameters(backup, model.parameters())


def by_another_memory_format(model):
    model.to(memory_format=torch.channels_last)
    model.to("cpu")


def by_loading_a_copy(model):
    model.load_state_dict(copy.deepcopy(model).state_dict())


WHOLE_MODELS = [by_loading_lower_precision, by_loading_float32, by_vectors, by_another_memory_format, by_loading_a_copy]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", WHOLE_MODELS)
def test_what_is_put_back_for_a_whole_model_is_back_to_the_last_bit(way, setting):
    model, _ = prepared(setting)
    before = float32_values(model)
    way(model)
    evaluated(model)
    after = float32_values(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_small_steps_between_attacks_are_not_lost():
    """Steps of 2^-12 on a weight of 1, whose last place in bfloat16 is 2^-7, with an attack before each: 64 of them are 2^-6."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = initialize_quietly(model, lambda p: torch.optim.SGD(p, lr=2.0**-12), STORED_BF16, policy="apex")
    for _ in range(64):
        backup = model.weight.data.clone()
        model.weight.data.add_(0.5)
        model(torch.ones(1, 1))
        model.weight.data = backup
        iterate(lambda: model(torch.ones(1, 1)).sum(), optimizer)
    assert model.state_dict()["weight"].item() == 1 - 2.0**-6


# Float32 values that are handed out: exact. Those of a state_dict() are copies.


def lent_in_place(value):
    with torch.no_grad():
        value.mul_(1.3)


def lent_through_data(value):
    value.data.mul_(1.3)


def lent_by_copy(value):
    with torch.no_grad():
        value.copy_(value.detach() * 1.3)


def lent_by_numpy(value):
    array = value.detach().numpy()
    array *= torch.tensor(1.3, dtype=F32).numpy()


def lent_in_part(value):
    value.detach()[0].mul_(1.3)


def lent_in_another_thread(value):
    thread = threading.Thread(target=lambda: value.detach().mul_(1.3))
    thread.start()
    thread.join()


@pytest.mark.parametrize("optimizer", ["SGD", "FusedAdam"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "way", [lent_in_place, lent_through_data, lent_by_copy, lent_by_numpy, lent_in_part, lent_in_another_thread]
)
def test_what_is_written_to_master_params_is_taken_over(way, setting, optimizer):
    model, optimizer = prepared(setting, optimizer)
    dtype = model[0].weight.dtype
    expected = float32_values(model)
    for value in expected.values():
        way(value)
    for value in ampkit.master_params(optimizer):
        way(value)
    model(torch.ones(2, 6))
    for name, value in float32_values(model).items():
        assert_within(value, expected[name], EXACT, dtype)


STATE_DICTS = {
    "whole": lambda model: model.state_dict(),
    "keep_vars": lambda model: model.state_dict(keep_vars=True),
    "of parts": lambda model: {f"{n}.{key}": v for n, m in model.named_children() for key, v in m.state_dict().items()},
}


@pytest.mark.parametrize("setting", ["O2", "float16"])
@pytest.mark.parametrize("saved", STATE_DICTS)
def test_what_is_written_to_a_state_dict_counts_once_it_is_loaded(saved, setting):
    model, optimizer = prepared(setting)
    before = float32_values(model)
    state = STATE_DICTS[saved](model)
    stored = [name for name, p in model.named_parameters() if p.dtype is not F32]
    for name in stored:
        lent_through_data(state[name])
    evaluated(model)
    assert_step_without_gradients_changes_nothing(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in float32_values(model).items())
    with torch.no_grad():
        model[2].weight.fill_(0.5)  # which is not refused: nothing compares it with the state_dict
    model.load_state_dict(state)
    evaluated(model)
    for name, value in float32_values(model).items():
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
def test_a_vector_of_float32_values_is_taken_over(setting):
    model, optimizer = prepared(setting)
    expected = {name: value * 1.3 for name, value in float32_values(model).items()}
    vector = nn.utils.parameters_to_vector(ampkit.master_params(optimizer)).detach()
    nn.utils.vector_to_parameters(vector * 1.3, ampkit.master_params(optimizer))
    for name, value in float32_values(model).items():
        assert_within(value, expected[name], EXACT, model[0].weight.dtype)


@pytest.mark.parametrize("setting", SETTINGS)
def test_reading_float32_values_writes_nothing(setting):
    """Also where a weight is 0 for a while, beside which its rest counts for nothing."""
    model, optimizer = prepared(setting)
    before = float32_values(model)
    backup = model[2].weight.data.clone()
    model[2].weight.data.zero_()
    handed = [model.state_dict(), list(ampkit.master_params(optimizer)), copy.deepcopy(model)]
    assert not handed[0]["2.weight"].any()
    model.state_dict()
    evaluated(model)
    model[2].weight.data.copy_(backup)
    assert all(torch.equal(value, before[name]) for name, value in float32_values(model).items())


# Gradients: what stands there is stepped with. A plain SGD step of rate 1 moves by the gradient.


def gradient_in_place(p):
    p.grad.mul_(0.5)
    return p.grad.float()


def gradient_through_data(p):
    p.grad.data.mul_(0.5)
    return p.grad.float()


def gradient_assigned(p):
    p.grad = p.grad * 0.5
    return p.grad.float()


def gradient_assigned_in_its_weights_dtype(p):
    p.grad = p.grad.to(p.dtype) * 0.5
    return p.grad.float()


def gradient_clamped(p):
    p.grad.clamp_(-0.01, 0.01)
    return p.grad.float()


def gradient_zeroed(p):
    p.grad.zero_()
    return p.grad.float()


def gradient_of_another_loss(p):
    (p.float() * 0.25).sum().backward()
    return p.grad.float()


def gradient_in_another_thread(p):
    thread = threading.Thread(target=lambda: p.grad.mul_(0.5))
    thread.start()
    thread.join()
    return p.grad.float()


def gradient_by_foreach(p):
    torch._foreach_mul_([p.grad], 0.5)
    return p.grad.float()


GRADIENTS = [
    gradient_in_place,
    gradient_through_data,
    gradient_assigned,
    gradient_assigned_in_its_weights_dtype,
    gradient_clamped,
    gradient_zeroed,
    gradient_of_another_loss,
    gradient_in_another_thread,
    gradient_by_foreach,
]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD], ids=["SGD", "FusedSGD"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", GRADIENTS)
def test_what_is_written_to_a_gradient_is_stepped_with(way, setting, make, blocks):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    settings = dict(SETTINGS[setting])
    model, optimizer = initialize_quietly(model, lambda p: make(p, lr=1.0), settings.pop("opt_level"), **settings)
    for seed in range(blocks):
        x, y = random_batch(seed)
        with ampkit.scale_loss(F.mse_loss(model(x).float(), y), optimizer) as scaled:
            scaled.backward()
    before = float32_values(model)
    expected = {name: before[name] - way(p) for name, p in model.named_parameters()}
    optimizer.step()
    for name, value in float32_values(model).items():
        assert_within(value, expected[name], EXACT, model.weight.dtype)
