"""N ranks on shards against one launched process on the whole batch, through the patched robomimic.

Run it: python -m tests.equivalence --release 0.3.0 --algo bc,bc_rnn_gmm --ranks 1,2,4 [--precision float64]

The release is copied beside the results, and patched there: what is installed stays as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from ddpshim import patching

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data" / "lift_scripted200_train.hdf5"
LOW_DIM = ["robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object"]
RUN_DEADLINE_S = 300
NOISY = {"td3_bc", "diffusion_policy"}  # draw noise of their own while training: ranks differ from one process

# What distinguishes a variant from its template, by dotted path.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bc": ("bc", {"algo.actor_layer_dims": [64, 64]}),
    "bc_gaussian": ("bc", {"algo.actor_layer_dims": [64, 64], "algo.gaussian.enabled": True}),
    "bc_gmm": ("bc", {"algo.actor_layer_dims": [64, 64], "algo.gmm.enabled": True}),
    "bc_rnn_gmm": (
        "bc",
        {
            "algo.actor_layer_dims": [],
            "algo.gmm.enabled": True,
            "algo.rnn.enabled": True,
            "algo.rnn.horizon": 5,
            "algo.rnn.hidden_dim": 32,
            "train.seq_length": 5,
        },
    ),
    "td3_bc": ("td3_bc", {"train.hdf5_load_next_obs": True, "train.hdf5_normalize_obs": False}),
    "diffusion_policy": ("diffusion_policy", {"train.frame_stack": 2, "train.seq_length": 16}),
}


@dataclass
class Run:
    """One training: what each rank saw and ended with, in rank order, and what was written and printed."""

    observed: list[dict[str, Any]]
    folder: Path
    log: str
    exit_code: int

    @property
    def checkpoint(self) -> dict[str, Any]:
        """The last checkpoint written."""
        newest = max(self.folder.glob("out/*/*/models/*.pth"), key=lambda path: path.stat().st_mtime)
        return torch.load(newest, weights_only=False)  # type: ignore[no-any-return]

    def losses(self, phase: str = "Train") -> list[float]:
        """The loss of each epoch as the trainer printed it."""
        out = []
        for part in self.log.split(f"\n{phase} Epoch ")[1:]:
            out.append(float(part.split('"Loss": ')[1].split("\n")[0].rstrip(",")))
        return out


def source(release: str) -> Optional[Path]:
    """The folder that holds the `robomimic` package of a release, or None where it cannot be had."""
    upstream = os.environ.get("DDPSHIM_UPSTREAM")
    if upstream and (Path(upstream) / f"robomimic-{release}" / "robomimic").is_dir():
        return Path(upstream) / f"robomimic-{release}"
    spec = importlib.util.find_spec("robomimic")
    if spec is None or spec.origin is None:
        return None
    installed = Path(spec.origin).parent.parent
    said = f'__version__ = "{release}"' in (installed / "robomimic" / "__init__.py").read_text()
    return installed if said else None


def copy_release(release: str, folder: Path, patched: bool = True) -> Path:
    """A copy of a release's package under `folder`, patched unless told otherwise."""
    found = source(release)
    if found is None:
        raise SystemExit(f"robomimic {release} is neither installed nor under DDPSHIM_UPSTREAM; see patches/README.md")
    tree = folder / f"robomimic-{release}-{'patched' if patched else 'plain'}"
    if not tree.exists():
        shutil.copytree(found / "robomimic", tree / "robomimic", ignore=shutil.ignore_patterns("__pycache__"))
        (patching.apply if patched else patching.revert)(str(tree))
    return tree


def make_data(folder: Path, num_demos: int = 200) -> Path:
    """The Lift demonstrations with `next_obs`, which value-based algorithms need."""
    import h5py

    path = folder / f"lift_{num_demos}.hdf5"
    if path.exists():
        return path
    with h5py.File(DATA) as given, h5py.File(path, "w") as made:
        made.create_group("data").attrs.update(given["data"].attrs)
        for number in range(num_demos):
            name = f"demo_{number}"
            given.copy(f"data/{name}", made["data"])
            for key, value in given[f"data/{name}/obs"].items():
                shifted = value[()][[*range(1, len(value)), len(value) - 1]]
                made.create_dataset(f"data/{name}/next_obs/{key}", data=shifted)
        if "mask" in given:
            kept = {f"demo_{number}" for number in range(num_demos)}
            for key, names in given["mask"].items():
                made.create_dataset(f"mask/{key}", data=[n for n in names[()] if n.decode() in kept])
    return path


def make_config(
    tree: Path, variant: str, data: Path, folder: Path, steps: Optional[int], epochs: int, **extra: Any
) -> Path:
    """A config file from the release's own template; `extra` overrides by dotted path ('__' for '.')."""
    template, changes = VARIANTS[variant]
    config = json.loads((tree / "robomimic" / "exps" / "templates" / f"{template}.json").read_text())
    settings = {
        "experiment.name": variant,
        "experiment.validate": False,
        "experiment.rollout.enabled": False,
        "experiment.epoch_every_n_steps": steps,
        "experiment.save.every_n_epochs": epochs,
        "experiment.logging.log_wandb": False,
        "train.data": str(data),
        "train.output_dir": str(folder / "out"),
        "train.num_epochs": epochs,
        "train.num_data_workers": 0,
        "train.batch_size": 100,
        "train.cuda": False,
        "train.seed": 1,
        "observation.modalities.obs.low_dim": LOW_DIM,
        **changes,
        **{key.replace("__", "."): value for key, value in extra.items()},
    }
    for dotted, value in settings.items():
        *path, last = dotted.split(".")
        section = config
        for part in path:
            section = section[part]
        section[last] = value
    made = folder / f"{variant}.json"
    made.write_text(json.dumps(config))
    return made


