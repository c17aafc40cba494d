"""Train the real robomimic in one process as released, on two ranks with ddpshim, and on two in a typical manual port.

python examples/same_experiment.py [--algo bc|bc_rnn_gmm|diffusion_policy] [--steps 500] [--nproc 2] [--out DIR]

`bc` and `bc_rnn_gmm` train the robomimic that is installed (0.3.0), `diffusion_policy` robomimic 0.5.0 from
DDPSHIM_UPSTREAM (see patches/README.md). None of its files is changed. The reference runs without ddpshim: not patched,
not launched, with its noise. Everything is written under --out.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "data" / "lift_scripted200_train.hdf5"
LOW_DIM = ["robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object"]
SETTINGS: dict[str, dict[str, Any]] = {
    "bc": {
        "algo.actor_layer_dims": [256, 256],
        "algo.optim_params.policy.learning_rate.initial": 1e-3,
    },
    "bc_rnn_gmm": {
        "algo.actor_layer_dims": [],
        "algo.gmm.enabled": True,
        "algo.rnn.enabled": True,
        "algo.rnn.hidden_dim": 100,
        "train.seq_length": 10,
    },
    "diffusion_policy": {"train.frame_stack": 2, "train.seq_length": 16},
}
DEFAULT_STEPS = {"bc": 500, "bc_rnn_gmm": 200, "diffusion_policy": 20}
GLOBAL_BATCH_SIZE = 100
RUN_DEADLINE_S = 1500
TOLERANCE = 1e-5  # float32, after the first epoch


EXACT_STEPS = 50
NUM_ROUNDS, NUM_BLOCKS = 3, 2  # of the speed's comparison


@dataclass
class Result:
    """The results of one run. `losses`: one per epoch, from the trainer's log; `weights`: by epoch."""

    exit_code: int
    losses: list[float]
    weights: dict[int, dict[str, Any]]
    samples: list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=sorted(SETTINGS), default="bc")
    parser.add_argument("--steps", type=int, help="gradient steps of each run, in 20 epochs")
    parser.add_argument("--nproc", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "same_experiment")
    args = parser.parse_args()
    steps, epochs = args.steps or DEFAULT_STEPS[args.algo], 20
    with emptied(args.out.resolve() / args.algo) as out:
        environ = robomimic_as_released(args.algo)
        one, many, by_hand = (
            train(args.algo, way, num_ranks, steps // epochs, epochs, out / way, environ)
            for way, num_ranks in (("released", 1), ("ddpshim", args.nproc), ("by_hand", args.nproc))
        )
        is_same = report(args.algo, args.nproc, one, many, by_hand)
        picture = draw(args.algo, args.nproc, one, many, by_hand, out)
        print(f"\nloss curves: {picture}")
        has_one_hash = show_hashes(args.algo, args.nproc, out, environ)
        is_verified = args.algo != "bc" or certify(args.nproc, out, environ)
        if args.algo == "bc":
            compare_speed(args.nproc)
    sys.exit(not (is_same and has_one_hash and is_verified))


@contextlib.contextmanager
def emptied(out: Path) -> Iterator[Path]:
    """Empty the folder `out`, and lock it for this process. Exits, with nothing deleted, if another run uses it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_name(f"{out.name}.lock"), "w") as lock:
        with contextlib.suppress(ImportError):  # Windows has no fcntl, so there is no lock
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.exit(
                    f"Another run of this example writes into {out}; this one would have deleted its files, and has "
                    "changed nothing. Wait for it to end, or name another folder with --out."
                )
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        yield out


def robomimic_as_released(algo: str) -> dict[str, str]:
    """Return the environment variables with which `import robomimic` finds the release."""
    where = [str(released_robomimic(algo).parent), str(ROOT)]
    if algo == "diffusion_policy" and importlib.util.find_spec("transformers") is None:
        where.append(str(ROOT / "tests" / "stubs"))  # the import of robomimic 0.5.0 loads a language model
    # One thread per process: small networks are no faster on more threads, and much slower on busy cores.
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(where), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return {**environ, "PYTHONHASHSEED": "0"}  # as in `ddpshim run`: one order of sets of strings on all ranks


def released_robomimic(algo: str) -> Path:
    """Return the package's folder of the release that has the algorithm."""
    if algo == "diffusion_policy":
        upstream = os.environ.get("DDPSHIM_UPSTREAM", "")
        source = Path(upstream) / "robomimic-0.5.0" / "robomimic"
        if not upstream or not source.is_dir():
            sys.exit(
                "diffusion_policy needs robomimic 0.5.0, which no package index holds: set DDPSHIM_UPSTREAM to a "
                "folder with robomimic-0.5.0/ in it (see patches/README.md)."
            )
        return source
    spec = importlib.util.find_spec("robomimic")
    if spec is None or spec.origin is None:
        sys.exit(
            f"robomimic is not installed for {sys.executable}, so there is nothing to train. Run `python3 bootstrap.py "
            "demo`, or `pip install --no-deps robomimic==0.3.0`."
        )
    return Path(spec.origin).parent


def train(
    algo: str, way: str, num_ranks: int, steps: int, epochs: int, folder: Path, environ: dict[str, str], **more: Any
) -> Result:
    """Run one training, and show a line per epoch. `more`: settings of the config, by dotted path."""
    import torch

    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(make_config(algo, steps, epochs, folder, environ, **more)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    launcher = [] if way == "released" else torchrun
    trainer = [str(ROOT / "examples" / "recorded_train.py"), way, str(folder), "--config", str(config)]
    if way == "run":  # the samples are not recorded
        launcher = ["-m", "ddpshim", "run", "--no-logs", "--nproc", str(num_ranks)]
        trainer = ["-m", "robomimic.scripts.train", "--config", str(config)]
    is_shown = not more
    if is_shown:
        print(f"\n{algo}, {way}: {epochs} epochs of {steps} steps on {num_ranks} process{'es' * (num_ranks > 1)}")
        sys.stdout.flush()
    with subprocess.Popen(
        [sys.executable, *launcher, *trainer],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        end, is_late, epoch, losses = time.monotonic() + RUN_DEADLINE_S, False, 0, {}
        assert process.stdout is not None
        with open(folder / "output.txt", "w") as log:
            for line in process.stdout:
                log.write(line)
                if line.startswith("ddpshim: ") and is_shown:
                    print(line, end="", flush=True)
                elif line.startswith("Train Epoch "):
                    epoch = int(line.split()[2])
                elif '"Loss": ' in line and epoch not in losses:  # in the port by hand, each rank prints its own
                    losses[epoch] = float(line.split(": ")[1].rstrip(",\n"))
                    if is_shown:
                        print(f"  epoch {epoch:2d} of {epochs}: loss {losses[epoch]:.6f}", flush=True)
                if time.monotonic() > end and not is_late:
                    is_late = True
                    process.terminate()  # torchrun then ends the ranks
        code = process.wait()
    if code:
        how = f"ended with exit code {code}"
        if is_late:
            how = f"was stopped after {RUN_DEADLINE_S // 60} minutes, the limit of this example: is the machine busy?"
        said = [line for line in (folder / "output.txt").read_text().splitlines() if "%|" not in line]  # no bars
        print(*said[-30:], sep="\n")
        sys.exit(f"the run '{way}' on {num_ranks} processes {how} (its output: {folder}/output.txt)")
    weights = {}
    for checkpoint in folder.glob("trained/*/*/models/model_epoch_*.pth"):
        model = torch.load(checkpoint, map_location="cpu", weights_only=False)["model"]
        held = model.get("nets", model)
        weights[int(checkpoint.stem.split("_")[-1])] = {key.replace(".module.", "."): held[key] for key in held}
    recorded = sorted(folder.glob("samples_*.json"), key=lambda path: int(path.stem.split("_")[1]))
    samples = [json.loads(path.read_text()) for path in recorded]
    return Result(code, [*losses.values()], weights, samples)


def make_config(
    algo: str, steps: int, epochs: int, folder: Path, environ: dict[str, str], **more: Any
) -> dict[str, Any]:
    """Return robomimic's own template for the algorithm, with the settings of this run."""
    code = "import robomimic; print(robomimic.__path__[0])"
    ran = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True)
    templates = Path(ran.stdout.splitlines()[-1]) / "exps" / "templates"
    config = json.loads((templates / f"{'bc' if algo.startswith('bc') else algo}.json").read_text())
    settings = {
        "experiment.name": algo,
        "experiment.validate": False,
        "experiment.rollout.enabled": False,
        "experiment.epoch_every_n_steps": steps,
        "experiment.save.every_n_epochs": epochs,
        "experiment.save.epochs": [1],
        "train.data": [{"path": str(DATA)}] if algo == "diffusion_policy" else str(DATA),
        "train.output_dir": str(folder / "trained"),
        "train.num_epochs": epochs,
        "train.num_data_workers": 0,
        "train.batch_size": GLOBAL_BATCH_SIZE,
        "train.cuda": False,
        "train.hdf5_load_next_obs": False,
        "observation.modalities.obs.low_dim": LOW_DIM,
        **SETTINGS[algo],
        **more,
    }
    for dotted, value in settings.items():
        *path, last = dotted.split(".")
        section = config
        for part in path:
            section = section[part]
        section[last] = value
    return config


def report(algo: str, num_ranks: int, one: Result, many: Result, by_hand: Result) -> bool:
    """Print the runs side by side; return whether `many` is the same experiment as `one`."""
    size = GLOBAL_BATCH_SIZE
    batches = [set(one.samples[0][i : i + size]) for i in range(0, len(one.samples[0]), size)]
    rows = [
        ["", "released", "ddpshim", "ported by hand"],
        ["processes", "1", str(num_ranks), str(num_ranks)],
        ["first epoch's loss", *(f"{run.losses[0]:.8f}" for run in (one, many, by_hand))],
        ["last epoch's loss", *(f"{run.losses[-1]:.8f}" for run in (one, many, by_hand))],
        ["samples of a step", str(size)],
        ["steps with the samples of the release", ""],
        *(
            [f"largest difference of a weight, {epoch * len(batches) // len(one.losses)} steps", ""]
            for epoch in sorted(one.weights)
        ),
        ["same experiment", ""],
    ]
    verdicts = []
    for run in (many, by_hand):
        share = len(run.samples[0]) // len(batches)
        joined = [
            {i for shard in run.samples for i in shard[step * share : (step + 1) * share]}
            for step in range(len(batches))
        ]
        num_same = sum(a == b for a, b in zip(batches, joined))
        rows[4].append(" + ".join([str(share)] * num_ranks))
        rows[5].append(f"{num_same} of {len(batches)}")
        differences = [_difference(one.weights[epoch], run.weights[epoch]) for epoch in sorted(one.weights)]
        for row, difference in zip(rows[6:], differences):
            row.append(f"{difference:.1e}")
        verdicts.append(num_same == len(batches) and differences[0] < TOLERANCE)
        rows[-1].append("yes" if verdicts[-1] else "no")
    print(f"\nrobomimic's {algo}:")
    for row in rows:
        print("  {:<46} {:>12} {:>14} {:>16}".format(*row))
    print(f"  (yes: the samples of every step, and weights within {TOLERANCE:g} after the first epoch. Later training")
    print("  amplifies float32's rounding; in float64 it is 1e-15: python -m evidence.equivalence --precision float64)")
    return verdicts[0]


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((value.double() - other[key].double()).abs().max()) for key, value in one.items())


def show_hashes(algo: str, num_ranks: int, out: Path, environ: dict[str, str]) -> bool:
    """Train with the option exact on one process and on all; return whether all weights have the same bits."""
    sizes, hashes = (1, num_ranks), []
    for size in sizes:
        given = {**environ, "DDPSHIM_EXACT": str(num_ranks)}
        run = train(algo, "run", size, EXACT_STEPS // 2, 2, out / f"exact_{size}", given, **SETTINGS[algo])
        made = hashlib.sha256()
        for _, weights in sorted(run.weights.items()):
            for key in sorted(weights):
                made.update(key.encode() + weights[key].numpy().tobytes())
        hashes.append(made.hexdigest()[:16])
    print(f"\nall bits of the weights after {EXACT_STEPS} steps, with DDPSHIM_EXACT={num_ranks}:")
    for size, found in zip(sizes, hashes):
        print(f"  on {size} process{'es' * (size > 1)}".ljust(46), found)
    return len(set(hashes)) == 1


def certify(num_ranks: int, out: Path, environ: dict[str, str]) -> bool:
    """Certify a run on all ranks, and repeat its last steps on one; return whether the bits agree."""
    folder = out / "certified"
    folder.mkdir()
    config, certificate = folder / "config.json", folder / "run.json"
    settings = make_config("bc", EXACT_STEPS, 4, folder, environ, **SETTINGS["bc"])
    config.write_text(json.dumps(settings))
    print(f"\na certificate, made on {num_ranks} processes and checked on 1:", flush=True)
    made = ["run", "--no-logs", "--nproc", str(num_ranks), "--certify", str(certificate), "--certify-every", "25"]
    for words in ([*made, "-m", "robomimic.scripts.train", "--config", str(config)], ["check", "--certificate"]):
        command = [sys.executable, "-m", "ddpshim", *words, *([str(certificate)] if words[0] == "check" else [])]
        ran = subprocess.run(command, env=environ, cwd=folder, check=False, capture_output=True, text=True)
        if ran.returncode:
            print(ran.stdout[-2000:], ran.stderr[-2000:])
            return False
    print(f"  {ran.stdout.strip()}")
    return True


def compare_speed(num_ranks: int) -> None:
    """Print the speed of a diffusion policy's U-Net, unedited, one core per process (as one GPU each), in turns."""
    sys.path.insert(0, str(ROOT))
    from evidence.one_process import measure

    times: list[list[float]] = []
    for _ in range(NUM_ROUNDS):
        times.append([min(measure("unet_256", NUM_BLOCKS, size)["ms"]) for size in (0, num_ranks)])
    alone, many = (statistics.median(found) for found in zip(*times))
    ratios = [a / b for a, b in times]
    print("\na diffusion U-Net, batch 256, one core for each process:")
    print(f"  a step takes {alone:.0f} ms on 1 process, {many:.0f} ms on {num_ranks}:", end=" ")
    print(f"{alone / many:.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f} in {NUM_ROUNDS} rounds)")
    if num_ranks > (os.cpu_count() or 1):
        print(f"  (this machine has {os.cpu_count()} cores for them)")


def draw(algo: str, num_ranks: int, one: Result, many: Result, by_hand: Result, out: Path) -> Path:
    """Draw the loss curves of the three runs as a PNG, and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, gap) = plt.subplots(2, 1, sharex=True, figsize=(7, 5.5), height_ratios=[3, 1])
    epochs = range(1, len(one.losses) + 1)
    curves.plot(epochs, one.losses, color="tab:orange", linewidth=5, alpha=0.45, label="1 process, released")
    curves.plot(epochs, many.losses, color="tab:blue", linewidth=1.5, label=f"{num_ranks} processes, ddpshim")
    curves.plot(epochs, by_hand.losses, color="tab:gray", linestyle=":", label=f"{num_ranks} processes, ported by hand")
    curves.set(ylabel="training loss", title=f"robomimic {algo} on Lift, batch {GLOBAL_BATCH_SIZE}", yscale="log")
    curves.legend(frameon=False)
    for run, color, shift in ((by_hand, "tab:gray", 0.2), (many, "tab:blue", -0.2)):
        heights = [max(abs(a - b), 1e-9) for a, b in zip(one.losses, run.losses)]
        gap.bar([epoch + shift for epoch in epochs], heights, 0.4, color=color)
    gap.set(xlabel="epoch", ylabel="|difference|", yscale="log", xticks=range(0, len(epochs) + 1, 5))
    figure.tight_layout()
    path = out / "loss_curves.png"
    figure.savefig(path, dpi=130)
    return path


if __name__ == "__main__":
    main()
