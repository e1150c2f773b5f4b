"""The scripts in benchmarks/ run, each once and tiny, and print what they promise; their times are not judged here."""

import importlib
import json
import re
import sys

import pytest
import torch
from helpers import ROOT, python
from torch.nn import functional as F

FOLDER = ROOT / "benchmarks"
#: Modules that scripts share.
SHARED = {"bfloat16_products.py", "cases.py", "host_reads.py", "memory.py", "resumable.py", "ways.py"}
WAYS = ["float32", "autocast", "O1", "O1, fused", "O2", "O2, fused", "O5", "O5, fused"]
FEWER = ["float32", "autocast", "O1, fused", "O2, fused", "O5, fused"]


def run(script, *arguments):
    """Return what a script prints, on the CPU and on one thread."""
    done = python(FOLDER / script, *arguments, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: Arguments of a script, and patterns of lines that it prints.
RUNS = {
    # In percent: weights, activations and gradients each rounded to bfloat16, by up to half of 2**-8 = 0.39%. One micro-batch
    # delays nothing.
    "accumulation_error.py --micro-batches 1 2": [
        *(r"\| 1 \| (0\.[1-9]\d)% \| \1% \| (0\.[1-9]\d)% \| \2% \|", r"\| 2 (\| 0\.[1-9]\d% ){4}\|"),
    ],
    "beside.py . --rounds 2 --only mlp": [rf"  {level}: .*saved 1\.000 of before.*" for level in ("O1", "O2", "O5")],
    "bench_dispatch.py --repetitions 2": [
        *(
            rf"{re.escape(call)} +[\d.]+ +[\d.]+ .*"
            for call in ("torch.mm", "F.linear", "F.conv2d", "x @ w", "torch.cat")
        ),
        r".*Python: geometric mean of the ratios.*",
    ],
    # The gradient twice, weight and rest each way, the momentum each way.
    "bench_kernels.py --lists tiny --rounds 1 --device cpu": [
        "tiny: 5000 tensors, 0.5 M elements, on cpu, 1 threads",
        rf"check, sgd with rests +{2 * 2 + 2 * 4 + 2 * 4}( +[\d.]+){{5}}",
    ],
    # Float32 parameter, gradient and two moments; at O2 2 bytes of weight, rest and gradient each and 8 of moments, of which those
    # in 8 bits take 2 bytes and 4 in 256. The host reads flags that are on the CPU.
    "bench_optimizer_step.py --small --rounds 1 --device cpu": [
        r"autocast +no .* 16\.0 +0",
        r"O2 +yes .* 14\.0 +[0-4]",
        r"O2, scale 1 +no .* 14\.0 +[0-2]",
        r"O2, int8 +no .* 8\.0 +[0-2]",
    ],
    "bench_iteration.py --parameters 2 5 --repetitions 1": [r" *2( +[\d.]+){7}", r" *5( +[\d.]+){7}"],
    "bench_recording.py --rounds 1 --short --only O2": [r"O2 ( +[\d.]+\D*){4}"],
    "bench_on_step.py --short --rounds 2": [
        *(r"no on_step .* 1\.000 \(1\.000-1\.000\)", r"underflow .*\)", r"lost_updates .*\)"),
    ],
    "bench_on_step.py --lost-updates --short --rounds 3": [r"LostUpdates, .*: \d\.\d{3} \(.*\) of a step without"],
    # 53 batch norms, and not one operation for each buffer.
    "bench_running_statistics.py --rounds 1 --batch 2 --size 32 --device cpu": [
        *(r".*159 buffers.*", r"before .* [1-8]", r"after .* [1-8]"),
    ],
    # Two moments in 4, 2 and 1 bytes; these with four bytes to 256, and the small tensors' last ones.
    "state_dtypes.py --seeds 1 --steps 3": [
        *(r"\| 0 \| (\d\.\d+ \| [+-]\d\.\d+% ?\|? ?){3}", r".*float32 8\.00, bfloat16 4\.00, int8 2\.0.*"),
    ],
    # More than weights and moments.
    "peak_memory.py --ways autocast;O5 --micro 1 --small": [
        *(rf".* {way} .* (1[2-9]|[2-9]\d)\.\d bytes per parameter" for way in ("autocast", "O5")),
    ],
    "rivals.py time --width 64 --layers 1 --only torch,_float32 ampkit": [
        *(r"\| torch, float32 \| \d+\.\d ms \| 1\.00 \|", r"\| ampkit \| \d+\.\d ms \| \d+\.\d\d \|"),
    ],
}


@pytest.mark.parametrize(
    "command", [pytest.param(command, marks=[pytest.mark.slow] * (place > 0)) for place, command in enumerate(RUNS)]
)
def test_script_runs_and_prints_what_it_promises(command):
    printed = run(*(word.replace(",_", ", ") for word in command.split()))
    missing = [pattern for pattern in RUNS[command] if not re.search(f"^{pattern}$", printed, re.MULTILINE)]
    assert missing == [], printed


@pytest.mark.slow
def test_bytes_of_rivals_are_those_that_one_adds_up():
    # Weight, rest, two moments; with the gradient at the peak of a backward pass.
    expected = {
        "torch, float32": (12, 16),
        "torch, bfloat16": (6, 8),
        "ampkit": (12, 14),
        "ampkit, int8 moments": (6.03, 8.03),
    }
    printed = run("rivals.py", "bytes", "--width", "128", "--layers", "2", "--only", *expected)
    for name, bytes_each in expected.items():
        found = re.findall(r"\d+\.\d+", printed.split(f"| {name} |")[1])[:2]
        assert tuple(map(float, found)) == pytest.approx(bytes_each, rel=0.02), name


@pytest.mark.slow
def test_weights_of_embeddings_err_no_more_than_under_autocast():
    pytest.importorskip("transformers")
    printed = [line for line in run("embedding_error.py").splitlines() if ", seed " in line]
    assert len(printed) == 6
    for line in printed:
        autocast, o4, o5, in_float32 = map(float, re.findall(r" (0\.\d+)", line))
        assert 0.001 < min(o4, in_float32) and max(o4, o5, in_float32) < 1.25 * autocast


def test_the_code_that_a_reader_of_an_iteration_follows_does_not_grow():
    printed = run("flow.py", "--levels", "O1,O2,O5")
    found = {line[:2]: [float(one) for one in re.findall(r"\d+", line[3:])] for line in printed.splitlines()}
    for level, most in {"O1": (126, 16, 54), "O2": (154, 17, 66), "O5": (112, 16, 48)}.items():
        assert all(number <= bound for number, bound in zip(found[level], most, strict=True)), (level, found[level])


def test_every_script_is_run():
    """But for ptxas.py, which needs nvcc."""
    elsewhere = {"bench.py", "embedding_error.py", "flow.py", "ptxas.py", "step_time_model.py", "troubles.py"}
    assert {command.split()[0] for command in RUNS} | elsewhere == {path.name for path in FOLDER.glob("*.py")} - SHARED


@pytest.mark.slow
def test_whole_steps_are_measured_in_every_way(tmp_path):
    out = tmp_path / "results.json"
    cases = ("mlp", "gpt", "gpt,4", "mlp,compiled")
    run("bench.py", "--short", *(word for case in cases for word in ("--only", case)), "--out", str(out))
    results = json.loads(out.read_text())
    assert results["short"] and results["torch"] == torch.__version__ and results["threads"] == 1
    for cell in results["cells"]:
        ways = cell["ways"]
        assert list(ways) == (FEWER if cell["compiled"] else WAYS)
        for its in ways.values():
            assert len(its["seconds"]) == 2 and min(its["seconds"]) > 0
            # Phases follow each other without a gap; each is a median of its own.
            assert sum(its["phases"].values()) == pytest.approx(sum(its["seconds"]) / 2, rel=0.1)
            assert its["loss"] == pytest.approx(ways["float32"]["loss"], rel=0.02)  # two steps, rounded to bfloat16
        # O1 saves what torch.autocast saves, or less; of O2's weights in lower precision autograd saves no copies.
        assert ways["O1, fused"]["saved_bytes"] <= ways["autocast"]["saved_bytes"]
        assert ways["O2, fused"]["saved_bytes"] < ways["autocast"]["saved_bytes"]
    mlp, one, four, _ = results["cells"]
    assert mlp["parameters"] == 12 * (64 * 64 + 64)
    # The activations of four micro-batches.
    saved = [cell["ways"]["float32"]["saved_bytes"] for cell in (one, four)]
    assert saved[1] == pytest.approx(4 * saved[0], rel=0.1)


# benchmarks/convergence: its loop is torch's


@pytest.fixture
def load(monkeypatch):
    """Import a module of benchmarks/ or benchmarks/convergence/, which is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "convergence"))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def task(load):
    """The task of MNIST over images that are drawn here: the package with the real ones is for the benchmark alone."""
    mnist = load("mnist")
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4100, 1, 28, 28, generator=generator), torch.randint(10, (4100,), generator=generator)
    mnist.data = lambda: images
    return mnist


def by_hand(task, autocast):
    """Return the losses of the task in torch alone: one loop, as a script has it."""
    x, y = task.data()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.LR, weight_decay=0.01)
    losses = []
    for factor in (1.0, 1.0, 0.5):  # a warm-up of one step, then half a cosine over two
        optimizer.param_groups[0]["lr"] = task.LR * factor
        chosen = torch.randint(4000, (task.BATCH,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(x[chosen])
        loss = F.cross_entropy(outputs.float(), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["float32", "torch.autocast", "O1", "O5"])
def test_losses_are_those_of_a_loop_by_hand(task, precision, tmp_path):
    losses, accuracy = task.train(precision, 0, "CNN", 3, tmp_path)
    assert losses[0] == pytest.approx(2.3, abs=0.3)  # ln 10, before anything is learned
    expected = by_hand(task, autocast=precision != "float32")
    assert losses == pytest.approx(expected, rel=1e-6 if precision == "float32" else 5e-3)
    assert 0 <= accuracy <= 100
