"""After close() the model and the optimizer are as before; that torch is, conftest.py asks in every test."""

import copy

import pytest
import torch
from helpers import LEVELS, backward, initialize_quietly, iterate, sgd
from torch import nn

import ampkit


class TokenClassifier(nn.Module):
    """A model with a bit of everything that initialize treats in its own way."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.batch_norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7)
        self.register_buffer("offset", torch.full((7,), 0.1))

    def forward(self, tokens):
        hidden, _ = self.rnn(self.norm(self.embed(tokens)))
        return self.head(self.frozen(self.batch_norm(hidden[:, -1]))) + self.offset


def make_pair():
    model = TokenClassifier()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def classify_tokens(model, optimizer):
    """Run three iterations on four sequences."""
    tokens, labels = torch.arange(12).reshape(4, 3) % 7, torch.arange(4)
    iterate(lambda: nn.functional.cross_entropy(model(tokens).float(), labels), optimizer, times=3)


def attributes(model, optimizer):
    """Keys of every module's __dict__ and of its hook dicts, and of the optimizer."""
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
    classify_tokens(model, optimizer)
    if level == "O2":  # nor after a step that was skipped
        backward(model(torch.zeros(2, 3, dtype=torch.long)).sum() * float("inf"), optimizer)
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
    classify_tokens(model, optimizer)
    masters = [p.detach().clone() for p in ampkit.master_params(optimizer)]
    saved = copy.deepcopy(model.state_dict())
    ampkit.close()
    assert all(x is y for x, y in zip(model.parameters(), objects))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    trained = [p for p in objects if p.requires_grad]
    assert all(x is y for x, y in zip(optimizer.param_groups[0]["params"], trained))
    assert all(torch.equal(p, master.float()) for p, master in zip(trained, masters))
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert not torch.equal(model.head.weight, start["head.weight"])
    for name in ("frozen.weight", "frozen.bias", "offset"):  # exact, though they were in lower precision
        rounded = start[name].bfloat16().float()
        assert torch.equal(model.state_dict()[name], rounded if level == "O3" and name != "offset" else start[name])


def test_close_twice_and_without_a_session_does_nothing():
    ampkit.close()
    model, _optimizer = ampkit.initialize(*make_pair(), opt_level="O2", verbosity=0)
    session = ampkit.current_session()
    session.close()
    weight = model.head.weight.data_ptr()
    session.close()
    ampkit.close()
    assert model.head.weight.data_ptr() == weight and not session.is_live


def test_forward_put_on_the_instance_is_given_back():
    model, optimizer = make_pair()

    def forward(tokens):
        return TokenClassifier.forward(model, tokens)

    model.forward = forward
    ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0)
    classify_tokens(model, optimizer)
    ampkit.close()
    assert vars(model)["forward"] is forward and type(model) is TokenClassifier


def test_block_made_before_close_is_refused_after_it():
    model, optimizer = initialize_quietly(nn.Linear(2, 2), sgd, "O1")
    block = ampkit.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer)
    ampkit.close()
    with pytest.raises(ampkit.NotInitializedError, match="initialize"):
        block.__enter__()
