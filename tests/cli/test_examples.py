"""The examples but for ImageNet's, whose scripts and notebooks run small: values of float32, of arithmetic, of pages and files."""

import functools
import json
import runpy

import pytest
import torch
from helpers import ROOT, others_slow, python

import ampkit

for package in ("torchvision", "sklearn", "matplotlib"):
    pytest.importorskip(package, reason="the examples need it")

EXAMPLES = ROOT / "examples"
F32, LOWER = torch.float32, torch.float16 if torch.cuda.is_available() else torch.bfloat16


@functools.cache
def names_of(script):
    return runpy.run_path(str(EXAMPLES / script))


# Layer policies: the precision of each layer, and the verbs of loss scaling one by one


@pytest.mark.parametrize(
    "level, dtypes, scale",
    [
        ("O0", {"body": (F32, F32), "gate": (F32, F32), "head": (F32, F32)}, 1.0),
        ("O1", {"body": (F32, LOWER), "gate": (F32, F32), "head": (F32, F32)}, 65536.0),
        ("O2", {"body": (LOWER, LOWER), "gate": (F32, F32), "head": (F32, F32)}, 65536.0),
    ],
)
def test_each_layer_has_its_precision_and_gradients_their_scale(level, dtypes, scale):
    found, right, scaled, unscaled = names_of("layer_policies/layer_policies.py")["train"](level, steps=60)
    assert found == dtypes
    assert torch.equal(scaled, unscaled * scale)  # a power of two changes no digit
    assert right > 0.9  # of four classes


def test_layer_policies_print_what_their_page_shows(capsys):
    names_of("layer_policies/layer_policies.py")["main"](steps=2)
    page = (EXAMPLES / "layer_policies" / "README.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        assert line.rpartition(";")[0].replace("float16", "bfloat16").replace("bbfloat16", "bfloat16") in page


# DCGAN: a scaler for each loss


@functools.cache
def first_iterations(level, out):
    small = ["--iters", "2", "--batch-size", "16", "--width", "8", "--print-freq", "1"]
    return names_of("dcgan/main_amp.py")["main"]([*small, "--opt-level", level, "--out", out])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_first_iterations_of_a_gan_are_those_of_float32(level, tmp_path_factory, tmp_path, capsys):
    expected = first_iterations("O0", str(tmp_path_factory.getbasetemp()))
    capsys.readouterr()
    for found, wanted in zip(first_iterations(level, str(tmp_path)), expected, strict=True):
        # Logits are sums of hundreds of products, each rounded by up to 0.4%, behind norms over few images.
        assert found == pytest.approx(wanted, rel=0.05)
    scales = "1 1 1" if level == "O5" else "65536 65536 65536"
    assert capsys.readouterr().out.count(f"scales {scales}") == 2
    assert (tmp_path / "fake.png").stat().st_size > 1000


# The quantised sine


@pytest.mark.parametrize("name", ["float32", "amp", "O1", "O2"])
def test_a_contender_learns_something_small(name, tmp_path):
    row = names_of("quantized_sine/quantized_sine.py")["contend"](name, 8, 6, tmp_path / "prediction.pt")
    assert set(row) == {"loss", "seconds", "bytes", "inference seconds", "inference bytes"}
    assert all(value > 0 for value in row.values()) and row["loss"] < 1
    prediction = torch.load(tmp_path / "prediction.pt")
    assert prediction.shape == (1, 1, 8, 8) and prediction.isfinite().all()
    weights = 4 * 133633
    if name == "O2":  # weights in half the bytes, but for the norms; masters are not needed to predict
        assert row["inference bytes"] < 0.75 * weights + 2 * 256 * 64 * 4


# Profile: own times and dtypes from a trace written by hand


def test_an_operator_has_its_own_time():
    """Without those that it calls; what runs at the same time in another thread is no part of it."""

    def operator(name, start, length, dtype="float", thread=1):
        arguments = {"Input type": ["", dtype], "External id": 0}
        return {"cat": "cpu_op", "name": f"aten::{name}", "ts": start, "dur": length, "tid": thread, "args": arguments}

    events = [
        operator("linear", 0, 10_000),
        operator("addmm", 1_000, 6_000, "c10::BFloat16"),
        operator("copy_", 2_000, 1_000, "c10::Half"),
        operator("add", 3_000, 2_000, thread=2),
    ]
    assert names_of("profile/profile_levels.py")["summarise"](events) == {
        ("linear", "float32"): (1, 4.0),
        ("addmm", "bfloat16"): (1, 5.0),
        ("copy_", "float16"): (1, 1.0),
        ("add", "float32"): (1, 2.0),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="names of the CPU's operators")
def test_convolutions_run_in_the_precision_of_the_level(tmp_path, capsys):
    arguments = ["--batch", "2", "--steps", "1", "--only", "O0", "O1", "O2", "--out", str(tmp_path)]
    results = names_of("profile/profile_levels.py")["main"](arguments)
    for name, dtype in (("O0", "float32"), ("O1", "bfloat16"), ("O2", "bfloat16")):
        calls = {row: calls for row, (calls, _) in results[name].items() if "conv" in row[0]}
        assert {dtype for operator, dtype in calls if "backward" not in operator} == {dtype}
        assert sum(calls[row] for row in calls if row[0] == "convolution_backward") == 20
    assert ("native_batch_norm", "float32") in results["O0"]
    assert f"traces and chart: {tmp_path}" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"O0.json", "O1.json", "O2.json", "levels.png"}


