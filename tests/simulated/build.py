"""Build the simulated GPUs of README.md beside this file, if torch was built with CUDA 13; else say that it does not.

python tests/simulated/build.py build/simulated
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
EMULATION = HERE.parent / "emulation"
FLAGS = ["-O1", "-g0", "-fPIC", "-shared", "-fvisibility=hidden"]


def headers_of_cuda() -> Path | None:
    """The folder of cuda_runtime_api.h that came with torch."""
    found = Path(torch.__file__).parents[1].glob("nvidia/cu13/include/cuda_runtime_api.h")
    return next((path.parent for path in found), None)


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


def build(to: Path, cuda: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    run(*compiler, *FLAGS, "-std=c++17", f"-I{HERE}", f"-I{cuda}", HERE / "runtime.cpp", "-o", to / "libruntime.so")
    as_c = [*FLAGS, "-fvisibility=default", "-x", "c", HERE / "driver.c"]
    run(*compiler, *as_c, "-Wl,-soname,libcuda.so.1", "-o", to / "libcuda.so.1")
    torch_headers = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    torch_libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    operators = [HERE / "operators.cpp", *torch_libraries, "-lc10", "-ltorch_cpu", f"-L{to}", "-lruntime"]
    run(*compiler, *FLAGS, "-std=c++20", *torch_headers, *operators, "-o", to / "liboperators.so")
    sys.path.insert(0, str(EMULATION))
    import build as emulation

    emulation.build(
        to / "kernels",
        ["-DSIMULATED_CUDA", "-DUSE_CUDA"],
        emulation.AS_THEY_ARE,
        [f"-L{to}", "-lruntime", "-ltorch_cuda"],
    )


if __name__ == "__main__":
    folder, cuda = Path(sys.argv[1]).resolve(), headers_of_cuda()
    if cuda is None or not re.match(r"13\.", torch.version.cuda or ""):
        print(f"the simulated GPUs need a torch for CUDA 13; this one is for {torch.version.cuda or 'the CPU'}")
    else:
        build(folder, cuda)
        (folder / "torch.txt").write_text(torch.__version__)  # which alone may load them
        print(f"built {folder}")
