"""Run entries of PTX on arrays with an element for each thread: see README.md beside this file.

Blocks run many at once. Of the threads that may go on, those at the lowest program counter do, so that threads that parted meet
again where their ways join. A thread that is at a barrier waits until no other thread of any block may go on.
"""

import ctypes
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ptx.translation import Entry, Place, PtxError

WARP = 32
LANES_AT_ONCE = 16_384
MOST_STEPS = 200_000  # of one gang of blocks; what takes more does not end
READ, WRITE, ATOMIC = "read", "write", "atomic"
#: The content of memory that was allocated and never written: a number that nothing computes.
UNWRITTEN = np.uint64(0xD1B54A32D192ED03)
FIRST_ADDRESS = 65_536  # of memory that may be there; an array cannot begin at 0
NEVER, BEFORE, NOBODY, SEVERAL = -4, -3, -2, -1  # instead of the number of a thread that has accessed a byte


class Access(NamedTuple):
    """The accesses of global memory that the threads of one instruction made."""

    kind: str
    address: np.ndarray
    size: int
    thread: np.ndarray  # among those of all blocks
    epoch: np.ndarray  # how many barriers these had passed,
    shuffles: np.ndarray  # and how many shuffles
    values: np.ndarray | None  # written
    place: Place
    base: int  # of the allocation


class Memory:
    """The memory of this process. Only allocations that ``find`` knows may be accessed: address -> (base, size), or None."""

    def __init__(self, find: Callable[[int], tuple[int, int] | None]) -> None:
        self.find = find
        self.known: dict[int, int] = {}  # allocations that were accessed: base, end
        everything = np.frombuffer((ctypes.c_ubyte * ((1 << 47) - FIRST_ADDRESS)).from_address(FIRST_ADDRESS), np.uint8)
        self.words = {size: everything.view(f"u{size}") for size in (1, 2, 4, 8)}

    def allocation(self, address: int) -> tuple[int, int]:
        for base, end in self.known.items():
            if base <= address < end:
                return base, end
        extent = self.find(address)
        if extent is None:
            return 0, 0
        self.known[extent[0]] = sum(extent)
        return extent[0], sum(extent)

    def check(self, address: np.ndarray, size: int, place: Place) -> int:
        """Raise if an access is misaligned or leaves its allocation."""
        if (address & np.uint64(size - 1)).any():
            raise PtxError(f"a misaligned access of {size} bytes: {place}")
        low, high = int(address.min()), int(address.max())
        base, end = self.allocation(low)
        if high + size > end:
            base = 0
            for one in map(int, np.unique(address)):
                if one + size > self.allocation(one)[1]:
                    raise PtxError(f"an access of {size} bytes at {one:#x}, outside of all memory: {place}")
        return base


