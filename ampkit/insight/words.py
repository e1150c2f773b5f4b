"""Figures in words, as records and comparisons print them."""

from __future__ import annotations


def percent(share: float | None) -> str:
    """``36%``, ``3.6%``, ``0.36%``, ``<0.01%``; nothing for None."""
    if share is None:
        return ""
    if 0 < share < 0.0001:
        return "<0.01%"
    return f"{100 * share:.2g}%" if share < 0.995 else f"{share:.0%}"


def in_bytes(size: float) -> str:
    """``1.2 MB``"""
    power = next((power for power in (0, 1, 2) if abs(size) < 999.5 * 1000**power), 3)
    unit, size = ("B", "kB", "MB", "GB")[power], size / 1000**power
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"


def in_seconds(seconds: float) -> str:
    """``12.3 ms``"""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
