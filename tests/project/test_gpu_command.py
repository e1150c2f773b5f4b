"""`make gpu` where there is no GPU: its steps, and the results that it writes as they come."""

import sys

import pytest
import torch
from gpu import run as gpu


@pytest.mark.parametrize("cuda, words", [("13.0", "was built with CUDA"), (None, "was built without CUDA")])
def test_without_a_gpu_it_says_so_and_fails(cuda, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(sys, "argv", ["run.py", "--part", "tests"])
    assert gpu.main() == 1
    told = capsys.readouterr().err
    assert "there is no GPU here" in told and words in told


@pytest.fixture
def results(tmp_path):
    return gpu.Results(gpu.results_file(str(tmp_path / "new"), "NVIDIA H100 80GB HBM3"), "NVIDIA H100 80GB HBM3")


def test_results_are_written_as_they_come_and_a_step_that_has_passed_is_not_run_again(results, monkeypatch, tmp_path):
    log = tmp_path / "log"
    steps = [
        gpu.Step("good", f"echo 5 passed; echo good >> {log}"),
        gpu.Step("bad", f"echo 1 failed; echo bad >> {log}; exit 3"),
        gpu.Step("endless", f"echo begun; echo endless >> {log}; sleep 20", limit=0.5),
        gpu.Step("last", f"echo last >> {log}"),
    ]
    monkeypatch.setitem(gpu.PARTS, "bench", steps)
    assert not gpu.run_part("bench", results)
    assert results.path.name.endswith("-nvidia-h100-80gb-hbm3.md")
    written = results.path.read_text()
    headings = ("good: passed in", "bad: failed with status 3", "endless: failed with status 124", "last: passed in")
    assert [heading for heading in headings if f"\n## {heading}" not in written] == []
    assert "5 passed" in written and "1 failed" in written and "ended after" in written
    assert not gpu.run_part("bench", gpu.Results(results.path, "another process"))
    assert log.read_text().split() == ["good", "bad", "endless", "last", "bad", "endless"]


def test_what_the_others_need_is_done_each_time_and_stops_a_part(results, monkeypatch, tmp_path, capsys):
    log, compiler = tmp_path / "log", "echo 'csrc/cuda/a.cu(7): error: no such thing'; seq 300"
    needed = gpu.Step("needed", f"echo needed >> {log}; {compiler}; test ! -e {tmp_path / 'broken'}", always=True)
    monkeypatch.setitem(gpu.PARTS, "bench", [needed, gpu.Step("one", f"echo one >> {log}")])
    assert gpu.run_part("bench", results) and gpu.run_part("bench", results)
    (tmp_path / "broken").touch()
    monkeypatch.setitem(gpu.PARTS, "bench", [needed, gpu.Step("two", f"echo two >> {log}")])
    assert not gpu.run_part("bench", results)
    assert log.read_text().split() == ["needed", "one", "needed", "needed"]
    # However much follows, what the compiler said is shown.
    assert "a.cu(7): error: no such thing" in capsys.readouterr().out
    assert "a.cu(7): error: no such thing" in results.path.read_text()