class Shared:
    """The shared memory of several blocks: who has written and read each byte since the last barrier."""

    def __init__(self, blocks: int, size: int) -> None:
        self.stride = -(-size // 16) * 16
        self.limit = size
        self.bytes = np.full(blocks * self.stride, 0xFF, np.uint8)  # a NaN in every floating point type
        self.words = {width: self.bytes.view(f"u{width}") for width in (1, 2, 4, 8)}
        self.writer = np.full(self.bytes.size, NEVER)
        self.reader = np.full(self.bytes.size, NOBODY)

    def reach(self, kind: str, block, address, size: int, thread, place: Place) -> np.ndarray:
        """The places at which these accesses begin, after a check of who has accessed their bytes."""
        if (address & np.uint64(size - 1)).any() or int(address.max()) + size > self.limit:
            raise PtxError(f"a misaligned access of shared memory, or one beyond its {self.limit} bytes: {place}")
        start = block * self.stride + address.astype(np.int64)
        bytes_, thread = start[:, None] + np.arange(size), thread[:, None]
        writer, reader = self.writer[bytes_], self.reader[bytes_]
        if kind == READ and (writer == NEVER).any():
            raise PtxError(f"shared memory that nobody has written is read: {place}")
        is_own = (writer == thread) | (writer == BEFORE) | (writer == NEVER)
        marks, did = (self.reader, "read") if kind == READ else (self.writer, "written")
        marks[bytes_] = thread
        alone = ((reader == thread) | (reader == NOBODY)) & (marks[bytes_] == thread)
        if not is_own.all() or not (kind == READ or alone.all()):
            raise PtxError(
                f"a race: shared memory is {did} that another thread has accessed since the last barrier: {place}"
            )
        self.reader[bytes_[~alone]] = SEVERAL
        return start

    def pass_barrier(self, block: int) -> None:
        own = slice(block * self.stride, (block + 1) * self.stride)
        self.writer[own][self.writer[own] >= 0] = BEFORE
        self.reader[own] = NOBODY


class Gang:
    """The state that translated instructions work on, for several blocks of a launch that run together."""

    def __init__(
        self, entry: Entry, parameters: np.ndarray, first: int, blocks: int, threads: int, grid: int, memory: Memory
    ) -> None:
        self.entry, self.memory, self.log = entry, memory, []
        self.count = blocks * threads
        self.lanes = np.arange(self.count)
        self.block_of, self.first_thread = self.lanes // threads, first * threads
        self.in_block = self.lanes % threads
        self.thread = self.in_block.astype(np.uint32)
        self.block = np.uint32(first) if blocks == 1 else (first + self.block_of).astype(np.uint32)
        self.threads, self.grid = np.uint32(threads), np.uint32(grid)
        self.parameters = {size: parameters.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.shared = Shared(blocks, entry.shared.size)
        self.registers: list = [None] * len(entry.registers)
        self.epoch = np.zeros(blocks, np.int64)
        self.shuffles = np.zeros(self.count, np.int64)

    # Registers: an array with an element for each lane, or one number for all of them.

    def taken(self, value, lanes):
        if value is None:
            raise PtxError(f"a register is read that nothing has written, in {self.entry.name}")
        return value if lanes is None or value.ndim == 0 else value[lanes]

    def moved(self, value, lanes):
        """The value of a register that is only moved to another; on paths that never meet it may be unset."""
        return value if value is None else self.taken(value, lanes)

    def put(self, number: int, lanes, value) -> None:
        if value is None:
            return
        if lanes is not None:
            before = self.registers[number]
            if before is None or before.ndim == 0:
                every = np.full(self.count, 0 if before is None else before, value.dtype)
            else:
                every = before.copy()  # moves leave one array in two registers
            every[lanes] = value
            value = every
        self.registers[number] = value

    # Running

    def run(self) -> None:
        ready: dict[int, np.ndarray | None] = {0: None}
        waiting: dict[int, np.ndarray] = {}
        for _ in range(MOST_STEPS):
            if not ready:
                if not waiting:
                    return
                self.pass_barriers(waiting, ready)
            number = min(ready)
            lanes = ready.pop(number)
            block = self.entry.blocks[number]
            try:
                outcome = block.run(self, self.registers, lanes)
            except (AttributeError, TypeError) as error:
                raise PtxError(
                    f"a register is read that nothing has written, after {block.instructions[0].place}"
                ) from error
            kind, *rest = block.end
            if kind == "jump":
                self.meet(ready, rest[0], lanes)
            elif kind == "branch":
                self.part(ready, lanes, outcome, rest[0], number + 1)
            elif kind == "barrier":
                waiting[number] = self.lanes if lanes is None else lanes
                if rest[0] is not None:
                    self.put(rest[0], lanes, outcome)
        raise PtxError(f"{self.entry.name} does not end")

    def meet(self, ready: dict, number: int, lanes) -> None:
        if number in ready:
            lanes = np.sort(np.concatenate([ready[number], lanes]))
        ready[number] = None if lanes is None or len(lanes) == self.count else lanes

    def part(self, ready: dict, lanes, outcome, target: int, other: int) -> None:
        if outcome.ndim == 0 or outcome.all() or not outcome.any():
            return self.meet(ready, target if outcome.flat[0] else other, lanes)
        lanes = self.lanes if lanes is None else lanes
        self.meet(ready, target, lanes[outcome])
        self.meet(ready, other, lanes[~outcome])

    def pass_barriers(self, waiting: dict[int, np.ndarray], ready: dict) -> None:
        """Release the blocks all of whose threads wait at the same barrier."""
        arrived = {
            number: np.bincount(self.block_of[lanes], minlength=len(self.epoch)) for number, lanes in waiting.items()
        }
        for number, lanes in list(waiting.items()):
            _, predicate, result, place = self.entry.blocks[number].end
            here = arrived[number]
            if ((here != 0) & (here != self.threads)).any():
                raise PtxError(f"not all threads of a block reach this barrier, but {here[here != 0].min()}: {place}")
            if predicate is not None:
                found = (
                    np.bincount(self.block_of[lanes], self.taken(self.registers[predicate], lanes), len(self.epoch)) > 0
                )
                self.put(result, None if len(lanes) == self.count else lanes, found[self.block_of[lanes]])
            for block in np.flatnonzero(here):
                self.shared.pass_barrier(block)
            self.epoch = self.epoch + (here != 0)
            del waiting[number]
            self.meet(ready, number + 1, lanes)

    def shuffle(self, lanes, mode: str, value, b, c, mask, place: Place):
        """Run shfl.sync: a lane takes the value of another lane of its warp, if that lies in its segment."""
        lanes = self.lanes if lanes is None else lanes
        warp = lanes - self.in_block[lanes] % WARP
        lane = self.in_block[lanes] % WARP
        b, clamp, segment = (np.broadcast_to(x, lanes.shape).astype(np.int64) & 31 for x in (b, c, c >> np.uint32(8)))
        mask = np.broadcast_to(mask, lanes.shape).astype(np.int64)
        here = np.bincount(warp, 2.0**lane, self.count).astype(np.int64)[warp]
        if ((here & mask) != mask).any() or ((mask >> lane & 1) == 0).any():
            raise PtxError(f"not all lanes of its mask reach this shuffle: {place}")
        last, first = (lane & segment) | (clamp & ~segment), lane & segment
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment)}[mode]
        inside = source >= last if mode == "up" else source <= last
        source = np.where(inside, source, lane)
        if ((mask >> source & 1) == 0).any():
            raise PtxError(f"a shuffle reads a lane that takes no part in it: {place}")
        every = np.zeros(self.count, value.dtype)
        every[lanes] = value
        self.shuffles[lanes] += 1
        return every[warp + source], inside

    # Memory

    def reach(self, space: str, kind: str, lanes, address, size: int, place: Place, values=None) -> tuple:
        """The words of a state space, and the bytes at which these accesses begin there."""
        lanes = self.lanes if lanes is None else lanes
        every = np.broadcast_to(address, lanes.shape)
        if space == "shared":
            return self.shared.words, self.shared.reach(
                kind, self.block_of[lanes], every, size, self.in_block[lanes], place
            )
        at = address.astype(np.int64)
        if space == "param":
            if (at & (size - 1)).any() or (at + size > self.parameters[1].size).any():
                raise PtxError(f"a misaligned access of the parameters, or one beyond their end: {place}")
            return self.parameters, at
        base = self.memory.check(every, size, place)
        passed = self.epoch[self.block_of[lanes]], self.shuffles[lanes]
        self.log.append(Access(kind, every, size, lanes + self.first_thread, *passed, values, place, base))
        at, words = at - FIRST_ADDRESS, self.memory.words
        if kind == READ and any((words[8][(at + k) >> 3] == UNWRITTEN).any() for k in range(0, size, 8)):
            raise PtxError(f"memory that nobody has written is read: {place}")
        return words, at

    def load(self, space: str, lanes, address, dtype: str, count: int, place: Place) -> list:
        size = np.dtype(dtype).itemsize
        words, at = self.reach(space, READ, lanes, address, size * count, place)
        return [words[size][at // size + k].view(dtype) for k in range(count)]

    def store(self, space: str, lanes, address, dtype: str, values: tuple, place: Place) -> None:
        size = np.dtype(dtype).itemsize
        count = self.count if lanes is None else len(lanes)
        bits = np.stack([np.broadcast_to(one, count) for one in values], axis=1).view(f"u{size}")
        words, at = self.reach(space, WRITE, lanes, address, size * len(values), place, bits)
        at = np.broadcast_to(at // size, count)
        for k in range(len(values)):
            words[size][at + k] = bits[:, k]

    def atomic_minimum(self, lanes, address, value, place: Place):
        words, at = self.reach("global", ATOMIC, lanes, address, 8, place)
        at = np.broadcast_to(at // 8, self.count if lanes is None else len(lanes))
        values = np.broadcast_to(value, at.shape)
        before = np.empty_like(values)
        for i, where in enumerate(at):
            before[i] = words[8].view(np.int64)[where]
            words[8].view(np.int64)[where] = min(before[i], values[i])
        return before


def launch(entry: Entry, parameters: bytes, grid: int, threads: int, memory: Memory) -> list[Access]:
    """Run all blocks; return their accesses of global memory."""
    if len(parameters) != entry.parameters.size:
        raise PtxError(f"{len(parameters)} bytes of parameters, where {entry.name} takes {entry.parameters.size}")
    if not 0 < threads <= (entry.max_threads or 1024) or grid < 1:
        raise PtxError(f"an invalid launch of {entry.name}: {grid} blocks of {threads} threads")
    words = np.frombuffer(parameters.ljust(-(-len(parameters) // 8) * 8, b"\0"), np.uint8)
    log: list[Access] = []
    at_once = max(LANES_AT_ONCE // threads, 1)
    with np.errstate(all="ignore"):
        for first in range(0, grid, at_once):
            gang = Gang(entry, words, first, min(at_once, grid - first), threads, grid, memory)
            gang.run()
            log += gang.log
    find_races(log, threads)
    return log


def find_races(log: list[Access], threads: int) -> None:
    """Raise if two threads access the same memory, one of them writes, and no barrier lies between."""
    written = {access.base for access in log if access.kind != READ}
    log = [access for access in log if access.base in written or access.base == 0]
    if not log:
        return
    width = min(access.size for access in log)
    parts = [(access, np.repeat(np.arange(access.address.size), access.size // width)) for access in log]
    key = np.concatenate(
        [
            np.add.outer(access.address // np.uint64(width), np.arange(access.size // width, dtype=np.uint64)).ravel()
            for access in log
        ]
    )
    thread = np.concatenate([access.thread[which] for access, which in parts])
    writes = np.concatenate([np.full(which.size, access.kind != READ) for access, which in parts])
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=key[order][:1] - np.uint64(1)))
    lowest, highest = (how.reduceat(thread[order], starts) for how in (np.minimum, np.maximum))
    suspects = np.flatnonzero((lowest != highest) & np.logical_or.reduceat(writes[order], starts))
    if not suspects.size:
        return
    source = np.concatenate([np.full(which.size, i) for i, (_, which) in enumerate(parts)])
    within = np.concatenate([which for _, which in parts])
    for suspect in suspects:
        group = order[starts[suspect] : starts[suspect + 1] if suspect + 1 < starts.size else None]
        check_order([(int(thread[i]), log[source[i]], within[i]) for i in group], threads)


def check_order(accesses: list[tuple[int, Access, int]], threads: int) -> None:
    """Raise if accesses of one place by different threads are not ordered, and it matters which comes first."""
    for (a_thread, a, i), (b_thread, b, j) in itertools.combinations(accesses, 2):
        if a_thread == b_thread or READ == a.kind == b.kind or ATOMIC == a.kind == b.kind:
            continue
        in_block = a_thread // threads == b_thread // threads
        if in_block and a.epoch[i] != b.epoch[j]:
            continue
        # A write after a shuffle depends on what all lanes have read before. (Their own writes need not be visible.)
        in_warp = in_block and a_thread % threads // WARP == b_thread % threads // WARP
        if in_warp and (a.kind, b.kind) == (READ, WRITE) and a.shuffles[i] < b.shuffles[j]:
            continue
        if in_warp and (a.kind, b.kind) == (WRITE, READ) and a.shuffles[i] > b.shuffles[j]:
            continue
        if WRITE == a.kind == b.kind and a.size == b.size and (a.values[i] == b.values[j]).all():
            continue
        raise PtxError(f"a race: threads {a_thread} and {b_thread} access the same memory: {a.place}; {b.place}")
