"""The demo: what it asks for, what it concludes from the metrics of its runs, and one short run of it all."""

import re
import sys

import pytest
from helpers import ROOT, python

EXAMPLE = ROOT / "examples" / "imagenet"
for package in ("torchvision", "matplotlib", "sklearn"):
    pytest.importorskip(package, reason="the demo needs it")


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = ("demo", "make_digits")
    try:
        yield __import__("demo")
    finally:
        for name in names:
            sys.modules.pop(name, None)


def rows(losses, images_per_s=100.0, top1=98.5, peak=2**30):
    """A metrics file of a training loss at each iteration, slow at first, and two validations."""
    train = [
        {"iteration": i + 1, "loss": loss, "images_per_s": 1.0 if i < 5 else images_per_s, "peak_memory_bytes": peak}
        for i, loss in enumerate(losses)
    ]
    val = {"iteration": len(losses), "loss": 0.1, "images_per_s": None, "peak_memory_bytes": peak + 2**20}
    return [
        *({"phase": "train", **row} for row in train),
        *({"phase": "val", **val, "top1": one} for one in (10.0, top1)),
    ]


LOSSES = [2.0, 1.5, 1.0, 0.5, 0.4, 0.3, 0.2, 0.1]


@pytest.fixture
def conclude(demo, monkeypatch, tmp_path):
    """Run main() on metrics that exist already; returns the arguments of main_amp.py, by level."""

    def run(runs):
        asked = {}

        def train(level, folder, options):
            assert folder == tmp_path / "out"
            asked[level] = " ".join(options)
            return runs[level]

        monkeypatch.setattr(
            demo, "make_digits", lambda folder: (folder.mkdir(parents=True), {"train": 1433, "val": 364})[1]
        )
        monkeypatch.setattr(demo, "slowness_of", lambda dtype: 1.0)
        monkeypatch.setattr(demo, "train", train)
        monkeypatch.setattr(sys, "argv", ["demo.py", "--dir", str(tmp_path / "out")])
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


@pytest.mark.slow
def test_short_demo_runs(tmp_path):
    done = python(EXAMPLE / "demo.py", "--short", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--short only shows that the demo runs" in done.stdout and "speed-up" not in done.stdout
    assert {path.name for path in (tmp_path / "demo").iterdir()} >= {"digits", "O0.jsonl", "O1.jsonl", "losses.png"}
