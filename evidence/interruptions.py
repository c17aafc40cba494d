"""Compares a training that is interrupted repeatedly, on changing numbers of ranks, with an uninterrupted one.

Run it: python -m evidence.interruptions --release 0.3.0 --algo bc --ends 20

The patched trainer, or with --way the unedited one, gets SIGTERM or SIGUSR1 on one rank or all (it saves, and exits
with code 75), or SIGKILL on one (it resumes from its last save), each time after a random number of steps, and is
started again on 1, 2 or 4 ranks. At the end the samples of every step that counts, and the weights, must equal those of
an uninterrupted run on two ranks. Computes in float64, so that two runs differ by rounding only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Optional

import torch

from evidence import equivalence
from evidence.compare import largest_difference
from evidence.equivalence import Run
from examples.recorded_train import record_samples
from tests import observed, trainer
from tests.preloaded import as_torchrun_says, preloaded
from tests.preloaded_commands import patience

STEPS, EPOCHS = 25, 8
START_DEADLINE_S = 120
EVERY_S = 0.3
KINDS = ["SIGKILL to one", "SIGTERM to one", "SIGUSR1 to one", "SIGTERM to all"]


def _write_down_steps(path: Path) -> None:
    """Make this rank append (epoch, step, samples) to a file before it trains on a batch."""
    from ddpshim.checkpoint.resume import Resumable

    steps = Resumable.steps
    file = path.open("a", buffering=1)
    samples: list[int] = []
    record_samples(lambda key, index: samples.append(index))

    def written_down(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        samples.clear()
        for batch in steps(self, *args, **kwargs):
            file.write(json.dumps([self.epoch, self.step, samples]) + "\n")
            samples.clear()
            yield batch

    Resumable.steps = written_down  # type: ignore[method-assign]


def _train(start: int, config: str) -> None:
    """Run as one rank of a start, in the training's folder."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
    os.environ["DDPSHIM_CHECKPOINT_EVERY_S"] = str(EVERY_S)
    _write_down_steps(Path(f"steps_{start}_{os.environ['RANK']}.txt"))  # before the main rank alone writes
    trainer.activate()
    observed._in_float64()
    observed._with_small_unet()
    torch.set_num_threads(1)
    sys.argv = ["train.py", "--config", config]
    trainer.run_trainer()


def _run_once(
    tree: Path, folder: Path, start: int, size: int, random: Random, end: Optional[tuple[str, int]] = None
) -> list[int]:
    """Run one start, and return its ranks' exit codes. `end`: how to interrupt it, and after how many steps."""
    environs = [{**equivalence._environ(tree), **here} for here in as_torchrun_says(size)]
    argv = ["evidence.interruptions", "--rank", str(start), str(folder / "config.json")]
    ranks = preloaded(tree).start([(argv, environ) for environ in environs], folder)
    progress = folder / f"steps_{start}_0.txt"
    deadline = time.monotonic() + patience(START_DEADLINE_S)
    while end is not None and ranks.pids and time.monotonic() < deadline:
        if progress.exists() and len(progress.read_text().splitlines()) > end[1]:
            name, _, whom = end[0].partition(" to ")
            running = sorted(ranks.pids)
            ranks.send(getattr(signal, name), random.sample(running, 1 if whom == "one" else len(running)))
            end = None
        ranks.see(0.01)
    ranks.wait(deadline - time.monotonic())
    return [ranks.codes[rank] for rank in range(size)]


