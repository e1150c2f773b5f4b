"""`ampkit.diagnose` on iterations that each have one culprit: found at its line, with its kind and its cure.

More kinds, each with its cure, are in test_troubles.py.

The line of a case that makes the first inf or NaN ends in ``# here``, or the case is a lambda. What a case is given is finite.
"""

import copy
import inspect
import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers import backward, initialize_quietly
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.insight.diagnose import diagnose

SGD, FP16 = torch.optim.SGD, torch.float16


def trained(model, level, **settings):
    settings["cast_model_type" if level == "O2" else "patch_torch_functions_type"] = FP16
    return initialize_quietly(model, lambda params: SGD(params, 0.125), level, **settings)


def filled(layer, weight, bias=0.0):
    with torch.no_grad():
        layer.weight.fill_(weight)
        if layer.bias is not None:
            layer.bias.fill_(bias)
    return layer


def leaf(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def layer_of(inputs, outputs, weight, level="O1", **settings):
    """Return a function that makes a layer with equal weights, and its optimizer, in float16."""
    return lambda: trained(filled(nn.Linear(inputs, outputs), weight), level, **settings)


OVERFLOW, DIVISION, SCALE = "overflow of the format", "division by zero", "the loss scale itself"
IN_FLOAT32_TOO = "float32 fails too: the model, not the precision"
CASES = []


def case(inputs, kind, function, evidence, cure=IN_FLOAT32_TOO, backward=False):
    """Decorate an iteration, called with a tensor or several, or with what ``inputs`` returns: the expected kind of its culprit,
    its function, words of the evidence and of the first cure, and whether it comes in the backward pass.
    """
    arguments = inputs if callable(inputs) else lambda: inputs if isinstance(inputs, tuple) else (inputs,)

    def add(run):
        CASES.append(
            pytest.param(run, arguments, kind, backward, function, evidence, cure, id=f"{function}, {kind}, {evidence}")
        )
        return run

    return add


# Forward


EXP = "max |input| = 20, exp needs 4.852e+08, float16 ends at 65504"
case(leaf(1.0, 20.0, dtype=FP16), OVERFLOW, "torch.exp", EXP, "torch.exp in float32: finite")(
    lambda x: (torch.exp(x).sum(dtype=torch.float32) * 1e-6).backward()
)


def two_layers():
    model, optimizer = trained(nn.Sequential(filled(nn.Linear(4, 4), 200.0), nn.Linear(4, 2)), "O2")
    filled(model[1], 60.0)
    return model, optimizer


LINEAR = "torch.nn.functional.linear"


@case(two_layers, OVERFLOW, LINEAR, "max |input| = 800", f'policy={{"{LINEAR}": "fp32"}}')
def a_matrix_product_beyond_float16(model, optimizer):
    loss = model(torch.ones(2, 4)).mean()  # here
    model(torch.ones(2, 4))
    backward(loss / 1e6, optimizer)


@case(lambda: [filled(nn.Linear(4, 2), 200.0)], OVERFLOW, LINEAR, "linear needs 8e+04", "in float32: finite")
def an_autocast_region(layer):
    with torch.autocast("cpu", FP16):
        y = layer(torch.full((2, 4), 100.0))  # here
    (y.float().mean() * 1e-6).backward()


@case(leaf(1.0, 2.0, dtype=FP16), OVERFLOW, "torch.Tensor.to", "max |input| = 3.403e+38", "torch.Tensor.to in float32")
def a_mask_in_the_wrong_dtype(scores):
    mask = torch.ones(2) * torch.finfo(torch.float32).min
    masked = scores + mask.to(scores.dtype)  # here
    F.softmax(masked, -1).float().square().sum().backward()


MASK = torch.ones(2, dtype=torch.bool)
case(leaf(1.0, 2.0), "inf that the script writes", "torch.Tensor.masked_fill", "reaches the loss")(
    lambda scores: scores.masked_fill(MASK, -torch.inf).logsumexp(-1).backward()
)
case(leaf(1.0, 2.0), DIVISION, "torch.Tensor.mean", "mean of no elements")(lambda x: x[x > 2].mean().backward())
ONE_ELEMENT = "a deviation of one element", "torch.Tensor.var", "var of one element"
case(leaf(1.0, 2.0, 3.0, 4.0), *ONE_ELEMENT)(lambda x: (x.view(4, 1).var(dim=1).sum() + x.sum()).backward())


@case(layer_of(1, 1, 1.0), SCALE, "mul", "6.554e+38, float32 ends at 3.4e+38", "harmless: finite at 32768")
def a_loss_that_the_scale_makes_inf(layer, optimizer):
    loss = layer(torch.ones(1, 1)).float().sum() * 1e34
    with ampkit.scale_loss(loss * 1.0, optimizer) as scaled_loss:  # here
        (scaled_loss * 1e-34).backward()


# Backward


backward_case = partial(case, backward=True)
FINITE, FOUND = "harmless: finite at", "the scale is found within"


POW = "the divisor is 0 in 1 of 2"
backward_case(leaf(0.0, 1.0), DIVISION, "torch.Tensor.__pow__", POW)(lambda x: (x**0.5).sum().backward())


@backward_case(leaf(0.0, 1.0), DIVISION, "torch.Tensor.sqrt", "1 of 2")
def in_a_checkpoint(x):
    def block(x):
        y = x * 2
        return y.sqrt()  # here

    checkpoint(block, x, use_reentrant=False).sum().backward()


@backward_case(leaf(0.0, 1.0), DIVISION, "torch.Tensor.__truediv__", "1 of 2")
def in_a_function_of_the_script(x):
    class Divide(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad / x  # here

    Divide.apply(x).sum().backward()


@backward_case(layer_of(4, 2, 0.25), SCALE, "torch.Tensor.float", "the cast", f"{FINITE} 32768; {FOUND} 1 step")
def a_harmless_overflow(layer, optimizer):
    y = layer(torch.ones(1, 4))
    backward(y.float().sum(), optimizer)  # here


@backward_case(layer_of(4, 2, 0.25, "O2"), SCALE, "cast", "65504", f"{FINITE} 256; {FOUND} 8 steps")
def a_harmless_overflow_eight_steps_off(layer, optimizer):
    y = layer(torch.ones(1, 4))  # here
    backward(y.sum() * 200, optimizer)


@backward_case(
    *(layer_of(4, 2, 0.25, loss_scale=2.0**20), SCALE, "torch.Tensor.float", "1.049e+06", "loss_scale=32768"),
)
def a_static_scale(layer, optimizer):
    y = layer(torch.ones(1, 4))
    backward(y.float().sum(), optimizer)  # here


@backward_case(
    lambda: [filled(nn.Linear(4, 2), 0.25), torch.amp.GradScaler("cpu", init_scale=2.0**17)],
    *(SCALE, "torch.Tensor.float", "1.311e+05", f"{FINITE} 32768; {FOUND} 2 steps"),
)
def a_grad_scaler(layer, scaler):
    optimizer = SGD(layer.parameters(), 0.1)
    with torch.autocast("cpu", FP16):
        y = layer(torch.ones(1, 4))
    scaler.scale(y.float().sum()).backward()  # here
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@backward_case(
    lambda: [*layer_of(1, 1, 1.0)(), leaf(1e-6, 2e-6, dtype=FP16), torch.tensor(6e4, dtype=FP16)],
    *(OVERFLOW, "torch.Tensor.__mul__", "2.197e+05", "bfloat16"),
)
def an_overflow_at_any_scale(layer, optimizer, x, factor):
    y = layer(torch.ones(1, 1)).float().sum() * 0
    narrow = x * factor  # here
    backward((narrow * factor).float().sum() + y, optimizer)


def marked_line(run):
    lines, first = inspect.getsourcelines(run)
    return next((first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")), first)


@pytest.mark.parametrize("run, given, kind, backward, function, evidence, cure", CASES)
def test_the_culprit_is_found_with_its_kind_and_cure(run, given, kind, backward, function, evidence, cure):
    arguments = given()
    diagnosis = diagnose(lambda: run(*arguments))
    print(diagnosis)
    culprit = diagnosis.culprit
    assert (culprit.site.file, culprit.site.line) == (__file__, marked_line(run))
    assert (culprit.kind, culprit.backward, culprit.function) == (kind, backward, function)
    assert evidence in culprit.evidence
    assert cure in diagnosis.cures[0]


# No culprits


def healthy(layer, optimizer):
    backward(layer(torch.ones(2, 4)).float().mean(), optimizer)


def nan_that_reaches_nothing(x):
    (x.detach() / x.detach()).mean()
    x.std(unbiased=False).backward()
    (x[:1].expand(2).std() * 1).backward()  # torch divides by 0 in the backward pass here, and masks the result


HEALTHY = [(healthy, layer_of(4, 2, 0.25)), (nan_that_reaches_nothing, lambda: [leaf(0.0, 1.0)])]


@pytest.mark.parametrize("run, given", HEALTHY)
def test_nothing_is_found_in_a_healthy_iteration(run, given):
    arguments = given()
    found = diagnose(lambda: run(*arguments))
    assert not found
    assert str(found).startswith(f"nothing found in {found.operations} operations")


# Values from before


NAN_OF = {
    "0.weight": ("Linear's 'weight' of shape (2, 2), torch.float32", "1 NaN among 4"),
    "1.running_var": ("BatchNorm1d's 'running_var' of shape (2,), torch.float32", "1 NaN among 2"),
}


@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.parametrize("name", NAN_OF)
def test_weights_and_statistics_that_were_not_finite_before_have_their_name(name, level):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    model, optimizer = initialize_quietly(model, torch.optim.Adam, level)
    model.state_dict()[name].view(-1)[0] = torch.nan
    diagnosis = diagnose(lambda: backward(model(torch.ones(2, 2)).float().sum(), optimizer))
    words, count = NAN_OF[name]
    assert diagnosis.culprit.kind == "not finite before the iteration" and not diagnosis.cures
    assert not diagnosis.culprit.rows  # the weight has two rows, as the batch has
    assert diagnosis.culprit.evidence == f"{words}, that this line uses, has {count} elements"


def test_complex_numbers_and_sparse_gradients_are_looked_at():
    x = leaf(100.0 + 0.0j, 1.0, dtype=torch.complex64)
    diagnosis = diagnose(lambda: torch.exp(x).abs().sum().backward())
    assert diagnosis.culprit.evidence == "max |input| = 100, exp needs 2.688e+43, complex64 ends at 3.4e+38"

    table = nn.Embedding(2, 1, sparse=True)
    with torch.no_grad():
        table.weight.fill_(0.0)
    diagnosis = diagnose(lambda: table(torch.tensor([1, 1])).sqrt().sum().backward())
    assert (diagnosis.culprit.kind, diagnosis.culprit.function) == (DIVISION, "torch.Tensor.sqrt")
    assert table.weight.grad is None


# State afterwards is as before


def everything(model, optimizer):
    """Return the bits of all that training changes, and of the random numbers to come."""
    state = [*model.state_dict().values(), *(param.grad for param in model.parameters())]
    state += [value for one in optimizer.state.values() for value in one.values()]
    state += [torch.get_rng_state(), torch.tensor(random.getstate()[1][:8])]
    return copy.deepcopy([*state, ampkit.state_dict()])


def same(one, other):
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("fails", ["finite", "inf", "error"])
def test_training_goes_on_as_if_nothing_had_been_diagnosed(level, fails):
    def train(with_diagnosis):
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)

        def iteration(scale=1.0):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4) * random.random()).square().sum() * scale
            backward(loss, optimizer)
            if scale == 2:
                raise KeyError("of the script")
            ampkit.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()

        factor = {"finite": 1.0, "inf": 1e39, "error": 2}[fails]
        for i in range(4):
            iteration()
            before = everything(model, optimizer)
            if with_diagnosis and i % 2:
                with pytest.raises(KeyError, match="of the script") if fails == "error" else nullcontext():
                    assert bool(diagnose(lambda: iteration(factor))) is (fails == "inf")
                assert same(everything(model, optimizer), before)
        ampkit.close()
        return before

    assert same(train(True), train(False))


def test_a_cure_that_is_named_cures_when_it_is_done():
    """Pass the settings that diagnose prints to `initialize`."""

    class Square(nn.Module):
        def forward(self, y):
            return (y * y).float().mean()

    def failing(**settings):
        model = nn.Sequential(filled(nn.Linear(4, 4), 25.0), Square())
        model, optimizer = trained(model, "O1", loss_scale=1.0, **settings)

        def iteration():
            backward(model(torch.full((2, 4), 3.0)), optimizer)

        return model, iteration

    _, iteration = failing()
    cures = [cure.removesuffix(": finite, tried") for cure in diagnose(iteration).cures]
    assert cures == [
        'policy={"torch.Tensor.__mul__": "fp32"}',
        'keep_fp32=["1"]',
        "bfloat16 (O4 or O5 without cast_model_type=)",
    ]
    for setting in cures[:2]:
        ampkit.close()
        model, iteration = failing(**eval(f"dict({setting})"))
        iteration()
        # 300**2 on average, and the gradient of the mean of 8 squares at 300, of inputs 3, over 2 rows
        assert model[0].weight.grad.unique().tolist() == [2 * 300 / 8 * 3 * 2]


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"expects a function without arguments.*found float"):
        diagnose(1.0)


