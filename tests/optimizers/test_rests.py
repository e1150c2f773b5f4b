"""Weights and rests in training: beside whole float32 masters, resumed, lent, copied and closed."""

import gc

import pytest
import torch
from helpers import backward, iterate, random_batch
from torch import nn

import ampkit
from ampkit import kernels, optimizers

BF16 = torch.bfloat16
LOWER = [torch.bfloat16, torch.float16]


def adamw(params):
    return optimizers.FusedAdam(params, lr=3e-3, weight_decay=0.1)


def torch_adamw(params):
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)


def torch_sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def sgd(params):
    return optimizers.FusedSGD(params, lr=0.05, momentum=0.9)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def initialized(make=adamw, dtype=BF16, model=None, **settings):
    """Initialize, by default without a loss scale."""
    model = net() if model is None else model
    optimizer = make(model.parameters())
    settings = {"loss_scale": 1.0, "cast_model_type": dtype, **settings}
    return ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0, **settings)


def loss_of(model, seed=1):
    inputs, targets = random_batch(seed)
    return lambda: nn.functional.mse_loss(model(inputs), targets)


def float32_values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].dtype is expected[name].dtype and torch.equal(found[name], expected[name]), name


def one_layer():
    """A model of few tensors, for many steps."""
    torch.manual_seed(0)
    return nn.Linear(6, 3, bias=False)


@pytest.mark.parametrize("dtype", LOWER)
@pytest.mark.parametrize(
    ("make", "build", "steps"),
    [(adamw, one_layer, 300), (sgd, net, 50), (torch_adamw, one_layer, 300), (torch_sgd, net, 50)],
)
def test_training_is_that_of_whole_float32_masters(make, build, steps, dtype):
    """The masters' weights are rounded ties away: equal bits in bfloat16; in float16 values below 2^-14 are kept to 2^-40."""
    model, optimizer = initialized(make, dtype, build(), one_pass_step=False)
    twin = build().to(dtype)
    masters = [nn.Parameter(p.detach().clone()) for p in build().parameters()]
    reference = make(masters)
    batches = [random_batch(seed) for seed in range(16)]
    for step in range(steps):
        inputs, targets = batches[step % 16]
        iterate(lambda x=inputs, y=targets: nn.functional.mse_loss(model(x), y), optimizer)
        with torch.no_grad():
            for p, master in zip(twin.parameters(), masters):
                p.copy_(kernels.split(master, dtype)[0])
        nn.functional.mse_loss(twin(inputs.to(dtype)).float(), targets).backward()
        for p, master in zip(twin.parameters(), masters):
            master.grad, p.grad = p.grad.float(), None
        reference.step()
    for found, master in zip(model.state_dict().values(), masters):
        torch.testing.assert_close(found, master.detach(), rtol=0, atol=0 if dtype is BF16 else 3e-7)
    assert any(not torch.equal(m.detach(), m.detach().to(dtype).float()) for m in masters)


def trained(**settings):
    model, optimizer = initialized(**settings)
    iterate(loss_of(model), optimizer, times=3)
    return model, optimizer


def test_other_memory_for_the_same_weights_loses_nothing():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    model, optimizer = initialized(model=model)
    inputs = torch.randn(2, 3, 3, 3)
    iterate(lambda: model(inputs).square().mean(), optimizer)
    before = float32_values(model)
    model.to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert_same(float32_values(model), before)
    iterate(lambda: model(inputs).square().mean(), optimizer)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_close_gives_the_float32_values_back():
    model, optimizer = trained()
    expected, weights = float32_values(model), list(model.parameters())
    ampkit.close()
    assert_same(dict(model.state_dict()), expected)
    assert all(p is q and p.dtype is torch.float32 for p, q in zip(model.parameters(), weights))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in weights]
    loss_of(model)().backward()
    optimizer.step()
    assert all(s["exp_avg"].dtype is torch.float32 and float(s["step"]) == 4 for s in optimizer.state.values())


# Gradients


def test_blocks_are_added_in_float32():
    """1 and then thirty-two times 2^-9 in bfloat16 stay 1; in float32 they are 1.0625."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    model, optimizer = initialized(lambda p: optimizers.FusedSGD(p, lr=2.0**-10), model=model, policy="apex")
    for size in (1.0, *[2.0**-9] * 32):
        backward(model(torch.full((1, 1), size)).sum(), optimizer)
    optimizer.step()
    assert model.state_dict()["weight"].item() == 1.0 - 1.0625 * 2.0**-10


def test_counted_writes_to_a_list_of_masters_are_seen_by_whoever_asks_next():
    """An average swapped in for a validation, and out again."""
    model, optimizer = trained()
    inputs, before = torch.randn(5, 6), float32_values(model)
    with torch.no_grad():
        masters = list(ampkit.master_params(optimizer))
        outputs = model(inputs)
        torch._foreach_mul_(masters, 0.5)
        assert not torch.equal(model(inputs), outputs)
        assert_same(float32_values(model), {name: value * 0.5 for name, value in before.items()})
        torch._foreach_mul_(masters, 2.0)
        assert_same(float32_values(model), before)
        assert torch.equal(model(inputs), outputs)
        vector = nn.utils.parameters_to_vector(masters)
        nn.utils.vector_to_parameters(vector * 2, masters)  # which assigns ``.data``
        assert_same(float32_values(model), {name: value * 2 for name, value in before.items()})


def test_what_is_loaded_is_newer_than_what_was_written_to_a_list_of_masters():
    model, optimizer = trained()
    masters = list(ampkit.master_params(optimizer))
    with torch.no_grad():
        torch._foreach_mul_(masters, 0.5)
    state = float32_values(net(seed=5))
    model.load_state_dict(state)
    model(torch.randn(5, 6))
    del masters
    assert_same(float32_values(model), state)


def test_gradients_taken_off_a_list_of_masters_are_not_stepped_with():
    model, optimizer = initialized(sgd)
    masters = list(ampkit.master_params(optimizer))
    loss_of(model)().backward()
    before = float32_values(model)
    for p in masters:
        p.grad = None
    optimizer.step()
    assert_same(float32_values(model), before)


def test_masters_that_were_kept_over_close_write_nowhere():
    model, optimizer = trained()
    kept = list(ampkit.master_params(optimizer))
    ampkit.close()
    expected = float32_values(model)
    with torch.no_grad():
        kept[0].zero_()
    del kept
    gc.collect()
    assert_same(dict(model.state_dict()), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_model_that_was_cast_before_close_keeps_what_it_holds(dtype):
    model, _ = trained()
    model.to(dtype)
    expected = {name: value.float() for name, value in model.state_dict().items()}
    ampkit.close()
    assert_same(float32_values(model), expected)


@pytest.mark.parametrize("value", (0.0, float("inf"), float("nan"), 1.0))
@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_a_write_to_one_element_of_a_loan_leaves_the_others(dtype, value):
    """Other elements may hold anything meanwhile: an element that is put back has its float32 value again."""
    model, optimizer = initialized(sgd, dtype)
    iterate(lambda: model(random_batch()[0]).float().square().mean(), optimizer, 2)
    before, kept = model.state_dict()["0.weight"].clone(), model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.fill_(value)
        model(random_batch()[0])
        next(iter(ampkit.master_params(optimizer)))[0, 0] = 1.5
        model(random_batch()[0])
        model[0].weight.copy_(kept)
    after = model.state_dict()["0.weight"]
    assert (after != before).sum() <= 1 and torch.equal(after.flatten()[1:], before.flatten()[1:])
