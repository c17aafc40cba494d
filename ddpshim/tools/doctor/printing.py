"""Prints a report as text for people, or as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ddpshim.tools.doctor.checking import Report
from ddpshim.tools.doctor.findings import SEVERITIES

_SCHEMA = 1


def as_json(report: Report) -> dict[str, Any]:
    """What `--json` prints; `schema` changes with every change that a reader could notice."""
    return {
        "schema": _SCHEMA,
        "files": report.num_files,
        "lines": report.num_lines,
        "programs": report.num_programs,
        "distributed_programs": report.num_distributed,
        "ignored": report.num_ignored,
        "findings": [asdict(finding) for finding in report.findings],
    }


def as_text(report: Report) -> str:
    """Each finding with its fix, then a summary of one line."""
    lines = [finding.as_text() for finding in report.findings]
    counts = [(severity, sum(f.severity == severity for f in report.findings)) for severity in SEVERITIES]
    found = ", ".join(f"{count} {severity}" for severity, count in counts if count) or "nothing found"
    ignored = f", {report.num_ignored} ignored" if report.num_ignored else ""
    programs = f"{report.num_programs} trainer{'s' * (report.num_programs != 1)} ({report.num_distributed} distributed)"
    lines.append(f"{found}{ignored}; {programs} in {report.num_files} files, {report.num_lines} lines")
    return "\n".join(lines)
