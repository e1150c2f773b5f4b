"""Optimizers that train a model in lower precision by themselves: no session, nothing patched."""

import copy
import functools
import logging
import math
import subprocess
import sys

import pytest
import torch
from helpers import (
    ROOT,
    STORED_BF16,
    assert_same,
    initialize_quietly,
    iterate,
    iterate_in_torch,
    saved_and_loaded,
    values_of,
)
from torch import nn

import ampkit
from ampkit import kernels
from ampkit.optimizers import SGD, Adam, AdamW, FusedAdam, FusedSGD, float32_state_dict, load_float32

pytestmark = pytest.mark.switch

BF16 = torch.bfloat16
# ampkit's optimizer, torch's, and settings of both.
KINDS = {
    "AdamW": (AdamW, torch.optim.AdamW, dict(lr=1e-3)),
    "Adam": (Adam, torch.optim.Adam, dict(lr=1e-3, weight_decay=0.01)),
    "SGD": (SGD, torch.optim.SGD, dict(lr=0.03, momentum=0.9, weight_decay=0.01)),
    "FusedAdam": (FusedAdam, torch.optim.AdamW, dict(lr=1e-3, weight_decay=0.0)),
    "FusedSGD": (FusedSGD, torch.optim.SGD, dict(lr=0.03)),
}
MAKERS = {name: functools.partial(kind, **settings) for name, (kind, _, settings) in KINDS.items()}

X = torch.rand(32, 8, generator=torch.manual_seed(5))


def net(dtype=BF16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1)).to(dtype)


def loss_of(model):
    y = model(X.to(next(model.parameters()).dtype)).float()
    return (y - torch.sin(6 * X).prod(1, keepdim=True)).square().mean()


def train(model, optimizer, steps):
    iterate_in_torch(lambda: loss_of(model), optimizer, steps)


def gradients_like(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(p.shape, generator=generator) * 0.1).to(p.dtype) for p in params]


def bits(optimizer):
    found = []
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        found += [param.detach().clone(), *(v.clone() for v in optimizer.state[param].values() if v is not None)]
    return found


@pytest.mark.parametrize("name, max_norm", [*((name, None) for name in MAKERS), ("AdamW", 0.05), ("SGD", 0.05)])
def test_weight_and_rest_are_what_float32_learns_from_the_same_gradients(name, max_norm, ops):
    """The bound: float32 of the kernels and of torch differ by a rounding or two of each step's update, 2^-23 of the weight.

    A norm is clipped by float32's too, which may differ in its last places.
    """
    model = net()
    optimizer = MAKERS[name](model.parameters(), max_norm=max_norm)
    twins = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    _, kind, settings = KINDS[name]
    twin = kind(twins, **settings)
    for step in range(100 if max_norm is None else 10):
        for param, other, gradient in zip(model.parameters(), twins, gradients_like(twins, step)):
            param.grad = gradient.to(BF16)
            other.grad = param.grad.float()
        norm = None if max_norm is None else nn.utils.clip_grad_norm_(twins, max_norm)
        optimizer.step()
        twin.step()
        if max_norm is not None:
            torch.testing.assert_close(optimizer.grad_norm.reshape(()), norm)
    values = float32_state_dict(model, optimizer).values()
    for value, other in zip(values, twins):
        bound = 100 * 2.0**-23 * other.detach().abs().clamp(min=2.0**-6)
        assert ((value - other).abs() <= bound).all()
    for param, value in zip(model.parameters(), values):  # and the weight is what that rounds to
        assert ((param.float() - value).abs() <= value.abs() * 2.0**-8).all()


def plainly(model, optimizer):
    train(model, optimizer, 20)


def over_sums(model, optimizer):
    for _ in range(3):
        with optimizer.accumulating():
            loss_of(model).backward()
            loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad_dtype is not torch.float32 for p in model.parameters())
    train(model, optimizer, 1)
    assert all(p.grad is None or p.grad.dtype is BF16 for p in model.parameters())


