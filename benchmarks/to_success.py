"""Measures the minutes to a policy that lifts the cube: robomimic as released, and by ddpshim on one and two ranks.

    DDPSHIM_UPSTREAM=... python -m benchmarks.to_success [--quick] [--write FILE]

The time includes everything: the command starts, imports, loads 200 demonstrations of robosuite's Lift, trains, and
plays episodes at fixed intervals, until it writes a checkpoint that has succeeded in 90% of them. Then the published
release plays that checkpoint again, in other episodes. At most 20 minutes on two quiet cores; `--quick`: one seed.

Needs the packages in requirements/simulator.txt, psutil, and robomimic 0.4.0 under DDPSHIM_UPSTREAM.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddpshim.evaluation.intervals import exact
from ddpshim.process.machine import num_cores
from evidence.equivalence import DATA, copy_release, make_config
from evidence.simulator import ALGORITHMS, RELEASE
from tests.preloaded import environment

WANTED = 0.9
STEPS_AN_EPOCH, MOST_EPOCHS = 300, 20
_BUDGET_S = 1050.0  # for all trainings; the rest of 20 minutes is for playing again
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
    """The result of a training, successful or not.

    Attributes:
        seconds: from the command to the checkpoint; infinite without one.
        cpu_s: CPU seconds of all its processes up to the checkpoint.
        epoch: the checkpoint's epoch.
        rate: the success rate in the trainer's own rollouts.
        again: the number of successes in the episodes that were played afterwards.
    """

    arm: str
    seed: int
    seconds: float
    cpu_s: float
    epoch: int = 0
    rate: float = math.nan
    path: str = ""
    again: int = 0


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
    import psutil

    folder.mkdir(parents=True)
    settings = {
        **ALGORITHMS["bc"],
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
    root, cpu_s, found = psutil.Process(process.pid), 0.0, None
    try:
        while found is None and process.poll() is None and time.time() - begin < plan.deadline_s:
            time.sleep(_LOOK_EVERY_S)
            cpu_s = max(cpu_s, sum(_cpu_seconds(root)))
            found = first_success(list(folder.glob("out/*/*/models/*.pth")))
        time.sleep(1.0 if found else 0.0)  # the release writes the file in place, so it may be incomplete
    finally:
        for one in (*_descendants(root), process):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                one.send_signal(signal.SIGKILL)
        process.wait()
    if found is None:
        tail = (folder / "output.txt").read_text()[-1500:]
        print(f"{arm}, seed {seed}: no success in {time.time() - begin:.0f} s\n{tail}", file=sys.stderr, flush=True)
        return Found(arm, seed, math.inf, cpu_s)
    path, epoch, rate = found
    return Found(arm, seed, path.stat().st_mtime - begin, cpu_s, epoch, rate, str(path))


def _descendants(root: Any) -> list[Any]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return [*root.children(recursive=True)]
    return []


def _cpu_seconds(root: Any) -> Iterator[float]:
    """Yield the CPU seconds of each running process, including its children that have ended."""
    import psutil

    for process in (root, *_descendants(root)):
        with contextlib.suppress(psutil.Error):
            yield sum(process.cpu_times()[:4])


def play_again(trained: Sequence[Found], plain: Path, folder: Path, plan: Plan) -> list[Found]:
    """Let the release play each checkpoint in other episodes, the same for all; return `trained` with the successes."""
    episodes = {"num_episodes": plan.num_again, "horizon": HORIZON, "seed": 4321}
    num_jobs = max(1, min(2, num_cores()))

    def share(number: int) -> dict[str, Any]:
        file = folder / f"again_{number}.json"
        mine = [found.path for found in trained if found.path][number::num_jobs]
        file.write_text(json.dumps({"checkpoints": mine, "episodes": episodes}))
        with file.with_suffix(".txt").open("w") as output:
            command = [sys.executable, "-m", "tests.episodes", str(file)]
            subprocess.run(command, env=environment(plain), stdout=output, stderr=subprocess.STDOUT, check=True)
        return json.loads(file.with_suffix(".found.json").read_text())  # type: ignore[no-any-return]

    with ThreadPoolExecutor(num_jobs) as pool:
        played = {path: of for part in pool.map(share, range(num_jobs)) for path, of in part.items()}
    return [Found(**{**vars(f), "again": played[f.path]["successes"]}) if f.path else f for f in trained]


def measure(folder: Path, plan: Plan) -> list[Found]:
    """Train all arms one after the other, in a different order for each seed, and play the checkpoints again."""
    plain = copy_release(RELEASE, folder, "plain")
    trained: list[Found] = []
    begin = time.monotonic()
    for turn, seed in enumerate(plan.seeds):
        if turn and (time.monotonic() - begin) * (turn + 1) > _BUDGET_S * turn:
            print(f"no time for seeds {plan.seeds[turn:]}", file=sys.stderr, flush=True)
            break
        names = list(ARMS)[turn % len(ARMS) :] + list(ARMS)[: turn % len(ARMS)]
        for arm in names:
            trained.append(train(arm, plain, folder / f"{list(ARMS).index(arm)}-{seed}", seed, plan))
            one = trained[-1]
            text = f"{one.seconds:6.1f} s, CPU {one.cpu_s:6.1f} s, {one.epoch * STEPS_AN_EPOCH} steps, {one.rate:.0%}"
            print(f"seed {seed}, {arm}: {text}", file=sys.stderr, flush=True)
    return play_again(trained, plain, folder, plan)


def page(found: Sequence[Found], plan: Plan, command: str, versions: str) -> str:
    """Return the table as Markdown, with what was measured and how."""
    lines = ["| | minutes | each seed, s | CPU, s | steps | played again | 95% |", "|---|---:|---|---:|---|---|---|"]
    of_arm = {arm: sorted((f for f in found if f.arm == arm), key=lambda f: f.seed) for arm in ARMS}
    base = _median(of_arm["robomimic as released"])
    ratios = []
    for arm, runs in of_arm.items():
        done = [f for f in runs if f.path]
        total, played = sum(f.again for f in done), plan.num_again * len(done)
        low, high = exact(total, played) if played else (0.0, 1.0)
        row = [
            arm,
            f"{_median(runs) / 60:.2f}",
            ", ".join(f"{f.seconds:.0f}" for f in runs),
            f"{statistics.median(f.cpu_s for f in runs):.0f}",
            ", ".join(str(f.epoch * STEPS_AN_EPOCH) if f.path else "-" for f in runs),
            f"{total}/{played}",
            f"{100 * low:.0f} to {100 * high:.0f}%",
        ]
        lines.append(f"| {' | '.join(row)} |")
        ratios.append(f"{arm}: {_median(runs) / base:.2f}")
    table, good = "\n".join(lines), round(WANTED * plan.num_episodes)
    low, high = (f"{100 * end:.0f}" for end in exact(good, plan.num_episodes))
    return f"""# Minutes to a policy

