"""What `make lint` asks of the code, but for types, asked by the tests too, where ruff is installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

RUFF = Path(sys.executable).with_name("ruff")


@pytest.mark.skipif(not RUFF.exists(), reason="ruff is not installed beside this Python")
@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_code_is_clean(arguments):
    done = subprocess.run([RUFF, *arguments, "--no-cache", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
