"""Formats numbers for reading: sizes, durations, shares."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Optional

from ddpshim.process import say

_MOST_DEPTH = 5


def span(shares: Collection[float]) -> str:
    low, high = percent(min(shares)), percent(max(shares))
    return high if low == high else f"{low} to {high}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"


def number(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.6g}"


def rate(share: float, interval: Optional[tuple[float, float]]) -> str:
    """Format a success rate: "90% (68% to 99%)"."""
    return f"{100 * share:.0f}%" + (f" ({100 * interval[0]:.0f}% to {100 * interval[1]:.0f}%)" if interval else "")


def between(value: float, interval: Optional[tuple[float, float]]) -> str:
    """Format a mean: "1.5 (1.2 to 1.8)"."""
    return f"{value:.4g}" + (f" ({interval[0]:.4g} to {interval[1]:.4g})" if interval else "")


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def size(value: Optional[float]) -> str:
    return "" if value is None else say.size(value)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))


def first_line(text: Any) -> str:
    lines = str(text or "").splitlines() or [""]
    return lines[0] if len(lines[0]) <= 300 else lines[0][:299] + "…"


def shown(value: Any, depth: int = 0) -> str:
    if depth > _MOST_DEPTH:
        return "…"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {shown(item, depth + 1)}" for name, item in value.items())
    if isinstance(value, list):  # str() of a deep one would exceed Python's recursion limit
        return f"[{', '.join(shown(item, depth + 1) for item in value)}]"
    return "none" if value is None else str(value)
