"""apex.fp16_utils and the FP16_Optimizers of three modules: conversions, loss scales, checkpoints, and what float32 learns."""

import copy
import math
import pickle

import pytest
import torch
from ampkit.apex.contrib import optimizers as contrib
from ampkit.apex.fp16_utils import FP16_Optimizer, fp16_optimizer, fp16util, loss_scaler
from helpers import saved_and_loaded
from torch import nn

import ampkit
from ampkit.apex import fp16_utils, optimizers
from ampkit.apex.amp.scaler import LossScaler

HALF = torch.float16


class ConvWithNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)
        self.bn, self.plain_bn = nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.long))

    def forward(self, x):
        return self.plain_bn(self.bn(self.conv(x)))


KEPT = {
    "conv.weight": HALF,
    "bn.weight": torch.float32,
    "bn.running_mean": torch.float32,
    "plain_bn.running_mean": HALF,
    "counts": torch.long,
}


CONVERSIONS = {
    "network_to_half": (fp16_utils.network_to_half, "1."),
    "convert_network": (lambda net: fp16_utils.convert_network(net, HALF), ""),
    "FP16Model": (fp16_utils.FP16Model, "network."),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_keep_affine_batch_norms(name):
    convert, prefix = CONVERSIONS[name]
    net = ConvWithNorms()
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    converted = convert(net)
    dtypes = {key.removeprefix(prefix): value.dtype for key, value in converted.state_dict().items()}
    assert dtypes.items() >= KEPT.items() and net.conv.weight.grad.dtype is HALF
    x = torch.randn(2, 2, 3, 3)
    assert converted(x.half() if name == "convert_network" else x).dtype is HALF
    assert name != "convert_network" or converted is net
    assert name != "network_to_half" or isinstance(converted[0], fp16_utils.tofp16)


def test_convert_module_leaves_children_alone():
    net = nn.Sequential(nn.Linear(1, 1))
    net.own = nn.Parameter(torch.ones(1))
    fp16_utils.convert_module(net, HALF)
    assert net.own.dtype is HALF and net[0].weight.dtype is torch.float32


@pytest.mark.parametrize("flat", [False, True])
def test_parameters_and_gradients_go_to_masters_and_back(flat):
    model = nn.Linear(3, 2).half()
    model_params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert all(m.dtype is torch.float32 and m.requires_grad for m in masters)
    assert len(masters) == (1 if flat else 2)
    model(torch.ones(1, 3).half()).sum().backward()
    fp16_utils.model_grads_to_master_grads(model_params, masters, flat_master=flat)
    wanted = torch.cat([p.grad.float().reshape(-1) for p in model_params])
    assert torch.equal(torch.cat([m.grad.reshape(-1) for m in masters]), wanted)
    with torch.no_grad():
        for master in masters:
            master.fill_(0.1)
    fp16_utils.master_params_to_model_params(model_params, masters, flat_master=flat)
    assert all(torch.equal(p, torch.full_like(p, 0.1)) for p in model_params)


def test_flat_masters_of_two_dtypes_are_refused():
    with pytest.raises(RuntimeError, match="one dtype"):
        fp16_utils.prep_param_lists(nn.Sequential(nn.Linear(1, 1).half(), nn.Linear(1, 1)), flat_master=True)


def test_small_things():
    assert fp16_utils.clip_grad_norm is nn.utils.clip_grad_norm_
    assert fp16_utils.to_python_float(torch.tensor([2.5])) == 2.5 and fp16_utils.to_python_float([3.0]) == 3.0
    assert fp16util.tofp16()(torch.ones(1)).dtype is HALF
    assert fp16_optimizer.FP16_Optimizer is FP16_Optimizer and loss_scaler.LossScaler is fp16_utils.LossScaler


def test_static_scaler():
    scaler = fp16_utils.LossScaler(scale=8)
    p = nn.Parameter(torch.ones(1))
    scaler.backward(p.sum())
    assert p.grad.item() == 8 and scaler.loss_scale == 8
    p.grad.fill_(float("inf"))
    assert scaler.has_overflow([p]) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == 8
    assert scaler.scale_gradient(None, (torch.ones(1), None), None) == (torch.tensor([8.0]), None)


def test_dynamic_scaler_falls_to_1_and_grows_a_window_after_the_last_overflow():
    scaler = fp16_utils.DynamicLossScaler(init_scale=4.0, scale_factor=2.0, scale_window=3)
    seen = []
    for overflow in (False, False, False, True, True, True, False, False, False):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    # Iterations 0 to 8; the last overflow before the first counts as iteration -1.
    assert seen == [4.0, 4.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 2.0]
    scaler.update_scale(True)
    scaler.update_scale(True)
    assert scaler.loss_scale == 1.0
    assert (scaler.cur_iter, scaler.last_overflow_iter) == (11, 10)
    assert fp16_utils.DynamicLossScaler().loss_scale == 2.0**32


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_dynamic_scaler_finds_what_is_not_finite(value):
    p, q = nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.ones(1))
    scaler = fp16_utils.DynamicLossScaler()
    assert not scaler.has_overflow([p, q])
    p.grad = torch.full((3,), 60000.0).half()  # their sum is not finite, they are
    assert not scaler.has_overflow([p, q])
    p.grad[1] = value
    assert scaler.has_overflow([p, q])


