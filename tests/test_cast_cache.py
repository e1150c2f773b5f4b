"""The weight-cast cache: one cast per weight, and never a stale one."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from engines import o1
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def casting():
    torch.manual_seed(0)
    with o1() as engine:
        yield engine


def casts_made(casting):
    return casting.cache(torch.bfloat16).casts_made


def kept(casting):
    return len(casting.cache(torch.bfloat16))


def product(weight):
    """What a whitelisted function makes of the weight now."""
    return torch.mm(torch.eye(weight.shape[0]), weight).detach().float()


def test_weight_is_cast_once_until_the_cache_is_dropped(casting):
    model, x = nn.Linear(3, 3), torch.rand(2, 3)
    for _ in range(4):
        model(x).sum().backward()
    assert casts_made(casting) == 2  # weight and bias
    casting.drop_cache()
    assert kept(casting) == 0
    model(x)
    assert casts_made(casting) == 4


def test_gradients_add_up_over_uses_of_one_cast(casting):
    weight, x = nn.Parameter(torch.eye(2)), torch.ones(1, 2)
    for _ in range(3):
        F.linear(x, weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 3.0))
    assert casts_made(casting) == 1


def test_tied_weights_share_a_cast(casting):
    weight = nn.Parameter(torch.rand(3, 3))
    F.linear(F.linear(torch.rand(1, 3), weight), weight).sum().backward()
    assert casts_made(casting) == 1


def in_place(p):
    with torch.no_grad():
        p.mul_(2)


def by_data(p):
    p.data = p.data * 2


def by_loading(p):
    holder = nn.Module()
    holder.p = p
    holder.load_state_dict({"p": p.detach() * 2})


def by_optimizer(p):
    p.grad = -p.detach()
    torch.optim.SGD([p], lr=1.0).step()


@pytest.mark.parametrize("edit", [in_place, by_data, by_loading, by_optimizer])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_edited_weight_is_cast_anew(casting, edit, mode):
    p = nn.Parameter(torch.ones(2, 2))
    with casting.forward_scope():
        with mode():
            assert torch.equal(product(p), torch.ones(2, 2))
        edit(p)
        with mode():
            assert torch.equal(product(p), torch.full((2, 2), 2.0))


def test_frozen_and_unfrozen_weight_is_cast_anew(casting):
    p = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    assert not torch.mm(p, p).requires_grad
    p.requires_grad_(True)
    torch.mm(torch.eye(2), p).sum().backward()
    assert torch.equal(p.grad, torch.ones(2, 2))


def test_weight_cast_without_grad_mode_still_trains_afterwards(casting):
    p = nn.Parameter(torch.ones(2, 2))
    with casting.forward_scope():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                product(p)
        torch.mm(torch.eye(2), p).sum().backward()
    assert torch.equal(p.grad, torch.ones(2, 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_pins_no_copy_of_the_model(casting, mode):
    model, x = nn.Linear(3, 3), torch.rand(2, 3)
    with mode():
        model(x)
        assert kept(casting) == 0, "kept outside of a forward scope"
        with casting.forward_scope():
            with casting.forward_scope():
                model(x)
            model(x)
            assert kept(casting) == 2
            assert casts_made(casting) == 4
        assert kept(casting) == 0


def test_training_cast_outlives_the_forward_scope(casting):
    model, x = nn.Linear(3, 3), torch.rand(2, 3)
    with casting.forward_scope():
        model(x)
    with casting.forward_scope():
        model(x)
    assert casts_made(casting) == 2


def test_cache_forgets_a_weight_that_died(casting):
    p = nn.Parameter(torch.rand(2, 2), requires_grad=False)
    torch.mm(p, p)
    assert kept(casting) == 1
    died = weakref.ref(p)
    del p
    gc.collect()
    assert died() is None
    assert kept(casting) == 0


def test_dropped_cache_lets_a_trained_weight_die(casting):
    p = nn.Parameter(torch.rand(2, 2))
    torch.mm(p, p).sum().backward()
    died = weakref.ref(p)
    del p
    casting.drop_cache()
    gc.collect()
    assert died() is None


def test_inputs_that_gather_gradients_are_not_taken_for_weights(casting):
    leaf, weight = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.ones(2, 2))
    for _ in range(2):
        torch.mm(leaf, weight)
    assert (casts_made(casting), len(casting.cache(torch.bfloat16))) == (1, 1)
    leaf.data += 1.0
    assert torch.equal(torch.mm(leaf, weight).float(), torch.full((2, 2), 4.0))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layer_gets_the_gradients_of_a_plain_one(casting, reentrant):
    layer, x = nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)
    layer(x).float().square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=reentrant).float().square().sum().backward()
    assert torch.equal(layer.weight.grad, expected)


def test_second_derivative_goes_through_the_cast(casting):
    w = nn.Parameter(torch.full((1, 1), 3.0))
    y = torch.mm(w, w)
    (first,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    assert (first.item(), second.item()) == (6.0, 2.0)


def test_functional_call_uses_the_weights_it_is_given(casting):
    model, x = nn.Linear(2, 2, bias=False), torch.eye(2)
    model(x)
    swapped = {"weight": torch.full((2, 2), 5.0)}
    assert torch.equal(torch.func.functional_call(model, swapped, (x,)).float(), swapped["weight"])


def test_transforms_leave_nothing_in_the_cache(casting):
    w, x = nn.Parameter(torch.ones(2, 2)), torch.rand(3, 2, 2)

    def loss(weight, sample):
        return torch.mm(sample, weight).float().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    expected = x.bfloat16().float().sum(1)[:, :, None].expand(3, 2, 2)
    torch.testing.assert_close(gradients, expected, rtol=1e-2, atol=1e-2)
    casting.drop_cache()
    torch.func.grad(lambda sample: loss(w, sample))(x[0])
    assert kept(casting) == 0, "a cast that belongs to the transform was kept"
    torch.mm(torch.eye(2), w).sum().backward()
    assert torch.equal(w.grad, torch.ones(2, 2))


def test_vmap_over_stacked_weights(casting):
    weights, x = torch.rand(3, 2, 2), torch.eye(2)
    result = torch.func.vmap(lambda w: F.linear(x, w))(weights)
    torch.testing.assert_close(result.float(), weights.transpose(1, 2), rtol=1e-2, atol=1e-2)


def test_parametrized_weight_is_not_stale(casting):
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False))
    before = layer(torch.eye(2)).detach()
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(2)
    torch.testing.assert_close(layer(torch.eye(2)).float(), 2 * before.float(), rtol=1e-2, atol=1e-2)


def test_threads_share_the_cache(casting):
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.rand(2, 4)
    expected = model(x).detach()
    casting.drop_cache()
    wrong = []

    def run():
        for _ in range(20):
            with casting.forward_scope():
                if not torch.equal(model(x), expected):
                    wrong.append(threading.get_ident())
                casting.drop_cache()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_cache_is_bypassed_while_compiling(casting, monkeypatch):
    p = nn.Parameter(torch.rand(2, 2))
    torch.mm(p, p)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    torch.mm(p, p)
    assert (kept(casting), casts_made(casting)) == (1, 1)


def test_close_drops_the_cache():
    with o1() as casting:
        nn.Linear(2, 2)(torch.rand(1, 2))
        assert kept(casting) == 2
    assert kept(casting) == 0
