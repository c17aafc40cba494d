"""Writes docs/report.svg, what `python -m ddpshim report A B` finds in two pairs of runs: `python -m docs.site.digits`.

The runs train a tiny policy in plain Python with float32 sums: they end in a second, with the same bits everywhere.
"""

from __future__ import annotations

import random
import tempfile
from array import array
from pathlib import Path

from ddpshim.observe import digits
from docs.site.drawing import BLUE, GREY, ORANGE, box, svg, text

FILE = Path(__file__).parents[1] / "report.svg"
LEFT, BOTTOM, STEP, DIGIT, STEPS = 44, 222, 9.8, 22, 60
RUNS = (("one", 1, 16), ("two", 2, 16), ("by_hand", 2, 32))  # name, ranks, samples in a batch of all ranks


def train(num_ranks: int, batch_size: int) -> str:
    """Return the log of a linear policy as CSV. Each rank adds up its samples, then the ranks' sums are added up."""
    draws, weights, log = random.Random(1), array("f", [0.0] * 4), "step,train/loss\n"
    for step in range(STEPS):
        total = array("f", [0.0] * 5)
        batch = [[draws.uniform(-1, 1) for _ in range(4)] for _ in range(batch_size)]
        for rank in range(num_ranks):
            own = array("f", [0.0] * 5)
            for obs in batch[rank * batch_size // num_ranks : (rank + 1) * batch_size // num_ranks]:
                error = obs[0] * obs[1] - obs[2] + 0.5 * obs[3]
                for weight, value in zip(weights, obs):
                    error -= weight * value
                for i, part in enumerate([*(-error * value for value in obs), error * error]):
                    own[i] += part
            for i, part in enumerate(own):
                total[i] += part
        weights = array("f", [weight - 0.4 * part / batch_size for weight, part in zip(weights, total)])
        log += f"{step},{total[4] / batch_size!r}\n"
    return log


def report() -> str:
    drawn = text(LEFT + 92, 24, "digits of train/loss that agree", GREY) + text(LEFT + 294, BOTTOM + 26, "step", GREY)
    for n in range(0, 9, 2):
        drawn += text(LEFT - 16, BOTTOM - DIGIT * n + 4, str(n), GREY)
        drawn += f'<path d="M{LEFT},{BOTTOM - DIGIT * n} h{STEPS * STEP:g}" stroke="{GREY}" stroke-opacity="0.4"/>\n'
    with tempfile.TemporaryDirectory() as folder:
        for name, num_ranks, batch_size in RUNS:
            Path(folder, f"{name}.csv").write_text(train(num_ranks, batch_size))
        for name, colour, y in (("two", BLUE, 96), ("by_hand", ORANGE, 140)):
            (found,), verdict = digits.compare(Path(folder, "one.csv"), Path(folder, f"{name}.csv"))
            points = (f"{LEFT + STEP * at:g},{BOTTOM - DIGIT * min(n, 8):g}" for at, n in sorted(found.digits.items()))
            drawn += f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="3"/>\n'
            drawn += box(LEFT + 50, y, 490, 28, colour, f"report one.csv {name}.csv: {verdict}")
    return svg(660, 260, "What report A B finds: digits that agree, by step", drawn)


if __name__ == "__main__":
    FILE.write_text(report(), encoding="utf-8")
    print(FILE)
