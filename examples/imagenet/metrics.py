"""Reports of a run: averages over all ranks' samples, rows of a JSON lines file, peak memory, a profiler trace."""

import contextlib
import json
import math
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROW = "phase epoch iteration loss top1 top5 images_per_s loss_scale skipped peak_memory_bytes".split()


class Averages(NamedTuple):
    """Means over samples; accuracies in percent."""

    loss: float
    top1: float
    top5: float


def batch_sums(loss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum loss, top-1 hits, top-5 hits and samples of one batch, in float64. Stays on the device."""
    best = logits.detach().topk(min(5, logits.size(1)), dim=1).indices
    hits = best == target[:, None]
    samples = torch.tensor(float(len(target)), dtype=torch.float64, device=loss.device)
    return torch.stack([loss.detach().double() * samples, hits[:, 0].sum(), hits.sum(), samples])


def averages_over_ranks(sums: torch.Tensor) -> Averages:
    """The means behind ``sums`` of all ranks. Waits for the device; all ranks must call it."""
    if dist.is_initialized():
        sums = sums.clone()
        dist.all_reduce(sums)
    loss, top1, top5, samples = sums.tolist()
    return Averages(loss / samples, 100 * top1 / samples, 100 * top5 / samples)


def peak_memory_bytes(device: torch.device) -> int:
    """The most that the CUDA allocator has handed out, or the peak resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsFile:
    """A file of one JSON object per line, each with every key of `ROW`. Without a path, nothing is written.

    ``drop_after`` takes out the rows of later iterations than this one: a run that was killed had got that far, and they will
    be written again.
    """

    def __init__(self, path: Path | None, append: bool, drop_after: int | None = None) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if append and drop_after is not None and path.exists():
                lines = path.read_text().splitlines(keepends=True)
                whole = (line for line in lines if line.endswith("}\n"))
                path.write_text("".join(line for line in whole if json.loads(line)["iteration"] <= drop_after))
            self._file = open(path, "a" if append else "w", buffering=1)  # a whole line at a time

    def write(self, **values: Any) -> None:
        if self._file is None:
            return
        row = {key: values[key] for key in ROW}
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[key] = None  # JSON has no word for it
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@contextlib.contextmanager
def trace_iterations(count: int, path: Path) -> Iterator[Callable[[], None]]:
    """Record the first ``count`` iterations to ``path`` as a Chrome trace; call what it yields after each of them."""
    if count == 0:
        yield lambda: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler = torch.profiler.profile(
        schedule=lambda step: _action(step, count),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        acc_events=True,
    )
    with profiler:
        yield profiler.step


def _action(step: int, count: int) -> torch.profiler.ProfilerAction:
    if step >= count:
        return torch.profiler.ProfilerAction.NONE
    last = step == count - 1
    return torch.profiler.ProfilerAction.RECORD_AND_SAVE if last else torch.profiler.ProfilerAction.RECORD
