"""Compares what each rank reads of a small RLDS dataset in DROID's schema, through octo's own pipeline, on the CPU.

    DDPSHIM_UPSTREAM=… python -m evidence.rlds_read

reads with one process, and with two ranks in three ways: as octo does, with `.shard` where a migration by hand would
put it, and through `ddpshim.robomimic.droid`. It prints which episodes were read twice, the mixture, and memory.
Needs what tests/rlds.py needs.
"""

from __future__ import annotations

import sys
import tempfile

from tests import rlds


def main() -> None:
    lacking = rlds.missing()
    if lacking is not None:
        sys.exit(f"needs {lacking}: see requirements/rlds.txt")
    with tempfile.TemporaryDirectory() as folder:
        rlds.build(folder, height=64)
        print("| | ranks | episodes of a rank | read by both | frames of droid : lab | asks for statistics | memory |")
        print("|---|---|---|---|---|---|---|")
        for way, num_ranks in (("octo", 1), ("octo", 2), ("octo, then .shard", 2), ("ddpshim", 2)):
            ranks = rlds.readings(way, num_ranks, folder)
            seen = [set(reading.episodes) for reading in ranks]
            both = len(set.intersection(*seen)) if num_ranks > 1 else 0
            shares = []
            for reading in ranks:
                droid = sum(count for (name, _), count in reading.episodes.items() if name == "droid")
                shares.append(f"{droid / sum(reading.episodes.values()):.2f}")
            cells = [
                way,
                str(num_ranks),
                " + ".join(str(len(episodes)) for episodes in seen),
                str(both),
                ", ".join(shares),
                " + ".join(str(reading.num_statistics) for reading in ranks),
                " + ".join(f"{reading.growth_bytes / 1e6:.0f} MB" for reading in ranks),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
