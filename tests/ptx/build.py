"""Has nvcc make PTX of csrc/cuda, for each architecture a folder of files; where there is no nvcc, says so.

python tests/ptx/build.py build/ptx
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("sm_80", "sm_90")


def make(source: Path, arch: str, folder: Path, csrc: Path = ROOT / "csrc") -> Path:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from ptxas import command_for

    (folder / arch).mkdir(parents=True, exist_ok=True)
    made = folder / arch / f"{source.stem}.ptx"
    subprocess.run(command_for(source, arch, made, ("-ptx", "-lineinfo"), csrc), check=True)
    return made


def build(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    # The longest first.
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"), key=lambda one: "step" not in one.name)
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        list(
            pool.map(
                lambda one: make(one[0], one[1], folder),
                [(source, arch) for source in sources for arch in ARCHITECTURES],
            )
        )


if __name__ == "__main__":
    if shutil.which("nvcc") is None:
        print("nvcc is not on PATH: no kernel was made into PTX, and none is run from it")
    else:
        build(Path(sys.argv[1]).resolve())
        print(f"built {sys.argv[1]}")
