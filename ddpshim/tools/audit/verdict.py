"""Defines a finding of an audit, and how messages name ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ddpshim.tools.doctor.findings import CODES


@dataclass(frozen=True)
class Incident:
    """A hazard that occurred in the run; `code` is the doctor's code for it, or None if it has none."""

    code: Optional[str]
    name: str
    severity: str
    message: str
    fix: str

    def as_text(self) -> str:
        title = f"{self.code} {self.name}" if self.code else self.name
        page = f" (python -m ddpshim doctor --explain {self.code})" if self.code else ""
        return f"{self.severity} {title}: {self.message}\n    fix: {self.fix}{page}"


def found(code: str, message: str) -> Incident:
    known = CODES[code]
    severity = "warning" if known.severity == "note" else known.severity  # it did happen, so it is at least a warning
    return Incident(code, known.name, severity, message, known.fix)


def error(name: str, message: str, fix: str) -> Incident:
    return Incident(None, name, "error", message, fix)


def of_ranks(values: Mapping[int, Any]) -> str:
    """Return text such as "12 on rank 0, 13 on ranks 1 and 2"."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on {named(ranks)}" for value, ranks in by_value.items())


def named(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
