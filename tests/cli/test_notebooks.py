"""The examples' notebooks: every code cell runs, in order, as in Jupyter, with sizes that take seconds."""

import json
import runpy

import pytest
from helpers import ROOT

import ampkit

for package in ("torchvision", "sklearn", "matplotlib"):
    pytest.importorskip(package, reason="the examples need it")

# The tag of the cell that sets sizes.
SMALL = {
    "cifar10/cifar10.ipynb": "ITERATIONS, BATCH = 2, 2",
    "quantized_sine/quantized_sine.ipynb": "GRID, STEPS = 8, 60",
}


# Stored with their outputs (examples/run_notebooks.py); the other trains for minutes where bfloat16 has instructions.
STORED = ["quantized_sine/quantized_sine.ipynb"]


@pytest.mark.parametrize("name", STORED)
def test_a_notebook_shows_what_its_cells_have_printed_and_drawn(name):
    text = (ROOT / "examples" / name).read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {"text/plain", "image/png"} <= {kind for output in outputs for kind in output.get("data", ())}
    assert (
        not any(output["output_type"] == "error" for output in outputs) and "/tmp/" not in text and "/home/" not in text
    )


@pytest.fixture
def run_notebook(monkeypatch, tmp_path):
    import matplotlib

    matplotlib.use("Agg")

    def run(name):
        file = ROOT / "examples" / name
        cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
        sources = [SMALL[name], *("".join(cell["source"]) for cell in cells[1:])]
        assert "".join(cells[0]["source"]).partition("=")[0] == SMALL[name].partition("=")[0]
        script = tmp_path / "notebook.py"
        script.write_text("\n\n".join(sources))
        monkeypatch.syspath_prepend(str(file.parent))
        monkeypatch.chdir(tmp_path)  # where it saves
        try:
            return runpy.run_path(str(script))
        finally:
            ampkit.close()
            matplotlib.pyplot.close("all")

    return run


def test_the_quantised_sine_is_learned_at_o2_as_in_float32(run_notebook):
    found = run_notebook("quantized_sine/quantized_sine.ipynb")
    (in_float32, _), (at_o2, picture) = found["results"].values()
    unlearned = found["levels"].var().item()  # the loss of what predicts the mean everywhere
    assert max(in_float32, at_o2) < 0.05 * unlearned and picture.shape == (8, 8)


def test_a_resumed_run_is_the_run_that_did_not_stop(run_notebook, monkeypatch, capsys):
    found = run_notebook("cifar10/cifar10.ipynb")  # asserts it itself
    assert found["resumed"].iteration == 2
    assert "O2" in capsys.readouterr().out.splitlines()[-1]  # the table of compare
