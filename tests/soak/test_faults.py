"""The soak notices faults: each row of faults.toml is planted in a copy of the project, and a promise does not hold there."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers import ROOT
from mutants.fault import named

from . import __main__ as driver

ROWS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())["fault"]


def test_each_fault_has_its_place_and_names_promises():
    names = {promise.name for promises in driver.GROUPS.values() for promise in promises}
    for row in ROWS:
        assert named(row, ROOT).planted(ROOT) != (ROOT / row["where"].partition("::")[0]).read_text()
        assert set(row["tests"]) <= names, row


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    for part in ("ampkit", "examples", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["promise"].replace(" ", "-"))
def test_the_soak_notices(row, project):
    fault = named(row, ROOT)
    path = project / fault.file
    sound = path.read_text()
    path.write_text(fault.planted(project))
    try:
        (promise,) = row["tests"]
        command = [sys.executable, "-B", "-m", "soak", "--only", promise, "--seed", "0", "--minutes", "1", "--first"]
        done = subprocess.run(
            command, cwd=project, env={"PYTHONPATH": "tests:."}, capture_output=True, text=True, timeout=300
        )
    finally:
        path.write_text(sound)
    assert done.returncode == 1 and "VIOLATED" in done.stdout, done.stdout + done.stderr
