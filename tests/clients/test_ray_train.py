"""The example for Ray Train: do its workers agree?"""

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='pip install "ray[train]": 530 MB, no part of make clients'
)
def test_workers_agree():
    command = [sys.executable, str(ROOT / "examples" / "ray_train" / "ray_train.py"), "--opt-level", "O2"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert "2 ranks agree: True" in done.stdout, done.stdout + done.stderr