Generated by `{command}`
after `requirements/simulator.txt` was installed: {versions}.

This page measures the time until a policy succeeds. Task: robosuite's Lift from states, behavioural cloning (bc, two
layers of 256, global batch 100, learning rate 1e-3), the 200 scripted demonstrations in `examples/data`. The time runs
from the command to the first checkpoint that lifts the cube in {WANTED:.0%} of {plan.num_episodes} episodes. It
includes imports, data, training, saves, and {plan.num_episodes} episodes (at most {HORIZON} steps; success ends
an episode) after every {STEPS_AN_EPOCH} steps. Training seeds: {", ".join(sorted({str(f.seed) for f in found}))}; the
rows of the table ran one after the other, in a different order for each seed. The first evaluation at {WANTED:.0%} may
be luck: {good} of {plan.num_episodes} means {low} to {high}%. So the published release evaluates each checkpoint again
in {plan.num_again} other episodes, the same for all, with the Clopper-Pearson interval for all seeds together.

{table}

Median wall time relative to robomimic as released: {"; ".join(ratios)}.

During training the rows evaluate on different episodes, so they may reach {WANTED:.0%} at different evaluations: the
released robomimic draws episodes from the training's random streams, ddpshim gives each episode its own seed.
"inf": no such checkpoint within {plan.deadline_s:g} s.
"""


def _median(runs: Sequence[Found]) -> float:
    return statistics.median(f.seconds for f in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, fewer episodes: does it run")
    parser.add_argument("--folder", type=Path, help="keep the runs here; a new folder")
    parser.add_argument("--write", type=Path, help="the page to write")
    args = parser.parse_args()
    plan, load = QUICK if args.quick else Plan(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(folder, plan)
    names = ("robosuite", "mujoco", "torch")
    versions = ", ".join(
        [f"robomimic {RELEASE}", *(f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in names)]
    )
    where = "DDPSHIM_UPSTREAM=… " if os.environ.get("DDPSHIM_UPSTREAM") else ""
    words = [where + "python -m benchmarks.to_success", *(["--quick"] if args.quick else [])]
    python = f"Python {sys.version.split()[0]}, gloo on {num_cores()} CPU cores, {load:.1f} processes computing before"
    text = page(found, plan, " ".join(words), f"{versions}, {python}")
    print(text)
    if args.write:
        args.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
