"""`ampkit.explain`: its plan is what initialize does, and its report of a session is what is there."""

import pytest
import torch
from helpers import LEVELS, STORED_BF16, at, iterate
from torch import nn

import ampkit
from ampkit.apex.optimizers import FusedLARS
from ampkit.optimizers import FusedAdam


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.gate = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x + self.gate * self.mlp(self.q(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 10, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


OPTIMIZERS = {
    "torch's": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused": lambda p: FusedAdam(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "unknown": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "in lists of norms": lambda p: FusedLARS(p, lr=1e-3),
}


@pytest.mark.parametrize("level", LEVELS)
def test_what_it_says_beforehand_is_what_initialize_does(level):
    for make in OPTIMIZERS.values():
        model = Model()
        optimizer = make(model.parameters())
        before = ampkit.explain(model, optimizer, opt_level=level, keep_fp32="layers.0.q")
        assert all(param.dtype is torch.float32 for param in model.parameters())
        with ampkit.session(model, optimizer, level, keep_fp32="layers.0.q", verbosity=0):
            after = ampkit.explain(model)
            assert before.modules == after.modules
            assert before.optimizers[0].step == after.optimizers[0].step
            assert before.optimizers[0].reason == after.optimizers[0].reason
            lower = sum(param.numel() for param in model.parameters() if param.dtype is torch.bfloat16)
        assert sum(row.parameters for row in after.modules if row.storage is torch.bfloat16) == lower


def test_rows_say_what_is_stored_and_kept():
    rows = {row.name: row for row in ampkit.explain(Model(), opt_level="O2", keep_fp32="head").modules}
    # The three blocks have 16 * 16 + 16; 16 + 16; 16 * 32 + 32 and 32 * 16 + 16; and there is a vector of 16.
    assert {name: (row.modules, row.parameters) for name, row in rows.items()} == {
        "embedding": (1, 160),
        "layers.0-2": (3, 48),
        "layers.0-2.q": (3, 3 * 272),
        "layers.0-2.norm": (3, 3 * 32),
        "layers.0-2.mlp.0,2": (6, 3 * (544 + 528)),
        "head": (1, 160),
    }
    bfloat16, float32 = torch.bfloat16, torch.float32
    expected = {
        "embedding": (bfloat16, True, None),
        "layers.0-2": (float32, False, "a vector"),
        "layers.0-2.q": (bfloat16, True, None),
        "layers.0-2.norm": (float32, False, "a norm"),
        "head": (float32, False, "keep_fp32= names it"),
    }
    assert {name: (rows[name].storage, rows[name].has_rest, rows[name].kept) for name in expected} == expected


@pytest.mark.parametrize(
    "name, level, step, reason",
    [
        ("torch's", STORED_BF16, "one pass", ""),
        ("amsgrad", STORED_BF16, "over float32 copies", "amsgrad=True"),
        ("unknown", STORED_BF16, "over float32 copies", "ampkit has no one-pass update of RMSprop"),
        ("in lists of norms", "O2", "over float32 copies", "the update of FusedLARS needs float32 parameters"),
        # Over float32 weights a pass checks gradients too, where there is no loss scale.
        ("torch's", "O4", "one pass", ""),
        ("fused", "O5", "one pass", ""),
        ("amsgrad", "O5", "its own", "amsgrad=True"),
        ("unknown", "O5", "its own", "ampkit has no one-pass update of RMSprop"),
        ("torch's", "O1", "one pass", ""),
        ("torch's", "O0", "its own", "weights are float32"),
        ("torch's", "O3", "its own", "weights are in lower precision, without float32 values"),
    ],
)
def test_the_step_of_an_optimizer_has_its_reason(name, level, step, reason):
    model = Model()
    (row,) = ampkit.explain(model, OPTIMIZERS[name](model.parameters()), **at(level)).optimizers
    assert (row.step, row.reason) == (step, reason)


@pytest.mark.parametrize(
    "level, width, expected",
    [
        ("O1", 64, 4 + 4 + 8),
        ("O2", 16, 2 + 2 + 2 + 8),
        (STORED_BF16, 16, 2 + 2 + 2 + 8),
        ("O3", 16, 2 + 2 + 4),
        # Gradients of 4,096 elements and more are bfloat16.
        ("O5", 63, 4 + 4 + 8),
        ("O5", 64, 4 + 2 + 8),
    ],
)
def test_bytes_per_parameter_before_and_after_a_step(level, width, expected):
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert ampkit.explain(model, optimizer, **at(level)).optimizers[0].total_bytes == expected
    ampkit.initialize(model, optimizer, **at(level, verbosity=0))
    iterate(lambda: model(torch.ones(2, width)).sum(), optimizer, times=2)
    (row,) = ampkit.explain(model).optimizers
    assert row.total_bytes == expected
    assert f"{expected}.0 = " in str(ampkit.current_session())


def test_models_sessions_and_plans_print_on_one_screen():
    model = nn.Sequential(*(Model() for _ in range(12)))
    with ampkit.session(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", verbosity=0):
        session = ampkit.current_session()
        printed = str(session).splitlines()
        assert len(printed) < 20 and any(line.startswith("0-11.layers.0-2.q ") for line in printed)
        assert repr(session) == "<Session O2: 1 model, 1 optimizer>"
        assert repr(session.plan).startswith("Plan(opt_level='O2', cast_model_type=torch.bfloat16, ")
    assert str(session) == "O2: closed." and repr(session) == "<Session O2: closed>"


def test_a_name_does_not_break_its_line():
    model = nn.Module()
    model.add_module("two\nlines\x1b[31m", nn.LayerNorm(4))
    text = str(ampkit.explain(model, opt_level="O2"))
    assert "two\\nlines\\x1b[31m" in text and all(line.isprintable() for line in text.split("\n"))


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="explain\\(\\) was given a str"):
        ampkit.explain("model")
    with pytest.raises(ampkit.ConfigurationError, match="needs opt_level="):
        ampkit.explain(Model(), keep_fp32="head")
