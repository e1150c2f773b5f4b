"""Advice from a recording of a script: each rule looks for one kind of finding, and gives the code to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...devices import computes_slowly_in
from .record import AMPKIT, FORWARD, GRAD_SCALER, STEP, Advice, CallRow, Record

#: Findings with smaller shares are left out.
_LEAST = 0.01
_READS, _MANY_READS = ("item", "tolist"), 2


#: Changes to a product in float32, by words of its reason.
_CHANGES = {
    "bound before": "call F.{function}(...) by the module: the name was bound before initialize patched it",
    "kept by": "take {item} out of keep_fp32=",
    "region": "end the region before it, or leave it out",
    "promoted": "cast what promotes it to the other's dtype, x.to(y.dtype): {cause}",
    "cast inside": "torch casts in it; for attention, the fused kernels do not, and on the CPU they need dropout_p=0",
    "row ": 'initialize(..., policy={{"torch.nn.functional.{function}": "lower"}}), if its range fits',
}
_CONVERT = "convert its arguments, x.to(y.dtype), or call it inside of the model's forward, where a level casts them"


def advise(record: Record) -> list[Advice]:
    advice_list = [advice for rule in _RULES for advice in rule(record)]
    return sorted(advice_list, key=lambda advice: -advice.gain)


def _float32_products(record: Record) -> Iterator[Advice]:
    rows = [row for row in record.calls if row.flops and row.dtype is torch.float32]
    share = sum(map(record.share_of_flops, rows))
    if computes_slowly_in(record.lower_precision or torch.bfloat16):  # then float32 is the fastest
        return
    if record.lower_precision is None and share > _LEAST:
        change = 'model, optimizer = ampkit.initialize(model, optimizer, opt_level="O1")'
        has_float64 = any(row.flops and row.dtype is torch.float64 for row in record.calls)
        finding = "every matrix product computes in float32" + " or float64" * has_float64
        yield Advice(share / 2, "", finding, change)
        return
    for (function, reason), alike in _grouped(rows, lambda row: (row.function, _forward_reason(record, row))):
        share = sum(map(record.share_of_flops, alike))
        if share >= _LEAST:
            sites = list(dict.fromkeys(row.site for row in alike))
            lines = f" at {len(sites)} lines" if len(sites) > 1 else ""
            finding = f"{function} computes in float32{lines} ({share:.0%} of FLOPs): {reason}"
            gain = sum(map(record.share_of_time, alike)) / 2
            yield Advice(gain, sites[0], finding, _instead_of_float32(function, reason))


def _forward_reason(record: Record, row: CallRow) -> str:
    """Return the reason of a row without the dtype; that of the forward row, if the function at the line has one."""
    at = row.site, row.function
    forward = (x for x in record.calls if x.phase == FORWARD and (x.site, x.function) == at)
    return next(forward, row).reason.partition(": ")[2]


def _instead_of_float32(function: str, reason: str) -> str:
    cause, item = reason.partition(" by ")[2] or "an argument", reason.partition("=")[2]
    change = next((change for words, change in _CHANGES.items() if words in reason), _CONVERT)
    return change.format(function=function, cause=cause, item=item)


def _shapes(record: Record) -> Iterator[Advice]:
    odd = [row for row in record.calls if "no multiple of" in row.tensor_cores and not computes_slowly_in(row.dtype)]
    for (site, function, module), rows in _grouped(odd, lambda row: (row.site, row.function, row.module)):
        share = sum(map(record.share_of_flops, rows))
        if share >= _LEAST:
            row = next((row for row in rows if row.phase == FORWARD), rows[0])
            text, _, change = row.tensor_cores.removeprefix("no: ").partition("; ")
            where = f" in {module!r}" if module else ""
            gain = sum(map(record.share_of_time, rows)) / 2
            yield Advice(gain, site, f"{function}{where} ({share:.0%} of FLOPs): {text}", change)


def _casts_of_weights(record: Record) -> Iterator[Advice]:
    often = [cast for cast in record.casts if cast[1] > 1.5]
    if often:
        name, number, _ = max(often, key=lambda cast: cast[1] * cast[2])
        # Half of these casts could be saved.
        size = sum(number * bytes_of_one for _, number, bytes_of_one in often) * record.iterations / 2
        written, took = (sum(getattr(row, name) for row in record.calls) for name in ("bytes_cast", "cast_seconds"))
        finding = f"{len(often)} weights are cast more than once an iteration ({name!r} {number:.0f} times)"
        change = 'ampkit.keep_casts(model) around the calls casts them once; "O2" stores them in lower precision'
        yield Advice(min(1.0, size / max(1, written)) * took / max(record.seconds, 1e-9), "", finding, change)


def _float64(record: Record) -> Iterator[Advice]:
    of_script = [row for row in record.calls if row.phase != STEP and row.function not in (AMPKIT, GRAD_SCALER)]
    exact = [row for row in of_script if row.dtype is torch.float64]
    for site, rows in _grouped(exact, lambda row: row.site):
        share = sum(map(record.share_of_time, rows))
        if max(share, sum(map(record.share_of_flops, rows))) >= _LEAST:
            first = next((row for row in rows if row.phase == FORWARD), rows[0])
            change = (
                "write .float() for .double(), or x.float() before it: numpy's arrays are float64, and what meets them"
            )
            yield Advice(share, site, f"{first.function} computes in float64 ({share:.0%} of the time)", change)


def _reads(record: Record) -> Iterator[Advice]:
    reads = [row for row in record.calls if row.function in _READS]
    for site, rows in _grouped(reads, lambda row: row.site):
        number = sum(row.calls for row in rows) / record.iterations
        if number > _MANY_READS:
            finding = f"{rows[0].function} reads {number:.0f} numbers an iteration, and the script waits for the device each time"
            change = "add them up as tensors, torch.stack(...).sum(), and read one number, every 100 steps"
            yield Advice(sum(map(record.share_of_time, rows)), site, finding, change)


def _grouped(rows: Iterable[CallRow], key: Callable[[CallRow], Any]) -> Iterable[tuple[Any, list[CallRow]]]:
    groups: dict[Any, list[CallRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups.items()


_RULES = (_float32_products, _float64, _reads, _shapes, _casts_of_weights)
