"""The demo: what it asks for, what it concludes from the metrics of its runs, and one short run of it all."""

import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

EXAMPLE = ROOT / "examples" / "imagenet"
for package in ("torchvision", "matplotlib", "sklearn"):
    pytest.importorskip(package, reason="the demo needs it")


@pytest.fixture
def demo(monkeypatch):
    """The module, importable as it is for the script itself."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = ("demo", "make_digits")
    try:
        yield __import__("demo")
    finally:
        for name in names:
            sys.modules.pop(name, None)


def rows(losses, images_per_s=100.0, top1=98.5, peak=2**30):
    """A metrics file of a training loss at each iteration, slow at first, and two validations."""
    common = {"peak_memory_bytes": peak}
    train = [
        {"phase": "train", "iteration": i + 1, "loss": loss, "images_per_s": 1.0 if i < 5 else images_per_s, **common}
        for i, loss in enumerate(losses)
    ]
    val = {
        "phase": "val",
        "iteration": len(losses),
        "loss": 0.1,
        "images_per_s": None,
        "peak_memory_bytes": peak + 2**20,
    }
    return [*train, {**val, "top1": 10.0}, {**val, "top1": top1}]


LOSSES = [2.0, 1.5, 1.0, 0.5, 0.4, 0.3, 0.2, 0.1]


def test_summary_leaves_the_warm_up_out_and_takes_the_last_validation(demo):
    assert demo.summarise(rows(LOSSES, images_per_s=80.0, top1=98.5)) == {
        "images_per_s": 80.0,
        "peak_memory_bytes": 2**30 + 2**20,
        "top1": 98.5,
    }


def test_table_compares_with_o0(demo):
    summaries = {
        "O0": {"images_per_s": 100.0, "peak_memory_bytes": 2**30, "top1": 98.5},
        "O1": {"images_per_s": 150.0, "peak_memory_bytes": 2**29, "top1": 97.25},
    }
    assert [line.split() for line in demo.table(summaries, ()).splitlines()] == [
        ["level", "images/s", "speed-up", "peak", "memory", "val", "top-1"],
        ["O0", "100.0", "1.00x", "1,024", "MiB", "98.50%"],
        ["O1", "150.0", "1.50x", "512", "MiB", "97.25%"],
    ]
    # The accuracy after a few iterations says nothing.
    assert demo.table(summaries, ("O1",)).splitlines()[2].split()[-1] == "-"


def test_largest_difference_is_relative_to_o0_over_the_iterations_of_both(demo):
    runs = {"O0": rows([2.0, 1.0, 0.5]), "O1": rows([2.1, 0.9])}
    assert demo.largest_difference(runs) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "native, speed_up, words",
    [
        (False, 0.5, "this CPU has no bfloat16 instructions"),
        (None, 0.5, "could not be found out"),
        (None, 1.5, None),
        (True, 0.5, None),
    ],
)
def test_note_on_processors_without_bfloat16(demo, monkeypatch, native, speed_up, words):
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "cpu_has_bfloat16", lambda: native)
    note = demo.precision_note(speed_up)
    assert note == "" if words is None else words in note


def test_gpus_need_no_note(demo, monkeypatch):
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: True)
    assert demo.precision_note(0.5) == ""


@pytest.mark.parametrize(
    "flags, has",
    [("fpu avx2", False), ("fpu avx512_bf16", True), ("amx_bf16 x", True), ("fp bf16", True), (None, None)],
)
def test_bfloat16_instructions_are_found_among_the_flags_of_the_processor(demo, monkeypatch, flags, has):
    def read_text(path):
        assert str(path) == "/proc/cpuinfo"
        if flags is None:
            raise FileNotFoundError(path)
        return f"flags\t\t: {flags}\n"

    monkeypatch.setattr(demo.Path, "read_text", read_text)
    assert demo.cpu_has_bfloat16() is has


@pytest.fixture
def conclude(demo, monkeypatch, tmp_path):
    """Run main() on metrics that exist already; returns the arguments of main_amp.py, by level."""

    def run(runs, *flags, slowness=1.0):
        asked = {}

        def train(level, folder, options):
            assert folder == tmp_path / "out"
            asked[level] = " ".join(options)
            return runs[level]

        monkeypatch.setattr(
            demo, "make_digits", lambda folder: (folder.mkdir(parents=True), {"train": 1433, "val": 364})[1]
        )
        monkeypatch.setattr(demo, "slowness_of", lambda dtype: slowness)
        monkeypatch.setattr(demo, "train", train)
        monkeypatch.setattr(sys, "argv", ["demo.py", "--dir", str(tmp_path / "out"), *flags])
        demo.main()
        return asked

    return run


def test_demo_that_learned_prints_the_table_and_draws_the_losses(conclude, capsys, tmp_path):
    asked = conclude({"O0": rows(LOSSES), "O1": rows(LOSSES, images_per_s=50.0, top1=97.0)})
    assert asked == {"O0": "--image-size 64", "O1": "--image-size 64"}
    printed = capsys.readouterr().out
    assert "1,433 handwritten digits to learn from, 364 to test with" in printed
    assert re.search(r"^O1 +50\.0 +0\.50x +1,025 MiB +97\.00%$", printed, re.MULTILINE)
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_demo_fails_where_a_level_did_not_learn(conclude, level):
    with pytest.raises(SystemExit, match=rf"{level} reached 96\.99% top-1; expected 97% or more"):
        conclude({"O0": rows(LOSSES), "O1": rows(LOSSES)} | {level: rows(LOSSES, top1=96.99)})


def test_demo_is_shorter_where_torch_has_no_kernels_for_lower_precision(conclude, capsys):
    asked = conclude({"O0": rows(LOSSES), "O1": rows([2.02, *LOSSES[1:]], top1=20.0)}, slowness=30.0)
    assert asked == {"O0": "--image-size 32", "O1": "--image-size 32 --max-iters 8"}
    printed = capsys.readouterr().out
    assert "takes 30 times as long for a convolution" in printed
    assert "O1's losses were within 1.0% of O0's." in printed
    assert re.search(r"^O1 .* -$", printed, re.MULTILINE)


def test_short_demo_trains_both_levels_for_a_few_iterations_and_judges_neither(conclude, capsys):
    asked = conclude({level: rows(LOSSES, top1=10.0) for level in ("O0", "O1")}, "--short")
    assert asked == dict.fromkeys(("O0", "O1"), "--image-size 32 --max-iters 8")
    printed = capsys.readouterr().out
    assert "Both levels ran 8 iterations: --short only shows that the demo runs." in printed
    assert not re.search(r"speed-up|^O[01] .*x|within", printed, re.MULTILINE)


@pytest.mark.parametrize("code", [0, 3])
def test_each_level_runs_as_a_script_on_the_digits(demo, monkeypatch, tmp_path, code):
    def run(command, check):
        assert command[:2] == [sys.executable, str(EXAMPLE / "main_amp.py")] and command[-1] == str(tmp_path / "digits")
        options = " ".join(command)
        assert "--opt-level O1" in options and "--max-iters 8" in options and "--epochs 5" in options
        (tmp_path / "O1.jsonl").write_text('{"phase": "train"}\n{"phase": "val"}\n')
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(demo.subprocess, "run", run)
    if code == 0:
        assert demo.train("O1", tmp_path, ["--max-iters", "8"]) == [{"phase": "train"}, {"phase": "val"}]
    else:
        with pytest.raises(SystemExit, match=r"main_amp\.py at O1 ended with exit code 3"):
            demo.train("O1", tmp_path, ["--max-iters", "8"])


@pytest.mark.slow
def test_short_demo_runs(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLE / "demo.py"), "--short"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--short only shows that the demo runs" in done.stdout and "speed-up" not in done.stdout
    assert {path.name for path in (tmp_path / "demo").iterdir()} >= {"digits", "O0.jsonl", "O1.jsonl", "losses.png"}
