"""Lines a second the doctor reads: `python -m benchmarks.doctor_speed [PATH]`, by default of the installed torch."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

from ddpshim.doctor.checking import check


def main() -> None:
    found = importlib.util.find_spec("torch")
    path = Path(sys.argv[1] if len(sys.argv) > 1 else (found.origin if found and found.origin else "."))
    path = path.parent if path.name == "__init__.py" else path
    wall, cpu = time.perf_counter(), time.process_time()
    report = check(path)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{report.num_lines} lines of {report.num_files} files in {path}: {wall:.1f} s, {cpu:.1f} s of CPU")
    print(
        f"{report.num_lines / cpu:.0f} lines per second of CPU; 50000 lines take {50000 * cpu / report.num_lines:.1f} s"
    )


if __name__ == "__main__":
    main()
