"""`make wheel`: builds the source distribution and the wheel in pure Python as a release does, and tries them in another folder.

The build is isolated, and so downloads setuptools and wheel; arguments (``--no-isolation``) are handed to ``python -m build``. The
wheel is installed beside nothing but torch and the tests' tools; the tests are those of the source distribution, whose own copy
of the package is taken away.
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


def main(arguments: list[str]) -> None:
    built = ROOT / "dist"
    shutil.rmtree(built, ignore_errors=True)
    run("-m", "build", "--outdir", str(built), *arguments, ".", cwd=ROOT, AMPKIT_BUILD_EXT="0")
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        site, tests = Path(folder) / "site", Path(folder) / source.name.removesuffix(".tar.gz")
        run(
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(site),
            str(wheel),
            cwd=Path(folder),
        )
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        shutil.rmtree(tests / "ampkit")
        environment = {"PYTHONPATH": str(site), "AMPKIT_EXTENSION": "off", "OMP_NUM_THREADS": "1"}
        run(
            "-c",
            f"import ampkit; assert ampkit.__file__.startswith({str(site)!r}), ampkit.__file__",
            cwd=tests,
            **environment,
        )
        run("-m", "pytest", "-q", "-m", "not slow", *(f"tests/{name}" for name in QUICK), cwd=tests, **environment)
    print(f"make wheel: {wheel.name} and {source.name} are in dist/, and work outside of the checkout")


if __name__ == "__main__":
    main(sys.argv[1:])