# FP16_Optimizer

DYNAMIC = dict(dynamic_loss_scale=True, dynamic_loss_args=dict(init_scale=1024.0))


def make(dtype=HALF, norm=True, **settings):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8).to(dtype), *([nn.BatchNorm1d(8)] if norm else []), nn.Linear(8, 1).to(dtype)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, FP16_Optimizer(optimizer, verbose=False, **settings)


def loss_of(model, seed=0):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return (model(x.to(model[0].weight.dtype)).float() - 1.0).square().mean()


def take_fp16_steps(model, optimizer, steps, factor=1.0):
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step) * factor)
        optimizer.step()


def numbers(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def masters(optimizer):
    return numbers(param for group in optimizer.param_groups for param in group["params"])


@pytest.mark.parametrize("settings", [dict(static_loss_scale=64.0), DYNAMIC], ids=str)
@pytest.mark.parametrize("update_each_time", [False, True])
def test_backward_passes_add_up(settings, update_each_time):
    model, optimizer = make(**settings)
    model.eval()  # fixed statistics: the sum of two losses is then the same as two passes
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0), update_master_grads=update_each_time)
    if settings.get("dynamic_loss_scale"):
        optimizer.loss_scale = optimizer.loss_scale / 4  # a scale that moves in between
    optimizer.backward(loss_of(model, 1), update_master_grads=False)
    optimizer.update_master_grads()
    found = [g for group in optimizer.inspect_master_grad_data() for g in group]
    twin = copy.deepcopy(model).float()
    (loss_of(twin, 0) + loss_of(twin, 1)).backward()
    for mine, theirs in zip(found, [p.grad for p in twin.parameters()], strict=True):
        assert torch.allclose(mine, theirs, rtol=2e-2, atol=2e-3)


WINDOW = dict(dynamic_loss_scale=True, dynamic_loss_args=dict(init_scale=1024.0, scale_window=2))
REDUCED = "Gradient overflow.  Skipping step, reducing loss scale to 512.0"
OVERFLOWS = [(WINDOW, (512.0, 1024.0), REDUCED), (dict(static_loss_scale=8.0), (8.0, 8.0), "the scale stays")]


@pytest.mark.parametrize("settings, scales, told", OVERFLOWS, ids=["dynamic", "static"])
def test_an_overflow_skips_the_step_and_says_so(settings, scales, told, capsys):
    model, optimizer = make(**settings)
    optimizer.verbose = True
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    optimizer.backward(loss_of(model.eval()) * float("inf"))
    assert optimizer.overflow and optimizer.loss_scale == scales[0]
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    assert told in capsys.readouterr().out
    take_fp16_steps(model, optimizer, range(2))
    assert optimizer.loss_scale == scales[1] and not optimizer.overflow


def test_masters_are_clipped():
    model, optimizer = make(static_loss_scale=32.0)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))

    def norm():
        return numbers(g for group in optimizer.inspect_master_grad_data() for g in group).norm()

    before = norm()
    assert torch.allclose(optimizer.clip_master_grads(0.01), before)
    assert torch.allclose(norm(), torch.tensor(0.01), rtol=1e-3)


CLASSES = {"apex.fp16_utils": fp16_utils, "apex.optimizers": optimizers, "apex.contrib.optimizers": contrib}
# The entries of a checkpoint; those of 2018 are followed by the name of their masters.
KEYS = ("loss_scaler", "overflow", "first_closure_call_this_step", "fp32_from_fp16")
KEYS_OF_2018 = {"apex.optimizers": "fp32_groups_flat", "apex.contrib.optimizers": "fp32_groups"}


