"""`ampkit.recording`: rows at the lines of the script, with dtypes, reasons, FLOPs and bytes that are worked out on paper.

The line that a case is about ends in ``# here``, or is that of a lambda.
"""

import inspect
import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import ROOT, backward, initialize_quietly
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import linear as bound_early
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.errors import ConfigurationError
from ampkit.insight.words import in_seconds

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def initialized(model, level, **settings):
    settings.setdefault("patch_torch_functions_type" if level == "O1" else "cast_model_type", BF16)
    return initialize_quietly(model, lambda params: torch.optim.SGD(params, 0.125), level, **settings)


def rows_here(record, case, phase="forward"):
    """Return the rows of the lines of ``case`` that end in ``# here``, or of a lambda's line."""
    lines, first = inspect.getsourcelines(case)
    here = {first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")} or {first}
    return [row for row in record.calls if row.file == __file__ and row.line in here and row.phase == phase]


def recorded(iteration):
    with ampkit.recording() as record:
        iteration()
    return record


# Reasons

REASONS = []


def case(function, dtypes_in, dtype_out, reason, model=lambda: nn.Linear(8, 8), level="O1", **settings):
    """Decorate an iteration of ``model`` over float32 inputs: what is expected of the row of ``function``. Without a level the
    model is in plain torch.
    """

    def add(run):
        expected = function, dtypes_in, dtype_out, reason
        REASONS.append(pytest.param(run, model, level, settings, expected, id=f"{function}, {reason}"))
        return run

    return add


# A row of the tables, an operator, a row of the caller's policy, and a function that was bound before initialize.
case("linear", {FP32}, BF16, 'bfloat16: row "linear" of the tables')(lambda model, x: model(x))
case("matmul", {FP32}, BF16, 'bfloat16: row "__matmul__" of the tables')(lambda model, x: x @ model.weight)
GELU = {"torch.nn.functional.gelu": "fp32"}
case("gelu", {BF16}, FP32, 'float32: row "gelu" of policy=', policy=GELU)(lambda model, x: F.gelu(model(x)))
BOUND = "bfloat16: bound before initialize, cast by torch.autocast's list"
case("linear", {FP32}, BF16, BOUND)(lambda model, x: bound_early(x, model.weight))


class _Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(8, 8, bias=False), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.layer(x) + self.bias


case("add", {BF16, FP32}, FP32, "float32: promoted by parameter 'bias'", _Biased)(lambda model, x: model(x))


@case("linear", {FP32}, FP32, "float32: region at test_recording.py:{line - 1}")
def a_region(model, x):
    with torch.autocast("cpu", enabled=False):
        model(x)  # here


@case("linear", {FP32}, FP32, "float32: region at test_recording.py:{line - 1}")
def casts_that_are_disabled(model, x):
    with ampkit.disable_casts():
        model(x)  # here


class _Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.body(x)
        return self.head(x)


KEPT = dict(model=_Headed, level="O2", keep_fp32=["head"])
case("linear", {FP32}, FP32, "float32: kept by keep_fp32='head'", **KEPT)(lambda model, x: model(x))
WIDE = dict(model=lambda: torch.randn(4, 8, dtype=FP64))
case("matmul", {FP64}, FP64, "float64: as given", **WIDE)(lambda wide, x: wide @ wide.t())
case("matmul", {FP32}, FP32, "float32: as given", level=None)(lambda model, x: x @ x.t())
NARROW = dict(model=lambda: torch.randn(4, 8, dtype=BF16), level=None)
case("sum", {BF16}, FP32, "float32: dtype= at the call", **NARROW)(lambda narrow, x: narrow.sum(dtype=FP32))


@case("linear", {FP32}, BF16, "bfloat16: torch.autocast's list, region at test_recording.py:{line - 1}", level=None)
def torchs_autocast(model, x):
    with torch.autocast("cpu", BF16):
        model(x)  # here


@pytest.mark.parametrize("run, make, level, settings, expected", REASONS)
def test_a_row_says_what_is_computed_in_what_and_why(run, make, level, settings, expected):
    function, dtypes_in, dtype_out, reason = expected
    model, x = make(), torch.randn(4, 8)
    if level is not None:
        model_of_level = model if isinstance(model, nn.Module) else nn.Linear(8, 8)
        initialized(model_of_level, level, **settings)
    record = recorded(lambda: run(model, x))
    rows = rows_here(record, run) or [row for row in record.calls if row.reason == reason and row.phase == "forward"]
    (row,) = [row for row in rows if row.function == function]
    wanted = reason.replace("{line - 1}", str(row.line - 1))
    assert (set(row.dtypes_in), row.dtypes_out, row.reason) == (dtypes_in, (dtype_out,), wanted)


# FLOPs, bytes and Tensor Cores


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def grouped(a, b):
    return F.grouped_mm(a, b, offs=None if a.dim() == b.dim() == 3 else torch.tensor([8, 32], dtype=torch.int32))


def no(dimension, size, padded):
    return f"no: {dimension} = {size} is no multiple of 8; pad it to {padded}"


#: Function, its arguments, FLOPs forward, how many times as many backward, and whether Tensor Cores can run it in bfloat16.
PRODUCTS = [
    (F.linear, [(4, 16), (8, 16)], 2 * 4 * 16 * 8, 2, "yes"),
    (torch.matmul, [(2, 3, 16), (2, 16, 8)], 2 * 2 * 3 * 16 * 8, 2, "yes"),
    (torch.matmul, [(16, 30), (30, 8)], 2 * 16 * 30 * 8, 2, no("K", 30, 32)),
    (F.linear, [(8, 1000), (1001, 1000)], 2 * 8 * 1000 * 1001, 2, no("N", 1001, 1008)),
    (F.conv2d, [(2, 8, 6, 6), (16, 8, 3, 3)], 2 * 2 * 16 * 4 * 4 * 8 * 9, 2, "yes"),
    (F.conv2d, [(2, 3, 6, 6), (16, 3, 3, 3)], 2 * 2 * 16 * 16 * 3 * 9, 2, no("C_in", 3, 8)),
    (F.conv_transpose2d, [(2, 8, 4, 4), (8, 16, 3, 3)], 2 * 2 * 8 * 4 * 4 * 16 * 9, 2, "yes"),
    # Scores and values; backward the scores once more, and a product for the gradient of each of four matrices.
    (attention, [(2, 3, 10, 8)] * 3, 2 * 2 * (2 * 3) * 10 * 10 * 8, 2.5, "yes"),
]
if hasattr(F, "grouped_mm"):  # newer torch
    PRODUCTS += [
        (grouped, [(32, 16), (2, 16, 8)], 2 * 32 * 16 * 8, 2, "yes"),  # rows 0-7 by the first, 8-31 by the second
        (grouped, [(2, 24, 16), (2, 16, 8)], 2 * 2 * 24 * 16 * 8, 2, "yes"),
    ]


@pytest.mark.parametrize("function, shapes, flops, times, verdict", PRODUCTS)
def test_flops_and_tensor_cores_follow_from_shapes_and_dtypes(function, shapes, flops, times, verdict):
    tensors = [torch.randn(shape, dtype=BF16, requires_grad=True) for shape in shapes]
    record = recorded(lambda: function(*tensors).sum(dtype=FP32).backward())
    rows = [row for row in record.calls if row.flops]
    assert sum(row.flops for row in rows if row.phase == "forward") == flops
    assert sum(row.flops for row in rows if row.phase == "backward") == flops * times
    (forward,) = [row for row in rows if row.phase == "forward"]
    assert forward.tensor_cores == verdict and forward.calls == 1
    assert record.flops_by_dtype() == {BF16: 1.0} and record.flops == flops * (1 + times)
    if verdict == "yes":
        assert record.tensor_core_share == 1.0


def test_tensor_cores_need_multiples_of_what_lies_side_by_side_in_memory():
    upright, transposed = torch.randn(30, 16, dtype=BF16), torch.randn(8, 30, dtype=BF16)
    rows = recorded(lambda: (upright.t() @ torch.randn(30, 8, dtype=BF16), upright.t() @ transposed.t())).calls
    verdicts = [row.tensor_cores for row in rows if row.flops]
    assert sorted(verdicts, reverse=True) == ["yes", "no: K = 30 is no multiple of 8; pad it to 32"]
    vector = torch.ones(30, dtype=BF16)
    (row,) = recorded(lambda: upright.t() @ vector).calls
    assert row.flops == 2 * 16 * 30 and row.tensor_cores == "no: K = 30 is no multiple of 8; pad it to 32"


def test_seconds_are_those_of_an_iteration():
    x = torch.randn(8, 8)
    with ampkit.recording() as record:
        x @ x
    (row,) = record.calls
    assert record.iterations == 1 and record.seconds == row.seconds > 0.0
    assert f"1 iteration: {in_seconds(row.seconds)} in operators each" in str(record)


@pytest.mark.parametrize("wait", [time.sleep, lambda seconds: threading.Event().wait(seconds)], ids=["sleep", "wait"])
def test_what_other_jobs_take_is_no_time_of_an_operator(wait):
    def is_kept_waiting(x: torch.Tensor) -> torch.Tensor:
        wait(0.25)
        return x + 1

    operator = torch.library.custom_op("ampkit_tests::is_kept_waiting", is_kept_waiting, mutates_args=())
    with ampkit.recording() as record:
        operator(torch.ones(4))
    assert "is_kept_waiting" in str(record) and record.seconds < 0.2


def test_an_lstm_counts_the_products_of_all_its_steps():
    lstm, x = nn.LSTM(16, 8, batch_first=True), torch.randn(2, 5, 16)
    record = recorded(lambda: lstm(x)[0].sum().backward())
    flops = 2 * (2 * 5) * (4 * 8 * 16 + 4 * 8 * 8)
    assert {row.phase: row.flops for row in record.calls if row.flops} == {"forward": flops, "backward": 2 * flops}


def test_bytes_of_casts_belong_to_the_call_that_needs_them():
    layer, x = nn.Linear(16, 8), torch.randn(4, 16, requires_grad=True)

    def iteration():
        with torch.autocast("cpu", BF16):
            y = layer(x)  # here
            torch.relu(y)
        y.float().sum().backward()

    record = recorded(iteration)
    (forward,) = rows_here(record, iteration)
    assert (forward.casts, forward.bytes_cast) == (3, 2 * (8 * 16 + 8 + 4 * 16))
    (back,) = rows_here(record, iteration, "backward")
    assert (back.casts, back.bytes_cast) == (3, 4 * (8 * 16 + 8 + 4 * 16))
    assert not any("cast" in row.function or "copy" in row.function for row in record.calls)
    assert sum(row.bytes_cast for row in record.calls) == forward.bytes_cast + back.bytes_cast + (4 + 2) * 4 * 8
    assert forward.dtypes_in == (FP32,) and forward.dtypes_out == (BF16,) and forward.calls == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_weight_that_a_call_uses_twice_is_cast_once_at_o1_and_never_at_o2(level):
    linear = nn.Linear(8, 8)
    model, optimizer = initialized(nn.Sequential(linear, linear), level)
    x = torch.randn(4, 8)

    def iteration():
        y = model(x)
        backward(y.float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    iteration()
    record = recorded(iteration)
    rows = [row for row in record.calls if row.function == "linear" and row.phase == "forward"]
    casts = {name: number for name, number, _ in record.casts}
    assert casts == ({"0.weight": 1.0, "0.bias": 1.0} if level == "O1" else {})
    # The input; at O1 weight and bias, at O2 the output of the model, to float32.
    assert sum(row.bytes_cast for row in rows) == 2 * 4 * 8 + (2 * (8 * 8 + 8) if level == "O1" else 4 * 4 * 8)


# Lines and modules


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))  # here
        return x