# CIFAR-10: a resumed run is the run that did not stop


@pytest.fixture
def cifar10():
    yield names_of("cifar10/cifar10.py")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("level", others_slow("O2", of=["O0", "O1", "O2", "O3"]))
def test_resuming_changes_no_bit(cifar10, level, tmp_path, capsys):
    file = tmp_path / "cifar10.pt"
    cifar10["main"](["--check-resume", "--iters", "2", "--batch-size", "2", "--opt-level", level, "--save", str(file)])
    assert f"{level}: 1 iterations after resuming" in capsys.readouterr().out
    assert torch.load(file)["model"]["classifier.1.weight"].dtype is torch.float32


def test_a_difference_after_resuming_is_noticed(cifar10, tmp_path, monkeypatch):
    class Forgetful(cifar10["Run"]):
        def load(self, file):
            super().load(file)
            self.optimizer.state.clear()  # the momentum

    monkeypatch.setitem(cifar10["check_resume"].__globals__, "Run", Forgetful)
    arguments = ["--check-resume", "--iters", "2", "--batch-size", "2", "--save", str(tmp_path / "cifar10.pt")]
    with pytest.raises(AssertionError):
        cifar10["main"](arguments)


def test_a_batch_that_is_no_multiple_of_8_is_noted(cifar10, capsys, tmp_path, monkeypatch):
    few = tuple(part[:8] for part in cifar10["load_images"](cifar10["parse_args"]([])))
    monkeypatch.setitem(cifar10["main"].__globals__, "load_images", lambda args: few)
    cifar10["main"](["--iters", "0", "--batch-size", "12", "--save", str(tmp_path / "cifar10.pt")])
    said = capsys.readouterr()
    assert "12 is no multiple of 8" in said.err and "0 iterations" in said.out and "of 8 right" in said.out


def test_levels_are_compared_with_float32_in_time_and_memory():
    script = EXAMPLES / "cifar10" / "cifar10.py"
    done = python(script, "--compare", "O2", "--iters", "1", "--batch-size", "8")
    rows = {row[0]: [float(figure) for figure in row[1:]] for row in map(str.split, done.stdout.splitlines()[1:])}
    assert list(rows) == ["O0", "O2"]
    (time, to_time, peak, to_peak, loss), at_o2 = rows.values()
    assert to_time == to_peak == 1.0
    assert at_o2[1] == pytest.approx(at_o2[0] / time, rel=0.02, abs=0.02)  # the table rounds
    assert at_o2[3] == pytest.approx(at_o2[2] / peak, rel=0.02, abs=0.02)
    assert at_o2[4] == pytest.approx(loss, rel=0.05)  # one iteration from the same weights


# Notebooks: every code cell runs, in order, as in Jupyter, with sizes that take seconds


#: The tag of the cell that sets sizes.
SMALL = {
    "cifar10/cifar10.ipynb": "ITERATIONS, BATCH = 2, 2",
    "quantized_sine/quantized_sine.ipynb": "GRID, STEPS = 8, 60",
}


def code_cells(name):
    return [cell for cell in json.loads((EXAMPLES / name).read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", ["cifar10/cifar10.ipynb", "quantized_sine/quantized_sine.ipynb"])
def test_a_notebook_shows_what_its_cells_have_printed_and_drawn(name):
    cells = code_cells(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {"text/plain", "image/png"} <= {kind for output in outputs for kind in output.get("data", ())}
    assert not any(output["output_type"] == "error" for output in outputs)
    assert "/tmp/" not in json.dumps(cells) and "/home/" not in json.dumps(cells)


@pytest.fixture
def run_notebook(monkeypatch, tmp_path):
    import matplotlib

    matplotlib.use("Agg")

    def run(name):
        first, *others = ("".join(cell["source"]) for cell in code_cells(name))
        assert first.partition("=")[0] == SMALL[name].partition("=")[0]
        (tmp_path / "notebook.py").write_text("\n\n".join([SMALL[name], *others]))
        monkeypatch.syspath_prepend(str((EXAMPLES / name).parent))
        monkeypatch.chdir(tmp_path)  # where it saves
        return runpy.run_path("notebook.py")

    yield run
    ampkit.close()
    matplotlib.pyplot.close("all")


def test_the_quantised_sine_is_learned_at_o2_as_in_float32(run_notebook):
    found = run_notebook("quantized_sine/quantized_sine.ipynb")
    (in_float32, _), (at_o2, picture) = found["results"].values()
    unlearned = found["levels"].var().item()  # the loss of what predicts the mean everywhere
    assert max(in_float32, at_o2) < 0.05 * unlearned and picture.shape == (8, 8)


def test_a_resumed_run_of_the_notebook_is_the_run_that_did_not_stop(run_notebook, capsys):
    found = run_notebook("cifar10/cifar10.ipynb")  # asserts it itself
    assert found["resumed"].iteration == 2
    assert "O2" in capsys.readouterr().out.splitlines()[-1]  # the table of compare
