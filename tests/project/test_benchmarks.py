"""The scripts in benchmarks/ run, each once and tiny, and print what they promise; their times are not judged here."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

FOLDER = ROOT / "benchmarks"
#: Modules that scripts share.
SHARED = {"bfloat16_products.py", "cases.py", "host_reads.py", "memory.py", "resumable.py", "ways.py"}
WAYS = ["float32", "autocast", "O1", "O1, fused", "O2", "O2, fused", "O5", "O5, fused"]
FEWER = ["float32", "autocast", "O1, fused", "O2, fused", "O5, fused"]


def run(script, *arguments):
    """Return what a script prints, on the CPU and on one thread."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(line):
    return [float(word) for word in re.findall(r"\d+(?:\.\d+)?", line)]


def check_accumulation_error():
    printed = run("accumulation_error.py", "--micro-batches", "1", "2")
    first, second = (numbers(line) for line in printed.splitlines()[-2:])
    assert (first[0], second[0]) == (1, 2)
    assert first[1] == first[2] and first[3] == first[4]  # one micro-batch delays nothing
    # In percent: weights, activations and gradients each rounded to bfloat16, by up to half of 2**-8 = 0.39%.
    assert all(0.1 < error < 1.0 for error in (*first[1:], *second[1:]))


def check_bench_dispatch():
    printed = run("bench_dispatch.py", "--repetitions", "2")
    for call in ("torch.mm", "F.linear", "F.conv2d", "x @ w", "torch.cat", "torch.relu"):
        (line,) = (line for line in printed.splitlines() if line.startswith(call + " "))
        bare, autocast = numbers(line.removeprefix(call))[:2]
        assert bare > 0 and autocast > 0
    assert "Python: geometric mean of the ratios" in printed


def check_bench_kernels():
    printed = run("bench_kernels.py", "--lists", "tiny", "--rounds", "1", "--device", "cpu")
    assert "tiny: 5000 tensors, 0.5 M elements, on cpu, 1 threads" in printed
    table = printed[printed.index("operation ") :].splitlines()[1:]
    assert len(table) == 23
    (line,) = (line for line in table if line.startswith("check, sgd with rests"))
    moved, ours, rate, share, theirs, ratio = numbers(line)
    # The gradient twice, weight and rest each way, the momentum each way.
    assert moved == 2 * 2 + 2 * 4 + 2 * 4 and rate == pytest.approx(0.5e6 * 20 / (ours / 1e3) / 1e9, rel=0.02, abs=0.05)
    assert 0 < share and ratio == pytest.approx(ours / theirs, rel=0.02, abs=0.005)


def check_bench(folder, *cells):
    out = folder / "results.json"
    only = [word for cell in cells for word in ("--only", cell)]
    printed = run("bench.py", "--short", *only, "--out", str(out))
    results = json.loads(out.read_text())
    assert results["short"] and results["torch"] == torch.__version__ and results["threads"] == 1
    assert len(results["cells"]) == len(cells)
    for cell in results["cells"]:
        of = cell["ways"]
        assert list(of) == (FEWER if cell["compiled"] else WAYS)
        for way, its in of.items():
            assert f"  {way} " in printed
            assert len(its["seconds"]) == 2 and min(its["seconds"]) > 0
            # Phases follow each other without a gap; each is a median of its own.
            assert sum(its["phases"].values()) == pytest.approx(sum(its["seconds"]) / 2, rel=0.1)
            assert its["loss"] == pytest.approx(of["float32"]["loss"], rel=0.02)  # two steps, rounded to bfloat16
        # O1 saves what torch.autocast saves, or less; of O2's weights in lower precision autograd saves no copies.
        assert of["O1, fused"]["saved_bytes"] <= of["autocast"]["saved_bytes"]
        assert of["O2, fused"]["saved_bytes"] < of["autocast"]["saved_bytes"]
        if not cell["compiled"]:
            assert all(its["peak_bytes"] > 4 * cell["parameters"] for its in of.values())
            # Flags on the CPU, which wait for nothing.
            assert all(of[way]["host_reads"] <= 2 * cell["accumulate"] for way in WAYS if way.endswith("fused"))
    return results


def check_bench_eager(folder):
    (cell,) = check_bench(folder, "mlp")["cells"]
    assert cell["parameters"] == 12 * (64 * 64 + 64)
    # Eleven inputs of layers, kept for the gradients of weights and by relu alike, the first input and what mse_loss keeps: the
    # difference of its arguments' storages, of 8 rows.
    assert cell["ways"]["float32"]["saved_bytes"] >= 12 * 8 * 64 * 4


