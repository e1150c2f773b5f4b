"""The CUDA kernels as nvcc compiles them: registers, shared memory, spilled bytes, occupancy and instructions, without a GPU.

python benchmarks/ptxas.py [--arch sm_90] [KERNEL ...]     only kernels whose name contains one of these words

Registers, bytes of shared memory and spills are what ``ptxas -v`` prints. Occupancy follows from these by the formula of NVIDIA's
"CUDA C++ Programming Guide": the threads that a multiprocessor can hold, as a share of those that it has room for. Instructions are
lines of SASS: of the whole kernel, and of its longest loop (the widest backward branch). ``memory`` counts the loads and stores of
global memory in that loop, by their width in bytes.
Needs nvcc, and cuobjdump (of the toolkit, or the one that triton brings).
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA", "-std=c++17", "-O3", "-fmad=false")
USED = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:[^\n]*?, (\d+) bytes smem)?",
    re.DOTALL,
)
THREADS = 512  # csrc/cuda/multi_tensor_apply.cuh
#: Of a multiprocessor: threads, blocks, bytes of shared memory. Each has 65,536 registers, in four parts.
LIMITS = {"sm_80": (2048, 32, 164 * 1024), "sm_90": (2048, 32, 228 * 1024)}
INSTRUCTION = re.compile(r"/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<text>[^;]+);")


def command_for(
    source: Path, arch: str, to: Path, how: tuple[str, ...] = ("-cubin", "-Xptxas", "-v"), csrc: Path = ROOT / "csrc"
) -> list[str]:
    from torch.utils import cpp_extension

    site = Path(cpp_extension.__file__).parents[2]
    headers = [*cpp_extension.include_paths(), *site.glob("nvidia/cu*/include"), csrc]
    folders = [flag for path in headers for flag in ("-I", str(path))]
    return ["nvcc", f"-arch={arch}", *how, *FLAGS, *folders, str(source), "-o", str(to)]


class Used(NamedTuple):
    """The resources of a kernel, as ptxas prints them."""

    registers: int  # of a thread
    shared: int  # bytes of a block
    stores: int  # bytes that a thread spills,
    loads: int  # and reads back

    def occupancy(self, arch: str, threads: int = THREADS) -> float:
        most_threads, most_blocks, shared = LIMITS[arch]
        warps = -(-threads // 32)
        of_warp = -(-self.registers * 32 // 256) * 256
        blocks = min(
            65_536 // 4 // of_warp * 4 // warps,
            shared // (-(-self.shared // 128) * 128 + 1024),  # a block takes 1,024 bytes for itself
            most_threads // (warps * 32),
            most_blocks,
        )
        return blocks * warps * 32 / most_threads


def used(said: str) -> dict[str, Used]:
    """The resources of kernels by their mangled names, from the text of ``ptxas -v``."""
    return {
        name: Used(int(registers), int(shared or 0), int(stores), int(loads))
        for name, stores, loads, registers, shared in USED.findall(said)
    }


def cuobjdump() -> str:
    path = shutil.which("cuobjdump")
    if path is None:
        import triton

        path = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    return path


#: csrc/tensor_lists.h, `DType`.
DTYPES = ("float32", "float16", "bfloat16", "rest", "packed")


def demangled(name: str) -> str:
    plain = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()
    plain = re.sub(r"ampkit::|\(anonymous namespace\)::|^void ", "", plain)
    plain = re.sub(r"\(DType\)(\d)", lambda found: DTYPES[int(found[1])], plain).partition("(")[0]
    table, _, kernel = plain.partition(", ")[2].partition(", ")
    return f"{kernel[:-1].strip()} | {table}" if plain.startswith("multi_tensor_apply_kernel") else f"{plain} |"


def loop_of(lines: list[tuple[int, str]]) -> list[str]:
    """The instructions of the longest loop."""
    longest: list[str] = []
    for at, text in lines:
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if target and (first := int(target.group(1), 16)) < at:
            body = [other for where, other in lines if first <= where <= at]
            longest = max(longest, body, key=len)
    return longest


def rows_of(source: Path, arch: str) -> list[tuple]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        done = subprocess.run(command_for(source, arch, cubin), capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        sass = subprocess.run([cuobjdump(), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    said = used(done.stderr)
    rows = []
    for part in sass.split("Function : ")[1:]:
        name = part.split(None, 1)[0]
        lines = [(int(m["at"], 16), m["text"]) for m in INSTRUCTION.finditer(part)]
        loop = loop_of(lines)
        widths = collections.Counter(
            f"{kind}{int(width or 32) // 8}"
            for kind, width in re.findall(r"\b(LDG|STG)\.E(?:\.\w+)*?\.?(128|64|16|8)?\b", "\n".join(loop))
        )
        memory = " ".join(f"{count}x{width}" for width, count in sorted(widths.items()))
        text = [one for _, one in lines if "NOP" not in one]
        rows.append((demangled(name), said[name], len(text), len(loop), memory))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--arch", default="sm_90", choices=LIMITS)
    arguments = parser.parse_args()
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [row for part in pool.map(lambda source: rows_of(source, arguments.arch), sources) for row in part]
    print(
        "| kernel | its table | registers | shared memory | spill stores, loads | occupancy | instructions "
        "| longest loop | memory in it |\n" + "|---" * 9 + "|"
    )
    for name, cost, count, loop, memory in sorted(rows):
        if not arguments.kernels or any(word in name for word in arguments.kernels):
            occupancy = cost.occupancy(arguments.arch)
            print(
                f"| {name} | {cost.registers} | {cost.shared} | {cost.stores}, {cost.loads} | {occupancy:.0%} "
                f"| {count} | {loop} | {memory} |"
            )


if __name__ == "__main__":
    main()