def test_a_row_is_a_line_with_its_modules_and_backward_is_at_the_forwards():
    model, x = _Blocks(), torch.randn(4, 8)
    record = recorded(lambda: model(x).sum().backward())
    for phase in ("forward", "backward"):
        found = {row.function: (row.module, row.calls) for row in rows_here(record, _Blocks, phase)}
        assert found == {"linear": ("blocks.0-2", 3), "tanh": ("", 3)}
    row = rows_here(record, _Blocks)[0]
    assert row.source == "x = torch.tanh(block(x))  # here" and row.site == f"test_recording.py:{row.line}"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_marked(use_reentrant):
    model, x = _Blocks(), torch.randn(4, 8, requires_grad=True)
    record = recorded(lambda: checkpoint(model, x, use_reentrant=use_reentrant).sum().backward())
    calls = {
        phase: {row.function: row.calls for row in rows_here(record, _Blocks, phase)}
        for phase in ("forward", "recomputed", "backward")
    }
    assert all(found == {"linear": 3, "tanh": 3} for found in calls.values())


def test_two_models_are_told_apart_by_their_classes():
    first, second = nn.Sequential(nn.Linear(8, 8)), _Blocks()
    x = torch.randn(4, 8)
    record = recorded(lambda: second(first(x)))
    assert {row.module for row in record.calls if row.function == "linear"} == {"0", "_Blocks.blocks.0-2"}


