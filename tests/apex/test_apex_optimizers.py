"""apex.optimizers: the core's fused optimizers, with Apex's layout of their state, its arguments and its words."""

import inspect

import pytest
import torch
from ampkit.apex.contrib import optimizers as contrib
from helpers import (
    FUSED_SETTINGS,
    assert_all_close,
    backward,
    drawn_gradients,
    params_after_handing_on,
    saved_and_loaded,
    several_params,
    take_steps,
)
from torch import nn

import ampkit
from ampkit import optimizers as core
from ampkit.apex import amp_C, fp16_utils, optimizers
from ampkit.errors import CheckpointError

pytestmark = pytest.mark.switch

ADAM = dict(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
SGD = dict(lr=0.05, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in FUSED_SETTINGS if hasattr(core, name) and hasattr(optimizers, name)])
def test_steps_are_the_cores_bit_for_bit(name, dtype):
    """The core's steps are tested in tests/optimizers; Apex's classes only count them elsewhere, and keep no rests."""
    params, core_params = several_params(dtype), several_params(dtype)
    take_steps(getattr(optimizers, name)(params, **FUSED_SETTINGS[name]), params, range(5))
    take_steps(getattr(core, name)(core_params, rests=False, **FUSED_SETTINGS[name]), core_params, range(5))
    assert all(torch.equal(a, b) for a, b in zip(params, core_params, strict=True))


TWINS = {"FusedSGD": (torch.optim.SGD, SGD), "FusedAdam": (torch.optim.AdamW, ADAM)}


@pytest.mark.parametrize("name", TWINS)
def test_state_of_the_torch_twin_loads_and_training_goes_on(name):
    cls, (twin, settings) = getattr(optimizers, name), TWINS[name]
    theirs, ours = params_after_handing_on(torch.float64, lambda p: twin(p, **settings), lambda p: cls(p, **settings))
    assert_all_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_state_goes_between_apexs_layout_and_the_cores(name):
    apex, settings = getattr(optimizers, name), FUSED_SETTINGS[name]
    params = several_params(torch.float32)
    optimizer = apex(params, **settings)
    take_steps(optimizer, params, range(2))

    def resumed(cls, state):
        again = [nn.Parameter(p.detach().clone()) for p in params]
        other = cls(again, **settings)
        other.load_state_dict(state)
        handed_on = saved_and_loaded(other.state_dict())
        take_steps(other, again, range(2, 4))
        return again, handed_on

    expected, state = resumed(apex, optimizer.state_dict())
    for cls in (getattr(core, name), apex):
        there, handed_on = resumed(cls, saved_and_loaded(state))
        back, _ = resumed(apex, handed_on)
        assert_all_close(there, expected, 1e-6)
        assert_all_close(back, expected, 1e-6)
    assert all(map(torch.equal, there, expected))  # its own state, bit for bit


LAYOUTS = {"FusedAdam": {"exp_avg", "exp_avg_sq"}, "FusedAdagrad": {"sum"}, "FusedNovoGrad": {"exp_avg"}}


@pytest.mark.parametrize("name", LAYOUTS)
def test_state_has_apexs_layout(name):
    params = several_params(torch.float16)
    optimizer = getattr(optimizers, name)(params)
    take_steps(optimizer, params, range(3))
    state = optimizer.state_dict()
    assert name == "FusedAdagrad" or state["param_groups"][0]["step"] == 3
    assert all(set(one) == LAYOUTS[name] for one in state["state"].values())
    assert {tensor.dtype for one in state["state"].values() for tensor in one.values()} == {torch.float32}