def check_bench_optimizer_step():
    printed = run("bench_optimizer_step.py", "--small", "--rounds", "1", "--device", "cpu")
    rows = [line for line in printed.splitlines() if re.match(r"(autocast|O2|O2, scale 1|O2, int8) +(yes|no) ", line)]
    assert len(rows) == 8
    for row in rows:
        way, clips, _ = re.split(" +(yes|no) ", row)
        *_, bytes_each, reads = numbers(row.removeprefix(way))
        # Float32 parameter, gradient and two moments; at O2 2 bytes of weight, rest and gradient each and 8 of moments, of
        # which those in 8 bits take 2 bytes and 4 in 256. The host reads flags where they are on the CPU, and so cost no wait: at
        # the end of a block for zeros and for news, in the step, and for a clipping; at scale 1 when a step judges, and after.
        flags = {"autocast": 0, "O2": 3 + (clips == "yes"), "O2, scale 1": 2, "O2, int8": 2}
        expected = {"autocast": 16.0, "O2": 14.0, "O2, scale 1": 14.0, "O2, int8": 8.0}
        assert bytes_each == expected[way] and reads <= flags[way]
    for name in ("autocast", "O5, delay_unscale", "O5, in float32", "bare"):
        assert re.search(rf"^{name} +[\d.]+ +[\d.]+$", printed, re.MULTILINE)


def check_bench_iteration():
    printed = run("bench_iteration.py", "--parameters", "2", "5", "--repetitions", "1")
    rows = [numbers(line) for line in printed.splitlines()[2:]]
    assert [row[0] for row in rows] == [2, 5] and all(len(row) == 8 and min(row) > 0 for row in rows)


def check_bench_recording():
    printed = run("bench_recording.py", "--rounds", "1", "--short", "--only", "O2")
    (row,) = (line for line in printed.splitlines() if line.startswith("O2 "))
    plain, recorded, ratio, peak = numbers(row.removeprefix("O2"))
    assert ratio == pytest.approx(recorded / plain, rel=0.02) and min(plain, peak) > 0


def check_bench_on_step():
    printed = run("bench_on_step.py", "--short", "--rounds", "2")
    rows = [line for line in printed.splitlines() if re.search(r" \d\.\d{3} \(\d", line)]
    names = [re.split(r" {2,}", row)[0] for row in rows]
    assert names[0] == "no on_step" and numbers(rows[0])[1:] == [1.0, 1.0, 1.0]
    reads = "nothing;loss_scale, skipped, grad_norm;the same, and norms;underflow;lost_updates"
    assert names[1:] == reads.split(";")
    assert all(min(numbers(row)) > 0 for row in rows)
    check_lost_updates()


def check_lost_updates():
    rows = run("bench_on_step.py", "--lost-updates", "--short", "--rounds", "3").strip().splitlines()
    assert len(rows) == 2 and all(
        re.search(r": \d\.\d{3} \(\d\.\d{3}-\d\.\d{3}\) of a step without$", row) for row in rows
    )


def check_bench_running_statistics():
    printed = run("bench_running_statistics.py", "--rounds", "1", "--batch", "2", "--size", "32", "--device", "cpu")
    assert "159 buffers" in printed  # 53 batch norms
    for part in ("before", "after"):
        (row,) = (line for line in printed.splitlines() if line.startswith(part + " "))
        assert 1 <= numbers(row)[-1] <= 8  # not one operation for each buffer


def check_beside():
    printed = run("beside.py", ".", "--rounds", "2", "--only", "mlp", "--only", "policy network")
    assert len(printed.splitlines()) == 8
    for level in ("O1", "O2", "O5"):
        trained, evaluated = (line for line in printed.splitlines() if line.startswith(f"  {level}: "))
        assert "saved 1.000 of before" in trained  # by the same checkout
        assert re.search(r"saved 0\.00 MB; time \d\.\d+ \(.*\) of before; time \d+\.\d+ \(.*\) of autocast$", evaluated)
        saved = re.search(r"saved (\d\.\d+) of autocast$", trained)[1]
        assert float(saved) == 1 if level != "O2" else 0.4 < float(saved) < 0.6  # no casts of weights


def check_embedding_error():
    pytest.importorskip("transformers")
    printed = [line for line in run("embedding_error.py").splitlines() if ", seed " in line]
    assert len(printed) == 6
    for line in printed:
        autocast, o4, o5, in_float32 = map(float, re.findall(r" (0\.\d+)", line))
        assert 0.001 < min(o4, in_float32) and max(o4, o5, in_float32) < 1.25 * autocast


def check_state_dtypes():
    printed = run("state_dtypes.py", "--seeds", "1", "--steps", "3")
    (row,) = (line for line in printed.splitlines() if line.startswith("| 0 |"))
    assert re.fullmatch(r"\| 0 \| (\d\.\d+ \| [+-]\d\.\d+% ?\|? ?){3}", row)
    # Two moments in 4, 2 and 1 bytes; these with four bytes to 256, and the small tensors' last ones.
    assert "float32 8.00, bfloat16 4.00, int8 2.0" in printed


