"""Losses of torch beside cast weights: computed in float32 from lower-precision tensors, as under torch.autocast."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import net_with_norm
from torch import nn

import ampkit
from ampkit.policy.cast_rules import CastKind
from ampkit.policy.tables import TABLES

LOW = torch.bfloat16


def cast_model(level="O2", lower=None, model=None):
    return ampkit.initialize(model or nn.Linear(2, 2), opt_level=level, verbosity=0, cast_model_type=lower)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(LOW)


def signs():
    return torch.arange(8) % 2 * 2 - 1


def classes(count):
    return torch.arange(8) % count


# Each loss module of torch.nn, and its arguments, made of a layer's output.
MODULES = {
    "BCELoss": lambda x: (x.sigmoid(), drawn(1, 8, 4).sigmoid()),
    "BCEWithLogitsLoss": lambda x: (x, drawn(1, 8, 4).sigmoid()),
    "CTCLoss": lambda x: (x.reshape(8, 1, 4).log_softmax(2), torch.tensor([[1, 2]]), (8,), (2,)),
    "CosineEmbeddingLoss": lambda x: (x, drawn(1, 8, 4), signs()),
    "CrossEntropyLoss": lambda x: (x, classes(4)),
    "GaussianNLLLoss": lambda x: (x, drawn(1, 8, 4), drawn(2, 8, 4).exp()),
    "KLDivLoss": lambda x: (x.log_softmax(1), drawn(1, 8, 4).softmax(1)),
    "MarginRankingLoss": lambda x: (x, drawn(1, 8, 4), signs().unsqueeze(1)),
    "MultiLabelMarginLoss": lambda x: (x, torch.tensor([[3, 0, -1, 1]] * 8)),
    "MultiLabelSoftMarginLoss": lambda x: (x, (drawn(1, 8, 4) > 0).to(LOW)),
    "MultiMarginLoss": lambda x: (x, classes(4)),
    "NLLLoss": lambda x: (x.log_softmax(1), classes(4)),
    "PoissonNLLLoss": lambda x: (x, drawn(1, 8, 4).exp()),
    **dict.fromkeys(("HuberLoss", "L1Loss", "MSELoss", "SmoothL1Loss"), lambda x: (x, drawn(1, 8, 4))),
    **dict.fromkeys(("HingeEmbeddingLoss", "SoftMarginLoss"), lambda x: (x, signs().unsqueeze(1).expand(8, 4))),
    **dict.fromkeys(
        ("TripletMarginLoss", "TripletMarginWithDistanceLoss"), lambda x: (x, drawn(1, 8, 4), drawn(2, 8, 4))
    ),
}


def test_no_loss_of_torch_is_left_out():
    # Losses with weights of their own are cast like any module; the second one, of torch 2.15, is made of two functions of F.
    others = {"NLLLoss2d", "AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss"}
    assert set(MODULES) == {name for name in dir(nn) if name.endswith("Loss")} - others
    in_float32 = {
        name
        for group in TABLES["default"]
        if "torch.nn.functional" in group.owners and group.kind in (CastKind.FP32, CastKind.BANNED)
        for name in group.names
    }
    losses = {name for name in dir(F) if name.endswith(("_loss", "cross_entropy", "_with_logits", "kl_div"))}
    assert losses - in_float32 <= {"linear_cross_entropy"}


@pytest.mark.parametrize(
    "level, name", [("O2", name) for name in MODULES] + [("O1", name) for name in MODULES if name != "BCELoss"]
)
def test_loss_is_float32_inside_and_out(level, name):
    arguments, loss = MODULES[name], getattr(nn, name)()
    x, twin = drawn(0, 8, 4).requires_grad_(), drawn(0, 8, 4).requires_grad_()
    inputs = arguments(x)  # in lower precision, as torch computes them
    assert LOW in {one.dtype for one in inputs if isinstance(one, torch.Tensor)}
    expected = loss(*(y.float() if isinstance(y, torch.Tensor) and y.dtype is LOW else y for y in arguments(twin)))
    expected.backward()
    model = cast_model(level)
    found = loss(*inputs)
    found.backward()
    assert found.dtype is torch.float32 and torch.equal(found, expected)
    assert x.grad.dtype is LOW and torch.equal(x.grad, twin.grad)
    del model


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.loss = net_with_norm(outputs=50), nn.CrossEntropyLoss()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": self.loss(logits, labels), "mse": F.mse_loss(logits, torch.ones_like(logits)), "logits": logits}


@pytest.mark.parametrize("level, lower", [("O2", None), ("O2", torch.float16), ("O3", None), ("O5", None)], ids=str)
def test_loss_inside_a_model_leaves_it_unrounded(level, lower):
    labels = torch.arange(64) % 50
    outputs = cast_model(level, lower, WithLoss())(torch.randn(64, 6), labels)
    logits = outputs["logits"].double()
    for name, expected in (("loss", F.cross_entropy(logits, labels)), ("mse", (logits - 1).square().mean())):
        assert outputs[name].dtype is torch.float32
        assert outputs[name].item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("first_to_close", [0, 1])
@pytest.mark.parametrize("levels", [("O2", "O2"), ("O1", "O2"), ("O2", "O1"), ("O3", "O5")], ids=str)
def test_losses_are_cast_until_the_last_session_ends(levels, first_to_close):
    x, before = drawn(0, 8, 4), F.mse_loss
    models, sessions = [], []
    for level in levels:
        models.append(cast_model(level))
        sessions.append(ampkit.current_session())
    held = F.mse_loss
    sessions.pop(first_to_close).close()
    assert F.mse_loss(x, x + 1).dtype is torch.float32
    sessions.pop().close()
    assert F.mse_loss is before
    assert held(x, x + 1).dtype is LOW  # what somebody kept calls straight through


@pytest.mark.parametrize("levels", [("O2", "O1"), ("O1", "O2"), ("O2", "O5")], ids=str)
def test_sessions_of_all_levels_share_one_policy(levels):
    policy = {"torch.nn.functional.mse_loss": "native"}
    first = ampkit.initialize(nn.Linear(2, 2), opt_level=levels[0], verbosity=0)
    other = nn.Linear(2, 2)
    with pytest.raises(ampkit.ConfigurationError, match=r"policy=.*a live session patches.*Use the same value"):
        ampkit.initialize(other, opt_level=levels[1], verbosity=0, policy=policy)
    assert type(other) is nn.Linear and other.weight.dtype is torch.float32
    ampkit.close()
    other = ampkit.initialize(other, opt_level=levels[1], verbosity=0, policy=policy)
    x = drawn(0, 8, 4)
    assert F.mse_loss(x, x + 1).dtype is LOW
    del first, other


class Probabilities(nn.Linear):
    def forward(self, x):
        return F.binary_cross_entropy(super().forward(x).sigmoid(), torch.full_like(x[:, :2], 0.25))


@pytest.mark.parametrize("level, lower", [("O2", None), ("O2", torch.float16), ("O3", None), ("O5", None)], ids=str)
def test_loss_that_o1_refuses_computes_in_float32_of_what_it_is_given(level, lower):
    model = Probabilities(2, 2)
    x, exact = torch.linspace(-2, 2, 16).view(8, 2), copy.deepcopy(model).double()
    cast_model(level, lower, model)
    found, wanted = model(x), exact(x.double())
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0.01, atol=0)
    found.backward(), wanted.backward()
    assert (model.weight.grad.double() - exact.weight.grad).norm() < 0.03 * exact.weight.grad.norm()


def test_scripts_and_symbolic_traces_have_the_losses():
    def loss(x, y):
        return F.mse_loss(x, y)

    x, y = drawn(0, 8, 4), drawn(1, 8, 4)
    model = cast_model()
    scripted, traced = torch.jit.script(loss), torch.fx.symbolic_trace(loss)
    assert torch.equal(scripted(x.float(), y.float()), loss(x, y))
    assert torch.equal(traced(x.float(), y.float()), loss(x, y))
    del model
