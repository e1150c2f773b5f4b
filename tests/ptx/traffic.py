"""Bytes that each kernel reads and writes in global memory, counted in a run from PTX, beside the need of its algorithm.

    AMPKIT_EXTENSION=emulated AMPKIT_EMULATION=ptx PYTHONPATH=tests:build/emulation python -m ptx.traffic

prints the table that docs/benchmarks.md has, with what ptxas says of each kernel. Bytes are those that a warp asks for in one
instruction, each once, of all launches of a call. A sector is 32 bytes of memory, and full where one such request takes all of it.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ampkit import kernels
from ampkit.apex import multi_tensor_steps
from ampkit.kernels import moments
from ptx import launching
from ptx.build import ARCHITECTURES, ROOT
from ptx.interpreter import READ, WARP, Access

sys.path.insert(0, str(ROOT / "benchmarks"))
import ptxas

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ELEMENTS = 2 * 65_536  # two chunks
SECTOR = 32
#: Adam's gradients, parameters, moments, and the tensors beside the parameters.
REST, PACKED = "rests", "8 bits"
ADAM = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-6, step=3)


class Counted(NamedTuple):
    """Bytes of one kind of access, and how many of their sectors are accessed as a whole."""

    bytes: int
    sectors: int
    full: int

    def __add__(self, other):
        return Counted(*(a + b for a, b in zip(self, other, strict=True)))


def count(access: Access) -> Counted:
    """The count of one instruction of many warps."""
    asked = np.unique(np.stack([access.thread // WARP, access.address.astype(np.int64)]), axis=1)
    _, lanes = np.unique(np.stack([asked[0], asked[1] // SECTOR]), axis=1, return_counts=True)
    return Counted(asked.shape[1] * access.size, lanes.size, int((lanes * access.size >= SECTOR).sum()))


class Traffic(NamedTuple):
    kernel: str  # the one that moves most
    read: Counted
    written: Counted

    def ratio(self, needed: float) -> float:
        return (self.read.bytes + self.written.bytes) / ELEMENTS / needed


def measured(call: Callable[[], object]) -> Traffic:
    """The counts of all launches that a call makes."""
    logs: dict[str, list[Access]] = {}
    launching.attached().heard = lambda name, log: logs.setdefault(name, []).extend(log)
    try:
        call()
    finally:
        launching.attached().heard = None
    nothing = Counted(0, 0, 0)
    read, written = (
        sum((count(one) for log in logs.values() for one in log if (one.kind == READ) is is_read), nothing)
        for is_read in (True, False)
    )
    largest = max(logs, key=lambda name: sum(one.address.size * one.size for one in logs[name]))
    return Traffic(largest, read, written)


def numbers(dtype) -> list[torch.Tensor]:
    return [torch.rand(ELEMENTS).to(dtype)]


def like(tensors: list[torch.Tensor], dtype) -> list[torch.Tensor]:
    return [torch.empty_like(one, dtype=dtype) for one in tensors]


def found() -> torch.Tensor:
    return torch.zeros(1)


def step(function, states: int, grad, param, state=F32, lower=None, **settings) -> Callable[[], object]:
    columns = [numbers(F32) for _ in range(states)]
    if state is PACKED:
        columns = [[moments.pack(one[0], k == 0)] for k, one in enumerate(columns)]
    else:
        columns = [[one.to(state) for one in some] for some in columns]
    params = numbers(param)
    beside = like(params, torch.int16 if lower is REST else lower) if lower else None
    if lower is REST:
        beside[0].zero_()
    if function is multi_tensor_steps.multi_tensor_novograd:
        columns.append(torch.rand(1))
    given = numbers(grad), params, *(columns or [None]), beside
    return lambda: function(*given, found_inf=found(), **settings)


def scale(source, target):
    x = numbers(source)
    return lambda: kernels.multi_tensor_scale(x, like(x, target), 0.5, found_inf=found())


def axpby(first, second):
    x, y = numbers(first), numbers(second)
    return lambda: kernels.multi_tensor_axpby(x, y, y, 0.5, 1.0, found_inf=found())


def norm(dtype, target=None):
    x = numbers(dtype)
    out = None if target is None else like(x, target)
    return lambda: kernels.multi_tensor_unscale_l2norm(x, out, 0.5, found_inf=found())


def split(dtype):
    x = numbers(F32)
    return lambda: kernels.multi_tensor_split(x, like(x, dtype), like(x, torch.int16))


def join(dtype):
    x = numbers(dtype)
    rests = [torch.zeros(ELEMENTS, dtype=torch.int16)]
    return lambda: kernels.multi_tensor_join(x, rests, like(x, F32))


def adam(grad, param, state=F32, lower=None, **more):
    return step(
        kernels.multi_tensor_adam, 2, grad, param, state, lower, decoupled=True, weight_decay=0.1, **ADAM, **more
    )


def sgd(momentum, *mix):
    return step(kernels.multi_tensor_sgd, int(momentum > 0), *mix, lr=0.1, momentum=momentum)


def apex(rule: str, states: int, grad, **settings):
    return step(getattr(multi_tensor_steps, f"multi_tensor_{rule}"), states, grad, F32, **settings)


DRAWN = dict(seed=5, round_params=True)
#: A call, and the bytes an element that its algorithm reads and writes: each input once, each output once.
CASES: dict[str, tuple[Callable[[], Callable[[], object]], float, float]] = {
    "scale: float32 into float32": (lambda: scale(F32, F32), 4, 4),
    "scale: bfloat16 into float32": (lambda: scale(BF16, F32), 2, 4),
    "scale: float32 into float16": (lambda: scale(F32, F16), 4, 2),
    "axpby: bfloat16 added to float32": (lambda: axpby(BF16, F32), 6, 4),
    "norm: float32": (lambda: norm(F32), 4, 0),
    "norm: bfloat16": (lambda: norm(BF16), 2, 0),
    "unscale and norm: bfloat16 into float32": (lambda: norm(BF16, F32), 2, 4),
    "split: float32 into bfloat16 and rests": (lambda: split(BF16), 4, 4),
    "join: float16 and rests into float32": (lambda: join(F16), 4, 4),
    "sgd: float32": (lambda: sgd(0.0, F32, F32), 8, 4),
    "sgd with momentum: float32": (lambda: sgd(0.9, F32, F32), 12, 8),
    "sgd with momentum: bfloat16 with rests": (lambda: sgd(0.9, BF16, BF16, F32, REST), 10, 8),
    "sgd with momentum: bfloat16 with rests, 8 bits": (lambda: sgd(0.9, BF16, BF16, PACKED, REST), 7, 5),
    "adam: float32": (lambda: adam(F32, F32), 16, 12),
    "adam: float32, bfloat16 gradients and copies": (lambda: adam(BF16, F32, F32, BF16), 14, 14),
    "adam: bfloat16 with rests": (lambda: adam(BF16, BF16, F32, REST), 14, 12),
    "adam: float16 with rests, float32 gradients": (lambda: adam(F32, F16, F32, REST), 16, 12),
    "adam: bfloat16 with rests, 8 bits": (lambda: adam(BF16, BF16, PACKED, REST), 8, 6),
    "adam: bfloat16 by numbers drawn, 8 bits": (
        lambda: adam(BF16, BF16, PACKED, positions=torch.zeros(1), **DRAWN),
        6,
        4,
    ),
    "adam: float32, 8 bits": (lambda: adam(F32, F32, PACKED), 10, 6),
    "adagrad: float32": (lambda: apex("adagrad", 1, F32, lr=0.1, eps=1e-6), 12, 8),
    "novograd: float32": (lambda: apex("novograd", 1, F32, **ADAM), 16, 8),
    "lamb: float32": (lambda: apex("lamb", 2, F32, **ADAM, decoupled=True, weight_decay=0.1), 28, 12),
}


def of_sectors(counted: Counted) -> str:
    return f"{counted.full / counted.sectors:.0%}" if counted.bytes >= ELEMENTS // 2 else "-"


def row_of(name: str, traffic: Traffic, used: dict[str, list[ptxas.Used]]) -> str:
    _, reads, writes = CASES[name]
    moved = [f"{one.bytes / ELEMENTS:.3f}" for one in (traffic.read, traffic.written)]
    of_kernel = used[traffic.kernel]
    occupancy = [f"{one.occupancy(arch):.0%}" for one, arch in zip(of_kernel, ARCHITECTURES, strict=True)]
    both = ["/".join(map(str, column)) for column in zip(*of_kernel, strict=True)]
    cells = [name, f"{reads} + {writes}", " + ".join(moved), f"{traffic.ratio(reads + writes):.3f}"]
    cells += [
        of_sectors(traffic.read),
        of_sectors(traffic.written),
        *both[:2],
        f"{both[2]}, {both[3]}",
        "/".join(occupancy),
    ]
    return f"| {' | '.join(cells)} |"


def what_ptxas_says() -> dict[str, list[ptxas.Used]]:
    """The numbers of ptxas by the names of kernels, for each architecture."""
    said: dict[str, list[ptxas.Used]] = {}
    for arch in ARCHITECTURES:
        of_arch = {}
        for path in sorted(launching.FOLDER.with_name(arch).glob("*.ptx")):
            command = ["nvcc", f"-arch={arch}", "-cubin", "-Xptxas", "-v", str(path), "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            of_arch |= {launching.demangled(name): one for name, one in ptxas.used(done.stderr).items()}
        for name, one in of_arch.items():
            said.setdefault(name, []).append(one)
    return said


COLUMNS = (
    "kernel", "bytes an element: needed, read + written", "moved", "ratio", "full sectors read", "written",
    "registers", "shared memory", "spills", "occupancy",
)  # fmt: skip


def main() -> None:
    used = what_ptxas_says()
    launching.attach()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name, (make, *_) in CASES.items():
        print(row_of(name, measured(make()), used), flush=True)


if __name__ == "__main__":
    main()
