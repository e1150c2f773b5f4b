"""Models that come in float16 or bfloat16, judged by the same model made float32 by hand before."""

import copy
import logging
import pickle
import sys
from contextlib import nullcontext

import pytest
import torch
from helpers import assert_same, backward, iterate, trained_params, values_of
from torch import nn

import ampkit
from ampkit.optimizers import FusedAdam, float32_state_dict

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
UNSTORED = ("O0", "O1", "O4", "O5")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """Two layers around a norm, a frozen layer, and a buffer that the forward replaces by a new tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.frozen, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)
        self.register_buffer("shift", torch.full((8,), 1 / 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.shift = self.shift * 1
        return self.last(self.frozen(self.norm(torch.tanh(self.first(x)))) + self.shift)


def born(dtype, norms=None):
    model = Net().to(dtype)
    if norms is not None:
        model.norm.to(norms)
    return model


def loss_of(model):
    return model(X).float().square().mean()


def train(model, optimizer, times=3):
    iterate(lambda: loss_of(model), optimizer, times)


def floating_dtypes(optimizer):
    return {
        value.dtype
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step" and value.ndim
    }


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),  # has state from its construction on
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
}


# Adagrad has state anyway; with state and without, each optimizer meets weights that are stored and weights that are not.
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "optimizer_name, with_state", [("SGD", True), ("AdamW", False), ("Adagrad", False), ("FusedAdam", True)]
)
def test_trains_as_the_same_model_made_float32_by_hand(level, optimizer_name, with_state):
    model = born(torch.bfloat16)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    if with_state:
        model(X.bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = copy.deepcopy(model).float()
    twin.load_state_dict(float32_state_dict(model, optimizer))  # with the rests that ampkit's optimizer keeps
    twins_optimizer = OPTIMIZERS[optimizer_name](twin.parameters())
    twins_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # casts state to the parameters' dtype
    results = []
    for pair in ((model, optimizer), (twin, twins_optimizer)):
        ampkit.initialize(*pair, opt_level=level, verbosity=0)
        train(*pair)
        results.append((pair[0].state_dict(), len(pair[1].state)))
    assert_same(*results)
    assert results[0][1] >= 6  # six parameters are trained


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("level", LEVELS)
def test_while_the_session_lives_values_are_float32_and_close_gives_the_dtype_back(level, dtype):
    model = born(dtype, norms=torch.float32)
    before = values_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)  # 1e-8 is 0 in float16
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) and value.dtype is not dtype, name
    train(model, optimizer)
    trained = values_of(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {p.dtype for p in twin.parameters()} == {torch.float32} and twin.shift.dtype is torch.float32
        assert_same(twin.state_dict(), trained)
    backward(loss_of(model), optimizer)
    ampkit.close()
    assert_same(model.state_dict(), {name: value.to(before[name].dtype) for name, value in trained.items()})
    for name, param in model.named_parameters():
        assert param.grad is None or param.grad.dtype is param.dtype, name
    assert floating_dtypes(optimizer) == {dtype, torch.float32}  # the norm's is float32
    model(X.to(dtype)).float().square().mean().backward()
    optimizer.step()


def test_a_second_initialize_does_not_round_what_was_learned():
    model = born(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    learned = None
    for level in ("O2", "O2", "O1", "O5", "O5", "O2"):
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
        masters = [p.detach().clone() for p in ampkit.master_params(optimizer)]
        moments = [optimizer.state[p]["exp_avg"] for p in ampkit.master_params(optimizer) if p in optimizer.state]
        if learned is not None:
            assert_same(masters, learned)
            assert {moment.dtype for moment in moments} == {torch.float32}
        train(model, optimizer)
        learned = [p.detach().clone() for p in ampkit.master_params(optimizer)]
        assert not all(torch.equal(p, p.bfloat16()) for p in learned)  # there is something to lose
    ampkit.close()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} == floating_dtypes(optimizer)


def test_a_part_that_the_next_session_leaves_out_gets_its_dtype_back():
    first, second = born(torch.bfloat16), born(torch.float16)
    ampkit.initialize([first, second], opt_level="O1", verbosity=0)
    ampkit.initialize(first, opt_level="O1", verbosity=0)
    assert {p.dtype for p in second.parameters()} == {torch.float16} and second.shift.dtype is torch.float16
    assert {p.dtype for p in first.parameters() if p.requires_grad} == {torch.float32}
    ampkit.close()
    assert {p.dtype for p in first.parameters()} == {torch.bfloat16}


def test_an_initialize_that_fails_halfway_leaves_dtypes_values_and_state(monkeypatch):
    model = born(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(X.bfloat16()).square().mean().backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    monkeypatch.setattr(sys.modules["ampkit.session"], "OptimizerWrapper", lambda *_: 1 / 0)
    for level in ("O1", "O2", "O5"):
        with pytest.raises(ZeroDivisionError):
            ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert_same((model.state_dict(), optimizer.state_dict()["state"]), before)
        assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize(
    "level, number, words",
    (
        ("O1", 7, "they are float32"),  # the frozen layer stays
        ("O5", 7, "they are float32"),
        ("O2", 9, "they train in float32"),
        ("O3", 9, "they train in torch.bfloat16"),
    ),
)
def test_one_line_says_so(level, number, words, caplog):
    caplog.set_level(logging.INFO, logger="ampkit")
    ampkit.initialize(born(torch.bfloat16), opt_level=level)
    lines = [record.getMessage() for record in caplog.records if "came in" in record.getMessage()]
    assert len(lines) == 1 and words in lines[0] and f"{number} tensors of the Net came in torch.bfloat16" in lines[0]
    caplog.clear()
    ampkit.initialize(Net(), opt_level=level)
    assert "came in" not in caplog.text


@pytest.mark.parametrize(
    "level, dtype, make",
    [
        *((level, torch.bfloat16, torch.optim.AdamW) for level in ("O1", "O2", "O4", "O5")),
        ("O2", torch.float16, FusedAdam),
        ("O2", torch.bfloat16, lambda params: torch.optim.SGD(params, momentum=0.9, lr=0.1)),
    ],
)
def test_a_checkpoint_goes_on_bit_for_bit_loaded_after_initialize_and_a_warning_says_so_before(
    make, level, dtype, caplog
):
    def begun():
        model = born(dtype)
        return model, make(trained_params(model))

    def load():
        for one, state in zip((model, optimizer), saved):
            one.load_state_dict(state)

    model, optimizer = ampkit.initialize(*begun(), opt_level=level, verbosity=0)
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer)
    whole = copy.deepcopy(model.state_dict())
    ampkit.close()
    assert "has state already" not in caplog.text

    model, optimizer = begun()
    load()
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert caplog.text.count("has state already") == 1 and "call load_state_dict() of model and" in caplog.text
    load()
    train(model, optimizer)
    assert_same(model.state_dict(), whole)


def with_int8_weight(model):
    model.last.weight = nn.Parameter(torch.ones(3, 8, dtype=torch.int8), requires_grad=False)
    return model


def mixed_buffer():
    model = born(torch.bfloat16)
    model.shift = model.shift.half()
    return model


UNFIT = {
    "two lower precisions": (
        lambda: born(torch.bfloat16, norms=torch.float16),
        ("'first.weight'", "torch.bfloat16", "'norm.weight'", "torch.float16", "model.float()"),
    ),
    "a buffer in another one": (mixed_buffer, ("Buffer 'shift'", "torch.float16", "torch.bfloat16")),
    "an int8 weight": (lambda: with_int8_weight(born(torch.bfloat16)), ("'last.weight'", "torch.int8", "quantised")),
    "an int8 weight in float32": (lambda: with_int8_weight(Net()), ("'last.weight'", "torch.int8", "quantised")),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("level", ("O0", "O1", "O2", "O3", "O5"))
@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_made_float32_is_refused_by_name(case, level):
    """At levels that store nothing in lower precision, only trained parameters are refused."""
    make, words = UNFIT[case]
    if level in UNSTORED:
        ampkit.initialize(make(), opt_level=level, verbosity=0)
        return
    model = make()
    before = [(p.dtype, p.data_ptr()) for p in model.parameters()]
    with pytest.raises(ampkit.ConfigurationError) as caught:
        ampkit.initialize(model, opt_level=level, verbosity=0)
    assert all(word in str(caught.value) for word in words), caught.value
    assert [(p.dtype, p.data_ptr()) for p in model.parameters()] == before


@pytest.mark.parametrize("alone", [True, False], ids=["without an optimizer", "with one"])
@pytest.mark.parametrize(
    "make, dtype",
    [(Net, torch.int64), (lambda: born(torch.float16), torch.bool), (lambda: born(torch.bfloat16), torch.int32)],
)
@pytest.mark.parametrize("level", ("O1", "O2", "O3"))
def test_a_table_of_integers_is_left_alone(level, make, dtype, alone):
    model, values = make(), torch.arange(3).to(dtype)
    model.table = table = nn.Parameter(values.clone(), requires_grad=False)
    before = {p.dtype for p in model.parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.is_floating_point()], lr=0.1)
    ampkit.initialize(model, None if alone else optimizer, opt_level=level, verbosity=0)
    if not alone:
        train(model, optimizer)
    assert model.table is table and torch.equal(table, values) and table.dtype is dtype
    assert torch.equal(model.state_dict()["table"], values)
    ampkit.close()
    assert torch.equal(model.table, values) and {p.dtype for p in model.parameters()} == before


# -- where calls are cast, what no optimizer holds stays as it came, but at O3


class Adapted(nn.Module):
    """A frozen base, batch norm over it, and a layer that is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.base(x.to(self.base.weight.dtype)).float()))