def end_again_and_again(
    tree: Path, folder: Path, ends: int, seed: int, sizes: Sequence[int], kinds: Sequence[str]
) -> list[dict[str, Any]]:
    """Interrupt the training in `folder` `ends` times, then let it finish; return a row for each start."""
    random = Random(seed)
    starts: list[dict[str, Any]] = []
    for start in range(ends + 1):
        size = random.choice(sizes)
        is_last = start == ends
        done = max((epoch * STEPS + step for epoch, step in steps_that_count(folder)), default=0)
        soon = random.randrange(max(1, (STEPS * EPOCHS - done) // (ends + 1 - start)))
        end = None if is_last else (kinds[start % len(kinds)], soon)
        began = time.monotonic()
        codes = _run_once(tree, folder, start, size, random, end)
        steps = len((folder / f"steps_{start}_0.txt").read_text().splitlines())
        starts.append({"ranks": size, "ended by": end, "exit codes": codes, "steps": steps})
        print(f"{time.monotonic() - began:5.1f} s  {starts[-1]}", file=sys.stderr, flush=True)
        if codes == [0] * size:
            break
    return starts


def steps_that_count(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Return, for each (epoch, step), the samples of its last start, sorted, joined from all ranks."""
    by_start: dict[tuple[int, int], dict[int, list[int]]] = {}
    for path in folder.glob("steps_*_*.txt"):
        start = int(path.name.split("_")[1])
        for line in path.read_text().splitlines():
            epoch, step, samples = json.loads(line)
            by_start.setdefault((epoch, step), {}).setdefault(start, []).extend(samples)
    return {key: sorted(starts[max(starts)]) for key, starts in by_start.items()}


def metrics(folder: Path) -> dict[str, dict[str, float]]:
    """Return the metrics printed for each training epoch, without times; for an epoch printed twice, the last."""
    log = (folder / "output.txt").read_text()
    said = dict(zip(re.findall(r"^Train Epoch (\d+)$", log, re.MULTILINE), Run([], folder, log, 0).metrics()))
    return {epoch: {k: v for k, v in log.items() if "Time" not in k} for epoch, log in said.items()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in the last checkpoint that the trainer wrote."""
    held = observed.flat(Run([], folder, "", 0).checkpoint["model"])
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def interrupt(
    release: str,
    variant: str,
    ends: int,
    folder: Path,
    seed: int = 0,
    ranks: Sequence[int] = (1, 2, 4),
    kinds: Sequence[str] = KINDS,
    releases: Optional[Path] = None,
    way: str = "patched",
) -> dict[str, Any]:
    """Return how a training that is interrupted `ends` times differs from an uninterrupted one.

    `releases`: the folder with the copy of the release, if not `folder`.
    """
    tree = equivalence.copy_release(release, releases or folder, way)
    config = equivalence.make_run_config(tree, release, variant, folder, STEPS, EPOCHS)
    runs = {}
    for name, number in (("whole", 0), ("ended", ends)):
        (folder / name).mkdir()
        settings = json.loads(config.read_text())
        settings["train"]["output_dir"] = str(folder / name / "out")
        (folder / name / "config.json").write_text(json.dumps(settings))
        sizes = ranks if number else [2]
        runs[name] = end_again_and_again(tree, folder / name, number, seed, sizes, kinds)
    counted = {name: steps_that_count(folder / name) for name in runs}
    before, after = weights(folder / "whole"), weights(folder / "ended")
    losses, losses_after = metrics(folder / "whole"), metrics(folder / "ended")
    # The last start's folder: a start that was killed before its first save leaves a folder with another time.
    last = max((folder / "ended").glob("out/*/*"), key=lambda path: path.name)
    left = sorted(path.name for path in last.iterdir())
    return {
        "starts": runs["ended"],
        "steps": len(counted["whole"]),
        "same samples in every step": counted["whole"] == counted["ended"],
        "largest difference of a weight": largest_difference(before, after),
        "largest difference of a metric": max(
            abs(value - losses_after[epoch][key]) for epoch, log in losses.items() for key, value in log.items()
        ),
        "left on disk": left,
    }


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        _train(int(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default="0.3.0")
    parser.add_argument("--algo", default="bc")
    parser.add_argument("--ends", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="1,2,4", help="drawn from for each start")
    parser.add_argument("--exact", type=int, help="the option: what is left is to be 0 then")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--way", choices=trainer.WAYS, default="patched", help="how the trainer is run: tests.trainer")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.exact:
        os.environ["DDPSHIM_EXACT"] = str(args.exact)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        ranks, kinds = [int(n) for n in args.ranks.split(",")], args.kinds.split(",")
        given = args.seed, ranks, kinds
        found = interrupt(args.release, args.algo, args.ends, folder.resolve(), *given, way=args.way)
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
