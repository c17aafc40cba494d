"""Prints the curve of a run of train.py: `python examples/rloo/table.py OUT/distributed_training_results.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    tasks = list(found["curve"][0]["tasks"])
    print(f"| to iteration | success | {' | '.join(tasks)} |")
    print("|---" * (2 + len(tasks)) + "|")
    for point in found["curve"]:
        rates = [point["success_rate"], *(point["tasks"][task] for task in tasks)]
        print(f"| {point['iterations']} | {' | '.join(f'{rate:.0%}' for rate in rates)} |")


if __name__ == "__main__":
    main()
