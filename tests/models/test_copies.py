"""Copies of initialized models: deepcopy, pickle, torch.save. Those that share weights are in test_keep_fp32.py."""

import copy
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.multiprocessing  # registers how tensors travel
from helpers import (
    ROWS as X,
)
from helpers import (
    RowClassifier,
    assert_same,
    classify_rows,
    initialize_quietly,
    iterate_in_torch,
    others_slow,
    saved_and_loaded,
    sgd,
    trained_params,
    values_of,
)
from torch import nn
from torch.nn import functional as F

import ampkit

LEVELS = ("O0", "O1", "O2", "O3", "O5")


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def trained_a_little(level):
    model = RowClassifier()
    optimizer = torch.optim.AdamW(trained_params(model), lr=0.02)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    classify_rows(model, optimizer, 2)
    return model, optimizer


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: saved_and_loaded(model, weights_only=False),
}


def assert_plain(module):
    """Assert that every part has its own class, one float32 parameter for a weight, and nothing of ampkit's on it."""
    for part in module.modules():
        for thing in (
            type(part),
            *vars(part),
            *(h for k, hs in vars(part).items() if k.endswith("_hooks") for h in hs.values()),
        ):
            assert "ampkit" not in f"{thing} {getattr(thing, '__module__', '')}" and "__deepcopy__" not in vars(part)
        assert not any("ampkit" in repr(base) for base in type(part).__mro__)
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert {t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()} == {torch.float32}


def in_float32(model):
    """Return the model as it is without ampkit: its class, the float32 weights of its state_dict(), its mode."""
    plain = RowClassifier().train(model.training)
    plain.load_state_dict(model.state_dict())
    plain.frozen.requires_grad_(False)
    return plain


@pytest.fixture(params=COPIES)
def copied(request):
    return COPIES[request.param]


#: A copy holds values and no level: each level is copied in one way, and one level in all ways.
ONE_WAY = [("deepcopy", level) for level in LEVELS]
EACH_LEVEL = pytest.mark.parametrize(
    "copied, level", [*ONE_WAY, ("pickle", "O2"), ("torch.save", "O2"), ("pickle", "O1")], indirect=["copied"]
)


@EACH_LEVEL
def test_copy_is_a_plain_float32_module_of_its_own_class(copied, level):
    model, _ = trained_a_little(level)
    model.first.requires_grad_(False), model.frozen.requires_grad_(True)  # the flags of the moment are copied
    twin = copied(model)
    assert_same(twin.state_dict(), values_of(model))
    assert_plain(twin)
    assert type(twin) is RowClassifier and repr(twin) == repr(model)
    plain = in_float32(model)
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    # At O1 torch's functions cast in both.
    assert torch.equal(twin(X), plain(X)) and torch.equal(twin.forward(X), plain.forward(X))
    model.eval(), twin.eval()
    torch.testing.assert_close(twin(X).float(), model(X).float(), atol=0.02, rtol=0.02)


def train_plainly(model, optimizer, times=3):
    return [classify_rows(model, optimizer, run=iterate_in_torch) for _ in range(times)]


@EACH_LEVEL
def test_copy_trains_with_a_plain_optimizer_and_shares_nothing_with_its_original(copied, level):
    model, optimizer = trained_a_little(level)
    twin, plain = copied(model), in_float32(model)
    before = values_of(twin)
    classify_rows(model, optimizer, 2)
    assert_same(twin.state_dict(), before)
    original = values_of(model)
    losses = [train_plainly(net, sgd(trained_params(net), lr=0.5), times=4) for net in (twin, plain)]
    assert losses[0][-1] < losses[0][0] and losses[0] == losses[1]
    assert torch.equal(twin.average, plain.average) and twin.average.any()
    assert_same(model.state_dict(), original)
    model.eval()(X)
    assert_same(model.state_dict(), original)


@pytest.mark.parametrize(
    "level, second",
    [*((level, "O2") for level in LEVELS), *(("O2", level) for level in ("O0", "O1", "O3", "O5")), ("O1", "O5")],
)
def test_copy_can_be_initialized(level, second):
    twin = copy.deepcopy(trained_a_little(level)[0])
    start = values_of(twin)
    optimizer = sgd(trained_params(twin))
    ampkit.initialize(twin, optimizer, opt_level=second, verbosity=0)
    if second != "O3":  # whose weights are rounded
        assert_same(values_of(twin), start)
    assert twin.first.weight.dtype is (torch.bfloat16 if second in ("O2", "O3") else torch.float32)
    classify_rows(twin, optimizer)
    trained = values_of(twin)
    assert not torch.equal(trained["first.weight"], start["first.weight"])
    ampkit.close()
    torch.testing.assert_close(twin.state_dict(), trained, rtol=0, atol=0, check_dtype=False)
    assert {p.dtype for p in twin.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "copied, level, order",
    [
        *((*row, "model first") for row in ONE_WAY if "O3" not in row),
        ("pickle", "O2", "optimizer first"),
        ("torch.save", "O1", "model first"),
    ],
    indirect=["copied"],
)
def test_model_and_optimizer_copied_together_train_together(copied, level, order):
    model, optimizer = trained_a_little(level)
    if order == "model first":
        twin, twin_optimizer = copied((model, optimizer))
    else:
        twin_optimizer, twin = copied((optimizer, model))
    assert twin_optimizer.step.__func__ is type(optimizer).step and "_ampkit" not in vars(twin_optimizer)
    held = {p for group in twin_optimizer.param_groups for p in group["params"]}
    assert held == set(trained_params(twin))
    # The result of torch without ampkit from the same weights and moments.
    plain = in_float32(model)
    plain_optimizer = type(optimizer)(trained_params(plain), lr=0.02)
    plain_optimizer.load_state_dict(copy.deepcopy(twin_optimizer.state_dict()))
    original = values_of(model)
    ampkit.close()
    train_plainly(twin, twin_optimizer)
    train_plainly(plain, plain_optimizer)
    assert_same(twin.state_dict(), plain.state_dict())
    assert not torch.equal(twin.first.weight, original["first.weight"])
    assert_same(model.state_dict(), original)


