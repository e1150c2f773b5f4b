"""Builds and packages: the sources of each library, and what `pip install .` puts beside other packages."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import setuptools
import torch
from helpers import ROOT, python
from torch.utils import cpp_extension

import ampkit

LIBRARIES = ["ampkit._C", "ampkit._casting"]
DIST_INFO = f"ampkit-{ampkit.__version__}.dist-info"


@pytest.fixture
def extensions(monkeypatch):
    """Return the libraries that setup.py asks setuptools for, under some values of the switches; nothing is built."""

    def asked_for(**switches):
        for name in ("AMPKIT_BUILD_EXT", "AMPKIT_CUDA", "CUDA_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in switches.items():
            monkeypatch.setenv(name, value)
        asked = {}
        monkeypatch.setattr(setuptools, "setup", lambda **keywords: asked.update(keywords))
        runpy.run_path("setup.py")
        return {extension.name: extension for extension in asked.get("ext_modules", ())}

    monkeypatch.chdir(ROOT)  # as pip does
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/usr/local/cuda")  # torch asks for one before anything is compiled
    return asked_for


def test_each_source_and_header_belongs_to_a_library(extensions):
    built = extensions(AMPKIT_CUDA="1")
    assert sorted(built) == ["ampkit._C", "ampkit._casting", "ampkit._cuda"]
    compiled = [path for extension in built.values() for path in extension.sources]
    # A change to any of them has the library built again.
    known = {path for extension in built.values() for path in (*extension.sources, *extension.depends)}
    names = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    included = re.findall(r'#include "(\w+\.cpp)"', (ROOT / "csrc/casting/all.cpp").read_text())
    compiled += [f"csrc/casting/{name}" for name in included]
    assert sorted(compiled) == sorted(name for name in names if name.endswith((".cpp", ".cu")))
    assert known == {name for name in names if name.endswith((".cpp", ".cu", ".h", ".cuh"))}


@pytest.mark.parametrize(
    "switches, names",
    [
        ({}, LIBRARIES),
        ({"AMPKIT_CUDA": "0", "CUDA_HOME": "/usr/local/cuda"}, LIBRARIES),
        ({"CUDA_HOME": "/usr/local/cuda"}, [*LIBRARIES, "ampkit._cuda"]),
        ({"AMPKIT_BUILD_EXT": "0"}, []),
    ],
    ids=str,
)
def test_switches_choose_the_libraries(extensions, switches, names):
    assert sorted(extensions(**switches)) == names


def test_kernels_serve_every_torch_from_2_10_on(extensions):
    for name, extension in extensions(AMPKIT_CUDA="1").items():
        stable = any("DTORCH_TARGET_VERSION=0x020a" in flag for flag in extension.extra_compile_args["cxx"])
        assert stable == extension.py_limited_api == (name != "ampkit._casting")


@pytest.fixture
def installed(tmp_path):
    """Install a copy of the checkout into a folder with `pip install .`, so that nothing lands in the checkout itself."""

    def install(**switches):
        copy, site = tmp_path / "sources", tmp_path / "site"
        unwanted = shutil.ignore_patterns("*.so", "__pycache__", ".*", "build", "*.egg-info", "demo")
        shutil.copytree(ROOT, copy, ignore=unwanted)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja
        options = "--disable-pip-version-check --no-index --no-deps --no-build-isolation --target".split()
        settings = {"PATH": path, "AMPKIT_CUDA": "0", **switches}
        done = python("-m", "pip", "install", *options, site, ".", cwd=copy, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return site

    return install


def assert_holds(site, libraries):
    """Assert that there are the package's modules and the libraries; no tests, no sources, nothing beside the package."""
    assert sorted(path.name for path in site.iterdir()) == ["ampkit", DIST_INFO, "bin"]
    assert [path.name for path in (site / "bin").iterdir()] == ["ampkit"]
    files = {str(path.relative_to(site)) for path in (site / "ampkit").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ampkit").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == modules
    data = {"ampkit/py.typed", "ampkit/insight/record/page.html.j2"}
    assert data <= files  # its annotations are for type checkers, too
    assert sorted(name.split("/")[1].split(".")[0] for name in files - modules - data) == libraries
    metadata = (site / DIST_INFO / "METADATA").read_text()
    for line in ("Name: ampkit", f"Version: {ampkit.__version__}", "Requires-Python: >=3.11", "License-File: LICENSE"):
        assert f"\n{line}\n" in metadata
    assert re.search(r"^Requires-Dist: torch ?\(?>=2\.10\)?$", metadata, re.MULTILINE)


USE = """
import sys, torch, ampkit
from ampkit import kernels
from ampkit.casting.cpp_wrappers import library
from ampkit.optimizers import FusedSGD

assert ampkit.__file__.startswith(sys.argv[1]), ampkit.__file__
print(kernels.implementation().name, "Python" if library is None else "C++")
for level in ("O1", "O2"):
    model = torch.nn.Linear(4, 1)
    optimizer = FusedSGD(model.parameters(), lr=1.0)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = model.state_dict()["bias"].item()
    with ampkit.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    print(level, before - model.state_dict()["bias"].item())
    ampkit.close()
"""


def run_elsewhere(site, *arguments, **environment):
    """Return what Python prints in another folder, with what was installed in ``site``.

    Without the module `site`, and so without .pth files: an editable install would lend its libraries.
    """
    path = os.pathsep.join([str(site), str(Path(torch.__file__).parents[1])])
    (site.parent / "elsewhere").mkdir(exist_ok=True)
    done = python("-S", *arguments, cwd=site.parent / "elsewhere", PYTHONPATH=path, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def use(site, **environment):
    """Train a step; return which implementations a script uses."""
    first, *steps = run_elsewhere(site, "-c", USE, str(site), **environment).splitlines()
    assert [step.split()[0] for step in steps] == ["O1", "O2"]
    # A sum over three samples, and a learning rate of 1.
    assert [float(step.split()[1]) for step in steps] == pytest.approx([3.0, 3.0])
    return first


def test_install_without_kernels_holds_the_package_and_works(installed):
    site = installed(AMPKIT_BUILD_EXT="0")
    assert_holds(site, [])
    assert use(site, AMPKIT_EXTENSION="auto") == "reference Python"


@pytest.mark.slow
def test_install_with_kernels_holds_them_and_works(installed):
    site = installed(AMPKIT_BUILD_EXT="1")
    assert_holds(site, ["_C", "_casting"])
    wheel = (site / DIST_INFO / "WHEEL").read_text()
    assert "Root-Is-Purelib: false" in wheel and "Tag: cp311-abi3-" in wheel  # the oldest Python of pyproject.toml
    assert f"Build: {torch.__version__.split('+')[0]}" in wheel
    assert use(site, AMPKIT_EXTENSION="require") == "extension C++"
    info = run_elsewhere(site, str(site / "bin" / "ampkit"), "info", AMPKIT_EXTENSION="auto")
    assert f"built with       torch {torch.__version__.split('+')[0]}, for torch 2.10 and newer" in info