def unfreezing(at, model, optimizer):
    model[0].requires_grad_(False)
    for step in range(5):
        if step == at:
            model[0].requires_grad_(True)
        train(model, optimizer, 1)


@pytest.mark.parametrize(
    "name, script",
    [
        *((name, plainly) for name in MAKERS),
        ("AdamW", over_sums),
        *(("AdamW", functools.partial(unfreezing, at)) for at in (0, 1, 2)),
    ],
)
def test_one_pass_in_backward_gives_the_bits_of_a_step(name, script):
    results = []
    for more in ({}, {"step_in_backward": True}):
        model = net()
        optimizer = MAKERS[name](model.parameters(), **more)
        script(model, optimizer)
        assert all((p.grad is None) == bool(more) for p in model.parameters())
        results.append(bits(optimizer))
    assert_same(*results)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place, name", [(place, ("AdamW", "SGD")[place % 2]) for place in range(6)])
@pytest.mark.parametrize("more", [{}, {"state_dtype": "int8"}], ids=str)
def test_a_bad_batch_changes_nothing(bad, place, name, more):
    model = net()
    optimizer = MAKERS[name](model.parameters(), **more)
    train(model, optimizer, 2)
    before = bits(optimizer)
    loss_of(model).backward()
    gradient = list(model.parameters())[place].grad
    gradient.view(-1)[place % gradient.numel()] = bad
    optimizer.step()
    assert_same(bits(optimizer), before)
    assert optimizer.skipped_steps == 1
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert optimizer.skipped_steps == 1 and not torch.equal(bits(optimizer)[0], before[0])


def test_skips_are_told_and_not_each_of_them(caplog):
    param = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = AdamW([param])
    param.grad = torch.full_like(param, math.nan)
    with caplog.at_level(logging.WARNING, "ampkit"):
        for _ in range(9):
            optimizer.step()
    assert [record.args[1] for record in caplog.records] == [1, 3, 7]


def test_in_backward_a_bad_gradient_skips_its_parameter():
    first, second = (nn.Parameter(torch.ones(3, dtype=BF16)) for _ in range(2))
    optimizer = AdamW([first, second], step_in_backward=True)
    (first.sum() * math.inf + second.sum()).backward()
    optimizer.step()
    assert (first == 1).all() and (kernels.join(second, optimizer.state[second]["rest"]) < 1).all()
    assert optimizer.skipped_steps == 1


def resumed(pair, name):
    model = net()
    model.load_state_dict(pair[0].state_dict())
    optimizer = MAKERS[name](model.parameters())
    optimizer.load_state_dict(saved_and_loaded(pair[1].state_dict()))
    return model, optimizer


WAYS_ON = {
    "resumed": resumed,
    "copied": lambda pair, name: copy.deepcopy(pair),
    "saved as a whole": lambda pair, name: saved_and_loaded(pair, weights_only=False),
}


@pytest.mark.parametrize(
    "name, way, more",
    [
        *((name, "resumed", {}) for name in MAKERS),
        *(("AdamW", way, {"max_norm": 10.0}) for way in ("copied", "saved as a whole")),
        ("AdamW", "copied", {"step_in_backward": True}),
        *(("FusedAdam", way, {"state_dtype": "int8", "seed": 3}) for way in ("copied", "saved as a whole")),
    ],
)
def test_what_is_resumed_or_copied_goes_on_bit_for_bit_and_apart(name, way, more):
    model = net()
    optimizer = MAKERS[name](model.parameters(), **more)
    train(model, optimizer, 5)
    before = bits(optimizer)
    again, twin = WAYS_ON[way]((model, optimizer), name)
    train(again, twin, 5)
    assert_same(bits(optimizer), before)
    assert twin.max_norm == optimizer.max_norm and twin.rests
    train(model, optimizer, 5)
    assert_same(bits(twin), bits(optimizer))


def test_state_of_torchs_adamw_loads_and_ours_loads_there(caplog):
    model, other = net(), net()
    reference = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, reference, 3)
    optimizer = AdamW(other.parameters())
    with caplog.at_level(logging.WARNING, "ampkit"):
        optimizer.load_state_dict(reference.state_dict())
    assert "no rests of 6 parameters" in caplog.text
    train(other, optimizer, 2)
    reference.load_state_dict(optimizer.state_dict())
    train(model, reference, 1)


