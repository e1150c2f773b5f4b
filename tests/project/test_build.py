"""The import switch, what an install without torch or a compiler does, and `python -m ampkit info`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from ampkit import __version__, kernels
from ampkit.casting import cpp_wrappers as wrappers


def run(*arguments, cwd=ROOT, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


NAME = "from ampkit import kernels; print(kernels.implementation().name)"


@pytest.mark.slow
def test_switch_off_means_reference():
    result = run("-c", NAME, AMPKIT_EXTENSION="off")
    assert result.stdout.strip() == "reference", result.stderr


def test_switch_with_another_value_is_refused_with_the_values_that_exist():
    result = run("-c", NAME, AMPKIT_EXTENSION="yes")
    assert result.returncode != 0
    assert "AMPKIT_EXTENSION is 'yes'; expected 'auto', 'off' or 'require'" in result.stderr


@pytest.fixture
def package_with_broken_extension(tmp_path):
    """A copy of the package whose library cannot be loaded, as one that was built for another torch."""
    shutil.copytree(ROOT / "ampkit", tmp_path / "ampkit", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    # A file of that name, since an editable install would find the real library even from here.
    (tmp_path / "ampkit" / "_C.py").write_text("raise ImportError('undefined symbol: torch_parallel_for')\n")
    wrappers = "torch_version = '2.11.0'\n\n\nclass Switch:\n    set = None\n"
    (tmp_path / "ampkit" / "_casting.py").write_text(wrappers)
    return tmp_path


@pytest.mark.slow
def test_auto_falls_back_and_keeps_the_reason(package_with_broken_extension):
    script = NAME + "; print(kernels.implementation().why)"
    result = run("-c", script, cwd=package_with_broken_extension, AMPKIT_EXTENSION="auto", PYTHONPATH="")
    assert result.stdout.startswith(
        "reference\nthe extension could not be loaded: undefined symbol: torch_parallel_for"
    ), result


def test_require_turns_the_fallback_into_an_error(package_with_broken_extension):
    result = run("-c", NAME, cwd=package_with_broken_extension, AMPKIT_EXTENSION="require", PYTHONPATH="")
    assert result.returncode != 0
    assert "ExtensionError: AMPKIT_EXTENSION=require, but the extension could not be loaded" in result.stderr
    assert "pip install --no-build-isolation ." in result.stderr


def test_the_implementation_asked_for_is_the_one_under_test():
    wish = os.environ.get("AMPKIT_EXTENSION", "auto")
    if wish != "auto":
        assert kernels.implementation().name == {"require": "extension", "off": "reference"}[wish]
        assert (wrappers.library is None) == (wish == "off")


DISPATCH = "from ampkit.casting.cpp_wrappers import library, why; print('Python' if library is None else 'C++', why)"
OTHER_TORCH = "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.11.1+cu999'); "


@pytest.fixture
def package_with_wrappers(tmp_path):
    """A copy of the package that has O1's wrappers in C++."""
    pytest.importorskip("ampkit._casting", reason="no ampkit._casting built for this torch", exc_type=ImportError)
    shutil.copytree(ROOT / "ampkit", tmp_path / "ampkit", ignore=shutil.ignore_patterns("_cuda.*", "__pycache__"))
    return tmp_path


def test_wrappers_built_with_another_torch_step_aside_and_say_so(package_with_wrappers):
    result = run("-c", OTHER_TORCH + DISPATCH, cwd=package_with_wrappers, AMPKIT_EXTENSION="auto", PYTHONPATH="")
    reason = f"it was built with torch {torch.__version__}, and this is torch 2.11.1+cu999"
    assert result.stdout.startswith("Python ") and reason in result.stdout, result
    assert result.stderr.count(reason) == 1 and "ampkit works without it, slower" in result.stderr


@pytest.mark.slow
def test_wrappers_built_with_another_torch_are_an_error_where_they_are_required(package_with_wrappers):
    result = run("-c", OTHER_TORCH + DISPATCH, cwd=package_with_wrappers, AMPKIT_EXTENSION="require", PYTHONPATH="")
    assert result.returncode != 0
    assert "ExtensionError: AMPKIT_EXTENSION=require, but ampkit._casting could not be loaded" in result.stderr


@pytest.fixture
def package_with_broken_cuda(tmp_path):
    """A copy of the package whose CUDA library cannot be loaded."""
    pytest.importorskip("ampkit._C", reason="no ampkit._C built", exc_type=ImportError)
    shutil.copytree(ROOT / "ampkit", tmp_path / "ampkit", ignore=shutil.ignore_patterns("_cuda.*", "__pycache__"))
    (tmp_path / "ampkit" / "_cuda.py").write_text("raise ImportError('undefined symbol: cudaGetDevice')\n")
    return tmp_path


