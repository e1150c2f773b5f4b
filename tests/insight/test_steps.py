"""`on_step`: the numbers of a report are those of float64 arithmetic on the gradients that float32 training would have."""

import math

import pytest
import torch
from helpers import backward, initialize_quietly
from torch import nn

import ampkit
from ampkit.integrations import tensorboard

MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, 0.125, momentum=0.5),
    "Adam": lambda params: torch.optim.Adam(params, 0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.01),  # over stand-ins
    "FusedAdam": lambda params: ampkit.optimizers.FusedAdam(params, 0.01),
}


class Line(nn.Module):
    """A model whose gradients are its inputs: exact in every precision."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.a(x).float().sum() + (self.b * 2).sum()


X = torch.tensor([[3.0, 4.0]])
NORMS = {"a.weight": math.sqrt(2 * 3**2 + 2 * 4**2), "b": math.sqrt(3 * 2**2)}


def train(model, optimizer, steps=1, scale=1.0, clip=None):
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model(X) * scale, optimizer)
        if clip:
            ampkit.clip_grad_norm_(optimizer, clip)
        optimizer.step()


def read(report):
    names = ("step", "loss_scale", "skipped", "grad_norm", "norms")
    return {name: getattr(report, name) for name in names}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_norms_are_those_of_unscaled_gradients(level, maker):
    model, optimizer = initialize_quietly(Line(), MAKERS[maker], level)
    reports = []
    ampkit.on_step(optimizer, lambda report: reports.append(read(report)))
    train(model, optimizer, steps=2)
    assert [report["step"] for report in reports] == [1, 2]
    for report in reports:
        assert report["norms"] == pytest.approx(NORMS, rel=1e-6)
        assert report["grad_norm"] == pytest.approx(math.hypot(*NORMS.values()), rel=1e-6)
        assert report["skipped"] is False
        assert report["loss_scale"] == (65536.0 if level in ("O1", "O2") else 1.0)


def test_an_optimizer_without_a_session_is_read_too():
    model = Line()
    optimizer = torch.optim.SGD(model.named_parameters(), 0.125)
    reports = []
    handle = ampkit.on_step(optimizer, lambda report: reports.append(read(report)))
    model(X).backward()
    optimizer.step()
    assert reports[0]["norms"] == pytest.approx(NORMS, rel=1e-6)
    assert reports[0]["loss_scale"] == 1.0 and not reports[0]["skipped"]
    handle.remove()
    optimizer.step()
    assert len(reports) == 1 and "step" not in vars(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_beside_torchs_grad_scaler_norms_are_unscaled_too(fused):
    model = Line()
    optimizer = torch.optim.Adam(model.named_parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    reports = []
    ampkit.on_step(optimizer, lambda report: reports.append(read(report)))
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(X) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    # torch calls the step of a fused optimizer in any case, and skips on the device.
    assert [report["skipped"] for report in reports] == ([False, True, False] if fused else [False, False])
    for report in reports[0], reports[-1]:
        assert report["norms"] == pytest.approx(NORMS, rel=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_norms_are_those_after_clipping(level):
    model, optimizer = initialize_quietly(Line(), MAKERS["Adam"], level)
    reports = []
    ampkit.on_step(optimizer, lambda report: reports.append(read(report)))
    train(model, optimizer, clip=1.0)
    assert reports[0]["grad_norm"] == pytest.approx(1.0, rel=1e-5)
    factor = 1 / math.hypot(*NORMS.values())
    assert reports[0]["norms"] == pytest.approx({name: norm * factor for name, norm in NORMS.items()}, rel=1e-5)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_is_reported_with_the_scale_that_follows(level, maker):
    model, optimizer = initialize_quietly(Line(), MAKERS[maker], level)
    reports = []
    ampkit.on_step(optimizer, lambda report: reports.append(read(report)))
    train(model, optimizer, scale=torch.inf)
    train(model, optimizer)
    assert [(report["skipped"], report["loss_scale"]) for report in reports] == [(True, 32768.0), (False, 32768.0)]
    assert math.isnan(reports[0]["grad_norm"]) and reports[0]["norms"] == {}
    assert reports[1]["grad_norm"] == pytest.approx(math.hypot(*NORMS.values()), rel=1e-6)


def test_f_is_called_at_every_third_step():
    model, optimizer = initialize_quietly(Line(), MAKERS["SGD"], "O1")
    steps = []
    ampkit.on_step(optimizer, lambda report: steps.append(report.step), every=3)
    train(model, optimizer, steps=7)
    assert steps == [3, 6]


def test_a_number_is_read_inside_of_f_or_not_at_all():
    model, optimizer = initialize_quietly(Line(), MAKERS["SGD"], "O1")
    reports = []
    ampkit.on_step(optimizer, lambda report: (reports.append(report), report.skipped))
    train(model, optimizer)
    assert reports[0].skipped is False
    with pytest.raises(RuntimeError, match="was not read inside of f"):
        reports[0].grad_norm  # noqa: B018
    with pytest.raises(AttributeError, match="gradnorm"):
        reports[0].gradnorm  # noqa: B018


def test_an_initialize_that_comes_later_is_refused_at_the_step():
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    ampkit.on_step(optimizer, print)
    model, optimizer = ampkit.initialize(model, optimizer, verbosity=0)
    with pytest.raises(ampkit.ConfigurationError, match=r"Call on_step\(\) after initialize\(\)"):
        train(model, optimizer)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_goes_along_with_it():
    model, optimizer = initialize_quietly(Line(), MAKERS["SGD"], "O1")
    steps = []
    handle = ampkit.on_step(optimizer, lambda report: steps.append(report.step))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer)
    scheduler.step()
    handle.remove()
    train(model, optimizer)
    scheduler.step()
    assert steps == [1]


def test_bad_arguments_are_refused():
    optimizer = MAKERS["SGD"](Line().parameters())
    with pytest.raises(TypeError, match="on_step expects a function that takes the report of a step, found NoneType"):
        ampkit.on_step(optimizer, None)
    with pytest.raises(TypeError, match="on_step expects the optimizer"):
        ampkit.on_step(Line(), print)
    with pytest.raises(ValueError, match="every=0"):
        ampkit.on_step(optimizer, print, every=0)


def test_loss_scale_is_that_of_the_optimizer_and_its_loss():
    model, optimizer = initialize_quietly(Line(), MAKERS["SGD"], "O1", num_losses=2, loss_scale=128.0)
    assert [ampkit.loss_scale(optimizer), ampkit.loss_scale(optimizer, 1)] == [128.0, 128.0]
    with pytest.raises(ampkit.LossIdError):
        ampkit.loss_scale(optimizer, 2)
    assert ampkit.loss_scale(MAKERS["SGD"](Line().parameters())) == 1.0
    with pytest.raises(TypeError, match="loss_scale expects the optimizer"):
        ampkit.loss_scale(model)


def test_tensorboard_gets_scalars():
    class Writer:
        def __init__(self):
            self.rows = []

        def add_scalar(self, *row):
            self.rows.append(row)

    model, optimizer = initialize_quietly(Line(), MAKERS["SGD"], "O1")
    writer = Writer()
    tensorboard.log(writer, optimizer)
    train(model, optimizer, steps=2)
    norm = pytest.approx(math.hypot(*NORMS.values()), rel=1e-6)
    plain = [("loss_scale", 65536.0), ("skipped", 0.0), ("grad_norm", norm)]
    assert writer.rows == [(f"ampkit/{name}", value, step) for step in (1, 2) for name, value in plain]