def test_an_optimizer_whose_session_keeps_the_rests_loads_its_own_state_without_a_warning(caplog):
    model, optimizer = initialize_quietly(nn.Linear(64, 64), FusedAdam, STORED_BF16)
    iterate(lambda: model(torch.ones(4, 64)).sum(), optimizer)
    with caplog.at_level(logging.WARNING, "ampkit"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert caplog.text == ""


@pytest.mark.parametrize(
    "kind, setting", [*((kind, "differentiable") for kind in (Adam, AdamW, SGD)), (Adam, "amsgrad"), (AdamW, "amsgrad")]
)
def test_what_is_not_supported_is_refused_with_the_twin_that_has_it(kind, setting):
    params, named = [[nn.Parameter(torch.ones(2))] for _ in range(2)], {setting: True}
    said = rf"{kind.__name__} does not support .*Use torch\.optim\.{kind.__name__}\({setting}=True\)"
    with pytest.raises(RuntimeError, match=said):
        kind(params[0], **named)
    optimizer = kind(params[0])
    with pytest.raises(RuntimeError, match=said):
        optimizer.add_param_group({"params": params[1], **named})
    assert len(optimizer.param_groups) == 1
    theirs = getattr(torch.optim, kind.__name__)(params[0], **named)
    with pytest.raises(RuntimeError, match=said):
        optimizer.load_state_dict(theirs.state_dict())


OF_ALL_GROUPS = "clip_value max_norm adam_w_mode wd_after_momentum set_grad_none rests state_dtype rounding".split()
REFUSED = [
    (dict(step_in_backward=True, max_norm=1.0), ValueError, "max_norm needs the gradients of all parameters at once"),
    (dict(max_norm=1.0, clip_value=1.0), ValueError, "max_norm and clip_value both clip"),
    (dict(clip_value=-1.0), ValueError, r"clip_value=-1\.0 is not accepted"),
    (dict(params=[nn.Parameter(torch.ones(2) * 1j)]), RuntimeError, "complex parameters"),
]


@pytest.mark.parametrize("name", OF_ALL_GROUPS)
def test_what_holds_for_all_groups_is_refused_in_one(name):
    with pytest.raises(ValueError, match=f"a parameter group says {name}=1, which is one for all groups"):
        AdamW([{"params": [nn.Parameter(torch.ones(2))], name: 1}])


@pytest.mark.parametrize("settings, error, said", REFUSED, ids=[said for *_, said in REFUSED])
def test_settings_that_are_refused(settings, error, said):
    with pytest.raises(error, match=said):
        AdamW(**{"params": [nn.Parameter(torch.ones(2, dtype=BF16))], **settings})


def test_sessions_and_second_passes_are_refused_in_the_backward_pass():
    param = nn.Parameter(torch.ones(2, dtype=BF16))
    optimizer = AdamW([param], step_in_backward=True)
    with pytest.raises(ampkit.ConfigurationError, match="step_in_backward"):
        ampkit.initialize(net(), optimizer, opt_level="O5", verbosity=0)
    (param.sum() * 1.0).backward()
    with pytest.raises(RuntimeError, match="a second backward pass came before"):
        (param.sum() * 1.0).backward()


def test_float32_values_go_out_and_in():
    """For evaluation or export, and from there into a model that goes on."""
    model, plain, other = net(), net(torch.float32), net()
    optimizer, twin = AdamW(model.parameters(), lr=1e-3), AdamW(other.parameters(), lr=1e-3)
    train(model, optimizer, 5)
    values = float32_state_dict(model, optimizer)
    plain.load_state_dict(values)
    assert abs(loss_of(plain).item() - loss_of(model).item()) < 0.01
    load_float32(other, twin, values)
    assert_same(float32_state_dict(other, twin), values)


def test_tied_weights_have_one_value():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(BF16)
    model[1].weight = model[0].weight
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 4, dtype=BF16)).sum().backward()
    optimizer.step()
    values = float32_state_dict(model, optimizer)
    assert values["0.weight"] is values["1.weight"]


