"""After close() the model and the optimizer are as before; that torch is, conftest.py asks in every test."""

import copy

import pytest
import torch
from helpers import LEVELS, RowClassifier, backward, classify_rows, initialize_quietly, sgd, trained_params
from torch import nn

import ampkit


def make_pair():
    model = RowClassifier()
    return model, torch.optim.AdamW(trained_params(model), lr=0.01)


def attributes(model, optimizer):
    modules = {
        name: {
            key: sorted(value) if key.endswith(("_hooks", "_kwargs", "_called")) else None
            for key, value in vars(m).items()
        }
        for name, m in model.named_modules()
    }
    return modules, [type(m) for m in model.modules()], set(vars(optimizer)), type(optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_no_key_of_ours_stays_on_model_or_optimizer(level):
    model, optimizer = make_pair()
    before = attributes(model, optimizer)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert attributes(model, optimizer) != before
    classify_rows(model, optimizer, 3)
    if level == "O2":  # nor after a step that was skipped
        backward(model(torch.zeros(2, 4)).sum() * float("inf"), optimizer)
        optimizer.step()
        assert ampkit.step_was_skipped(optimizer)
    ampkit.close()
    assert attributes(model, optimizer) == before


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_are_the_same_objects_with_the_values_of_the_masters(level):
    model, optimizer = make_pair()
    objects = list(model.parameters())
    start = copy.deepcopy(model.state_dict())
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    classify_rows(model, optimizer, 3)
    masters = [p.detach().clone() for p in ampkit.master_params(optimizer)]
    saved = copy.deepcopy(model.state_dict())
    ampkit.close()
    assert all(x is y for x, y in zip(model.parameters(), objects))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    trained = [p for p in objects if p.requires_grad]
    assert all(x is y for x, y in zip(optimizer.param_groups[0]["params"], trained))
    assert all(torch.equal(p, master.float()) for p, master in zip(trained, masters))
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert not torch.equal(model.last.weight, start["last.weight"])
    for name in ("frozen.weight", "frozen.bias", "offset"):  # exact, though they were in lower precision
        rounded = start[name].bfloat16().float()
        assert torch.equal(model.state_dict()[name], rounded if level == "O3" and name != "offset" else start[name])


def test_close_twice_and_without_a_session_does_nothing():
    ampkit.close()
    model, _optimizer = ampkit.initialize(*make_pair(), opt_level="O2", verbosity=0)
    session = ampkit.current_session()
    session.close()
    weight = model.last.weight.data_ptr()
    session.close()
    ampkit.close()
    assert model.last.weight.data_ptr() == weight and not session.is_live


def test_forward_put_on_the_instance_is_given_back():
    model, optimizer = make_pair()

    def forward(x):
        return RowClassifier.forward(model, x)

    model.forward = forward
    ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0)
    classify_rows(model, optimizer, 3)
    ampkit.close()
    assert vars(model)["forward"] is forward and type(model) is RowClassifier


def test_block_made_before_close_is_refused_after_it():
    model, optimizer = initialize_quietly(nn.Linear(2, 2), sgd, "O1")
    block = ampkit.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer)
    ampkit.close()
    with pytest.raises(ampkit.NotInitializedError, match="initialize"):
        block.__enter__()
