"""The profile example: own times, dtypes and kernels from a trace written by hand; one small step of ResNet-18."""

import runpy

import pytest
import torch
from helpers import ROOT

for package in ("torchvision", "matplotlib"):
    pytest.importorskip(package, reason="the example needs it")


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "profile" / "profile_levels.py"))


def operator(name, start, length, dtype="float", thread=1, number=0):
    arguments = {"Input type": ["", dtype], "External id": number}
    return {"cat": "cpu_op", "name": f"aten::{name}", "ts": start, "dur": length, "tid": thread, "args": arguments}


def test_an_operator_has_its_own_time_without_that_of_those_it_calls(example):
    events = [
        operator("linear", 0, 10_000),
        operator("addmm", 1_000, 6_000, "c10::BFloat16"),
        operator("copy_", 2_000, 1_000, "c10::Half"),
        operator("add", 3_000, 2_000, thread=2),  # at the same time, elsewhere
        operator("relu", 10_000, 500, "Int"),
        {"cat": "user_annotation", "name": "step", "ts": 0, "dur": 99_000, "tid": 1},
    ]
    assert example["summarise"](events) == {
        ("linear", "float32"): (1, 4.0),
        ("addmm", "bfloat16"): (1, 5.0),
        ("copy_", "float16"): (1, 1.0),
        ("add", "float32"): (1, 2.0),
        ("relu", "other"): (1, 0.5),
    }


def test_where_there_are_kernels_theirs_is_the_time(example):
    kernel = {"cat": "kernel", "name": "gemm", "ts": 50, "dur": 3_000, "tid": 7, "args": {"External id": 4}}
    events = [operator("mm", 0, 10, "c10::Half", number=4), operator("view", 20, 10, number=5), kernel, kernel]
    assert example["summarise"](events) == {("mm: gemm", "float16"): (2, 6.0)}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("aten::copy_", "copy_"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
            "vectorized_elementwise_kernel",
        ),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16", "sm80_xmma_fprop_implicit_gemm_bf16bf16"),
    ],
)
def test_kernels_go_by_their_short_names(example, name, expected):
    assert example["short"](name) == expected


def test_each_row_is_the_median_of_its_steps(example):
    steps = [{("mm", "float16"): (2, ms)} for ms in (1.0, 50.0, 3.0)]
    steps[0]["add", "float32"] = (1, 9.0)  # in one of three
    assert example["medians"](steps) == {("mm", "float16"): (2, 3.0), ("add", "float32"): (0, 0.0)}


def test_bars_of_all_levels_have_one_scale(example, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.pyplot.close", drawn.append)
    example["draw"](
        {"O0": {("mm", "float32"): (1, 100.0)}, "O1": {("mm", "bfloat16"): (1, 1.0)}}, 8, tmp_path / "x.png"
    )
    monkeypatch.undo()
    first, second = drawn[0].axes
    assert first.get_xlim() == second.get_xlim() and second.get_xlim()[1] > 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="names of the CPU's operators")
def test_convolutions_run_in_the_precision_of_the_level(example, tmp_path, capsys):
    results = example["main"](["--batch", "2", "--steps", "1", "--only", "O0", "O1", "O2", "--out", str(tmp_path)])
    for name, dtype in (("O0", "float32"), ("O1", "bfloat16"), ("O2", "bfloat16")):
        found = {found for operator, found in results[name] if "conv" in operator and "backward" not in operator}
        assert found == {dtype}
        assert (
            sum(calls for (operator, _), (calls, _) in results[name].items() if operator == "convolution_backward")
            == 20
        )
    assert ("native_batch_norm", "float32") in results["O0"]
    assert f"traces and chart: {tmp_path}" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"O0.json", "O1.json", "O2.json", "levels.png"}
