"""The scripts of examples/distributed, under torchrun on the CPU: do their ranks agree?"""

import re

import pytest
from helpers import ROOT, python

FOLDER = ROOT / "examples" / "distributed"
SCRIPTS = sorted(FOLDER.glob("*.py"))
RUNS = [
    ("ddp", "O1"),
    ("ddp", "O2"),
    ("fsdp2", "O1"),
    ("fsdp2", "O2"),
    ("fsdp2", "O5"),
    ("hsdp", "O2"),
    ("by_hand", None),
    ("policy_gradient", None),
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_fits_on_a_screen_and_is_run_here(path):
    assert len(path.read_text().splitlines()) < 70
    assert path.stem in {name for name, _ in RUNS}


@pytest.mark.slow
@pytest.mark.parametrize("name, level", RUNS)
def test_ranks_agree(name, level):
    ranks = 4 if name == "hsdp" else 2
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", FOLDER / f"{name}.py"]
    command += [] if level is None else ["--opt-level", level]
    done = python(*command, OMP_NUM_THREADS="1")
    assert f"{ranks} ranks agree: True" in done.stdout, done.stdout + done.stderr
    if name == "policy_gradient":  # a coin of ten sides is right once in ten
        reward, apart = re.search(r"reward (\S+), chances apart (\S+),", done.stdout).groups()
        assert float(reward) > 0.9 and float(apart) < 0.001, done.stdout
