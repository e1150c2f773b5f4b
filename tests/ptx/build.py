"""Make PTX of csrc/cuda by nvcc, in a folder for each architecture; without nvcc, say so.

python tests/ptx/build.py build/ptx
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("sm_80", "sm_90")


def make(source: Path, arch: str, folder: Path, flags: tuple[str, ...] = ()) -> Path:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from ptxas import command_for

    (folder / arch).mkdir(parents=True, exist_ok=True)
    made = folder / arch / f"{source.stem}.ptx"
    subprocess.run(command_for(source, arch, made, ("-ptx", "-lineinfo", *flags), source.parents[1]), check=True)
    return made


def build(
    folder: Path, architectures: Sequence[str] = ARCHITECTURES, csrc: Path = ROOT / "csrc", flags: tuple[str, ...] = ()
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    # The longest first.
    sources = sorted((csrc / "cuda").glob("*.cu"), key=lambda source: "step" not in source.name)
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        done = [pool.submit(make, source, arch, folder, flags) for source in sources for arch in architectures]
        for job in done:
            job.result()


if __name__ == "__main__":
    if shutil.which("nvcc") is None:
        shutil.rmtree(sys.argv[1], ignore_errors=True)  # what another nvcc has made of other sources
        print("nvcc is not on PATH: no kernel was made into PTX, and none is run from it")
    else:
        build(Path(sys.argv[1]).resolve())
        print(f"built {sys.argv[1]}")