WITH_CUDA = "import torch; torch.version.cuda = '13.0'; "


def test_broken_cuda_kernels_are_told_once_and_those_for_the_cpu_serve(package_with_broken_cuda):
    result = run("-c", WITH_CUDA + NAME, cwd=package_with_broken_cuda, AMPKIT_EXTENSION="auto", PYTHONPATH="")
    assert result.stdout == "extension\n", result
    assert result.stderr.count("the CUDA library could not be loaded: undefined symbol: cudaGetDevice") == 1


def test_broken_cuda_kernels_are_an_error_where_libraries_are_required(package_with_broken_cuda):
    result = run("-c", WITH_CUDA + NAME, cwd=package_with_broken_cuda, AMPKIT_EXTENSION="require", PYTHONPATH="")
    assert result.returncode != 0
    assert "ExtensionError: AMPKIT_EXTENSION=require, but the CUDA library could not be loaded" in result.stderr


@pytest.mark.slow
def test_wrappers_of_older_sources_step_aside(package_with_broken_extension):
    library = package_with_broken_extension / "ampkit" / "_casting.py"
    library.write_text("torch_version = '2.11.0'\n\n\nclass CastStore:\n    pass\n")
    result = run("-c", DISPATCH, cwd=package_with_broken_extension, AMPKIT_EXTENSION="auto", PYTHONPATH="")
    assert result.stdout.startswith("Python ") and "built from older sources; build it again" in result.stdout, result


@pytest.mark.slow
def test_wrappers_that_were_never_built_are_no_news(package_with_broken_extension):
    library = package_with_broken_extension / "ampkit" / "_casting.py"
    library.write_text("""raise ModuleNotFoundError("No module named 'ampkit._casting'")\n""")
    result = run("-c", DISPATCH, cwd=package_with_broken_extension, AMPKIT_EXTENSION="auto", PYTHONPATH="")
    assert result.stdout.startswith("Python ") and "No module named 'ampkit._casting'" in result.stdout, result
    assert "O1" not in result.stderr


def test_info_says_what_is_loaded_and_why():
    result = run("-m", "ampkit", "info")
    assert result.returncode == 0, result.stderr
    chosen = kernels.implementation()
    for words in (
        chosen.name,
        chosen.why,
        "in Python" if wrappers.library is None else "in C++",
        wrappers.why,
        f"ampkit           {__version__}\n",
        "torch",
        "CPU",
    ):
        assert words in result.stdout
    is_slow = "no instructions for bfloat16" in result.stdout
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "avx512"
    assert is_slow == ("avx512bw" not in flags), flags[:2000]


def build(tmp_path, *arguments, python=(), **environment):
    """Run setup.py on a copy of the sources, so that nothing lands in the checkout."""
    for name in ("ampkit", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").touch()
    return run(*python, "setup.py", *arguments, cwd=tmp_path, PYTHONPATH="", **environment)


def libraries(folder):
    return sorted(path.name for path in folder.rglob("*.so"))


def test_build_without_torch_is_pure_python_and_loud(tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "torch.py").write_text("raise ImportError('hidden for this test')\n")
    hide = (
        f"import sys, runpy; sys.path.insert(0, {str(tmp_path / 'hidden')!r}); "
        "sys.argv = ['setup.py', 'build']; runpy.run_path('setup.py')"
    )
    result = build(tmp_path, python=("-c", hide))
    assert result.returncode == 0, result.stderr
    assert "installing ampkit as pure Python" in result.stderr and "--no-build-isolation" in result.stderr
    assert libraries(tmp_path) == []
    result = run("-c", hide, cwd=tmp_path, PYTHONPATH="", AMPKIT_BUILD_EXT="1")
    assert result.returncode != 0 and "torch cannot be imported here" in result.stderr


@pytest.mark.slow
def test_build_without_a_working_compiler_is_pure_python_and_loud(tmp_path):
    broken = {"CXX": "/bin/false", "CC": "/bin/false"}
    result = build(tmp_path, "build", AMPKIT_BUILD_EXT="auto", AMPKIT_CUDA="0", **broken)
    assert result.returncode == 0, result.stderr
    assert "ampkit._C could not be built" in result.stderr
    assert "ampkit._casting could not be built" in result.stderr
    assert libraries(tmp_path) == []
    result = run("setup.py", "build", cwd=tmp_path, PYTHONPATH="", AMPKIT_BUILD_EXT="1", AMPKIT_CUDA="0", **broken)
    assert result.returncode != 0


@pytest.mark.parametrize("name", ["AMPKIT_BUILD_EXT", "AMPKIT_CUDA"])
def test_build_switch_with_another_value_is_refused(tmp_path, name):
    result = build(tmp_path, "--version", **{name: "maybe"})
    assert result.returncode != 0 and f"{name}='maybe'" in result.stderr
