"""Launches of the emulation (tests/emulation), run from PTX too: ``attach(folder)``, and every call of a kernel does both.

The host code of csrc/cuda packs the parameters and chooses the grid, as for a GPU. The kernel's PTX runs on the memory of this
process, and then the C++ of tests/emulation on the same memory as it was before. What differs is an error of the call; NaNs are
equal. What PTX has left is what stays.
"""

import ctypes
import gc
import os
import re
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from ptx.interpreter import FIRST_ADDRESS, Access, Memory, launch
from ptx.translation import Module, PtxError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("AMPKIT_PTX") or ROOT / "build" / "ptx" / "sm_80")
ENTRY = re.compile(r"emulation::Entry<&(.*)>$")  # a type that has the kernel in its name

_demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
_demangle.argtypes, _demangle.restype = [ctypes.c_char_p, *[ctypes.c_void_p] * 3], ctypes.c_void_p
_free = ctypes.CDLL(None).free
_free.argtypes = [ctypes.c_void_p]


def demangled(name: str) -> str:
    """A kernel's name with the arguments of its template, and without its parameters, which the host writes differently."""
    pointer = _demangle(name.encode(), None, None, None)
    if not pointer:
        raise PtxError(f"no name of C++: {name}")
    text = ctypes.string_at(pointer).decode()
    _free(pointer)
    if found := ENTRY.match(text):
        text = found[1][1:-1] if found[1][0] == "(" else found[1]
    depth = 0
    for i in range(len(text) - 1, -1, -1) if text.endswith(")") else ():
        depth += {")": 1, "(": -1}.get(text[i], 0)
        if depth == 0:
            text = text[:i]
            break
    return re.sub(r"ampkit::|\(anonymous namespace\)::|^void ", "", text)


def other_storages() -> list[tuple[int, int]]:
    """(address, size) of every tensor's memory: that of deep copies, files and shared memory comes from no allocator of torch's."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = [x.untyped_storage() for x in tensors if x.layout is torch.strided and x.device.type == "cpu"]
    return [(x.data_ptr(), x.nbytes()) for x in storages]


class Snapshots(Memory):
    """Memory that keeps what each allocation held at its first access. ``listed`` finds allocations of torch's allocator."""

    def __init__(self, listed) -> None:
        super().__init__(self._find)
        self.listed = listed
        self.others: list[tuple[int, int]] | None = None  # looked for once in a launch
        self.before: dict[int, np.ndarray] = {}

    def _find(self, address: int) -> tuple[int, int] | None:
        extent = self.listed(address)
        if extent is None:
            self.others = other_storages() if self.others is None else self.others
            extent = next((x for x in self.others if 0 <= address - x[0] < x[1]), None)
        return extent

    def allocation(self, address: int) -> tuple[int, int]:
        base, end = super().allocation(address)
        if end and base not in self.before:
            self.before[base] = self.held(base).copy()
        return base, end

    def keep(self, parameters: bytes) -> None:
        """Keep the memory that parameters point to, so that it is compared too if only the emulation writes to it."""
        for address in np.frombuffer(parameters[: len(parameters) // 8 * 8], np.uint64).tolist():
            found = self.listed(address)
            if found is not None and found[0] not in self.known:
                self.allocation(address)

    def held(self, base: int) -> np.ndarray:
        return self.words[1][base - FIRST_ADDRESS : self.known[base] - FIRST_ADDRESS]

    def swap(self, others: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        now = {base: self.held(base).copy() for base in others}
        for base, bytes_ in others.items():
            self.held(base)[:] = bytes_
        return now


class Machine:
    """All entries of a folder of PTX, by their names in C++, and how often each was launched."""

    def __init__(self, folder: Path, listed) -> None:
        self.listed = listed
        self.entries: dict[str, list[tuple[str, Module, str]]] = {}
        for path in sorted(folder.glob("*.ptx")):
            module = Module(path.read_text())
            for name in module.starts:
                self.entries.setdefault(demangled(name), []).append((path.stem, module, name))
        self.launched = Counter({(file, name): 0 for name, some in self.entries.items() for file, *_ in some})
        self.one_at_a_time = threading.Lock()
        self.last: tuple[str, list[Access], Snapshots]
        self.heard = None  # called after each launch with its entry's name and its accesses of memory

    def begin(self, entry: str, parameters: bytes, blocks: int, threads: int, shared: int) -> None:
        self.one_at_a_time.acquire()
        try:
            name = demangled(entry)
            if shared:
                raise PtxError(f"{name}: shared memory of a launch is not known here")
            if name not in self.entries:
                raise PtxError(f"no PTX for {name}: make {FOLDER} anew")
            # The same kernel may be in several files: each takes its turn.
            file, module, mangled = min(self.entries[name], key=lambda one: self.launched[one[0], name])
            self.launched[file, name] += 1
            memory = Snapshots(self.listed)
            memory.keep(parameters)
            log = launch(module.entry(mangled), parameters, blocks, threads, memory)
            self.last = name, log, memory, memory.swap(memory.before)
        except BaseException:
            self.one_at_a_time.release()
            raise

    def end(self) -> None:
        try:
            name, log, memory, by_ptx = self.last
            by_emulation = memory.swap(by_ptx)
            for base, bytes_ in by_ptx.items():
                compare(name, bytes_, by_emulation[base])
            if self.heard is not None:
                self.heard(name, log)
        finally:
            self.one_at_a_time.release()

    def launches(self) -> int:
        return sum(self.launched.values())

    def never_launched(self) -> list[str]:
        return sorted(f"{file}: {name}" for (file, name), count in self.launched.items() if not count)


def compare(name: str, by_ptx: np.ndarray, by_emulation: np.ndarray) -> None:
    """Raise if bytes differ that do not belong to a NaN on both sides."""
    if np.array_equal(by_ptx, by_emulation):
        return
    # The code of a NaN in a packed moment has its sign, as have a block's largest numbers: the tests of moments look at these.
    differs = (by_ptx != by_emulation) & ((by_ptx & by_emulation & 0x7F) != 0x7F)
    for bits, infinities in (("u8", [0x7FF << 52]), ("u4", [0x7F800000]), ("u2", [0x7F80, 0x7C00])):
        size = int(bits[1])
        whole = by_ptx.size // size * size
        for infinity in infinities:
            magnitude = np.array((1 << 8 * size - 1) - 1, bits)
            both = [(x[:whole].view(bits) & magnitude) > np.array(infinity, bits) for x in (by_ptx, by_emulation)]
            differs[:whole] &= ~np.repeat(both[0] & both[1], size)
    if differs.any():
        at = np.flatnonzero(differs)
        first = at[0] // 4 * 4
        shown = [x[first : first + 4].tobytes()[::-1].hex() for x in (by_ptx, by_emulation)]
        raise PtxError(
            f"{name}: {at.size} bytes differ, the first at {at[0]} of {by_ptx.size}: {shown[0]}, emulated {shown[1]}"
        )


_attached: list[Machine] = []


def attach(folder: Path = FOLDER) -> None:
    """Make the emulation hand over every launch from now on."""
    import ampkit_emulated

    _attached.append(Machine(folder, ampkit_emulated.allocation))
    ampkit_emulated.hand_over(_attached[0].begin, _attached[0].end)


def attached() -> Machine:
    return _attached[0]