def test_a_closure_is_no_part_of_the_step():
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    record = recorded(lambda: [optimizer.step(closure), optimizer.step(closure=closure)])
    assert record.iterations == 2
    calls = {row.phase: row.calls for row in record.calls if row.function in ("linear", "step")}
    assert calls == {"forward": 2, "backward": 2, "step": 2}


def test_iterations_are_those_of_the_optimizer_that_steps_first_and_a_step_is_one_row():
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    generator, critic = (torch.optim.Adam(one.parameters()) for one in models)

    def iteration():
        for _ in range(3):
            models[0](torch.ones(2, 8)).sum().backward()
            generator.step()
            for _ in range(5):
                models[1](torch.ones(2, 8)).sum().backward()
                critic.step()

    record = recorded(iteration)
    assert record.iterations == 3
    steps = {(row.function, row.source): row.calls for row in record.calls if row.phase == "step"}
    assert steps == {("step", "generator.step()"): 3, ("step", "critic.step()"): 15}


def test_json_has_rows_in_plain_words_and_names_no_folders(tmp_path):
    layer = nn.Linear(8, 8, bias=False)
    recorded(lambda: layer(torch.ones(4, 8))).to_json(tmp_path / "record.json")
    text = (tmp_path / "record.json").read_text()
    (row,) = [row for row in json.loads(text)["calls"] if row["function"] == "linear"]
    assert (row["file"], row["dtypes_in"], row["flops"]) == ("test_recording.py", ["float32"], 2 * 4 * 8 * 8)
    assert row["reason"] == "float32: as given" and row["site"] == f"test_recording.py:{row['line']}"
    assert str(ROOT) not in text