def test_parameters_copied_before_their_model_are_those_of_its_copy(level):
    model, _ = trained_a_little(level)
    expected = in_float32(model).state_dict()
    params, twin = copy.deepcopy((list(model.parameters()), model))
    assert all(one is other for one, other in zip(params, twin.parameters()))
    assert_same(twin.state_dict(), expected)


@pytest.mark.parametrize("trained", (True, False), ids=("trained", "frozen"))
def test_tied_weights_of_a_copy_are_tied(copied, trained):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model.requires_grad_(trained)
    ampkit.initialize(model, sgd(model.parameters()) if trained else None, opt_level="O2", verbosity=0)
    for part in (copied(model), copied(nn.ModuleList([model[1], model[0]]))):
        assert len(list(part.parameters())) == 1 and next(part.parameters()).requires_grad is trained
        assert_plain(part)


@pytest.mark.parametrize("level", ("O2", "O3"))
def test_weight_that_was_removed_is_missing_in_copies(copied, level):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    ampkit.initialize(model, sgd(model.parameters()), opt_level=level, verbosity=0)
    model[1].bias = None
    twin = copied(model)
    assert twin[1].bias is None and set(twin.state_dict()) == {"0.weight", "0.bias", "1.weight"}
    expected = F.linear(F.linear(X, twin[0].weight, twin[0].bias), twin[1].weight)
    assert torch.equal(twin(X), expected)
    torch.testing.assert_close(model(X), expected, atol=0.02, rtol=0.02)
    ampkit.close()
    assert model[1].bias is None and {p.dtype for p in model.parameters()} == {torch.float32}


class Careful(RowClassifier):
    """A model that copies itself its own way, and leaves out what it does not know."""

    def __deepcopy__(self, memo=None):
        memo = {} if memo is None else memo
        twin = RowClassifier.__new__(type(self))
        memo[id(self)] = twin
        nn.Module.__init__(twin)
        for name in ("_modules", "_parameters", "_buffers", "training"):
            twin.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return twin


@pytest.mark.parametrize("kind", ("own __deepcopy__", "torch.fx"))
def test_model_with_a_deepcopy_of_its_own_is_copied_by_it(level, kind):
    small = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    model = torch.fx.symbolic_trace(small) if kind == "torch.fx" else Careful()
    model, optimizer = initialize_quietly(model, sgd, level)
    classify_rows(model, optimizer)
    twin = copy.deepcopy(model.eval())
    assert type(twin) is not type(model) or kind != "torch.fx"  # each graph has a class of its own
    memo = {}
    copies = [twin, model.__deepcopy__(memo=memo), *([model.__deepcopy__()] if kind != "torch.fx" else [])]
    assert memo
    for each in copies:
        assert_same(each.state_dict(), values_of(model))
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    torch.testing.assert_close(twin(X).float(), model(X).float(), atol=0.02, rtol=0.02)
    before = values_of(twin)
    classify_rows(model, optimizer)
    assert_same(twin.state_dict(), before)


# torch.load where there is no ampkit


@pytest.mark.parametrize("level", others_slow("O2", of=("O1", "O1 in forward", "O2", "O5")))
def test_saved_model_and_optimizer_load_without_ampkit(tmp_path, level):
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scope = {"scope": "forward"} if "forward" in level else {}
    ampkit.initialize(model, optimizer, opt_level=level[:2], keep_fp32="2", verbosity=0, **scope)
    classify_rows(model, optimizer, 2)
    torch.save((model, optimizer), tmp_path / "pair.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    script = f"""
        import sys
        sys.modules["ampkit"] = None
        import torch
        model, optimizer = torch.load({str(tmp_path / "pair.pt")!r}, weights_only=False)
        state = torch.load({str(tmp_path / "state.pt")!r}, weights_only=True)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
        assert type(model) is torch.nn.Sequential and [type(m) for m in model][:2] == [torch.nn.Linear, torch.nn.LayerNorm]
        x = torch.linspace(-1, 1, 12).reshape(3, 4)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0])))
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0]
        print(losses[0].dtype, "trains")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True
    )
    assert run.stdout == "torch.float32 trains\n", run.stderr