def begun(name, dtype=torch.bfloat16, wrapper=None, inner=None, **settings):
    """A model of one dtype in two groups, as the FP16_Optimizers of 2018 need it, and the FP16_Optimizer of a module."""
    model = make(dtype, norm=False)[0]
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": 2e-2}]
    inner = (inner or getattr(CLASSES[name], "FusedAdam", optimizers.FusedAdam))(groups, lr=1e-2, weight_decay=0.0)
    return model, (wrapper or CLASSES[name].FP16_Optimizer)(inner, verbose=False, **settings)


@pytest.mark.parametrize("inner", (None, torch.optim.AdamW, torch.optim.RMSprop))
@pytest.mark.parametrize("name", CLASSES)
def test_the_masters_learn_what_float32_learns(name, inner):
    model, optimizer = begun(name, inner=inner, static_loss_scale=64.0)
    start, exact = (make(torch.float32, norm=False)[0] for _ in range(2))
    groups = [{"params": exact[0].parameters()}, {"params": exact[1].parameters(), "lr": 2e-2}]
    twin = (inner or torch.optim.AdamW)(groups, lr=1e-2, weight_decay=0.0)
    for step in range(20):
        twin.zero_grad()
        loss_of(exact, step).backward()
        twin.step()
    take_fp16_steps(model, optimizer, range(20))
    learned = numbers(exact.parameters()) - numbers(start.parameters())
    assert (masters(optimizer) - numbers(exact.parameters())).norm() <= 0.05 * learned.norm()
    stored = numbers(model.parameters())
    assert stored.dtype is torch.bfloat16 and torch.equal(stored, masters(optimizer).bfloat16())


@pytest.mark.parametrize("settings", [{}, dict(static_loss_scale=64.0), DYNAMIC], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_checkpoints_load_under_weights_only_and_go_on_bit_for_bit(name, settings):
    make_pair = (lambda: make(**settings)) if name == "apex.fp16_utils" else (lambda: begun(name, **settings))
    model, optimizer = make_pair()
    take_fp16_steps(model, optimizer, range(1))
    if settings or name in KEYS_OF_2018:  # fp16_utils checks nothing at a scale of 1
        take_fp16_steps(model, optimizer, range(1), math.inf)
    take_fp16_steps(model, optimizer, range(1, 3))
    state, keys = optimizer.state_dict(), set(KEYS)
    if name in KEYS_OF_2018:
        keys = {"cur_scale", "cur_iter", KEYS_OF_2018[name]}
        keys |= {"last_overflow_iter", "scale_factor", "scale_window"} if settings is DYNAMIC else set()
    assert set(state) == {"dynamic_loss_scale", "optimizer_state_dict"} | keys
    loaded = saved_and_loaded([model.state_dict(), state])
    again, resumed = make_pair()
    again.load_state_dict(loaded[0])
    resumed.load_state_dict(loaded[1])
    take_fp16_steps(model, optimizer, range(3, 6))
    take_fp16_steps(again, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    assert torch.equal(masters(optimizer), masters(resumed)) and resumed.loss_scale == optimizer.loss_scale


@pytest.mark.parametrize("name, other", (list(KEYS_OF_2018), list(reversed(KEYS_OF_2018))))
def test_a_checkpoint_of_another_layout_is_refused(name, other):
    with pytest.raises(ampkit.CheckpointError, match=f"expected '{KEYS_OF_2018[name]}' of shapes"):
        begun(name)[1].load_state_dict(begun(other)[1].state_dict())


@pytest.mark.parametrize("name", KEYS_OF_2018)
def test_the_scale_falls_with_an_overflow_and_grows_after_its_window(name):
    args = {"init_scale": 8.0, "scale_window": 3}
    model, optimizer = begun(name, dynamic_loss_scale=True, dynamic_loss_args=args)
    seen, before = [], masters(optimizer).clone()
    for factor in (math.inf, 1.0, 1.0, 1.0, 1.0):
        take_fp16_steps(model, optimizer, [0], factor)
        assert torch.equal(masters(optimizer), before) == (not seen)
        seen.append((optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter))
    assert seen == [(4.0, 1, 0), (4.0, 2, 0), (4.0, 3, 0), (8.0, 4, 0), (8.0, 5, 0)]
    assert optimizer.loss_scale == 8.0 and (optimizer.scale_factor, optimizer.scale_window) == (2.0, 3)


@pytest.mark.parametrize("name", KEYS_OF_2018)
def test_a_subclass_decides_about_its_scale(name):
    class Own(CLASSES[name].FP16_Optimizer):
        def _update_scale(self, skip):
            self.cur_scale = 3.0 if skip else 5.0

    model, optimizer = begun(name, wrapper=Own)
    for factor, scale in ((math.inf, 3.0), (1.0, 5.0)):
        take_fp16_steps(model, optimizer, [0], factor)
        assert optimizer.cur_scale == scale


@pytest.mark.parametrize("name", KEYS_OF_2018)
def test_several_dtypes_in_one_group_are_refused(name):
    mixed = nn.ParameterList([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)])
    with pytest.raises(TypeError, match="several dtypes in one group"):
        CLASSES[name].FP16_Optimizer(torch.optim.SGD(mixed.parameters(), lr=0.1))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_of_initialize_is_refused(name, level):
    model = nn.Linear(2, 1)
    _, optimizer = ampkit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match=r"prepared already.*scale_loss"):
        CLASSES[name].FP16_Optimizer(optimizer, verbose=False)


