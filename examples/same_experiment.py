"""Train the real robomimic on two processes and on one, and put the two runs side by side.

python examples/same_experiment.py [--algo bc|bc_rnn_gmm|diffusion_policy] [--steps 1000] [--ranks 2] [--out DIR]

`bc` and `bc_rnn_gmm` train the robomimic that is installed (0.3.0), `diffusion_policy` robomimic 0.5.0 from
DDPSHIM_UPSTREAM (see patches/README.md). Each is copied, and the copy patched: what is installed stays as it is. Both
runs are launched by torchrun and consume the same global batches; everything is written under --out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
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
DEFAULT_STEPS = {"bc": 1000, "bc_rnn_gmm": 200, "diffusion_policy": 20}
GLOBAL_BATCH_SIZE = 100
RUN_DEADLINE_S = 1500


@dataclass
class Result:
    """What one run left behind. `losses`: one an epoch, as the trainer logged it; `weights`: by epoch."""

    exit_code: int
    losses: list[float]
    weights: dict[int, dict[str, Any]]
    samples: list[list[int]]
    steps_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=sorted(SETTINGS), default="bc")
    parser.add_argument("--steps", type=int, help="gradient steps of each run, in 20 epochs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "same_experiment")
    args = parser.parse_args()
    steps, epochs = args.steps or DEFAULT_STEPS[args.algo], 20
    with emptied(args.out.resolve() / args.algo) as out:
        environ = patched_robomimic(args.algo, out)
        many = train(args.algo, args.ranks, steps // epochs, epochs, out, environ)
        one = train(args.algo, 1, steps // epochs, epochs, out, environ)
        report(args.algo, args.ranks, one, many)
        picture = draw(args.algo, args.ranks, one, many, out)
    print(f"\nloss curves: {picture}")
    sys.exit(one.exit_code or many.exit_code)


@contextlib.contextmanager
def emptied(out: Path) -> Iterator[Path]:
    """The folder `out`, empty, and this process's alone; ends before anything is deleted if another writes there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_name(f"{out.name}.lock"), "w") as lock:
        with contextlib.suppress(ImportError):  # Windows has no fcntl: there, nothing keeps two runs apart
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


def patched_robomimic(algo: str, out: Path) -> dict[str, str]:
    """The environment in which `import robomimic` finds a patched copy under `out`."""
    copy = out / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(released_robomimic(algo), copy / "robomimic", ignore=ignored)
    where = [str(copy), str(ROOT)]
    if algo == "diffusion_policy" and importlib.util.find_spec("transformers") is None:
        where.append(str(ROOT / "tests" / "stubs"))  # robomimic 0.5.0 loads a language model while it is imported
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(where), "PYTHONUNBUFFERED": "1"}
    patch = [sys.executable, "-m", "ddpshim", "patch", "apply", "--target", str(copy)]
    subprocess.run(patch, check=True, env=environ)
    return environ


def released_robomimic(algo: str) -> Path:
    """The package's folder in the release that has the algorithm."""
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


