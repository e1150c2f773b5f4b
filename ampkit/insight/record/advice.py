"""What to change in a script, by what was recorded of it: each rule looks for one finding, and says what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ...policy.tables import tables_for
from ..words import in_bytes, short
from .data import FORWARD, STEP, Advice, CallRow, Rows

#: Shares below this are no finding.
_LEAST = 0.01
_READS, _MANY_READS = ("item", "local_scalar_dense", "tolist"), 2
#: Functions that hand on their input's precision where weights are stored in lower precision.
_NARROW = {name for group in tables_for("default") if group.narrow for name in group.names}


def advise(record: Rows) -> list[Advice]:
    """The findings, most gain first."""
    found = [advice for rule in _RULES for advice in rule(record)]
    return sorted(found, key=lambda advice: -advice.gain)


def _float32_products(record: Rows) -> Iterator[Advice]:
    """Matrix products that compute in float32."""
    rows = [row for row in record.calls if row.flops and row.dtype is torch.float32]
    share = sum(map(record.share_of_flops, rows))
    if record.lower_precision is None and share > _LEAST:
        change = 'model, optimizer = ampkit.initialize(model, optimizer, opt_level="O1")'
        yield Advice(share / 2, "", "every matrix product computes in float32", change)
        return
    alike: dict[tuple[str, str], list[CallRow]] = {}
    for row in rows:
        alike.setdefault((row.function, _forward_reason(record, [row])), []).append(row)
    for (function, reason), own in alike.items():
        share = sum(map(record.share_of_flops, own))
        if share >= _LEAST:
            sites = list(dict.fromkeys(row.site for row in own))
            lines = f" at {len(sites)} lines" if len(sites) > 1 else ""
            found = f"{function} computes in float32{lines} ({share:.0%} of FLOPs): {reason}"
            gain = sum(map(record.share_of_time, own)) / 2
            yield Advice(gain, sites[0], found, _instead_of_float32(function, reason))


def _forward_reason(record: Rows, rows: list[CallRow]) -> str:
    """Why, without the dtype: of the forward pass, where a function at a line was recorded in it."""
    of = {(row.site, row.function) for row in rows}
    forward = (row for row in record.calls if row.phase == FORWARD and (row.site, row.function) in of)
    return next(forward, rows[0]).reason.partition(": ")[2]


def _instead_of_float32(function: str, reason: str) -> str:
    if reason.startswith("bound before"):
        return f"call F.{function}(...) by the module: the name was bound before initialize patched it"
    if reason.startswith("kept by"):
        return f"take {reason.partition('=')[2]} out of keep_fp32="
    if "region" in reason:
        return "end the region before it, or leave it out"
    if "promoted" in reason:
        return (
            f"cast what promotes it to the other's dtype, x.to(y.dtype): {reason.partition(' by ')[2] or 'an argument'}"
        )
    if reason.startswith("cast inside"):
        return "torch casts in it; for attention, the fused kernels do not, and on the CPU they need dropout_p=0"
    if "row " in reason:
        return f'initialize(..., policy={{"torch.nn.functional.{function}": "lower"}}), if its range fits'
    return "convert its arguments, x.to(y.dtype), or call it inside of the model's forward, where a level casts them"


def _shapes(record: Rows) -> Iterator[Advice]:
    """Products in lower precision whose sizes Tensor Cores do not take."""
    found: dict[tuple[str, ...], list[CallRow]] = {}
    for row in record.calls:
        if "no multiple of" in row.tensor_cores:
            found.setdefault((row.site, row.function, row.module), []).append(row)
    for (site, function, module), rows in found.items():
        share = sum(map(record.share_of_flops, rows))
        if share >= _LEAST:
            row = next((row for row in rows if row.phase == FORWARD), rows[0])
            text, _, change = row.tensor_cores.removeprefix("no: ").partition("; ")
            where = f" in {module!r}" if module else ""
            gain = sum(map(record.share_of_time, rows)) / 2
            yield Advice(gain, site, f"{function}{where} ({share:.0%} of FLOPs): {text}", change)


def _casts_of_weights(record: Rows) -> Iterator[Advice]:
    """Weights that are cast more than once in an iteration."""
    often = [cast for cast in record.casts if cast[1] > 1.5]
    if often:
        name, number, _ = max(often, key=lambda cast: cast[1] * cast[2])
        size = sum(number * bytes_of_one for _, number, bytes_of_one in often) * record.iterations
        found = f"{len(often)} weights are cast more than once an iteration ({name!r} {number:.0f} times)"
        change = 'ampkit.keep_casts(model) around the calls casts them once; "O2" stores them in lower precision'
        yield Advice(_gain_of_casts(record, size / 2), "", found, change)


def _ping_pong(record: Rows) -> Iterator[Advice]:
    """Activations that go to float32 and back around a function."""
    rows: dict[tuple[str, str], list[CallRow]] = {}
    for row in record.calls:
        if row.ping_pong and row.phase != STEP:
            rows.setdefault((row.site, row.function), []).append(row)
    for (site, function), own in sorted(rows.items(), key=lambda item: -sum(row.ping_pong for row in item[1]))[:3]:
        size = sum(row.ping_pong for row in own)
        each = in_bytes(size / record.iterations)
        lower = short(record.lower_precision or torch.bfloat16)
        reason = _forward_reason(record, own)
        change = _instead_of_float32(function, reason)
        if function in _NARROW and record.about.startswith(("O2", "O3", "O5")):
            continue  # it hands on the precision of its input already
        if "row " in reason:
            change = f'policy={{"torch.nn.functional.{function}": "native"}}, if {lower} does for it'
            if function in _NARROW:
                change = 'opt_level="O2" or "O5", where it hands on the precision of its input'
        found = f"activations go {lower} -> float32 -> {lower} around {function} ({each} an iteration): {reason}"
        yield Advice(_gain_of_casts(record, size), site, found, change)


def _float64(record: Rows) -> Iterator[Advice]:
    """Lines that compute in float64."""
    for site, rows in _by_site(row for row in record.calls if row.dtype is torch.float64 and row.phase != STEP):
        share = sum(map(record.share_of_time, rows))
        if share >= _LEAST:
            first = next((row for row in rows if row.phase == FORWARD), rows[0])
            change = "x.float() before it: numpy's arrays are float64, and a tensor in float64 makes float64 of what meets it"
            yield Advice(share, site, f"{first.function} computes in float64 ({share:.0%} of the time)", change)


def _reads(record: Rows) -> Iterator[Advice]:
    """Lines that read many numbers from the device."""
    for site, rows in _by_site(row for row in record.calls if row.function in _READS):
        number = sum(row.calls for row in rows) / record.iterations
        if number > _MANY_READS:
            found = f"{rows[0].function} reads {number:.0f} numbers an iteration, and the script waits for the device each time"
            change = "add them up as tensors, torch.stack(...).sum(), and read one number, every 100 steps"
            yield Advice(sum(map(record.share_of_time, rows)), site, found, change)


def _by_site(rows: Iterable[CallRow]) -> Iterator[tuple[str, list[CallRow]]]:
    found: dict[str, list[CallRow]] = {}
    for row in rows:
        found.setdefault(row.site, []).append(row)
    yield from found.items()


_RULES = (_float32_products, _float64, _reads, _shapes, _casts_of_weights, _ping_pong)


def _gain_of_casts(record: Rows, size: float) -> float:
    """The share of the time that casts of so many bytes take, of all that were written."""
    written, seconds = (sum(getattr(row, name) for row in record.calls) for name in ("bytes_cast", "cast_seconds"))
    return min(1.0, size / max(1, written)) * seconds / max(record.seconds, 1e-9)