def check_rivals():
    ways = "torch, float32", "torch, bfloat16", "ampkit", "ampkit, int8 moments"
    timed = run("rivals.py", "time", "--width", "64", "--layers", "1", "--only", *ways)
    assert re.findall(r"^\| (.+?) \| \d+\.\d ms \| \d+\.\d\d \|$", timed, re.M) == list(ways)
    assert re.search(r"^\| torch, float32 \|.*\| 1\.00 \|$", timed, re.M)
    printed = run("rivals.py", "bytes", "--width", "128", "--layers", "2", "--only", *ways)
    bytes_each = {
        name: tuple(map(float, re.findall(r"\d+\.\d+", printed.split(f"| {name} |")[1])[:2])) for name in ways
    }
    # Weight, rest, two moments; with the gradient at the peak of a backward pass.
    assert bytes_each["torch, float32"] == pytest.approx((12, 16), rel=0.02)
    assert bytes_each["torch, bfloat16"] == pytest.approx((6, 8), rel=0.02)
    assert bytes_each["ampkit"] == pytest.approx((12, 14), rel=0.02)
    assert bytes_each["ampkit, int8 moments"] == pytest.approx((6.03, 8.03), rel=0.02)


def check_ptxas():
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    header, _, row = run("ptxas.py", "update_scale").strip().splitlines()[-3:]
    assert row.startswith("| update_scale_kernel |") and row.count("|") == header.count("|")
    registers, shared, stores, loads, occupancy, instructions, loop = map(int, re.findall(r"\d+", row)[:7])
    # One thread moves seven words: no loop, nothing to spill, and no limit to how many blocks there are.
    assert 0 < registers <= 32 and shared == stores == loads == loop == 0 and occupancy == 100 and instructions > 7


def check_peak_memory():
    lines = run("peak_memory.py", "--ways", "autocast;O5", "--micro", "1", "--small").strip().splitlines()
    assert [line.split()[2] for line in lines] == ["autocast", "O5"]
    assert all(float(line.split()[-4]) > 12.0 for line in lines)  # weights and moments


def check_flow():
    """Check that the code that a reader of an iteration follows does not grow."""
    printed = run("flow.py", "--levels", "O1,O2,O5")
    found = {line[:2]: numbers(line[3:]) for line in printed.splitlines()}
    for level, most in {"O1": (124, 16, 54), "O2": (152, 17, 66), "O5": (110, 16, 48)}.items():
        assert all(number <= bound for number, bound in zip(found[level], most, strict=True)), (level, found[level])


RUNS = {
    "accumulation_error.py": check_accumulation_error,
    "beside.py": check_beside,
    "embedding_error.py": check_embedding_error,
    "bench_dispatch.py": check_bench_dispatch,
    "bench_kernels.py": check_bench_kernels,
    "bench_optimizer_step.py": check_bench_optimizer_step,
    "bench_iteration.py": check_bench_iteration,
    "bench_recording.py": check_bench_recording,
    "bench_on_step.py": check_bench_on_step,
    "bench_running_statistics.py": check_bench_running_statistics,
    "state_dtypes.py": check_state_dtypes,
    "peak_memory.py": check_peak_memory,
    "rivals.py": check_rivals,
    "ptxas.py": check_ptxas,
    "flow.py": check_flow,
}
#: Tested elsewhere: in test_troubles.py, and with the pages.
ELSEWHERE = ["bench.py", "step_time_model.py", "troubles.py"]


@pytest.mark.parametrize(
    "script",
    ["accumulation_error.py", "flow.py", *(pytest.param(name, marks=pytest.mark.slow) for name in list(RUNS)[1:-1])],
)
def test_script_runs_and_prints_what_it_promises(script):
    RUNS[script]()


def test_every_script_is_run():
    assert sorted([*RUNS, *ELSEWHERE]) == sorted({path.name for path in FOLDER.glob("*.py")} - SHARED)


@pytest.mark.slow
def test_whole_steps_are_measured_in_every_way(tmp_path):
    check_bench_eager(tmp_path)


@pytest.mark.slow
def test_whole_steps_are_measured_with_several_micro_batches_and_compiled(tmp_path):
    one, four, compiled = check_bench(tmp_path, "gpt", "gpt,4", "mlp,compiled")["cells"]
    assert (four["accumulate"], compiled["compiled"]) == (4, True)
    # The activations of four micro-batches.
    saved = [cell["ways"]["float32"]["saved_bytes"] for cell in (one, four)]
    assert saved[1] == pytest.approx(4 * saved[0], rel=0.1)
