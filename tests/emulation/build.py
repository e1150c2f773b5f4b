"""Build the library ampkit_emulated: csrc/cuda compiled for the host, see README.md beside this file.

python tests/emulation/build.py build/emulation [--address-sanitizer]
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
MODULE = "ampkit_emulated"

# Replacements that no macro can make. Each keeps to its line, so that messages name the lines of the originals.
REWRITES = [
    # kernel<<<blocks, threads, shared, stream>>>(arguments)
    (
        re.compile(r"(?P<kernel>\w+(?:<[^<>()]*>)?)<<<(?P<how>.*?)>>>", re.DOTALL),
        r'::emulation::launch<&\g<kernel>>("\g<kernel>", [](const auto&... all) { \g<kernel>(all...); }, \g<how>)',
    ),
    # __shared__ Type name[size];
    (
        re.compile(r"__shared__ (?P<type>[\w:<>*]+) (?P<name>\w+)(?P<size>(?:\[[^\]]*\])*);"),
        r"auto& \g<name> = ::emulation::shared<\g<type>\g<size>>([] {});",
    ),
    # Arguments of a kernel stay where the launch has put them.
    (re.compile(r"const __grid_constant__ (?P<type>[\w:<>, ]+?) (?P<name>\w+)(?=[,)])"), r"const \g<type>& \g<name>"),
    # The page of registrations: these kernels replace the CPU's. (Not on simulated devices.)
    (re.compile(r"STABLE_TORCH_LIBRARY_IMPL\(ampkit, CUDA, (\w+)\)"), r"STABLE_TORCH_LIBRARY_IMPL(ampkit, CPU, \1)"),
    (re.compile(r"aoti_torch_device_type_cuda"), "aoti_torch_device_type_cpu"),
]
AS_THEY_ARE = REWRITES[:-2]
LEFT_OVER = ("<<<", "__shared__ ", "__grid_constant__ ")

CHECKS = "alignment,bounds,shift,signed-integer-overflow,null,vla-bound"
FLAGS = [
    *"-std=c++17 -O1 -g0 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno".split(),
    "-fno-strict-aliasing",  # as nvcc
    *(f"-fsanitize={CHECKS}", f"-fno-sanitize-recover={CHECKS}", "-Wno-unknown-pragmas", "-Wno-psabi"),
]


def rewritten(source: Path, rewrites: list) -> str:
    """Return a CUDA source as C++."""
    text = source.read_text()
    for pattern, replacement in rewrites:
        text = pattern.sub(replacement, text)
    code = re.sub(r"//.*", "", text)
    left = [one for one in LEFT_OVER if one in code]
    if left:
        raise SystemExit(f"{source}: the emulation has no rule for this use of {', '.join(left)}; see REWRITES")
    return f'#line 1 "{source.relative_to(ROOT)}"\n{text}'


def write_sources(to: Path, rewrites: list) -> list[Path]:
    """Write csrc/cuda as C++ and return the files to compile: one file includes all kernels, since torch's headers take longest."""
    for folder, sources in (
        ("cuda", [*CSRC.glob("cuda/*"), HERE / "broken.cu"]),
        ("moments", CSRC.glob("moments/*.cuh")),
    ):
        (to / folder).mkdir(parents=True, exist_ok=True)
        for source in sources:
            (to / folder / source.name).write_text(rewritten(source, rewrites))
    kernels = ["registration.cpp", *sorted(source.name for source in CSRC.glob("cuda/*.cu")), "broken.cu"]
    (to / "kernels.cpp").write_text("".join(f'#include "cuda/{name}"\n' for name in kernels))
    return [to / "kernels.cpp", *(HERE / name for name in ("threads.cpp", "handover.cpp", "module.cpp"))]


def build(to: Path, extra: list[str], rewrites: list = REWRITES, libraries_besides: Sequence[str] = ()) -> Path:
    from torch.utils import cpp_extension

    sources = write_sources(to / "sources", rewrites)
    torch_headers = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    headers = [f"-I{HERE / 'shadow'}", f"-I{HERE}", f"-I{to / 'sources'}", f"-I{CSRC}", *torch_headers]
    headers.append(f"-isystem{sysconfig.get_path('include')}")
    # The version of torch's stable ABI, as in setup.py.
    target = re.search(r'TARGET_TORCH = "(\w+)"', (ROOT / "setup.py").read_text()).group(1)
    compiler = [*shlex.split(os.environ.get("CXX", "g++")), *FLAGS, *extra, *shlex.split(os.environ.get("CFLAGS", ""))]

    def compile_one(source: Path) -> Path:
        made = to / f"{source.stem}.o"
        command = [*compiler, f"-DTORCH_TARGET_VERSION={target}", *headers, "-c", str(source), "-o", str(made)]
        subprocess.run(command, check=True, cwd=ROOT)
        return made

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        objects = list(pool.map(compile_one, sources))
    library = to / f"{MODULE}.abi3.so"
    fresh = to / f"{MODULE}.new"  # a process that has the old one loaded keeps it
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    link = [*compiler, "-shared", *map(str, objects), *libraries, "-ltorch_cpu", "-lc10", *libraries_besides]
    subprocess.run([*link, "-o", str(fresh)], check=True)
    fresh.replace(library)
    return library


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    print(f"built {build(folder, ['-fsanitize=address'] if '--address-sanitizer' in sys.argv else [])}")
