"""Checks that robomimic with the option `exact` ends with one hash on all numbers of ranks that divide it.

Run it: python -m evidence.exact --release 0.5.0 --algo all --exact 4 --ranks 1,2,4

Noise, dropout, BatchNorm and validation are on. The hash covers all bits of weights, targets, EMA and optimizer
moments, the numbers that the trainer logged, and the final states of all generators, on each rank.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence import equivalence, pages
from evidence.equivalence import Run
from evidence.variants import VARIANTS, is_shipped


def hash_of(run: Run) -> str:
    """Return a hash of all bits at the end of a run, or a text if the ranks' hashes differ."""
    of_ranks = {_hash(observed, run) for observed in run.observed}
    return of_ranks.pop() if len(of_ranks) == 1 else f"{len(of_ranks)} on {len(run.observed)} ranks"


def _hash(observed: dict[str, Any], run: Run) -> str:
    made = hashlib.sha256()
    for name in ("networks", "moments"):
        for key in sorted(observed[name]):
            made.update(f"{name}/{key}".encode() + observed[name][key].contiguous().numpy().tobytes())
    states = observed["states"]
    made.update(states["torch"].numpy().tobytes() + states["numpy"][1].tobytes() + repr(states["numpy"][2:]).encode())
    for phase in ("Train", "Validation"):
        for epoch in run.metrics(phase):
            made.update(repr([(key, epoch[key]) for key in sorted(epoch) if not key.startswith("Time_")]).encode())
    return made.hexdigest()[:12]


def train(
    release: str,
    variant: str,
    exact: int,
    ranks: Sequence[int],
    folder: Path,
    steps: int,
    epochs: int,
    **settings: Any,
) -> list[str]:
    """Train on each number of ranks; return the hash of each run, or how it failed."""
    tree = equivalence.copy_release(release, folder)
    batch = 24 if VARIANTS[variant][1].get("train.batch_size") else 96
    settings = {**equivalence.VALIDATION, "train__batch_size": batch, **settings}
    config = equivalence.make_run_config(tree, release, variant, folder, steps, epochs, **settings)
    found = []
    for size in ranks:
        run = equivalence.train(
            tree,
            config,
            folder / f"{variant}-{exact}-{size}",
            size,
            environ={"DDPSHIM_EXACT": str(exact), "OMP_NUM_THREADS": "1"},
            check=False,
            forked=True,
            deadline_s=equivalence.RUN_DEADLINE_S + steps * epochs,
        )
        found.append(hash_of(run) if not run.exit_code else f"failed: {equivalence._last_line(run)}")
        print(f"{variant}, exact={exact}, {size} ranks: {found[-1]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default="0.5.0")
    parser.add_argument("--algo", default="all", help="names from evidence/variants.py, or all")
    parser.add_argument("--exact", type=int, default=4)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--steps", type=int, default=25, help="gradient steps an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    ranks = [int(n) for n in args.ranks.split(",")]
    variants = [name for name in VARIANTS if is_shipped(name, args.release)]
    variants = variants if args.algo == "all" else args.algo.split(",")
    same, others = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        for variant in variants:
            found = train(args.release, variant, args.exact, ranks, folder, args.steps, args.epochs)
            is_same = len(set(found)) == 1 and not found[0].startswith("failed")
            (same if is_same else others).append(variant)
    lines = [f"One hash ({len(same)} of {len(variants)}): {', '.join(same)}."]
    pages.finish([*lines, *(f"- **{variant}: not one hash**" for variant in others)], None, "")


if __name__ == "__main__":
    main()
