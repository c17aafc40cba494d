"""Measures how fast `check --read` is: `python -m benchmarks.reading_speed [PATH]` (default: torch)."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

from benchmarks.results import Result
from ddpshim.tools.check.reading.command import read


def run(quick: bool) -> list[Result]:
    """Measure on the installed torch; `quick`: on its folder `distributed` only."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    return measure(root / "distributed" if quick else root)


def measure(path: Path) -> list[Result]:
    """Return the CPU time of reading the files in `path`."""
    cpu = time.process_time()
    report = read(path)
    cpu = time.process_time() - cpu
    note = f"{report.lines} lines of {report.files} files in {cpu:.1f} s of CPU"
    return [Result("reading_speed", "50,000 lines", 50000 * cpu / report.lines, "s of CPU", at_most=5.0, note=note)]


def main() -> None:
    for result in measure(Path(sys.argv[1])) if len(sys.argv) > 1 else run(quick=False):
        print(f"{result.what}: {result.value:.2f} {result.unit} ({result.note})")


if __name__ == "__main__":
    main()
