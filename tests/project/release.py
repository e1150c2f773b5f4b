"""`make wheel`: builds the source distribution, the wheel in pure Python and one with kernels, and tries them in another folder.

The first two builds are isolated, and so download setuptools and wheel; arguments (``--no-isolation``) are handed to ``python -m
build``. The third builds what the source distribution holds against the torch that is here. Wheels are installed beside nothing but
torch and the tests' tools; the tests are those of the source distribution, whose own copy of the package is taken away.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
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


def run(*command: str, cwd: Path, **environment: str) -> None:
    subprocess.run([sys.executable, *command], cwd=cwd, env={**os.environ, **environment}, check=True)


def install(wheel: Path, site: Path) -> None:
    options = "--disable-pip-version-check install --quiet --no-deps --no-index --target".split()
    run("-m", "pip", *options, str(site), str(wheel), cwd=site.parent)


def try_out(site: Path, tests: Path, extension: str) -> None:
    """The quick tests, with what was installed in ``site``."""
    environment = {"PYTHONPATH": str(site), "AMPKIT_EXTENSION": extension, "OMP_NUM_THREADS": "1"}
    where = f"import ampkit; assert ampkit.__file__.startswith({str(site)!r}), ampkit.__file__"
    run("-c", where, cwd=tests, **environment)
    run(str(site / "bin" / "ampkit"), "info", cwd=tests, **environment)
    run("-m", "pytest", "-q", "-m", "not slow", *(f"tests/{name}" for name in QUICK), cwd=tests, **environment)


def main(arguments: list[str]) -> None:
    built = ROOT / "dist"
    shutil.rmtree(built, ignore_errors=True)
    run("-m", "build", "--outdir", str(built), *arguments, ".", cwd=ROOT, AMPKIT_BUILD_EXT="0")
    (pure,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        tests = folder / source.name.removesuffix(".tar.gz")
        # Against the torch that is here, and so not isolated. The CUDA kernels need a build on the machine that runs them.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja
        switches = {"AMPKIT_BUILD_EXT": "1", "AMPKIT_CUDA": "0", "PATH": path}
        run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), ".", cwd=tests, **switches)
        (compiled,) = set(built.glob("*.whl")) - {pure}
        shutil.rmtree(tests / "ampkit")
        for wheel, extension in ((pure, "off"), (compiled, "require")):
            site = folder / f"site-{extension}"
            install(wheel, site)
            try_out(site, tests, extension)
    print(f"make wheel: {pure.name}, {compiled.name} and {source.name} are in dist/, and work outside of the checkout")


if __name__ == "__main__":
    main(sys.argv[1:])