def train(algo: str, num_ranks: int, steps: int, epochs: int, out: Path, environ: dict[str, str]) -> Result:
    """One training under torchrun, its progress shown as a line an epoch."""
    import torch

    folder = out / f"ranks_{num_ranks}"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(make_config(algo, steps, epochs, folder, environ)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    trainer = [str(ROOT / "examples" / "recorded_train.py"), str(folder), "--config", str(config)]
    print(f"\n{algo}: {epochs} epochs of {steps} steps on {num_ranks} process{'es' * (num_ranks > 1)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, *torchrun, *trainer],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end, epoch, losses, seconds = time.monotonic() + RUN_DEADLINE_S, 0, [], []
    assert process.stdout is not None
    with open(folder / "output.txt", "w") as log:
        for line in process.stdout:
            log.write(line)
            if line.startswith("ddpshim: "):
                print(line, end="", flush=True)
            elif line.startswith("Train Epoch "):
                epoch = int(line.split()[2])
            elif '"Loss": ' in line:
                losses.append(float(line.split(": ")[1].rstrip(",\n")))
                print(f"  epoch {epoch:2d} of {epochs}: loss {losses[-1]:.6f}", flush=True)
            elif '"Time_Epoch": ' in line:
                seconds.append(60 * float(line.split(": ")[1].rstrip(",\n")))
            if time.monotonic() > end:
                process.kill()
    code = process.wait()
    if code:
        print((folder / "output.txt").read_text()[-5000:])
        sys.exit(f"the run on {num_ranks} processes ended with exit code {code}")
    weights = {}
    for checkpoint in folder.glob("trained/*/*/models/model_epoch_*.pth"):
        model = torch.load(checkpoint, map_location="cpu", weights_only=False)["model"]
        weights[int(checkpoint.stem.split("_")[-1])] = model.get("nets", model)
    samples = [json.loads((folder / f"samples_{rank}.json").read_text()) for rank in range(num_ranks)]
    # The first epoch warms up; it is left out of the speed.
    return Result(code, losses, weights, samples, steps * (epochs - 1) / sum(seconds[1:]))


def make_config(algo: str, steps: int, epochs: int, folder: Path, environ: dict[str, str]) -> dict[str, Any]:
    """robomimic's own template for the algorithm with the settings of this run."""
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
    }
    for dotted, value in settings.items():
        *path, last = dotted.split(".")
        section = config
        for part in path:
            section = section[part]
        section[last] = value
    return config


def report(algo: str, num_ranks: int, one: Result, many: Result) -> None:
    """Print the two runs side by side."""
    batches = [set(one.samples[0][i : i + GLOBAL_BATCH_SIZE]) for i in range(0, len(one.samples[0]), GLOBAL_BATCH_SIZE)]
    share = GLOBAL_BATCH_SIZE // num_ranks
    joined = [
        {i for shard in many.samples for i in shard[step * share : (step + 1) * share]} for step in range(len(batches))
    ]
    rows = [
        ("", "1 process", f"{num_ranks} processes"),
        ("exit code", str(one.exit_code), str(many.exit_code)),
        ("first epoch's loss", f"{one.losses[0]:.8f}", f"{many.losses[0]:.8f}"),
        ("last epoch's loss", f"{one.losses[-1]:.8f}", f"{many.losses[-1]:.8f}"),
        ("samples seen", str(len(one.samples[0])), " + ".join(str(len(shard)) for shard in many.samples)),
        ("steps per second", f"{one.steps_per_s:.1f}", f"{many.steps_per_s:.1f}"),
    ]
    print(f"\n{algo}, the same experiment:")
    for row in rows:
        print("  {:<20} {:>16} {:>18}".format(*row))
    same = sum(a == b for a, b in zip(batches, joined))
    print(f"  global batches with the same samples: {same} of {len(batches)}")
    for epoch in sorted(one.weights):
        pairs = [(value, many.weights[epoch][key]) for key, value in one.weights[epoch].items()]
        difference = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
        print(
            f"  largest difference of a weight after {epoch * len(batches) // len(one.losses)} steps: {difference:.1e}"
        )
    if algo == "diffusion_policy":
        print("  (each rank draws noise of its own: the weights are those of the same run with another draw)")
    else:
        print("  (float32 adds in another order, and training amplifies it; in float64 it stays at 1e-15:")
        print("  python -m tests.equivalence --precision float64 --steps 0 --epochs 1)")


def draw(algo: str, num_ranks: int, one: Result, many: Result, out: Path) -> Path:
    """The loss curves, one process over many, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, gap) = plt.subplots(2, 1, sharex=True, figsize=(7, 5.5), height_ratios=[3, 1])
    epochs = range(1, len(one.losses) + 1)
    curves.plot(epochs, one.losses, color="tab:orange", linewidth=5, alpha=0.45, label="1 process")
    curves.plot(epochs, many.losses, color="tab:blue", linewidth=1.5, label=f"{num_ranks} processes")
    curves.set(ylabel="training loss", title=f"robomimic {algo} on Lift, global batch {GLOBAL_BATCH_SIZE}")
    curves.legend(frameon=False)
    gap.bar(epochs, [abs(a - b) for a, b in zip(one.losses, many.losses)], color="tab:gray")
    gap.set(xlabel="epoch", ylabel="|difference|", yscale="log", xticks=range(0, len(epochs) + 1, 5))
    figure.tight_layout()
    path = out / "loss_curves.png"
    figure.savefig(path, dpi=130)
    return path


if __name__ == "__main__":
    main()