def train(
    tree: Path,
    config: Path,
    folder: Path,
    num_ranks: Optional[int],
    precision: str = "float32",
    environ: Optional[dict[str, str]] = None,
    check: bool = True,
    module: str = "tests.observed",
) -> Run:
    """Train once: under torchrun on `num_ranks` processes, or plainly where that is None."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(config.read_text())
    settings["train"]["output_dir"] = str(folder / "out")
    own = folder / "config.json"
    own.write_text(json.dumps(settings))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    observe = [str(folder), precision] if module == "tests.observed" else []
    command = [*(torchrun if num_ranks is not None else []), "-m", module, *observe, "--config", str(own)]
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    stubs = [] if importlib.util.find_spec("transformers") else [str(ROOT / "tests" / "stubs")]
    where = os.pathsep.join([str(tree), str(ROOT), *stubs])
    ran = subprocess.run(
        [sys.executable, *command],
        env={**inherited, "PYTHONPATH": where, "PYTHONDONTWRITEBYTECODE": "1", **(environ or {})},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_DEADLINE_S,
        check=False,
    )
    (folder / "output.txt").write_text(ran.stdout)
    ranks = ["plain"] if num_ranks is None else range(num_ranks)
    files = [folder / f"observed_{rank}.pt" for rank in ranks]
    if check and (ran.returncode or (observe and not all(f.exists() for f in files))):
        raise RuntimeError(f"training in {folder} ended with {ran.returncode}:\n{ran.stdout[-6000:]}")
    observed = [torch.load(f, weights_only=False) for f in files if f.exists()]
    return Run(observed, folder, ran.stdout, ran.returncode)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference between equally named tensors; names that differ are an error."""
    if one.keys() != other.keys():
        raise AssertionError(f"different networks: {sorted(one.keys() ^ other.keys())}")
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one if one[key].numel())


def batches(run: Run, global_batch_size: int, filter_key: str = "None") -> list[set[int]]:
    """The set of samples of each global batch, put together from all ranks."""
    shards = [observed["samples"][filter_key] for observed in run.observed]
    size = global_batch_size // len(shards)
    steps = {len(shard) // size for shard in shards}
    assert len(steps) == 1, f"ranks took different numbers of steps: {steps}"
    return [{i for shard in shards for i in shard[step * size : (step + 1) * size]} for step in range(steps.pop())]


def compare(
    release: str, variant: str, ranks: Sequence[int], precision: str, steps: Optional[int], epochs: int, folder: Path
) -> list[dict[str, Any]]:
    """For each number of ranks: how the run differs from a launched world of one."""
    tree = copy_release(release, folder)
    data = make_data(folder)
    as_release = [{"path": str(data)}] if release in ("0.5.0", "master") else str(data)
    config = make_config(tree, variant, data, folder, steps, epochs, train__data=as_release)
    runs = {n: train(tree, config, folder / f"{release}-{variant}-{precision}-{n}", n, precision) for n in {1, *ranks}}
    one = runs[1]
    rows = []
    for n in ranks:
        run = runs[n]
        weights = [observed["networks"] for observed in run.observed]
        noises = {tuple(observed["noise"].tolist()) for observed in run.observed}
        rows.append(
            {
                "release": release,
                "algo": variant,
                "ranks": n,
                "precision": precision,
                "steps": len(batches(run, 100)),
                "weights against one process": largest_difference(one.observed[0]["networks"], weights[0]),
                "weights between ranks": max(largest_difference(weights[0], other) for other in weights),
                "loss against one process": max(abs(a - b) for a, b in zip(one.losses(), run.losses())),
                "same samples": batches(run, 100) == batches(one, 100),
                "streams of noise": len(noises),
                "checkpoint keys equal": _keys(run.checkpoint["model"]) == _keys(one.checkpoint["model"]),
            }
        )
    return rows


def _keys(tree: Any) -> Any:
    return {key: _keys(value) for key, value in tree.items()} if isinstance(tree, dict) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default="0.3.0")
    parser.add_argument("--algo", default="bc,bc_gaussian,bc_gmm,bc_rnn_gmm,td3_bc")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--precision", default="float32", choices=["float32", "float64"])
    parser.add_argument("--steps", type=int, default=10, help="gradient steps an epoch; 0: a whole pass")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        header = False
        for variant in args.algo.split(","):
            sizes = [int(n) for n in args.ranks.split(",")]
            for row in compare(
                args.release, variant, sizes, args.precision, args.steps or None, args.epochs, folder.resolve()
            ):
                if not header:
                    print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
                    header = True
                print(
                    "| " + " | ".join(f"{v:.1e}" if isinstance(v, float) else str(v) for v in row.values()) + " |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
