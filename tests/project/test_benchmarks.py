"""The scripts in benchmarks/ run, each once and tiny, and print what they promise; their times are not judged here."""

import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

FOLDER = ROOT / "benchmarks"


def run(script, *arguments):
    """What a script prints, on the CPU and on one thread."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(line):
    return [float(word) for word in re.findall(r"\d+(?:\.\d+)?", line)]


def check_accumulation_error():
    printed = run("accumulation_error.py", "--micro-batches", "1", "2")
    one, two = (numbers(line) for line in printed.splitlines()[-2:])
    assert (one[0], two[0]) == (1, 2)
    assert one[1] == one[2] and one[3] == one[4]  # one micro-batch delays nothing
    # In percent: weights, activations and gradients each rounded to bfloat16, by up to half of 2**-8 = 0.39%.
    assert all(0.1 < error < 1.0 for error in (*one[1:], *two[1:]))


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
    assert len(table) == 16
    (line,) = (line for line in table if line.startswith("check, sgd with masters"))
    moved, ours, rate, share, theirs, ratio = numbers(line)
    assert moved == 22 and rate == pytest.approx(0.5e6 * 22 / (ours / 1e3) / 1e9, rel=0.02, abs=0.05)
    assert 0 < share and ratio == pytest.approx(ours / theirs, rel=0.02, abs=0.005)


def check_bench_step():
    printed = run("bench_step.py", "--only", "mlp", "--rounds", "2", "--device", "cpu")
    theirs, ours, ratio, low, high, bare, their_bytes, our_bytes, _ = numbers(printed.splitlines()[-1])
    assert min(theirs, ours, bare) > 0 and low <= ratio <= high
    # Twelve layers: what autograd saves is bfloat16 either way, and O1 keeps no more of it.
    assert our_bytes <= their_bytes


def check_bench_optimizer_step():
    printed = run("bench_optimizer_step.py", "--small", "--rounds", "1", "--device", "cpu")
    rows = [line for line in printed.splitlines() if re.match(r"(autocast|O2|O2, scaled|O5) +(yes|no) ", line)]
    assert len(rows) == 8
    for row in rows:
        *_, bytes_each, reads = numbers(re.split(" (?:yes|no) ", row)[1])
        # Float32 parameter, gradient and two moments; at O2 and O5 2 bytes of weight and gradient each and 12 of masters and
        # moments. Neither way hands a value to the host.
        assert (bytes_each, reads) == (16.0, 0)
    for name in ("autocast", "O5, delay_unscale", "O5, in float32", "bare"):
        assert re.search(rf"^{name} +[\d.]+ +[\d.]+$", printed, re.MULTILINE)


def check_bench_iteration():
    printed = run("bench_iteration.py", "--parameters", "2", "5", "--repetitions", "1")
    rows = [numbers(line) for line in printed.splitlines()[2:]]
    assert [row[0] for row in rows] == [2, 5] and all(len(row) == 6 and min(row) > 0 for row in rows)


def check_bench_running_statistics():
    printed = run("bench_running_statistics.py", "--rounds", "1", "--batch", "2", "--size", "32", "--device", "cpu")
    assert "159 buffers" in printed  # 53 batch norms
    for part in ("copy", "choose"):
        (row,) = (line for line in printed.splitlines() if line.startswith(part + " "))
        assert 1 <= numbers(row)[-1] <= 4  # not one operation for each buffer, nor for each dtype


def check_convergence():
    printed = run("convergence.py", "--seeds", "1", "--steps", "3")
    assert "O0: 3 losses equal plain torch's bit for bit" in printed
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        assert f"{level}: losses 4 to 6 after save and load are equal bit for bit" in printed
    for level in ("O1", "O2", "autocast"):
        (line,) = (line for line in printed.splitlines() if line.startswith(f"| 0 | {level} |"))
        assert numbers(line.removeprefix(f"| 0 | {level} |"))[0] < 1.0  # percent that the first losses are from O0's
    assert printed.endswith("Nothing differs; bounds are for 110 steps.\n")


RUNS = {
    "accumulation_error.py": check_accumulation_error,
    "bench_dispatch.py": check_bench_dispatch,
    "bench_kernels.py": check_bench_kernels,
    "bench_step.py": check_bench_step,
    "bench_optimizer_step.py": check_bench_optimizer_step,
    "bench_iteration.py": check_bench_iteration,
    "bench_running_statistics.py": check_bench_running_statistics,
    "convergence.py": check_convergence,
}


@pytest.mark.parametrize(
    "script", ["accumulation_error.py", *(pytest.param(name, marks=pytest.mark.slow) for name in list(RUNS)[1:])]
)
def test_script_runs_and_prints_what_it_promises(script):
    RUNS[script]()


def test_every_script_is_run():
    assert sorted(RUNS) == sorted(path.name for path in FOLDER.glob("*.py") if path.name != "memory.py")
