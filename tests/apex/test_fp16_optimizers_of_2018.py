"""``apex.optimizers.FP16_Optimizer`` and that of ``apex.contrib``: judged by float32, and by arithmetic on paper."""

import copy
import math

import pytest
import torch
from ampkit.apex.contrib import optimizers as contrib
from torch import nn

import ampkit
from ampkit.apex import optimizers

CLASSES = {"apex.optimizers": (optimizers, "fp32_groups_flat"), "apex.contrib.optimizers": (contrib, "fp32_groups")}
X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))


def net(dtype):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def begun(module, dtype=torch.bfloat16, wrapper=None, inner=None, **settings):
    model = net(dtype)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 2e-2}]
    adam = (inner or module.FusedAdam)(groups, lr=1e-2, weight_decay=0.0)
    return model, (wrapper or module.FP16_Optimizer)(adam, verbose=False, **settings)


def train(model, optimizer, factors):
    for factor in factors:
        optimizer.zero_grad()
        loss = (model(X.to(model[0].weight.dtype)).float() - X[:, :2].sin()).square().mean()
        optimizer.backward(loss * factor)
        optimizer.step()


def masters(optimizer):
    return torch.cat([param.detach().flatten() for group in optimizer.param_groups for param in group["params"]])


@pytest.mark.parametrize("inner", (None, torch.optim.AdamW, torch.optim.RMSprop))
@pytest.mark.parametrize("name", CLASSES)
def test_the_masters_learn_what_float32_learns(name, inner):
    model, optimizer = begun(CLASSES[name][0], inner=inner, static_loss_scale=64.0)
    train(model, optimizer, [1.0] * 20)
    exact = net(torch.float32)
    groups = [{"params": exact[0].parameters()}, {"params": exact[2].parameters(), "lr": 2e-2}]
    twin = (inner or torch.optim.AdamW)(groups, lr=1e-2, weight_decay=0.0)
    for _ in range(20):
        twin.zero_grad()
        (exact(X) - X[:, :2].sin()).square().mean().backward()
        twin.step()
    start = torch.cat([param.detach().flatten() for param in net(torch.float32).parameters()])
    learned = torch.cat([param.detach().flatten() for param in exact.parameters()]) - start
    assert (masters(optimizer) - start - learned).norm() <= 0.05 * learned.norm()
    stored = torch.cat([param.detach().flatten() for param in model.parameters()])
    assert stored.dtype is torch.bfloat16 and torch.equal(stored, masters(optimizer).bfloat16())


@pytest.mark.parametrize("name", CLASSES)
def test_the_scale_falls_with_an_overflow_and_grows_after_its_window(name):
    _, optimizer = pair = begun(
        CLASSES[name][0], dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0, "scale_window": 3}
    )
    seen, before = [], masters(optimizer).clone()
    for factor in (math.inf, 1.0, 1.0, 1.0, 1.0):
        train(*pair, [factor])
        if factor == math.inf:
            assert torch.equal(masters(optimizer), before)
        seen.append((optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter))
    assert seen == [(4.0, 1, 0), (4.0, 2, 0), (4.0, 3, 0), (8.0, 4, 0), (8.0, 5, 0)]
    assert optimizer.loss_scale == 8.0 and (optimizer.scale_factor, optimizer.scale_window) == (2.0, 3)


@pytest.mark.parametrize("dynamic", (True, False))
@pytest.mark.parametrize("name", CLASSES)
def test_a_checkpoint_has_apexs_keys_and_goes_on_bit_for_bit(name, dynamic, tmp_path):
    module, key = CLASSES[name]
    model, optimizer = begun(module, dynamic_loss_scale=dynamic)
    train(model, optimizer, [1.0, math.inf, 1.0])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    of_scale = {"cur_scale", "cur_iter"} | (
        {"last_overflow_iter", "scale_factor", "scale_window"} if dynamic else set()
    )
    assert set(saved[1]) == {"dynamic_loss_scale", "optimizer_state_dict", key} | of_scale
    torch.save(saved, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    train(model, optimizer, [1.0, 1.0])
    again, second = begun(module, dynamic_loss_scale=dynamic)
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    train(again, second, [1.0, 1.0])
    assert torch.equal(masters(second), masters(optimizer)) and second.cur_scale == optimizer.cur_scale


@pytest.mark.parametrize("name, other", (list(CLASSES), list(reversed(CLASSES))))
def test_a_checkpoint_of_another_layout_is_refused(name, other):
    _, optimizer = begun(CLASSES[name][0])
    _, foreign = begun(CLASSES[other][0])
    with pytest.raises(ampkit.CheckpointError, match=f"expected '{CLASSES[name][1]}' of shapes"):
        optimizer.load_state_dict(foreign.state_dict())


@pytest.mark.parametrize("name", CLASSES)
def test_a_subclass_decides_about_its_scale(name):
    class Own(CLASSES[name][0].FP16_Optimizer):
        def _update_scale(self, skip):
            self.cur_scale = 3.0 if skip else 5.0

    _, optimizer = pair = begun(CLASSES[name][0], wrapper=Own)
    train(*pair, [math.inf])
    assert optimizer.cur_scale == 3.0
    train(*pair, [1.0])
    assert optimizer.cur_scale == 5.0


@pytest.mark.parametrize("name", CLASSES)
def test_what_it_cannot_wrap_is_refused(name):
    module = CLASSES[name][0]
    mixed = nn.ParameterList([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)])
    with pytest.raises(TypeError, match="several dtypes in one group"):
        module.FP16_Optimizer(torch.optim.SGD(mixed.parameters(), lr=0.1))
    model = net(torch.float32)
    _, optimizer = ampkit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="prepared already"):
        module.FP16_Optimizer(optimizer)
