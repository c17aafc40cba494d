"""Mistakes planted in five trainers, and where `python -m ddpshim prove` finds them.

Run it: python -m tests.proofs [--only by_hand,coupled]

Each trainer is proved as it is, and with each of its mistakes. A mistake is found at the right place where the verdict
names the line that has its name in a comment, or the network that is trained wrongly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

FOLDER = Path(__file__).parent / "proved"


class Planted(NamedTuple):
    """A mistake: what of the step is to part first, and of which tensors."""

    trainer: str
    mistake: str
    what: str
    where: str = ""


CLEAN = ("by_hand", "actor_critic", "coupled", "sampled", "parallel")
PLANTED = [
    Planted("by_hand", "past the wrapper", "gradients", "body.0"),
    Planted("by_hand", "own weights", "weights at the start", "head.bias"),
    Planted("by_hand", "scaled loss", "loss"),
    Planted("by_hand", "summed", "gradients"),
    Planted("by_hand", "clipped before", "gradients"),
    Planted("by_hand", "own rate", "learning rate"),
    Planted("by_hand", "schedule of each", "learning rate"),
    Planted("by_hand", "frozen average", "networks", "Policy.body.0.weight"),
    Planted("by_hand", "unfrozen later", "gradients", "head.weight"),
    Planted("by_hand", "stale buffer", "networks", "seen"),
    Planted("by_hand", "equal noise", "noise"),
    Planted("by_hand", "whole batches", "samples"),
    Planted("by_hand", "off by one", "samples"),
    Planted("actor_critic", "critic alone", "gradients"),
    Planted("actor_critic", "actor alone", "gradients"),
    Planted("actor_critic", "gradients summed", "gradients"),
    Planted("actor_critic", "target alone", "networks", "Sequential"),
    Planted("actor_critic", "another seed", "weights at the start", "0.weight"),
    Planted("actor_critic", "own scale", "gradients"),
    Planted("actor_critic", "momentum lost", "weights"),
    Planted("coupled", "own count", "loss"),
    Planted("coupled", "own pairs", "loss"),
    Planted("coupled", "own batchnorm", "loss"),
    Planted("coupled", "cut gather", "gradients"),
    Planted("sampled", "weights lost", "samples"),
    Planted("sampled", "not divided", "samples"),
    Planted("sampled", "own seed", "samples"),
    Planted("parallel", "largest", "loss"),
]


def prove(
    trainer: str, mistake: Optional[str], folder: Path, environ: Optional[Mapping[str, str]] = None
) -> tuple[int, dict[str, Any]]:
    """The exit code of a proof, and what it says."""
    options = ["--convert", "dataparallel"] if trainer == "parallel" else []
    argv = [
        "-m",
        "ddpshim",
        "prove",
        "--json",
        *options,
        str(FOLDER / f"{trainer}.py"),
        *([mistake] if mistake else []),
    ]
    done = subprocess.run(
        ["python" if environ else sys.executable, *argv],
        cwd=folder,
        env=None if environ is None else dict(environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode > 1:
        raise RuntimeError(f"{trainer} {mistake}: {done.stderr[-3000:]}")
    return done.returncode, json.loads(done.stdout)


def is_placed(planted: Planted, proof: Mapping[str, Any]) -> bool:
    """Whether the mistake is found where it was planted."""
    parting = proof["parting"]
    if parting is None or parting["what"] != planted.what:
        return False
    if planted.where:
        return planted.where in parting["where"]
    line = int(parting["place"].rpartition(":")[2] or 0)
    text = (FOLDER / f"{planted.trainer}.py").read_text().splitlines()[line - 1]
    return planted.mistake in text.partition("#")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CLEAN))
    chosen = parser.parse_args().only.split(",")
    num_placed, num_wrong = 0, 0
    print("| trainer | mistake | parts at | found |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for trainer in chosen:
            code, proof = prove(trainer, None, Path(name))
            num_wrong += code
            size = f" ({proof['largest_difference']:.0e}; rounding alone {proof['of_rounding']:.0e})"
            says = "the same experiment" + size if proof["is_same"] else f"**{proof['parting']}**"
            print(f"| {trainer} | none | | {says} |", flush=True)
        planted = [each for each in PLANTED if each.trainer in chosen]
        for each in planted:
            _, proof = prove(each.trainer, each.mistake, Path(name))
            placed = is_placed(each, proof)
            num_placed += placed
            parting = proof["parting"] or dict.fromkeys(("what", "where", "place", "step"), "")
            where = f"step {parting['step']}, {parting['what']} {parting['where']}, {Path(parting['place']).name}"
            print(f"| {each.trainer} | {each.mistake} | {where} | {'yes' if placed else '**no**'} |", flush=True)
    print(f"\n{num_placed} of {len(planted)} placed; {num_wrong} alarms on {len(chosen)} clean trainers")
    sys.exit(num_wrong > 0 or num_placed < len(planted))


if __name__ == "__main__":
    main()