def test_apexs_layout_of_novograd_has_norms_in_the_group():
    params = [nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    optimizer = optimizers.FusedNovoGrad(params, betas=(0.9, 0.5))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    half, full = optimizer.state_dict()["param_groups"][0]["exp_avg_sq"]
    assert_all_close([half, full], [torch.tensor([2.0]).sqrt(), torch.tensor([3.0, 4.0]).sqrt()], 1e-6)


def test_norms_of_another_number_of_tensors_than_moments_are_refused():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = optimizers.FusedNovoGrad(params)
    optimizer.load_state_dict(optimizer.state_dict())  # before the first step there are neither
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["exp_avg_sq"][1] = torch.ones(3)
    with pytest.raises(CheckpointError, match="norms of 3 tensors and the moments of 2"):
        optimizer.load_state_dict(state)
    state["param_groups"][0]["exp_avg_sq"][1] = torch.zeros(0)  # as for float16 parameters, of which there are none
    optimizer.load_state_dict(state)


# Arguments


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedMixedPrecisionLamb"])
def test_amsgrad_is_refused(name):
    with pytest.raises(RuntimeError, match="AMSGrad"):
        getattr(optimizers, name)(several_params(torch.float32), amsgrad=True)


def test_arguments_that_fused_adam_took_once_are_refused():
    optimizer = optimizers.FusedAdam(several_params(torch.float32))
    for name in ("grads", "output_params", "scale", "grad_norms"):
        with pytest.raises(RuntimeError, match=f"FusedAdam has been updated.*{name}"):
            optimizer.step(**{name: 1.0})
    with pytest.raises(RuntimeError, match="capturable"):
        optimizers.FusedAdam(several_params(torch.float32), master_weights=True)


@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("make", [optimizers.FusedAdam, optimizers.FusedAdagrad])
def test_zero_grad_does_by_default_what_the_constructor_said(make, none):
    params = several_params(torch.float32)
    optimizer = make(params, set_grad_none=none)
    take_steps(optimizer, params, range(1))
    optimizer.zero_grad()
    assert all((p.grad is None) is none for p in params)


def test_a_new_group_counts_steps_of_its_own():
    params = several_params(torch.float32)
    optimizer = optimizers.FusedAdam(params[:2])
    take_steps(optimizer, params, range(1))
    optimizer.add_param_group({"params": params[2:]})
    take_steps(optimizer, params, range(1))
    assert [group["step"] for group in optimizer.param_groups] == [2, 1]


# With initialize


@pytest.mark.parametrize("materialize", [False, True])
def test_fused_sgd_at_o2_gives_unscaled_master_gradients_and_skips_an_overflow(materialize):
    model = nn.Linear(2, 1, bias=False)
    optimizer = optimizers.FusedSGD(model.parameters(), lr=0.5, momentum=0.5, materialize_master_grads=materialize)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    before, x = next(ampkit.master_params(optimizer)).detach().clone(), torch.tensor([[1.0, 2.0]])
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        backward(model(x).sum() * factor, optimizer)
        if factor == 1.0:
            assert torch.equal(next(ampkit.master_params(optimizer)).grad, x)
        optimizer.step()
    # Momenta 1 and 1.5 in units of the gradient: 0.5 * 2.5 altogether, the overflow between them skipped.
    after = next(ampkit.master_params(optimizer)).detach()
    assert torch.allclose(after, before - 1.25 * x)
    assert torch.equal(model.weight.detach(), after.to(model.weight.dtype))


# Scripts that subclass


KERNELS = {
    "FusedAdam": "multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master",
    "FusedLAMB": "multi_tensor_l2norm multi_tensor_lamb",
    "FusedSGD": "multi_tensor_sgd",
    "FusedAdagrad": "multi_tensor_adagrad",
    "FusedNovoGrad": "multi_tensor_novograd",
}


@pytest.mark.parametrize("name", KERNELS)
def test_optimizers_carry_their_kernels_and_one_flag(name):
    optimizer = getattr(optimizers, name)(several_params(torch.float32), **FUSED_SETTINGS[name])
    assert all(getattr(optimizer, kernel) is getattr(amp_C, kernel) for kernel in KERNELS[name].split())
    flag = optimizer._dummy_overflow_buf
    assert flag.dtype is torch.int32 and flag.tolist() == [0] and optimizer._dummy_overflow_buf is flag
    assert "_dummy_overflow_buf" not in optimizer.state_dict()


# Scripts of before amp


@pytest.mark.parametrize("wrapper", (optimizers, contrib, fp16_utils), ids=lambda module: module.__name__)
@pytest.mark.parametrize("cls", [optimizers.FusedAdam, contrib.FusedAdam])
def test_the_first_fused_adam_clips_each_group_by_its_own_norm(cls, wrapper, caplog):
    """The BERT scripts of 2019: a float16 model, FusedAdam(max_grad_norm=1.0), and FP16_Optimizer around it."""
    params = several_params(torch.float16)
    twins = [nn.Parameter(p.detach().double()) for p in params]
    settings, parts = [{"weight_decay": 0.01}, {"weight_decay": 0.0}], (range(2), range(2, len(params)))
    groups = [{"params": [params[i] for i in part], **decay} for part, decay in zip(parts, settings)]
    adam = cls(groups, lr=0.01, bias_correction=False, max_grad_norm=1.0)
    optimizer = wrapper.FP16_Optimizer(adam, static_loss_scale=64.0, verbose=False)
    caplog.set_level("WARNING", "ampkit")
    moments = [[torch.zeros_like(twin), torch.zeros_like(twin)] for twin in twins]
    for step in range(3):
        drawn = [gradient * (step + 1) for gradient in drawn_gradients(step, params)]
        loss = sum((p.float() * g.float()).sum() for p, g in zip(params, drawn))
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        for part, decay in zip(
            parts, settings
        ):  # Adam without bias correction, in float64, from gradients as float16 has them
            in_float16 = [(drawn[i].float() * 64).half().double() / 64 for i in part]
            norm = torch.cat([g.reshape(-1) for g in in_float16]).norm()
            for i, g in zip(part, in_float16):
                g = g / max(1.0, float(norm) + 1e-6)
                m, v = moments[i]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                with torch.no_grad():
                    twins[i] -= 0.01 * (m / (v.sqrt() + 1e-8) + decay["weight_decay"] * twins[i])
    masters = [master.flatten() for group in optimizer.param_groups for master in group["params"]]
    assert_all_close([torch.cat(masters)], [torch.cat([twin.flatten() for twin in twins])], 1e-5)
    assert adam.param_groups[0]["max_grad_norm"] == 1.0
    assert not caplog.messages


def test_max_grad_norm_without_the_wrapper_clips_nothing_and_says_so_once(caplog):
    params, unclipped = several_params(torch.float32), several_params(torch.float32)
    with caplog.at_level("WARNING", "ampkit"):
        take_steps(optimizers.FusedAdam(params, max_grad_norm=1e-3, **ADAM), params, range(2))
    assert len(caplog.messages) == 1 and "before step()" in caplog.messages[0]
    take_steps(optimizers.FusedAdam(unclipped, **ADAM), unclipped, range(2))
    assert all(torch.equal(a, b) for a, b in zip(params, unclipped, strict=True))


# apex.contrib.optimizers


def test_contrib_adam_takes_scaled_gradients_and_writes_output_params():
    params = several_params(torch.float32)
    twins, outputs = [nn.Parameter(p.detach().double()) for p in params], [p.detach().half() for p in params]
    optimizer, reference = contrib.FusedAdam(params, lr=0.01), torch.optim.AdamW(twins, lr=0.01, weight_decay=0.0)
    for step in range(3):
        found = drawn_gradients(step, params)
        optimizer.step(grads=[(g * 64).half() for g in found], output_params=outputs, scale=64.0)
        for twin, gradient in zip(twins, found):
            twin.grad = gradient.half().double()
        reference.step()
    assert_all_close(params, twins, 1e-3)
    assert all(torch.equal(copied, p.detach().half()) for copied, p in zip(outputs, params))
    assert all(p.grad is None for p in params)


def test_contrib_adam_clips_by_the_norms_it_is_given():
    a, b = (nn.Parameter(torch.ones(4)) for _ in range(2))
    clipped, plain = contrib.FusedAdam([a], lr=0.1, max_grad_norm=1.0, eps=1.0), contrib.FusedAdam([b], lr=0.1, eps=1.0)
    g = torch.full((4,), 5.0)  # of norm 10
    clipped.step(grads=[g], grad_norms=[10.0])
    plain.step(grads=[g / 10.0])
    assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("eps_mode", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_extension_of_the_first_fused_adam_is_adam_with_decay_by_the_step(eps_mode, dtype):
    """fairseq and OpenNMT-py call the extension from optimizers of their own."""
    import fused_adam_cuda

    torch.manual_seed(0)
    param, scale, lr, (beta1, beta2), eps, decay = torch.randn(5), 8.0, 0.1, (0.9, 0.99), 1e-3, 0.1
    m, v, copy = torch.zeros(5), torch.zeros(5), torch.zeros(5, dtype=torch.float16)
    p, exact_m, exact_v = param.double(), 0.0, 0.0
    for step in (1, 2, 3):
        grad = (scale * torch.randn(5)).to(dtype)
        fused_adam_cuda.adam(param, copy, m, v, grad, lr, beta1, beta2, eps, scale, step, eps_mode, 1, decay)
        g = grad.double() / scale
        exact_m, exact_v = beta1 * exact_m + (1 - beta1) * g, beta2 * exact_v + (1 - beta2) * g * g
        root = (exact_v + eps).sqrt() if eps_mode == 0 else exact_v.sqrt() + eps
        p -= lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) * (exact_m / root + decay * p)
    torch.testing.assert_close(param.double(), p, rtol=1e-5, atol=1e-6)
    assert torch.equal(copy, param.half())
    fused_adam_cuda.adam(param, torch.empty(0), m, v, torch.zeros(5), 0.0, beta1, beta2, eps, 1.0, 4, 1, 0, 0.0)
    assert torch.equal(copy, param.half())  # a learning rate of 0 and no bias correction: nothing moves


# Arguments by position, in the order of Apex's documentation


POSITIONS = {
    "FusedAdam": (
        "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none capturable master_weights",
        (0.1, False, (0.5, 0.6), 1e-4, False, 0.2, False, False, True, True),
    ),
    "FusedSGD": (
        "lr momentum dampening weight_decay nesterov wd_after_momentum materialize_master_grads set_grad_none",
        (0.1, 0.5, 0.0, 0.2, True, True, False, True),
    ),
    "FusedLAMB": (
        "lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none max_grad_norm use_nvlamb",
        (0.1, False, (0.5, 0.6), 1e-4, 0.2, False, False, False, False, 0.5, True),
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_arguments_have_the_order_of_apexs_documentation(name):
    cls, names, values = getattr(optimizers, name), *POSITIONS[name]
    made = cls(several_params(torch.float32), *values)
    found = {**vars(made), **made.defaults}
    for key, value in zip(names.split(), values, strict=True):
        if key in found:
            assert torch.equal(*(torch.as_tensor(one, dtype=torch.float32) for one in (found[key], value))), key
    assert list(inspect.signature(cls).parameters)[1 : len(values) + 1] == names.split()
    with pytest.raises(TypeError):
        cls(several_params(torch.float32), *values, None)
