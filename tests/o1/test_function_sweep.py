"""Functions of the tables inside of a model: where torch.autocast computes one, a level does, and as near to float32.

Arguments are those of torch's own autocast tests, and for other rows the first of a few that the function takes.
"""

import contextlib
import functools

import pytest
import torch
from test_policy_samples import CASES, LOW, OWNERS, to
from torch import nn

import ampkit
from ampkit.casting.tensors import map_tensors, tensors_in
from ampkit.policy import CastKind, Policy

pytestmark = [pytest.mark.switch, pytest.mark.filterwarnings("ignore")]

LEVELS = ("O1", "O2", "O5")
# Relative to the norm: that far from float32, or one and a half times as far as torch.autocast.
TOLERANCE, TIMES_AUTOCAST = 0.02, 1.5

SAMPLES = [case.values for case in CASES]
MATRIX = torch.eye(4) / 4 + torch.rand(4, 4, generator=torch.Generator().manual_seed(1)) / 2
TALL = torch.cat([MATRIX, MATRIX[:2].flip(1)])
IMAGE = torch.stack([MATRIX, MATRIX.T, MATRIX, MATRIX]).unsqueeze(0)
EIGHTS = MATRIX.repeat(1, 2, 2)
# Tried in this order, for rows that torch's lists have no sample of.
CANDIDATES = [
    *[(TALL,), (MATRIX,), (MATRIX + 1,), (IMAGE,), (MATRIX[0],), (MATRIX @ MATRIX.T,)],
    # Before a square: _weight_norm reads uninitialized memory if its second argument is not a column.
    (MATRIX, MATRIX[:, :1]),
    *[(MATRIX, MATRIX), (MATRIX, MATRIX[0]), (MATRIX[0], MATRIX[1]), (IMAGE, IMAGE), (IMAGE, IMAGE[0])],
    *[(MATRIX, 2), (MATRIX, 2, 0), (MATRIX, 0), (IMAGE, 2), (2, MATRIX), (IMAGE, [4]), (IMAGE[0], 3), (IMAGE, (2, 2))],
    *[(MATRIX, MATRIX, MATRIX), (MATRIX, MATRIX, 2), ([MATRIX, MATRIX],), (MATRIX.to(torch.complex64),)],
    (EIGHTS, EIGHTS),
]
NAMES = OWNERS | {torch.fft: "torch.fft", torch.special: "torch.special"}
CASTING = {CastKind.LOWER_PRECISION_FP, CastKind.FP32, CastKind.PROMOTE, CastKind.MATCH_FIRST}


class Between(nn.Module):
    """A model that calls a function between two layers: on the first layer's results, and for the second layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(1, 1), nn.Linear(1, 1)
        for layer in (self.inner, self.outer):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, *inputs):
        owner, name, args, kwargs = self.call
        left = iter(inputs)

        def handed(x):
            taken = next(left, None) if x.is_floating_point() else None
            return x if taken is None else self.inner(taken.unsqueeze(-1)).squeeze(-1)

        results = getattr(owner, name)(*map_tensors(args, handed), **kwargs)
        results = [torch.view_as_real(x) if x.is_complex() else x for x in tensors_in(results)]
        return [self.outer(x.unsqueeze(-1)) for x in results if x.is_floating_point()]


def results(model, optimizer, call, from_layer, region=contextlib.nullcontext, scale_loss=None):
    """The results of the call, after a backward pass through it that leaves finite gradients."""
    torch.default_generator.manual_seed(0)  # that of the CPU alone: the others take milliseconds
    optimizer.zero_grad()
    model.call = call
    floating = [x for x in tensors_in(call[2]) if x.is_floating_point()]
    with region():
        outputs = model(*floating[:from_layer])
        loss = sum(x.float().square().mean() for x in outputs)
    with contextlib.nullcontext(loss) if scale_loss is None else scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()), "a gradient is not finite"
    return torch.cat([x.detach().double().flatten() for x in outputs])


def fresh():
    model = Between()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def reference(call, from_layer):
    """The float32 result, if it is finite and depends on the layer; else None."""
    owner, name, args, kwargs = call
    try:
        getattr(owner, name)(*map_tensors(args, torch.clone), **kwargs)  # which most candidates do not come through
        model, optimizer = fresh()
        exact = results(model, optimizer, call, from_layer)
    except Exception:
        return None
    return exact if exact.isfinite().all() and model.inner.weight.grad is not None else None


@functools.cache
def sweep(from_layer):
    """Rows of label, call, float32 result and torch.autocast's distance from it; no row for a call that raises under autocast."""
    torch.manual_seed(0)
    calls = [[(owner, name, to(args, torch.float32, only=LOW), kwargs)] for owner, name, args, kwargs in SAMPLES]
    sampled = {(owner, name) for [(owner, name, _, _)] in calls}
    for rule in Policy().rules():
        if rule.kind in CASTING and rule.owner in NAMES and (rule.owner, rule.name) not in sampled:
            calls.append([(rule.owner, rule.name, args, {}) for args in CANDIDATES])
    rows = []
    for candidates in calls:
        tried = ((call, reference(call, from_layer)) for call in candidates)
        call, exact = next(((call, exact) for call, exact in tried if exact is not None), (None, None))
        if call is None:
            continue
        try:
            autocast = results(*fresh(), call, from_layer, region=lambda: torch.autocast("cpu", torch.bfloat16))
        except Exception:
            continue
        rows.append((f"{NAMES[call[0]]}.{call[1]}", call, exact, (autocast - exact).norm()))
    return rows


@pytest.mark.parametrize("from_layer", [1, 9], ids=["first tensor", "all tensors"])
def test_sweep_covers_the_tables(from_layer):
    assert len({label for label, *_ in sweep(from_layer)}) >= 187


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("from_layer", [1, 9], ids=["first tensor", "all tensors"])
def test_functions_compute_as_under_autocast(from_layer, level):
    rows, failed = sweep(from_layer), {}
    model, optimizer = ampkit.initialize(*fresh(), opt_level=level, verbosity=0)
    for label, call, exact, of_autocast in rows:
        try:
            error = (results(model, optimizer, call, from_layer, scale_loss=ampkit.scale_loss) - exact).norm()
            if not error <= max(TOLERANCE * exact.norm(), TIMES_AUTOCAST * of_autocast):
                failed[label] = f"{error / exact.norm():.4f}, torch.autocast {of_autocast / exact.norm():.4f}"
        except Exception as problem:
            failed[label] = repr(problem)
    assert not failed