class OldScaler:
    """The scaler in a checkpoint of Apex: the object itself."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    "scaler, scale, clean",
    [
        (OldScaler(_loss_scale=512.0, _unskipped=7, dynamic=True), 512.0, 7),
        (OldScaler(cur_scale=256.0), 256.0, 0),
        (LossScaler("dynamic", init_scale=128.0), 128.0, 7),
    ],
)
def test_checkpoints_with_a_pickled_scaler_load(scaler, scale, clean):
    _, optimizer = make(dynamic_loss_scale=True)
    if isinstance(scaler, LossScaler):
        scaler._unskipped = clean
    state = optimizer.state_dict() | {"loss_scaler": scaler}
    with pytest.raises(pickle.UnpicklingError):
        saved_and_loaded(state)
    optimizer.load_state_dict(saved_and_loaded(state, weights_only=False))
    assert (optimizer.loss_scale, optimizer.loss_scaler._unskipped) == (scale, clean)


def test_checkpoints_that_cannot_be_right_say_so():
    _, optimizer = make()
    state = optimizer.state_dict()
    with pytest.raises(ampkit.CheckpointError, match="without a scale that is known"):
        optimizer.load_state_dict(state | {"loss_scaler": OldScaler(other=1)})
    with pytest.raises(ampkit.CheckpointError, match="masters of shapes"):
        optimizer.load_state_dict(state | {"fp32_from_fp16": [[torch.ones(1)]]})


def test_closures_run_again_while_they_overflow():
    model, optimizer = make(dynamic_loss_scale=True, norm=False)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss * (float("inf") if len(calls) < 2 else 1.0))
        calls.append(optimizer.loss_scale)
        return loss

    before = model[0].weight.detach().clone()
    assert optimizer.step(closure).isfinite()
    assert calls == [2.0**15, 2.0**14, 2.0**14]
    assert not torch.equal(before, model[0].weight)
    assert optimizer.first_closure_call_this_step


def test_a_closure_of_lbfgs_sees_the_masters_in_the_model():
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False).half()
    optimizer = FP16_Optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10), verbose=False)
    x, y = torch.randn(8, 2).half(), torch.randn(8, 1)

    def closure():
        assert torch.equal(model.weight.flatten(), masters(optimizer).half())
        optimizer.zero_grad()
        loss = (model(x).float() - y).square().mean()
        optimizer.backward(loss)
        return loss

    first = closure().item()
    optimizer.step(closure)
    assert closure().item() < first


def test_a_closure_that_overflows_at_a_static_scale_ends():
    model, optimizer = make(static_loss_scale=2.0, norm=False)

    def closure():
        optimizer.backward(loss_of(model) * float("inf"))
        return torch.ones(())

    with pytest.raises(ampkit.LossScaleError):
        optimizer.step(closure)


def test_fp16_optimizer_passes_on_what_an_optimizer_has(capsys):
    model = nn.Linear(2, 1).half()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = FP16_Optimizer(inner)
    assert "FP16_Optimizer is deprecated" in capsys.readouterr().out
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    torch.optim.lr_scheduler.StepLR(inner, 1)
    optimizer.loss_scale = 4
    assert optimizer.loss_scale == optimizer.loss_scaler.loss_scale() == 4.0
    model(torch.ones(1, 2).half()).sum().backward()
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError, match="init_scales"):
        FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args={"init_scales": 2.0}, verbose=False)
