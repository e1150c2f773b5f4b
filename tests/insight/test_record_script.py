"""``ampkit record script.py``: some iterations of a script are recorded, printed and written, and the script ends there."""

import json
import textwrap

import pytest

from ampkit.__main__ import main

TRAINS = """
    import sys, torch
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        print("step", i)
"""


@pytest.fixture
def record(tmp_path, monkeypatch, capsys):
    """Run ``ampkit record`` in a folder of its own: exit code, standard output and standard error."""

    def run(source, *arguments, options=()):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "script.py").write_text(textwrap.dedent(source))
        code = main(["record", *options, "script.py", *arguments])
        return code, *capsys.readouterr()

    return run


def test_some_iterations_are_recorded_and_the_script_ends(record, tmp_path):
    code, out, _ = record(TRAINS, "100", options=["--iterations", "2", "--skip", "3", "--json", "record.json"])
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("step ")] == [f"step {i}" for i in range(4)]
    assert "script.py:7" in out and "2 iterations" in out
    found = json.loads((tmp_path / "record.json").read_text())
    (linear,) = [row for row in found["calls"] if row["function"] == "linear" and row["phase"] == "forward"]
    assert (linear["calls"], linear["source"]) == (2, "model(torch.ones(2, 4)).mean().backward()")
    assert found["iterations"] == 2


def test_integers_that_the_host_reads_are_told_where_cuda_calls_run_on_the_cpu(record):
    reads = TRAINS.replace("optimizer.step()", "optimizer.step(); n = sum(int(i) for i in torch.arange(5).cuda())")
    _, out, _ = record(reads, "100", options=["--device", "cpu"])
    assert "script.py:8: item reads 5 numbers an iteration" in out


def test_a_script_that_ends_early_is_told_of(record):
    code, out, _ = record(TRAINS, "2", options=["--iterations", "5"])  # one skipped, one recorded
    assert code == 0 and "1 iteration:" in out
    code, _, err = record(TRAINS, "1")
    assert code == 1 and "the script ended before the 2. step of an optimizer" in err
