"""Compares what two runs of the same programs logged and trained (see runner.py).

`python -m tests.one_process.compare OUT OTHER [NUDGED]` prints the programs that differ, and exits with 1 if any does.
NUDGED is OUT's run with `--nudge`: ten times what that changes is no difference.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, Optional

TOLERANCE = 1e-6


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two results, relative to numbers above 1; infinite where kinds differ."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max(map(difference, one, other), default=0.0)
    if isinstance(one, dict) and isinstance(other, dict):
        return difference(list(one.items()), list(other.items()))
    if isinstance(one, float) and isinstance(other, float) and math.isfinite(one - other):
        return abs(one - other) / max(1.0, abs(one))
    return 0.0 if repr(one) == repr(other) else math.inf


def compare(one: dict[str, Any], other: dict[str, Any], nudged: Optional[dict[str, Any]] = None) -> dict[str, str]:
    """Return "equal", the largest differences, or the error of each program of two results, `one` and `other`."""
    verdicts = {}
    for name, expected in one.items():
        found = other.get(name, {"error": "did not run"})
        if expected["error"] or found["error"]:
            same = expected["error"] == found["error"]
            verdicts[name] = f"{'both: ' if same else ''}{found['error'] or 'no error, but: ' + expected['error']}"
            continue
        parts = {part: difference(expected[part], found[part]) for part in ("log", "weights")}
        nudge = (nudged or {}).get(name) or expected
        noise = {part: difference(expected[part], nudge[part]) for part in parts}
        # A nudge that changes a count, or whether a step is done, is no measure of rounding.
        limits = {part: max(TOLERANCE, 10 * noise[part] if math.isfinite(noise[part]) else 0) for part in parts}
        if all(parts[part] <= limits[part] for part in parts):
            verdicts[name] = "equal"
        else:
            verdicts[name] = ", ".join(f"{part} {parts[part]:.1e} (nudged {noise[part]:.1e})" for part in parts)
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="folders that hold results.json: OUT OTHER [NUDGED]")
    read = [json.loads((folder / "results.json").read_text()) for folder in parser.parse_args().results]
    verdicts = compare(*read)
    for name, verdict in verdicts.items():
        if verdict != "equal":
            print(f"{name:40} {verdict}")
    equal = list(verdicts.values()).count("equal")
    print(f"{equal} of {len(verdicts)} equal")
    raise SystemExit(equal < len(verdicts))


if __name__ == "__main__":
    main()
