"""The results of `tune`: a `Row` for each way of training, and a `Tuning` that recommends a way, prints, and writes files."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..words import columns, percent
from .ways import AUTOCAST, FLOAT32, Way

WIDTH = 100
#: The rule. Losses may be this many times as far from float32's as torch.autocast's, this far if that failed, and this far always;
TIMES_AUTOCAST, WITHOUT_AUTOCAST, NO_DISTANCE = 1.5, 0.01, 1e-4
#: this share of updates may be lost in addition to those that float32 loses; times and memory within this factor count as equal.
MORE_LOST, ALIKE = 0.05, 1.03
RULE = (
    f"The rule: the fastest way whose losses are, step by step, at most {TIMES_AUTOCAST} times as far from float32's as "
    f"torch.autocast's, and which loses at most {MORE_LOST:.0%} more updates than float32. Ways within {ALIKE - 1:.0%} of it, "
    f"turn by turn, are as fast: of these the one with the least memory, or the first within {ALIKE - 1:.0%} of that."
)


@dataclass
class Row:
    """The measurements of a way; if it failed ``error`` says why, and figures are missing.

    ``seconds`` has the time of a step, turn by turn; ``peak_bytes`` is the peak memory of tensors. ``losses`` has those of the
    first steps, of which ``skipped`` had an overflow. ``lost_updates`` is the share that rounding lost in the last five of them.
    """

    way: Way
    error: str | None = None
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    lost_updates: float = math.nan

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The quartiles of ``seconds``; NaN if there are none."""
        values = self.seconds if len(self.seconds) > 1 else (self.seconds or [math.nan]) * 2
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return low, median, high

    @property
    def loss(self) -> float:
        """The mean of the last five losses; NaN if there are none."""
        return statistics.fmean(self.losses[-5:] or [math.nan])

    def ratio(self, other: Row) -> float:
        """Return the median ratio of ``seconds`` to those of another row in the same round."""
        return statistics.median(x / y for x, y in zip(self.seconds, other.seconds))

    def distance(self, reference: Row) -> float:
        """Return the mean distance of ``losses`` from those of ``reference``, relative to the mean of these; inf for a NaN."""
        off = statistics.fmean(abs(x - y) for x, y in zip(self.losses, reference.losses, strict=True))
        size = statistics.fmean(map(abs, reference.losses))
        return off / size if size and math.isfinite(off) else math.inf


@dataclass
class Tuning:
    """The result of `tune`: ``print`` it. ``rows`` has all figures, by the name of a way, and ``recommended`` is one of them.

    ``about`` has the model, the device, the number of steps, and the ways that were left out, with reasons.
    """

    about: dict[str, Any]
    rows: dict[str, Row]

    def of_autocast(self, way: Way) -> float | None:
        """Return the distance of torch.autocast's losses from float32's, in this precision if measured; None if it failed."""
        yardsticks = [row for row in self.rows.values() if row.way.level == AUTOCAST and row.error is None]
        rows = [row for row in yardsticks if row.way.dtype == way.dtype] or yardsticks
        distances = [row.distance(self.rows[FLOAT32]) for row in rows]
        return max(filter(math.isfinite, distances), default=None)

    def _distances(self, row: Row) -> str:
        of_autocast = self.of_autocast(row.way)
        beside = "torch.autocast failed" if of_autocast is None else f"torch.autocast's {percent(of_autocast)}"
        return f"its losses are {percent(row.distance(self.rows[FLOAT32]))} from float32's, {beside}"

    def why_not(self, row: Row) -> str | None:
        """Return the reason why a way is not recommended, however fast; None if it follows the rule, as float32 does."""
        if row.error is not None:
            return "failed"
        of_autocast = self.of_autocast(row.way)
        allowed = WITHOUT_AUTOCAST if of_autocast is None else max(NO_DISTANCE, TIMES_AUTOCAST * of_autocast)
        if row.distance(self.rows[FLOAT32]) > allowed:
            return self._distances(row)
        if row.lost_updates > self.rows[FLOAT32].lost_updates + MORE_LOST:
            return f"it loses {percent(row.lost_updates)} of the updates"
        return None

    @property
    def recommended(self) -> Row:
        fit = [row for row in self.rows.values() if self.why_not(row) is None]
        fastest = min(fit, key=lambda row: row.ratio(self.rows[FLOAT32]))
        alike = [row for row in fit if row.ratio(fastest) <= ALIKE]
        least = min(row.peak_bytes or 0 for row in alike)
        return next(row for row in alike if (row.peak_bytes or 0) <= ALIKE * least)

    @property
    def reason(self) -> str:
        row, plain = self.recommended, self.rows[FLOAT32]
        reason = f"{row.way}: stay with it, {_mib(row)} MiB."
        if row is not plain:
            reason = f"{row.way}: {1 / row.ratio(plain):.2f} times as fast as float32, {_mib(row)} MiB (float32 {_mib(plain)})."
            reason += f" I{self._distances(row)[1:]}."
        out = [(other, self.why_not(other)) for other in self.rows.values() if other.error is None]
        faster = [f"{other.way}, {why}" for other, why in out if why and other.ratio(plain) < row.ratio(plain)]
        return reason + f" Faster, and out: {'; '.join(faster)}." * bool(faster)

    @property
    def lines(self) -> list[str]:
        """The lines to write into the script for the recommended way; none for float32."""
        return self.recommended.way.lines(self.about["device"], self.about["fused"])

    def __str__(self) -> str:
        about = self.about
        title = (
            f"{about['model']} on {about['device']}, {about['threads']} threads: {about['parameters']:,} parameters, "
            f"{about['optimizer']}, {about['samples']} samples a step, losses of {about['steps']} steps"
        )
        table = [("way", "ms", "quartiles", "samples/s", "MiB", "loss", "off", "skips", "lost")]
        table += [self._cells(row) for row in self.rows.values() if row.error is None]
        told = [f"failed: {row.way}: {row.error}" for row in self.rows.values() if row.error is not None]
        told += [f"left out: {words}" for words in about["left_out"]]
        told += [f"recommended: {self.reason} {RULE}"]
        wrapped = [line for words in told for line in textwrap.wrap(words, WIDTH, subsequent_indent="  ")]
        lines = [*textwrap.wrap(title, WIDTH), "", *columns(table, right=range(1, len(table[0]))), "", *wrapped]
        return "\n".join(lines + [""] * bool(self.lines) + [f"    {line}" for line in self.lines])

    def _cells(self, row: Row) -> tuple[str, ...]:
        low, median, high = (_number(1e3 * seconds) for seconds in row.quartiles)
        plain, rate = self.rows[FLOAT32], _number(self.about["samples"] / row.quartiles[1])
        off = "-" if row is plain else percent(row.distance(plain))
        figures = (median, f"{low}-{high}", rate, _mib(row), f"{row.loss:.4g}", off)
        return (str(row.way), *figures, str(row.skipped), percent(row.lost_updates))

    def to_json(self, path: str | Path) -> None:
        """Write all figures, the recommendation, and its reason as JSON."""
        rows = {name: {**asdict(row), "why_not": self.why_not(row)} for name, row in self.rows.items()}
        told = {"recommended": str(self.recommended.way), "reason": self.reason, "rule": RULE, "lines": self.lines}
        Path(path).write_text(json.dumps({"about": self.about, "rows": rows, **told}, indent=1) + "\n")


def _mib(row: Row) -> str:
    return "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}"


def _number(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