def test_sums_of_600_passes_are_float32():
    param = nn.Parameter(torch.zeros(64, dtype=BF16))
    optimizer = AdamW([param], lr=1e-3)
    x = torch.rand(600, 64, generator=torch.manual_seed(3)).to(BF16)
    with optimizer.accumulating():
        for row in x:
            (param * row).sum().backward()
    exact = x.double().sum(0)
    assert param.grad.dtype is torch.float32
    assert ((param.grad.double() - exact) / exact).abs().max() < 600 * 2.0**-24
    optimizer.step()
    optimizer.zero_grad()
    for row in x:
        (param * row).sum().backward()
    assert param.grad.dtype is BF16
    assert ((param.grad.double() - exact) / exact).abs().max() > 0.1


def test_on_several_processes_sums_and_steps_in_backward_are_refused(monkeypatch):
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    param = nn.Parameter(torch.ones(4, dtype=BF16))
    with pytest.raises(RuntimeError, match="DDP averages them in the precision"), AdamW([param]).accumulating():
        raise AssertionError("not refused")
    optimizer = AdamW([param], step_in_backward=True)
    with pytest.raises(RuntimeError, match="runs on one process"):
        (param * 2).sum().backward()
    assert optimizer.skipped_steps == 0
    assert (param == 1).all()


def test_a_second_pass_in_bfloat16_is_told_once(caplog):
    model = net()
    optimizer = AdamW(model.parameters())
    with caplog.at_level(logging.WARNING, "ampkit"):
        train(model, optimizer, 3)
        assert caplog.text == ""
        for _ in range(3):
            loss_of(model).backward()
            loss_of(model).backward()
            optimizer.step()
    assert len(caplog.records) == 1 and "optimizer.accumulating()" in caplog.text


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_session_takes_rests_over_and_gives_them_back(name, level):
    model = net()
    optimizer = MAKERS[name](model.parameters())
    train(model, optimizer, 4)
    before = float32_state_dict(model, optimizer)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert not any("rest" in state for state in optimizer.state.values())
    assert_same(model.state_dict(), before)
    ampkit.close()
    assert all(p.dtype is BF16 for p in model.parameters())
    assert_same(float32_state_dict(model, optimizer), before)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    iterate(lambda: loss_of(model), optimizer)
    learned = values_of(model)
    ampkit.close()
    assert_same(float32_state_dict(model, optimizer), learned)
    train(model, optimizer, 2)


def test_a_compiled_step_gives_the_bits_of_the_plain_one():
    results = []
    for compiles in (False, True):
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        step = torch.compile(optimizer.step) if compiles else optimizer.step
        for i in range(4):
            optimizer.zero_grad()
            loss_of(model).backward()
            if i == 2:
                model[0].weight.grad[0, 0] = math.nan
            step()
        assert optimizer.skipped_steps == 1
        results.append(bits(optimizer))
    assert_same(*results)


@pytest.mark.cpu_kernels
def test_torch_stays_as_it_is():
    script = """
import sys, torch
def functions():
    places = [torch, torch.Tensor, torch.nn.functional, torch.nn.utils, torch.autograd, torch.optim, torch.optim.Optimizer,
              sys.modules["torch.optim.adam"], sys.modules["torch.optim.sgd"], torch.nn.Module, torch.amp, torch.nn.utils.clip_grad]
    return {(i, name): value for i, place in enumerate(places) for name, value in vars(place).items() if callable(value)}
import torch._dynamo
param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
torch.optim.SGD([param])
before = functions()
from ampkit.optimizers import AdamW
optimizer = AdamW([param])
param.sum().backward()
optimizer.step()
now = functions()
print([key for key in before.keys() | now.keys() if before.get(key) is not now.get(key)])
print(len(torch.nn.modules.module._global_module_registration_hooks))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["[]", "0"], (done.stdout, done.stderr)