def test_compiled_code_is_recorded_eagerly_and_the_record_says_so():
    model, x = _Blocks(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    record = recorded(lambda: compiled(x))
    assert {row.function: row.calls for row in rows_here(record, _Blocks)} == {"linear": 3, "tanh": 3}
    assert len(record.notes) == 1 and record.notes[0].startswith("torch.compile: recorded eagerly")
    torch.compiler.reset()


# State that a recording leaves alone


def state_of_torch():
    owners = (torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler, torch.Tensor, F, torch)
    hooks, of_optimizers = nn.modules.module, sys.modules["torch.optim.optimizer"]
    return (
        [dict(vars(owner)) for owner in owners],
        len(hooks._global_forward_pre_hooks),
        len(hooks._global_forward_hooks),
        len(of_optimizers._global_optimizer_pre_hooks),
        len(of_optimizers._global_optimizer_post_hooks),
        torch._C._len_torch_dispatch_stack(),
    )


def test_an_exception_inside_goes_on_and_leaves_torch_as_it_was():
    x, before = torch.randn(4, 8), state_of_torch()
    with pytest.raises(ZeroDivisionError), ampkit.recording() as record:
        x @ x.t()
        raise ZeroDivisionError
    assert state_of_torch() == before
    assert [row.function for row in record.calls] == ["matmul"]
    assert recorded(lambda: x @ x.t()).flops == 2 * 4 * 8 * 4


def test_a_recording_inside_of_another_is_refused_in_every_thread():
    with ampkit.recording():
        with ThreadPoolExecutor() as pool:
            error = pool.submit(recorded, lambda: None).exception()
        with pytest.raises(ConfigurationError, match="while another recording runs"):
            recorded(lambda: None)
    assert isinstance(error, ConfigurationError)
    recorded(lambda: None)  # and the refusal has ended nothing


def test_results_are_those_without_a_recording():
    def losses():
        torch.manual_seed(0)
        model, optimizer = initialized(_Blocks(), "O1")
        x, values = torch.randn(4, 8), []
        for _ in range(3):
            loss = model(x).float().square().mean()
            backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        ampkit.close()
        return values

    plain = losses()
    with ampkit.recording():
        assert losses() == plain


# Printed words


def test_a_record_fits_100_columns_and_says_what_it_found():
    model, optimizer = initialized(_Headed(), "O1")
    x = torch.randn(4, 8)

    def iteration():
        backward(model(x).float().square().mean(), optimizer)
        optimizer.step()

    record = recorded(iteration)
    lines = str(record).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("O1: torch functions cast to bfloat16")
    assert any(line.split()[:1] == ["time"] for line in lines)
    assert any(re.search(r'test_recording\S*:\d+ +linear +fp32 -> bf16 +row "linear"$', line) for line in lines)


def test_an_empty_record_says_so():
    with ampkit.recording() as record:
        assert str(record).startswith("nothing recorded")
    assert str(record).startswith("nothing recorded")
