"""The fused optimizers on their own: judged by torch.optim in float64, or by the published update written out in float64."""

import copy

import pytest
import torch
from helpers import (
    FUSED_SETTINGS,
    assert_all_close,
    assert_same,
    drawn_gradients,
    fused_class,
    iterate,
    iterate_in_torch,
    net_with_norm,
    params_after_handing_on,
    several_params,
    take_steps,
)
from torch import nn
from updates import lamb64, novograd64, sgd64

import ampkit
from ampkit import optimizers
from ampkit.apex import optimizers as apex_optimizers

pytestmark = pytest.mark.switch

STEPS = 5
ADAM = dict(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
SGD = dict(lr=0.05, momentum=0.9, weight_decay=0.1)
ADAGRAD = dict(lr=0.1, eps=1e-8, weight_decay=0.05)
# name: (our class, settings, twin in torch.optim, its settings)
TWINS = {
    "sgd": ("FusedSGD", dict(lr=0.1), torch.optim.SGD, dict(lr=0.1)),
    "sgd_momentum": ("FusedSGD", SGD, torch.optim.SGD, SGD),
    "sgd_dampening": ("FusedSGD", SGD | dict(dampening=0.3), torch.optim.SGD, SGD | dict(dampening=0.3)),
    "sgd_nesterov": ("FusedSGD", SGD | dict(nesterov=True), torch.optim.SGD, SGD | dict(nesterov=True)),
    "adamw": ("FusedAdam", ADAM, torch.optim.AdamW, ADAM),
    "adam": ("FusedAdam", ADAM | dict(adam_w_mode=False), torch.optim.Adam, ADAM),
    "adam_capturable": ("FusedAdam", ADAM | dict(capturable=True), torch.optim.AdamW, ADAM),
    "adagrad": ("FusedAdagrad", ADAGRAD, torch.optim.Adagrad, ADAGRAD),
}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", TWINS)
def test_fused_optimizer_agrees_with_float64_torch_optim(case, dtype, device):
    name, settings, twin, twin_settings = TWINS[case]
    params, twins = several_params(dtype, device), [nn.Parameter(p.detach().double()) for p in several_params(dtype)]
    # Lower-precision gradients are the same numbers on both sides.
    optimizer, reference = fused_class(name)(params, **settings), twin(twins, **twin_settings)
    for step in range(STEPS):
        for param, clone, gradient in zip(params, twins, drawn_gradients(step, params)):
            param.grad, clone.grad = gradient, gradient.double().cpu()
        optimizer.step()
        reference.step()
    assert_all_close([p.detach().cpu() for p in params], [p.detach() for p in twins], TOLERANCES[dtype])


@pytest.mark.parametrize("case", [case for case in TWINS if case != "adam_capturable"])
def test_state_goes_from_the_torch_twin_and_back(case):
    name, settings, twin, twin_settings = TWINS[case]
    fused = lambda params: fused_class(name)(params, **settings)  # noqa: E731
    torchs = lambda params: twin(params, **twin_settings)  # noqa: E731
    assert_all_close(*params_after_handing_on(torch.float64, torchs, fused), 1e-6)
    if name != "FusedAdagrad":  # Apex's layout has no step counts, which torch's asks for
        assert_all_close(*params_after_handing_on(torch.float64, fused, torchs), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED_SETTINGS)
def test_resume_from_own_state_is_bit_for_bit(name, dtype):
    make = lambda params: fused_class(name)(params, **FUSED_SETTINGS[name])  # noqa: E731
    assert_same(*params_after_handing_on(dtype, make, make))


@pytest.mark.parametrize("name", FUSED_SETTINGS)
def test_a_copied_optimizer_has_its_settings(name):
    params = several_params(torch.float32)
    optimizer = fused_class(name)(params, **FUSED_SETTINGS[name] | dict(lr=0.25, weight_decay=0.5))
    copied, twin = copy.deepcopy((params, optimizer))
    for one, its in ((optimizer, params), (twin, copied)):
        take_steps(one, its, range(2))
    assert_same(params, copied)


def test_state_that_holds_none_is_loaded():
    """torch's SGD once wrote None where there was no momentum yet."""
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = optimizers.FusedSGD([param], lr=0.5, momentum=0.5)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": None}}})
    for expected in (0.5, -0.25):  # 1 - 0.5 * 1, and 0.5 - 0.5 * 1.5
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert param.tolist() == [expected] * 2


def in_float64(params, states, update, max_norm=0.0):
    """The values after ``update`` of each with its drawn gradients, which ``max_norm`` clips together."""
    values = [p.detach().double() for p in params]
    states = [[torch.zeros_like(p) for _ in range(states)] for p in values]
    for step in range(STEPS):
        gradients = [gradient.double() for gradient in drawn_gradients(step, params)]
        norm = sum(x.square().sum() for x in gradients).sqrt()
        factor = min(1.0, max_norm / norm) if max_norm > 0 else 1.0
        for i, gradient in enumerate(gradients):
            update(step, i, gradient * factor, values[i], states[i])
    return values


@pytest.mark.parametrize(
    "extra",
    [
        *({}, dict(weight_decay=0.0), dict(weight_decay=0.0, use_nvlamb=True), dict(adam_w_mode=False)),
        *(dict(grad_averaging=False), dict(max_grad_norm=0.0), dict(max_grad_norm=0.5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["FusedLAMB", "FusedMixedPrecisionLamb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_lamb_is_the_published_update(name, extra, dtype):
    """You et al. 2020, algorithm 2, with the gradients of all tensors clipped together first."""
    settings = dict(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=1.0) | extra
    rule = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}
    rule |= dict(decoupled=extra.get("adam_w_mode", True), grad_averaging=extra.get("grad_averaging", True))
    rule["trusts"] = extra.get("use_nvlamb", False) or settings["weight_decay"] > 0

    def update(step, i, gradient, value, states):
        lamb64(gradient, value, states, step=step + 1, **rule)

    params = several_params(dtype)
    expected = in_float64(params, 2, update, settings["max_grad_norm"])
    take_steps(fused_class(name)(params, **settings), params, range(STEPS))
    assert_all_close(params, expected, TOLERANCES[dtype])


@pytest.mark.parametrize(
    "extra",
    [
        *({}, dict(reg_inside_moment=True), dict(norm_type=0), dict(init_zero=True), dict(grad_averaging=False)),
        # Ginsburg et al. 2019, algorithm 1, to the letter:
        dict(reg_inside_moment=True, grad_averaging=False, bias_correction=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_novograd_is_the_published_update(extra, dtype):
    settings = dict(lr=0.02, betas=(0.9, 0.7), eps=1e-6, weight_decay=0.1, **extra)
    norms, params = [], several_params(dtype)

    def update(step, i, gradient, value, states):
        if step == 0:
            first = gradient.norm(extra.get("norm_type", 2) or float("inf"))
            norms.append(torch.zeros_like(first) if extra.get("init_zero") else first)
        novograd64(gradient, value, states, norms[i], step=step + 1, **settings)

    expected = in_float64(params, 1, update)
    take_steps(apex_optimizers.FusedNovoGrad(params, **settings), params, range(STEPS))
    assert_all_close(params, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_lars_is_the_published_update(nesterov, skipped):
    """You et al. 2017, algorithm 1: a local rate times gradient and weight decay, then momentum."""
    settings = dict(lr=0.5, momentum=0.9, weight_decay=0.1, nesterov=nesterov)

    def update(step, i, gradient, value, states):
        trust = 1.0 if skipped else 0.02 * value.norm() / (gradient.norm() + 0.1 * value.norm() + 1e-9)
        sgd64(gradient, value, states, trust, first_run=step == 0, **settings)

    params = several_params(torch.float32)
    expected = in_float64(params, 1, update)
    groups = [dict(params=params, is_skipped=skipped)]
    optimizer = apex_optimizers.FusedLARS(groups, trust_coefficient=0.02, eps=1e-9, **settings)
    take_steps(optimizer, params, range(STEPS))
    assert_all_close(params, expected, 1e-5)


# Optimizer, its settings, the parameter, its gradient, and its values after steps.
ON_PAPER = {
    # m = 0.5 * 2 = 1 and v = 0.0625 * 4 = 0.25: the step is 0.1 * 1 / 0.5.
    "adam, bias": ("FusedAdam", dict(lr=0.1, betas=(0.5, 0.9375), eps=0.0, bias_correction=False), 1.0, 2.0, [0.8]),
    # m = 1: w = 2 - 0.5 * (1 + 0.2) = 1.4; m = 1.5: w = 1.4 - 0.5 * (1.5 + 0.14) = 0.58
    "sgd, decay stays out of momentum": (
        *("FusedSGD", dict(lr=0.5, momentum=0.5, weight_decay=0.1, wd_after_momentum=True), 2.0, 1.0, [1.4, 0.58]),
    ),
    "adagrad, decoupled": (
        *("FusedAdagrad", dict(lr=0.5, weight_decay=0.1, eps=0.0, adagrad_w_mode=True), 2.0, 3.0),
        [2.0 - 0.5 * (1 + 0.1 * 2.0)],
    ),
}


@pytest.mark.parametrize("case", ON_PAPER)
def test_steps_on_paper(case):
    name, settings, value, gradient, expected = ON_PAPER[case]
    p = nn.Parameter(torch.tensor([value]))
    optimizer = fused_class(name)([p], **settings)
    for after in expected:
        p.grad = torch.tensor([gradient])
        optimizer.step()
        assert torch.allclose(p.detach(), torch.tensor([after]))


def test_adagrad_heeds_the_lr_decay_of_a_checkpoint_of_torchs():
    p, other = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0]))
    optimizer = fused_class("FusedAdagrad")([p], lr=0.5, eps=0.0)
    optimizer.load_state_dict(torch.optim.Adagrad([other], lr=0.5, lr_decay=1.0, eps=0.0).state_dict())
    for expected in (0.5, 0.5 - 0.25 / 2**0.5):  # 0.5 / 1 * 1 / 1, then 0.5 / 2 * 1 / sqrt(2)
        p.grad = torch.ones(1)
        optimizer.step()
        assert torch.allclose(p.detach(), torch.tensor([expected]))


@pytest.mark.parametrize("name", FUSED_SETTINGS)
def test_gradients_of_zero_move_nothing_without_weight_decay(name):
    params = several_params(torch.float32)
    before = [p.detach().clone() for p in params]
    optimizer = fused_class(name)(params, **FUSED_SETTINGS[name] | dict(weight_decay=0.0))
    for _ in range(2):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert_same(params, before)


NO_NUMBERS = [dict(lr=-0.1), dict(lr="0.1"), dict(lr=None), dict(lr=float("nan")), dict(weight_decay=-1)]


@pytest.mark.parametrize("name", FUSED_SETTINGS)
@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=str)
def test_a_setting_out_of_its_range_is_refused_by_name_and_value(name, wrong):
    (setting, value), cls, params = *wrong.items(), fused_class(name), several_params(torch.float32)
    expected = f"{name}: {setting}={value!r} is not accepted: expected a number of at least 0"
    with pytest.raises(ValueError, match=expected):
        cls(params, **FUSED_SETTINGS[name] | wrong)
    optimizer = cls(params[:1], **FUSED_SETTINGS[name])
    with pytest.raises(ValueError, match=setting):
        optimizer.add_param_group({"params": params[1:], **wrong})
    assert len(optimizer.param_groups) == 1


BETAS = "expected two numbers, each at least 0 and below 1"
REFUSED = [
    *(("FusedAdam", dict(betas=betas), BETAS) for betas in (0.9, (0.9,), (1.0, 0.999), ("0.9", 0.999))),
    *(("FusedSGD", wrong, None) for wrong in (dict(), dict(lr=0.1, momentum=-1.0), dict(lr=0.1, nesterov=True))),
]


@pytest.mark.parametrize("name, settings, said", REFUSED, ids=str)
def test_settings_that_torch_refuses_are_refused(name, settings, said):
    with pytest.raises(ValueError, match=said):
        fused_class(name)(several_params(torch.float32), **settings)


@pytest.mark.parametrize("name", FUSED_SETTINGS)
def test_sparse_gradients_are_refused_by_name(name):
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = fused_class(name)(embedding.parameters(), **FUSED_SETTINGS[name])
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=f"{name} does not support sparse"):
        optimizer.step()


@pytest.mark.parametrize("name", FUSED_SETTINGS)
def test_zero_grad_takes_set_to_none_and_closures_return_their_loss(name):
    params = several_params(torch.float32)
    optimizer = fused_class(name)(params, **FUSED_SETTINGS[name])

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    before = closure().item()
    assert optimizer.step(closure).item() == pytest.approx(before)
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in params)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)


SETTINGS_IN_TENSORS = {
    "capturable": (lambda groups: optimizers.FusedAdam(groups, capturable=True), ["lr"]),
    "mixed_lamb": (lambda groups: apex_optimizers.FusedMixedPrecisionLamb(groups), ["lr", "step"]),
}


@pytest.mark.parametrize("make, names", SETTINGS_IN_TENSORS.values(), ids=SETTINGS_IN_TENSORS)
def test_settings_that_are_tensors_stand_beside_the_parameters(make, names):
    """A step that copies them from the host cannot be captured in a graph. No GPU is needed to see where they are."""

    def on_meta():
        return nn.Parameter(torch.empty(3, device="meta"))

    optimizer = make([{"params": [on_meta()]}, {"params": [on_meta()], "lr": 0.5}])
    optimizer.add_param_group({"params": [on_meta()], "lr": torch.tensor(0.25)})
    elsewhere = make([{"params": [nn.Parameter(torch.ones(3))]} for _ in range(3)])
    assert [group["lr"].device.type for group in elsewhere.param_groups] == ["cpu"] * 3
    optimizer.load_state_dict(elsewhere.state_dict())
    assert all(group[name].device.type == "meta" for group in optimizer.param_groups for name in names)
    elsewhere.param_groups[0]["lr"] = 0.125  # as a script may
    elsewhere.param_groups[0]["params"][0].grad = torch.ones(3)
    elsewhere.step()
    assert elsewhere.param_groups[0]["lr"].item() == 0.125
    assert len({id(group[name]) for group in elsewhere.param_groups for name in names}) == 3 * len(names)


UNSCALING = {
    "capturable": lambda params: optimizers.FusedAdam(params, lr=0.1, capturable=True),
    "masters": lambda params: apex_optimizers.FusedAdam(params, lr=0.1, capturable=True, master_weights=True),
    "mixed_lamb": lambda params: apex_optimizers.FusedMixedPrecisionLamb(params, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("make", UNSCALING.values(), ids=UNSCALING)
def test_optimizers_that_unscale_work_inside_grad_scaler(make, unscale_first):
    params, plain = several_params(torch.float32), several_params(torch.float32)
    optimizer, reference = make(params), make(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for param, twin, gradient in zip(params, plain, drawn_gradients(0, params)):
        param.grad, twin.grad = gradient * 1024.0, gradient
    reference.step()
    scaler.scale(torch.ones(()))
    for overflows in (False, True):
        before = [p.detach().clone() for p in params]
        if overflows:
            params[0].grad.fill_(float("inf"))
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert_all_close(params, *((before, 0.0) if overflows else (plain, 1e-6)))
    assert scaler.get_scale() == 512.0


def test_fused_adam_with_masters_trains_what_float16_alone_would_lose():
    p = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = apex_optimizers.FusedAdam([p], lr=1e-3, capturable=True, master_weights=True)
    for _ in range(10):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.allclose(optimizer.param_groups_master[0]["params"][0], torch.full((4,), 0.99), atol=1e-5)
    assert torch.equal(p.detach(), torch.full((4,), 0.99).bfloat16())


# With these rates each parameter moves by many times the error of its rounding to bfloat16. The others have torch's twins
# beside them in test_fused_step.py.
MOVED = [
    *(("FusedAdam", dict(lr=0.01), level) for level in ("O0", "O1", "O3", "O4")),
    ("FusedLAMB", dict(lr=0.01), "O2"),
    ("FusedNovoGrad", dict(lr=0.1), "O2"),
    ("FusedMixedPrecisionLamb", dict(lr=0.01), "O2"),
    ("FusedLARS", dict(lr=10.0, momentum=0.9), "O2"),
    ("FusedLARS", dict(lr=10.0, materialize_master_grads=False), "O2"),
]


@pytest.mark.parametrize("name, settings, level", MOVED)
def test_fused_optimizers_move_parameters_as_in_float32_at_every_level(name, settings, level):
    model, twin = net_with_norm(6, 16, 2, seed=5), net_with_norm(6, 16, 2, seed=5)
    start = [p.detach().clone() for p in twin.parameters()]
    optimizer, reference = (fused_class(name)(m.parameters(), **settings) for m in (model, twin))
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    # Before O1 patches torch: its casts reach every model of the process.
    iterate_in_torch(lambda: (twin(x) - y).square().mean(), reference, 4)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    iterate(lambda: (model(x).float() - y).square().mean(), optimizer, 4)
    for before, actual, expected in zip(start, model.state_dict().values(), twin.parameters(), strict=True):
        error, way = (actual.float() - expected).norm(), (expected - before).norm()
        # O3 has no masters: each step rounds the weights, by half a unit in the last place at most.
        rounding = 2 * 2**-8 * expected.norm() if level == "O3" else 0.0
        assert error <= (0.0 if level == "O0" else 0.05) * way + rounding, (error, way)
