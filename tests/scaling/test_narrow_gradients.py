"""At O5 the gradient of a large matrix is bfloat16 until a script reads it; torch.autocast on the same passes is the reference."""

import contextlib
import copy
import functools
import gc
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import backward, in_threads, initialize_quietly
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.casting.narrow_gradients import stored_gradient
from ampkit.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.compiled("wrappers")

NARROW, WIDE = torch.bfloat16, torch.float32


class Net(nn.Module):
    """A model with two matrices of 8,192 elements and one of 64; the gradient of each is a single product in bfloat16."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        self.small = nn.Linear(64, 1, bias=False)

    checkpoints = None  # use_reentrant of one around the first layer

    def forward(self, x):
        if self.checkpoints is None:
            x = self.first(x)
        else:
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.checkpoints)
        return self.small(torch.relu(self.second(torch.relu(x))))


class Script:
    """The training of a row: the model, inputs, and calls of the model, each in a region of its own under torch.autocast."""

    def __init__(self, level):
        torch.manual_seed(0)
        self.model, self.level = Net(), level
        self.weight = self.model.first.weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inputs = torch.randn(4, 16, 64)
        if level is not None:
            ampkit.initialize(self.model, self.optimizer, opt_level=level, verbosity=0)

    def loss(self, batch=0):
        with torch.autocast("cpu", torch.bfloat16) if self.level is None else contextlib.nullcontext():
            return self.model(self.inputs[batch]).float().square().sum()

    def penalty(self):
        return 1e-3 * self.weight.square().sum()


def once(script, batch=0):
    script.loss(batch).backward()


def in_a_block(script, batch=0):
    if script.level is None:
        script.loss(batch).backward()
    else:
        backward(script.loss(batch), script.optimizer)


def in_a_checkpoint(script, use_reentrant):
    script.model.checkpoints = use_reentrant
    once(script)


def between(*lines):
    """Return a script that runs ``lines`` between two backward passes."""
    return lambda script: (once(script, 0), *(line(script) for line in lines), once(script, 1))


def a_penalty(script):
    script.penalty().backward()


def a_hook(script):
    script.weight.register_hook(lambda gradient: gradient).remove()


def read(script):
    assert script.weight.grad.dtype is torch.float32


def with_an_alias_that_is_kept(script):
    once(script, 0)
    alias = script.weight.grad
    once(script, 1)
    assert script.weight.grad is alias


def one_graph_twice(script, between=lambda weight: None):
    loss = script.loss()
    loss.backward(retain_graph=True)
    between(script.weight)
    loss.backward()


def with_a_hook_after_accumulation(script):
    dtypes = []
    script.weight.register_post_accumulate_grad_hook(lambda weight: dtypes.append(weight.grad.dtype))
    once(script)
    assert dtypes == [torch.float32]


def by_autograd_grad(script):
    (gradient,) = torch.autograd.grad(script.loss(), [script.weight])
    assert gradient.dtype is torch.float32
    script.weight.grad = gradient


def that_may_be_differentiated(script):
    script.loss().backward(create_graph=True)
    for param in script.model.parameters():
        param.grad = param.grad.detach()


def frozen_after_the_forward(script):
    loss = script.loss()
    script.weight.requires_grad_(False)
    loss.backward()
    assert script.weight.grad is None
    script.weight.requires_grad_(True)
    once(script)


def read_in_inference_mode(script):
    with torch.inference_mode():
        assert script.weight.grad.norm() > 0


PASSES = {
    "one": (once, NARROW),
    "in a block": (in_a_block, NARROW),
    "in a checkpoint": (lambda script: in_a_checkpoint(script, use_reentrant=False), NARROW),
    "in a reentrant checkpoint": (lambda script: in_a_checkpoint(script, use_reentrant=True), NARROW),
    "frozen after the forward": (frozen_after_the_forward, NARROW),
    "two": (between(), WIDE),
    "four blocks": (lambda script: [in_a_block(script, batch) for batch in range(4)], WIDE),
    "two calls of one loss": (lambda script: (script.loss(0) + script.loss(1)).backward(), WIDE),
    "one graph twice": (one_graph_twice, WIDE),
    "one graph twice, with a hook from the second on": (
        lambda script: one_graph_twice(script, lambda weight: weight.register_hook(lambda gradient: 1e-3 * gradient)),
        WIDE,
    ),
    "with a penalty": (lambda script: (script.loss() + script.penalty()).backward(), WIDE),
    "a penalty later": (lambda script: (once(script), a_penalty(script)), WIDE),
    "a penalty before": (lambda script: (a_penalty(script), once(script)), WIDE),
    "read in between": (between(read), WIDE),
    "read in inference mode": (between(read_in_inference_mode), WIDE),
    "with an alias that is kept": (with_an_alias_that_is_kept, WIDE),
    "with a hook": (
        lambda script: (script.weight.register_hook(lambda gradient: gradient * torch.ones(128, 64)), once(script)),
        WIDE,
    ),
    "after a hook": (lambda script: (a_hook(script), once(script)), NARROW),
    "a hook between two passes": (between(a_hook, a_penalty), WIDE),
    "with a hook after accumulation": (with_a_hook_after_accumulation, WIDE),
    "after a hook after accumulation": (
        lambda script: (script.weight.register_post_accumulate_grad_hook(lambda _: None).remove(), once(script)),
        NARROW,
    ),
    "of some inputs": (lambda script: script.loss().backward(inputs=[script.weight]), WIDE),
    "by autograd.grad": (by_autograd_grad, WIDE),
    "that may be differentiated": (that_may_be_differentiated, WIDE),
    "after zero_grad": (between(lambda script: script.optimizer.zero_grad()), NARROW),
    "after zeros": (between(lambda script: script.optimizer.zero_grad(set_to_none=False)), WIDE),
    "in a thread": (lambda script: in_threads(lambda: once(script)), NARROW),
}


@pytest.mark.parametrize("name", PASSES)
def test_gradients_are_those_of_torch_autocast_in_the_precision_that_the_row_says(name):
    (passes, dtype), by_autocast, by_ampkit = PASSES[name], Script(None), Script("O5")
    passes(by_autocast)
    passes(by_ampkit)
    assert stored_gradient(by_ampkit.weight).dtype is dtype
    if by_ampkit.model.small.weight.grad is not None:
        assert stored_gradient(by_ampkit.model.small.weight).dtype is torch.float32
    for param, exact in zip(by_ampkit.model.parameters(), by_autocast.model.parameters(), strict=True):
        if exact.grad is None:
            assert param.grad is None
        else:
            assert param.grad.dtype is torch.float32
            # Sums are made in another order: float32's rounding of the largest element.
            torch.testing.assert_close(param.grad, exact.grad, rtol=0, atol=4e-7 * exact.grad.abs().max().item())


# Rows of 64 numbers: from 1,024 rows on gradients are narrow, and the rows that were used are summed up alone.
of_both_sizes = pytest.mark.parametrize("rows", [300, 1100], ids=["float32", "narrow"])


def initialized(model, level="O5", lr=0.1, **settings):
    return initialize_quietly(model, lambda p: torch.optim.SGD(p, lr=lr), level, **settings)


def stored_in(*layers):
    return [stored_gradient(layer.weight).dtype for layer in layers]


class Tied(nn.Module):
    """A model with a table that has its padding in row 3, and a head, which may be the table."""

    def __init__(self, tied, rows):
        super().__init__()
        self.table = nn.Embedding(rows, 64, padding_idx=3)
        self.head = nn.Linear(64, rows, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words):
        return self.head(torch.tanh(self.table(words)))


@of_both_sizes
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_tables_gradient_is_summed_up_by_rows_in_float32_and_rounded_once(tied, batches, rows):
    """Row 7 is used 1,000 times: a sum in bfloat16 would stop at 256 times one gradient."""
    words = torch.full((batches, 10, 100), 7)
    words[:, :, 0] = 3
    tables = []
    for level in (None, "O5"):
        torch.manual_seed(0)
        model = Tied(tied, rows)
        if level is not None:
            model, _optimizer = initialized(model)
        for batch in words:
            with torch.autocast("cpu", torch.bfloat16) if level is None else contextlib.nullcontext():
                logits = model(batch).float()
            F.cross_entropy(logits.flatten(0, 1), (batch.flatten() + 1)).backward()
        tables.append(model.table.weight)
    exact, table = tables
    assert stored_gradient(table).dtype is (NARROW if batches == 1 and rows > 1024 else WIDE)
    error = (table.grad - exact.grad).abs()
    rounding = 2.0**-7 if tied else 2.0**-8  # one; tied, the head's and one more
    assert (error <= rounding * exact.grad.abs() + 1e-9).all()
    if not tied:
        assert torch.equal(table.grad[3], torch.zeros(64))


@of_both_sizes
def test_a_table_that_is_used_many_times_in_a_pass_has_a_float32_sum(rows):
    """A decoder looks its last word up in every step: sums in bfloat16 stop at 256 times a summand."""
    table, _optimizer = initialized(nn.Embedding(rows, 64))
    sum(table(torch.tensor([3])).sum() for _ in range(1000)).backward()
    assert table.weight.grad[3, 0] == 1000.0 and table.weight.grad[4, 0] == 0.0


@of_both_sizes
@pytest.mark.parametrize(
    ("settings", "dtype", "stored", "twice"),
    [
        ({}, torch.int32, NARROW, 2.0),
        ({"sparse": True}, torch.int64, WIDE, 2.0),
        ({"scale_grad_by_freq": True}, torch.int64, WIDE, 1.0),
    ],
    ids=["indices of 32 bits", "sparse", "by frequency"],
)
def test_a_tables_gradient_is_what_its_settings_say(settings, dtype, stored, twice, rows):
    table, _optimizer = initialized(nn.Embedding(rows, 64, **settings))
    table(torch.tensor([1, 1, 7], dtype=dtype)).sum().backward()
    assert stored_gradient(table.weight).dtype is (stored if rows > 1024 else WIDE)
    assert table.weight.grad.is_sparse is settings.get("sparse", False)
    assert table.weight.grad.to_dense()[:, 0].tolist() == [{1: twice, 7: 1.0}.get(row, 0.0) for row in range(rows)]


@pytest.mark.parametrize("closes", [True, False])
def test_weights_whose_optimizer_is_gone_are_torchs_own_after_the_session(closes):
    script = Script("O5")
    once(script)
    weight = script.weight
    if closes:
        script.optimizer = None
        gc.collect()
        ampkit.close()
    else:
        del script
        gc.collect()
    assert ampkit.current_session() is None
    assert stored_gradient(weight).dtype is torch.float32 and weight.grad_dtype is torch.float32
    torch.optim.AdamW([weight]).step()


@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, torch.optim.SGD, FusedAdam, functools.partial(FusedSGD, set_grad_none=True)],
    ids=["AdamW", "SGD", "FusedAdam", "FusedSGD"],
)
def test_a_step_reads_narrow_gradients_as_they_are_and_moves_weights_as_with_float32_ones(make):
    weights = []
    for reads in (False, True):
        torch.manual_seed(0)
        model, optimizer = initialize_quietly(Net(), lambda p: make(p, lr=0.1), "O5")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 64)).float().square().mean().backward()
            if reads:
                assert model.first.weight.grad.dtype is torch.float32
            optimizer.step()
            assert stored_gradient(model.first.weight).dtype is (WIDE if reads else NARROW)
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("clip", ["ampkit", "torch"])
def test_clipping_measures_in_float32_and_leaves_gradients_narrow(clip):
    script = Script("O5")
    once(script)
    exact = torch.cat([stored_gradient(param).double().flatten() for param in script.model.parameters()]).norm()
    if clip == "ampkit":
        norm = ampkit.clip_grad_norm_(script.optimizer, 1.0)
    else:
        norm = torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
    assert norm.dtype is torch.float32 and norm.item() == pytest.approx(exact.item(), rel=1e-5)
    assert stored_gradient(script.weight).dtype is NARROW
    clipped = torch.cat([param.grad.double().flatten() for param in script.model.parameters()]).norm()
    assert clipped.item() == pytest.approx(1.0, abs=2.0**-9)


def test_clipping_by_the_largest_element_is_torchs():
    script = Script("O5")
    once(script)
    largest = max(stored_gradient(param).abs().max().item() for param in script.model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(script.model.parameters(), largest / 4, norm_type=float("inf"))
    assert norm.item() == largest
    clipped = max(param.grad.abs().max().item() for param in script.model.parameters())
    assert clipped == pytest.approx(largest / 4, rel=2.0**-8)


def test_hooks_of_a_step_read_float32():
    script, seen = Script("O5"), []
    for register in (script.optimizer.register_step_pre_hook, script.optimizer.register_step_post_hook):
        register(lambda *_: seen.append(script.weight.grad.dtype))
    once(script)
    script.optimizer.step()
    assert seen == [WIDE, WIDE]


def test_an_optimizer_that_was_not_initialized_steps_over_float32_gradients():
    script = Script("O5")
    other = torch.optim.AdamW(script.model.parameters(), lr=0.1, fused=True)
    once(script)
    other.step()
    assert stored_gradient(script.weight).dtype is WIDE


def test_threads_may_read_a_gradient_at_once(threads_take_turns_often):
    """With the graph gone torch has no lock for a weight: a reader must not replace the gradient that another reader uses."""
    script = Script("O5")

    def make():
        script.optimizer.zero_grad()
        in_a_block(script)

    def read():
        for _ in range(200):
            barrier.wait()
            assert all(param.grad.dtype is torch.float32 for param in script.model.parameters())

    barrier = threading.Barrier(4, action=make, timeout=60)
    in_threads(*[read] * 4)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gradient_of_another_dtype_may_be_assigned_at_every_level(level, dtype):
    """1.5 is exact in every dtype; at O2 a weight in lower precision may have a float32 gradient."""
    model, optimizer = initialized(Net(), level, lr=1.0)
    weight, gradient = model.first.weight, torch.full((128, 64), 1.5, dtype=dtype)
    before = model.state_dict()["first.weight"].clone()
    if dtype is torch.float64 and level == "O2":
        with pytest.raises(RuntimeError):
            weight.grad = gradient
        return
    weight.grad = gradient
    assert weight.grad[0, 0] == 1.5 and weight.grad.dtype is (dtype if level == "O2" else torch.float32)
    optimizer.step()
    torch.testing.assert_close(model.state_dict()["first.weight"], before - 1.5, rtol=0, atol=2.0**-15)


def test_a_hook_may_return_float32_for_a_stored_weight():
    """A mask of zeros and ones is exact in every dtype."""
    model, optimizer = initialized(Net(), "O2")
    mask = torch.zeros(128, 64).index_fill_(0, torch.arange(64), 1.0)
    handle = model.first.weight.register_hook(lambda gradient: gradient * mask)
    backward(model(torch.ones(4, 64)).sum(), optimizer)
    handle.remove()
    rows = model.first.weight.grad.abs().sum(1) > 0
    assert rows[:64].any() and not rows[64:].any()


def test_close_makes_gradients_float32_and_later_ones_are_torchs():
    script = Script("O5")
    once(script)
    weight = script.weight
    expected = stored_gradient(weight).float()
    ampkit.close()
    assert "grad" not in vars(torch.Tensor) and "_grad" not in vars(torch.Tensor)
    assert torch.equal(weight.grad, expected) and weight.grad.dtype is torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        weight.grad = torch.zeros(128, 64, dtype=torch.bfloat16)


def test_a_copy_has_float32_gradients():
    script = Script("O5")
    once(script)
    twin = copy.deepcopy(script.model)
    twin(script.inputs[0]).sum().backward()
    assert stored_in(twin.first) == [WIDE]


def test_parameters_that_an_optimizer_gets_later_have_narrow_gradients_and_those_of_none_have_float32_ones():
    model, x = Net(), torch.ones(4, 64)
    optimizer = torch.optim.SGD([model.second.weight], lr=0.1)
    ampkit.initialize(model, optimizer, opt_level="O5", verbosity=0)
    model(x).sum().backward()
    assert stored_in(model.first, model.second) == [WIDE, NARROW]
    optimizer.add_param_group({"params": [model.first.weight]})
    optimizer.zero_grad()
    model(x).sum().backward()
    assert stored_in(model.first, model.second) == [NARROW, NARROW]


def test_at_a_loss_scale_gradients_are_float32():
    model, optimizer = initialized(Net(), loss_scale=128.0)
    backward(model(torch.ones(4, 64)).sum(), optimizer)
    assert stored_in(model.first) == [WIDE]


# way: (whether gradients are added, where they are cleared, whether it is reported, times that they count in three blocks)
WRITES = {
    "assigned": (False, None, True, 3),
    "added by hand": (True, None, True, 3),
    "assigned after zero_grad": (False, "before the block", False, 1),
    "assigned over zeros": (False, "in the block", False, 1),
}


def thrice_by_hand(model, optimizer, adds=False, clears=None):
    """Run three blocks that write the gradient of the weight themselves."""
    weight = model.weight
    for _ in range(3):
        if clears == "before the block":
            optimizer.zero_grad()
        with ampkit.scale_loss(model(torch.tensor([[1.0, 2.0]])).sum(), optimizer) as scaled:
            if clears == "in the block":
                model.zero_grad(set_to_none=False)
            (gradient,) = torch.autograd.grad(scaled, [weight])
            weight.grad = gradient if weight.grad is None or not adds else weight.grad + gradient


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("way", WRITES)
def test_gradients_that_are_assigned_inside_of_a_block_are_told_of_where_earlier_ones_come_back(way, level):
    adds, clears, is_told, times = WRITES[way]
    model, optimizer = initialized(nn.Linear(2, 1, bias=False), level, lr=0.0, loss_scale=128.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thrice_by_hand(model, optimizer, adds, clears)
    assert model.weight.grad.tolist() == [[times * 1.0, times * 2.0]]
    told = [one for one in caught if "set the gradients of earlier passes aside" in str(one.message)]
    assert bool(told) is is_told and {one.filename for one in told} <= {__file__}


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_gradients_that_are_assigned_at_loss_scale_1_replace_those_before(level):
    model, optimizer = initialized(nn.Linear(2, 1, bias=False), level, lr=0.0)
    thrice_by_hand(model, optimizer)
    assert model.weight.grad.tolist() == [[1.0, 2.0]]
