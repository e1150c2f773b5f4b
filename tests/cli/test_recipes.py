"""The recipes: each runs, is as close to float32 as its page says, and is short."""

import re
import runpy
import sys

import pytest
import torch
from helpers import ROOT, python

FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.py"))
ROWS = dict(re.findall(r"^\| \[(\w+)\]\(\1\.py\)[^|]*\| ([^|]+?) \|", (FOLDER / "README.md").read_text(), re.MULTILINE))
GPUS = {"data_parallel": 2, "ddp_devices": 2, "cuda_graph": 1}

# The allowed distance of recipes from float32: bfloat16 rounds by 2**-8, and sums of such errors stay near it.
FURTHEST = 2.0


def test_each_recipe_is_on_the_page():
    assert sorted(ROWS) == [path.stem for path in RECIPES]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_close_to_float32_and_prints_one_line(path, capsys, monkeypatch):
    run_and_check(path, capsys, monkeypatch, torch.cuda.is_available())


def run_and_check(path, capsys, monkeypatch, in_float16):
    monkeypatch.setattr(sys, "argv", [str(path)])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # ddp.py fills in what is missing
    waits = GPUS.get(path.stem, 0) > torch.cuda.device_count()
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        assert waits and not end.code
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path.stem}: ")
    assert waits == line.endswith("nothing was run") == (waits and ROWS[path.stem].startswith("needs"))
    percentages = [float(number) for number in re.findall(r"([\d.]+)%(?= from| away| \(O)", line)]
    assert all(number < FURTHEST for number in percentages)
    if not waits and not in_float16:
        assert re.sub(r"[\d.]+", "#", line.split(": ", 1)[1]) == re.sub(r"[\d.]+", "#", ROWS[path.stem])


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem not in GPUS], ids=lambda path: path.stem)
def test_a_recipe_holds_in_float16_as_on_a_gpu(path, capsys, monkeypatch):
    """On a GPU the first loss scale is 2**16, and a gradient that it takes out of range costs the only step."""
    monkeypatch.setenv("AMPKIT_LOWER_PRECISION", "float16")
    run_and_check(path, capsys, monkeypatch, in_float16=True)


@pytest.mark.slow
def test_two_processes_take_the_step_of_one():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = python(*launcher, FOLDER / "ddp.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ddp: 2 process(es), step " in done.stdout
