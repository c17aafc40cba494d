"""Measures the minutes to a policy that lifts the cube: robomimic as released, and by ddpshim on one and two ranks.

    DDPSHIM_UPSTREAM=... python -m evidence.to_success [--quick]

The time includes everything: the command starts, imports, loads 200 demonstrations of robosuite's Lift, trains, and
plays episodes at fixed intervals, until it writes a checkpoint that has succeeded in 90% of them. Then the published
release plays that checkpoint again, in other episodes. 20 minutes on two quiet cores; `--quick`: one seed.

Needs the packages in requirements/simulator.txt, and robomimic 0.4.0 under DDPSHIM_UPSTREAM.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from ddpshim.evaluation.evaluating import exact_interval
from evidence import pages
from evidence.equivalence import DATA, copy_release, make_config
from tests.preloaded import environment, kill_all_in

RELEASE, WANTED = "0.4.0", 0.9
STEPS_AN_EPOCH, MOST_EPOCHS = 300, 20
HORIZON = 80  # demonstrations are 42 steps long
_LOOK_EVERY_S = 0.1
_TRAINER = ["-m", "robomimic.scripts.train"]
ARMS = {
    "robomimic as released": _TRAINER,
    "ddpshim, 1 rank": ["-m", "ddpshim", "run", "--nproc", "1", *_TRAINER],
    "ddpshim, 2 ranks": ["-m", "ddpshim", "run", "--nproc", "2", *_TRAINER],
}


@dataclass(frozen=True)
class Plan:
    """The amount of training and playing."""

    seeds: tuple[int, ...] = (1, 2, 3)
    num_episodes: int = 20  # of each evaluation
    num_again: int = 50  # of the checkpoint, afterwards
    deadline_s: float = 240.0  # of one training


QUICK = Plan(seeds=(1,), num_episodes=10, num_again=10, deadline_s=600.0)


@dataclass(frozen=True)
class Found:
    """The result of a training, successful or not."""

    arm: str
    seed: int
    seconds: float  # from the command to the checkpoint; infinite without one
    epoch: int = 0  # the checkpoint's
    rate: float = math.nan  # of success, in the trainer's own rollouts
    path: str = ""
    again: int = 0  # successes in the episodes that were played afterwards


def first_success(models: Sequence[Path]) -> Optional[tuple[Path, int, float]]:
    """Return the first checkpoint that succeeded in enough episodes, its epoch and its rate; None if none did."""
    named = [(re.fullmatch(r"model_epoch_(\d+)_Lift_success_([\d.]+)\.pth", path.name), path) for path in models]
    good = [(int(name[1]), float(name[2]), path) for name, path in named if name and float(name[2]) >= WANTED]
    if not good:
        return None
    epoch, rate, path = min(good)
    return path, epoch, rate


def train(arm: str, tree: Path, folder: Path, seed: int, plan: Plan) -> Found:
    """Train until the first success, or the deadline."""
    folder.mkdir(parents=True)
    settings = {
        "algo__actor_layer_dims": [256, 256],
        "algo__optim_params__policy__learning_rate__initial": 1e-3,
        "experiment__rollout__enabled": True,
        "experiment__rollout__n": plan.num_episodes,
        "experiment__rollout__horizon": HORIZON,
        "experiment__rollout__rate": 1,
        "experiment__save__on_best_rollout_success_rate": True,
        "experiment__render_video": False,
        "train__seed": seed,
    }
    config = make_config(tree, "bc", DATA, folder, STEPS_AN_EPOCH, MOST_EPOCHS, **settings)
    begin = time.time()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *ARMS[arm], "--config", str(config)],
            cwd=folder,
            env=environment(tree),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    found = None
    try:
        while found is None and process.poll() is None and time.time() - begin < plan.deadline_s:
            time.sleep(_LOOK_EVERY_S)
            found = first_success(list(folder.glob("out/*/*/models/*.pth")))
        time.sleep(1.0 if found else 0.0)  # the release writes the file in place, so it may be incomplete
    finally:
        kill_all_in(folder)
        process.wait()
    if found is None:
        tail = (folder / "output.txt").read_text()[-1500:]
        print(f"{arm}, seed {seed}: no success in {time.time() - begin:.0f} s\n{tail}", file=sys.stderr, flush=True)
        return Found(arm, seed, math.inf)
    path, epoch, rate = found
    return Found(arm, seed, path.stat().st_mtime - begin, epoch, rate, str(path))


def play_again(trained: Sequence[Found], plain: Path, folder: Path, plan: Plan) -> list[Found]:
    """Let the release play each checkpoint in other episodes, the same for all; return `trained` with the successes."""
    task = folder / "episodes.json"
    episodes = {"num_episodes": plan.num_again, "horizon": HORIZON, "seed": 4321}
    task.write_text(json.dumps({"checkpoints": [f.path for f in trained if f.path], "episodes": episodes}))
    with task.with_suffix(".txt").open("w") as output:
        command = [sys.executable, "-m", "evidence.episodes", str(task)]
        subprocess.run(command, env=environment(plain), stdout=output, stderr=subprocess.STDOUT, check=True)
    played = json.loads(task.with_suffix(".found.json").read_text())
    return [replace(f, again=played[f.path]["successes"]) if f.path else f for f in trained]


def measure(folder: Path, plan: Plan) -> list[Found]:
    """Train all arms one after the other, in a different order for each seed, and play the checkpoints again."""
    plain = copy_release(RELEASE, folder, "plain")
    trained: list[Found] = []
    for turn, seed in enumerate(plan.seeds):
        names = list(ARMS)[turn % len(ARMS) :] + list(ARMS)[: turn % len(ARMS)]
        for arm in names:
            trained.append(train(arm, plain, folder / f"{list(ARMS).index(arm)}-{seed}", seed, plan))
            one = trained[-1]
            text = f"{one.seconds:6.1f} s, {one.epoch * STEPS_AN_EPOCH} steps, {one.rate:.0%}"
            print(f"seed {seed}, {arm}: {text}", file=sys.stderr, flush=True)
    return play_again(trained, plain, folder, plan)


def table(found: Sequence[Found], plan: Plan) -> list[str]:
    """Return the lines of README's table."""
    rows = []
    for arm in ARMS:
        runs = sorted((f for f in found if f.arm == arm), key=lambda f: f.seed)
        done = [f for f in runs if f.path]
        total, played = sum(f.again for f in done), plan.num_again * len(done)
        low, high = exact_interval(total, played) if played else (0.0, 1.0)
        seconds = ", ".join(f"{f.seconds:.0f}" for f in runs)
        steps = ", ".join(str(f.epoch * STEPS_AN_EPOCH) if f.path else "-" for f in runs)
        median = f"{statistics.median(f.seconds for f in runs):.0f}"
        rows.append((arm, median, seconds, steps, f"{total}/{played}", f"{100 * low:.0f} to {100 * high:.0f}%"))
    return pages.table(("", "s", "each seed, s", "steps", "played again", "95%"), rows, prints=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer episodes: does it run")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(Path(temporary).resolve(), plan)
    print("\n".join(table(found, plan)))


if __name__ == "__main__":
    main()