@pytest.mark.parametrize("level", ("O1", "O2", "O4", "O5"))
def test_frozen_parameters_stay_as_they_came(level):
    model = Adapted().bfloat16()
    frozen = model.base.weight.detach().clone()
    ampkit.initialize(model, torch.optim.SGD(trained_params(model), lr=0.1), opt_level=level, verbosity=0)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    dtypes = {name: value.dtype for name, value in tensors.items() if value.is_floating_point()}
    lower = {name for name, dtype in dtypes.items() if dtype is torch.bfloat16}
    stored = {"head.weight", "head.bias"} if level == "O2" else set()
    assert lower == {"base.weight", "base.bias"} | stored and set(dtypes.values()) == {torch.bfloat16, torch.float32}
    ampkit.close()
    assert torch.equal(model.base.weight, frozen) and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.norm.running_mean.dtype is torch.bfloat16


@pytest.mark.parametrize("level", ("O1", "O2", "O4", "O5"))
def test_model_that_no_optimizer_trains_stays_as_it_came(level):
    policy, reference = Net(), Net().bfloat16().requires_grad_(False)
    ampkit.initialize([policy, reference], torch.optim.SGD(policy.parameters(), lr=0.1), opt_level=level, verbosity=0)
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16} == {reference.shift.dtype}


