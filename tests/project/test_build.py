"""The import switch, what an install without torch or a compiler does, and `python -m ampkit info`."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import ROOT, others_slow, python

from ampkit import __version__, kernels
from ampkit.casting import cpp_wrappers as wrappers

NAME = "from ampkit import kernels; print(kernels.implementation().name)"


def test_switch_with_another_value_is_refused_with_the_values_that_exist():
    result = python("-c", NAME, AMPKIT_EXTENSION="yes")
    assert result.returncode != 0
    assert "AMPKIT_EXTENSION is 'yes'; expected 'auto', 'off' or 'require'" in result.stderr


def test_the_implementation_asked_for_is_the_one_under_test():
    wish = os.environ.get("AMPKIT_EXTENSION", "auto")
    if wish != "auto":
        assert kernels.implementation().name == {"require": "extension", "off": "reference"}[wish]
        assert (wrappers.library is None) == (wish == "off")


NAME_AND_WHY = f"{NAME}; print(kernels.implementation().why)"
DISPATCH = "from ampkit.casting.cpp_wrappers import library, why; print('Python' if library is None else 'C++', why)"
OTHER_TORCH = "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.11.1+cu999'); "
WITH_CUDA = "import torch; torch.version.cuda = '13.0'; "
REQUIRED = "ExtensionError: AMPKIT_EXTENSION=require, but "
BUILT_WITH_ANOTHER = f"it was built with torch {torch.__version__}, and this is torch 2.11.1+cu999"
# Files of these names, since an editable install would find the real libraries even from here.
BROKEN = {"_C": "raise ImportError('undefined symbol: torch_parallel_for')\n"}
BROKEN_CUDA = {"_cuda": "raise ImportError('undefined symbol: cudaGetDevice')\n"}
OLDER = {**BROKEN, "_casting": "torch_version = '2.11.0'\n\n\nclass CastStore:\n    pass\n"}
NEVER_BUILT = {**BROKEN, "_casting": """raise ModuleNotFoundError("No module named 'ampkit._casting'")\n"""}

#: Modules in the place of libraries, a script, AMPKIT_EXTENSION, a pattern of what is printed, and words, each once among errors.
LIBRARIES = {
    "broken kernels": (
        *(BROKEN, NAME_AND_WHY, "auto"),
        *("reference\nthe extension could not be loaded: undefined symbol: torch_parallel_for", []),
    ),
    "broken kernels where they are required": (
        *(BROKEN, NAME, "require", ""),
        [f"{REQUIRED}the extension could not be loaded", "pip install --no-build-isolation ."],
    ),
    "wrappers of another torch": (
        *({}, OTHER_TORCH + DISPATCH, "auto"),
        *(f"Python .*{re.escape(BUILT_WITH_ANOTHER)}", [BUILT_WITH_ANOTHER, "ampkit works without it, slower"]),
    ),
    "wrappers of another torch where they are required": (
        *({}, OTHER_TORCH + DISPATCH, "require", "", [f"{REQUIRED}ampkit._casting could not be loaded"]),
    ),
    "wrappers of older sources": (OLDER, DISPATCH, "auto", "Python .*built from older sources; build it again", []),
    "wrappers that were never built": (NEVER_BUILT, DISPATCH, "auto", "Python .*No module named 'ampkit._casting'", []),
    "broken CUDA kernels": (
        *(BROKEN_CUDA, WITH_CUDA + NAME, "auto", "extension\n$"),
        ["the CUDA library could not be loaded: undefined symbol: cudaGetDevice"],
    ),
    "broken CUDA kernels where libraries are required": (
        *(BROKEN_CUDA, WITH_CUDA + NAME, "require", "", [f"{REQUIRED}the CUDA library could not be loaded"]),
    ),
}


@pytest.mark.parametrize("case", others_slow(*list(LIBRARIES)[1:3], *list(LIBRARIES)[6:], of=LIBRARIES))
def test_a_library_that_cannot_be_loaded_is_told_once_or_is_an_error_where_it_is_required(case, tmp_path):
    modules, script, wish, printed, words = LIBRARIES[case]
    if "_C" not in modules:
        pytest.importorskip("ampkit._casting", reason="no ampkit._casting built for this torch", exc_type=ImportError)
    replaced = shutil.ignore_patterns("__pycache__", "_cuda.*", *(f"{name}.*" for name in modules))
    shutil.copytree(ROOT / "ampkit", tmp_path / "ampkit", ignore=replaced)
    for name, text in modules.items():
        (tmp_path / "ampkit" / f"{name}.py").write_text(text)
    done = python("-c", script, cwd=tmp_path, AMPKIT_EXTENSION=wish, PYTHONPATH="")
    assert (done.returncode == 0) == (wish == "auto"), done
    assert re.match(printed, done.stdout), done
    assert [done.stderr.count(word) for word in words] == [1] * len(words), done
    assert modules is not NEVER_BUILT or "O1" not in done.stderr, done  # which is no news


def test_info_says_what_is_loaded_and_why():
    result = python("-m", "ampkit", "info")
    assert result.returncode == 0, result.stderr
    chosen = kernels.implementation()
    of_casts = "in Python" if wrappers.library is None else "in C++", wrappers.why
    for words in (chosen.name, chosen.why, *of_casts, f"ampkit           {__version__}\n", "torch", "CPU"):
        assert words in result.stdout
    is_slow = "no instructions for bfloat16" in result.stdout
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "avx512"
    assert is_slow == ("avx512bw" not in flags), flags[:2000]


def build(tmp_path, *arguments, code=(), **environment):
    """Run setup.py on a copy of the sources, so that nothing lands in the checkout."""
    for name in ("ampkit", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").touch()
    return python(*code, "setup.py", *arguments, cwd=tmp_path, PYTHONPATH="", **environment)


def libraries(folder):
    return sorted(path.name for path in folder.rglob("*.so"))


def test_build_without_torch_is_pure_python_and_loud(tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "torch.py").write_text("raise ImportError('hidden for this test')\n")
    hide = (
        f"import sys, runpy; sys.path.insert(0, {str(tmp_path / 'hidden')!r}); "
        "sys.argv = ['setup.py', 'build']; runpy.run_path('setup.py')"
    )
    result = build(tmp_path, code=("-c", hide))
    assert result.returncode == 0, result.stderr
    assert "installing ampkit as pure Python" in result.stderr and "--no-build-isolation" in result.stderr
    assert libraries(tmp_path) == []
    result = python("-c", hide, cwd=tmp_path, PYTHONPATH="", AMPKIT_BUILD_EXT="1")
    assert result.returncode != 0 and "torch cannot be imported here" in result.stderr


@pytest.mark.slow
def test_build_without_a_working_compiler_is_pure_python_and_loud(tmp_path):
    broken = {"CXX": "/bin/false", "CC": "/bin/false"}
    result = build(tmp_path, "build", AMPKIT_BUILD_EXT="auto", AMPKIT_CUDA="0", **broken)
    assert result.returncode == 0, result.stderr
    assert "ampkit._C could not be built" in result.stderr
    assert "ampkit._casting could not be built" in result.stderr
    assert libraries(tmp_path) == []
    result = python("setup.py", "build", cwd=tmp_path, PYTHONPATH="", AMPKIT_BUILD_EXT="1", AMPKIT_CUDA="0", **broken)
    assert result.returncode != 0


@pytest.mark.parametrize("name", ["AMPKIT_BUILD_EXT", "AMPKIT_CUDA"])
def test_build_switch_with_another_value_is_refused(tmp_path, name):
    result = build(tmp_path, "--version", **{name: "maybe"})
    assert result.returncode != 0 and f"{name}='maybe'" in result.stderr