def test_the_warning_after_25_skips_names_the_call(caplog):
    layer, optimizer = trained(nn.Linear(1, 1), "O1")
    for _ in range(26):
        backward(layer(torch.ones(1, 1)).float().sum() * torch.nan, optimizer)
        optimizer.step()
    (warning,) = [one.message for one in caplog.records if "25 steps in a row" in one.message]
    assert "print(ampkit.diagnose(iteration))" in warning


@pytest.mark.parametrize(
    ("write", "kind"), [("mul_", "not finite before the iteration"), ("copy_", "overflow of the format")]
)
def test_what_a_tensor_held_counts_where_an_operator_reads_what_it_writes(write, kind):
    weight = leaf(1.0, 1.0)
    held = torch.full((2,), torch.nan, dtype=torch.float16)
    large = torch.tensor([1e6, 1.0])

    def iteration():
        getattr(held, write)(large)
        (weight * held).sum().backward()

    assert diagnose(iteration).culprit.kind == kind


def test_running_statistics_of_a_scripted_module_are_read_and_put_back():
    norm = torch.jit.script(nn.BatchNorm1d(2))
    x = torch.tensor([[1.0, 2.0], [float("inf"), 4.0]], requires_grad=True)
    diagnosis = diagnose(lambda: norm(x).square().sum().backward())
    assert diagnosis.culprit is not None and "not finite before the iteration" in str(diagnosis)
    assert norm.running_mean.tolist() == [0.0, 0.0] and norm.running_var.tolist() == [1.0, 1.0]


def test_a_second_diagnosis_deeper_in_the_stack_takes_no_step_either():
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(layer.parameters())

    def iteration():
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    ampkit.diagnose(iteration)
    (lambda: (lambda: ampkit.diagnose(iteration))())()
    assert not optimizer.state