@pytest.mark.parametrize("level", ("O1", "O2", "O4", "O5"))
def test_frozen_parameters_train_in_float32_when_an_optimizer_gets_them(level):
    weights = {}
    for born_in in (torch.bfloat16, torch.float32):
        model = Adapted().bfloat16().to(born_in)
        optimizer = torch.optim.AdamW(trained_params(model), lr=0.01)
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
        train(model, optimizer, times=1)
        model.base.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.base.parameters()), "lr": 1e-4})
        assert {p.dtype for p in model.base.parameters()} == {torch.float32}
        train(model, optimizer)
        weights[born_in] = model.state_dict()["base.weight"].clone()
        ampkit.close()
        assert {p.dtype for p in model.base.parameters()} == {born_in}
    before = Adapted().base.weight.bfloat16().float()
    moved = (weights[torch.float32] - before).norm()
    assert moved > 0
    # The base computes in its own precision before it is trained; three steps at 1e-4 would be lost in bfloat16.
    assert (weights[torch.bfloat16] - weights[torch.float32]).norm() < 0.2 * moved


@pytest.mark.parametrize("level", ("O1", "O2", "O4", "O5"))
def test_running_statistics_are_float32_from_when_an_optimizer_gets_their_norm(level):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).requires_grad_(False)).bfloat16()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    dtypes = [model[1].running_mean.dtype]
    optimizer.add_param_group({"params": list(model[1].requires_grad_(True).parameters())})
    model(torch.randn(4, 3)).float().sum().backward()
    dtypes.append(model[1].running_mean.dtype)
    ampkit.close()
    assert [*dtypes, model[1].running_mean.dtype] == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("held", (False, True), ids=("not trained", "trained"))
@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.float8_e4m3fn))
@pytest.mark.parametrize("level", LEVELS)
def test_frozen_weights_of_one_byte_train_adapters_but_at_o3_and_not_in_an_optimizer(level, dtype, held):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    codes = nn.Parameter(torch.ones(3, 3).to(dtype), requires_grad=False)
    model.register_parameter("codes", codes)
    optimizer = torch.optim.SGD([p for p in model.parameters() if held or p is not codes], lr=0.1)
    words = "Parameter 'codes' is" if held else "every level but O3 then leaves such weights as they are"
    refused = pytest.raises(ampkit.ConfigurationError, match=words)
    with refused if held or level == "O3" else nullcontext():
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.codes is codes and codes.dtype is dtype
