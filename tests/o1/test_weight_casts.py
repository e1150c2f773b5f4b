"""Casts of weights in C++: the weights of a call are cast at once at the first use in the next call that begins alike."""

import copy
import gc
import sys

import pytest
import torch
from helpers import assert_same, casts_made, o1
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import ampkit

pytestmark = pytest.mark.compiled("wrappers")

LOW = torch.bfloat16


@pytest.fixture
def casting():
    torch.manual_seed(0)
    with o1(in_python=False) as engine:
        yield engine


def make_model(depth=3, width=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def cast_weights(casting):
    return set(casting.caches.pairs())


def train_once(casting, model, x):
    """Run an iteration, in which casts live to the end of the call."""
    with casting.caches.call():
        loss = model(x).float().square().sum()
    loss.backward()
    return loss.detach()


def begin(casting, model, x):
    with casting.caches.call():
        model[0](x)
        return cast_weights(casting)


def test_second_call_casts_all_weights_at_the_first_use(casting):
    model, x = make_model(), torch.rand(2, 4)
    assert begin(casting, model, x) == set(model[0].parameters())
    train_once(casting, model, x)
    assert casts_made(casting) == 2 + 6
    with casting.caches.call():
        model[0](x)
        assert cast_weights(casting) == set(model.parameters())
        model(x)
        assert casts_made(casting) == 2 + 12


def test_losses_and_gradients_are_those_of_single_casts(casting):
    model, x = make_model(), torch.rand(2, 4)
    twin = copy.deepcopy(model)
    train_once(casting, model, x)  # so that the next pass casts ahead
    model.zero_grad()
    together = train_once(casting, model, x)
    casting.close()
    with o1(in_python=True) as single:
        alone = train_once(single, twin, x)
    assert torch.equal(together, alone)
    assert_same(*([p.grad for p in one.parameters()] for one in (model, twin)))


def test_gradients_arrive_while_others_are_still_to_be_computed(casting):
    """As for single casts: DDP reduces the last layer's gradients while the first layer's backward pass runs."""
    model, x = make_model(), torch.rand(2, 4)
    arrived = []
    for index, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, index=index: arrived.append(f"backward of {index}"))
        layer.weight.register_post_accumulate_grad_hook(lambda _, index=index: arrived.append(f"gradient of {index}"))
    x = x.requires_grad_()
    train_once(casting, model, x)
    single = arrived.copy()
    arrived.clear()
    train_once(casting, model, x)
    assert arrived == single
    assert arrived.index("gradient of 2") < arrived.index("backward of 0")


def test_recomputed_segment_keeps_no_casts(casting):
    model, x = make_model(), torch.rand(2, 4, requires_grad=True)
    kept = []

    def segment(x):
        y = model[1](x)
        kept.append(len(cast_weights(casting)))
        return y

    with set_checkpoint_early_stop(False), casting.caches.call():
        loss = model[2](checkpoint(segment, model[0](x), use_reentrant=False)).sum()
    loss.backward()
    assert kept == [4, 0]


def test_weight_that_was_cast_in_vain_is_not_cast_ahead_again(casting):
    model, x = make_model(), torch.rand(2, 4)
    train_once(casting, model, x)
    first_two = model[:2]
    train_once(casting, first_two, x)  # casts the third layer in vain
    assert casts_made(casting) == 12
    train_once(casting, first_two, x)
    assert casts_made(casting) == 16


def make_lower(weight):
    with ampkit.disable_casts():  # where values that are assigned keep their dtype
        weight.data = weight.data.to(LOW)


CHANGES = {
    "frozen": lambda weight: weight.requires_grad_(False),
    "float64": lambda weight: setattr(weight, "data", weight.data.double()),
    "lower precision": make_lower,
    "large, on the CPU": lambda weight: setattr(weight, "data", torch.rand(2**14, 4)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weight_that_has_changed_its_kind_is_cast_where_it_is_used(casting, change):
    model, x = make_model(), torch.rand(2, 4)
    train_once(casting, model, x)
    CHANGES[change](model[2].weight)
    assert begin(casting, model, x) == set(model.parameters()) - {model[2].weight}


def test_evaluation_casts_what_it_uses_and_a_weight_that_died_is_forgotten(casting):
    model, x = make_model(), torch.rand(2, 4)
    train_once(casting, model, x)
    with torch.no_grad():
        assert begin(casting, model, x) == set(model[0].parameters())
    del model[2]
    gc.collect()
    assert begin(casting, model, x) == set(model.parameters())


# -- what happens to a weight between the cast ahead and its first use


class Clamped(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.5, 0.5)
        return super().forward(x)


@pytest.mark.parametrize("outside", [True, False])
def test_write_through_data_before_the_first_use_is_seen(casting, outside):
    """A WGAN clamps its critic after the generator's forward, at whose first weight the critic's were cast ahead."""
    generator, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    critic = (nn.Linear if outside else Clamped)(2, 2, bias=False)
    train_once(casting, nn.Sequential(generator, critic), x)
    nn.init.eye_(generator.weight)
    nn.init.constant_(critic.weight, 3.0)
    with casting.caches.call():
        hidden = generator(x)
        if outside:
            critic.weight.data.fill_(0.5)
        assert torch.equal(critic(hidden).detach().float(), torch.ones(1, 2))


def test_weight_whose_storage_is_freed_between_uses_is_left_out(casting):
    """Sharding (FSDP) frees the storage of layers that do not compute."""
    model, x = make_model(), torch.rand(2, 4)
    train_once(casting, model, x)
    size = model[2].weight.untyped_storage().nbytes()
    model[2].weight.untyped_storage().resize_(0)
    with casting.caches.call():
        hidden = model[1](model[0](x))
        assert model[2].weight not in cast_weights(casting)
        model[2].weight.untyped_storage().resize_(size)
        with torch.no_grad():
            model[2].weight.fill_(0.0)
            model[2].bias.fill_(1.0)
        assert torch.equal(model[2](hidden).detach().float(), torch.ones(2, 4))


def test_cast_that_fails_keeps_nothing_alive(casting):
    model, x = make_model(), torch.rand(2, 4)
    train_once(casting, model, x)
    companion = model[2].weight
    references = sys.getrefcount(companion)
    model[0].weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        model[0](x)
    assert sys.getrefcount(companion) == references
