"""Runs DROID's own train.py on a small RLDS dataset, on the CPU: unpatched in one process, patched on two ranks.

    DDPSHIM_UPSTREAM=… python -m evidence.rlds_train [--steps 60] [--full]

prints which trajectories the ranks trained on, whether their final networks are equal, losses and memory; for
comparison also of two ranks that read as octo does. The tree is droid-9a29c83 with its patch set; octo and dlimp are
beside it. Nothing is downloaded: DistilBERT is its own class with random weights and one layer, and its tokenizer has
one token for each word. The UNet is small unless `--full` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

import ddpshim
from ddpshim.rows.tensor import Rows
from tests import droid, rlds
from tests.preloaded import start_afresh

RUN_DEADLINE_S = 1200
NUM_EPOCHS = 2


class Training(NamedTuple):
    """One training: for each rank the (episode, step) of its samples, its networks and its peak memory."""

    samples: list[list[tuple[int, int]]]
    networks: list[dict[str, torch.Tensor]]
    peak_bytes: list[int]
    losses: list[float]
    log: str


def make_config(tree: Path, data: str, num_steps: int, batch_size: int = 8) -> dict[str, Any]:
    """Return a config for RLDS as upstream's generator writes it, except for sizes."""
    epoch = num_steps // NUM_EPOCHS
    settings = {
        "experiment.epoch_every_n_steps": epoch,
        "experiment.save.every_n_epochs": NUM_EPOCHS,
        "observation.modalities.obs.low_dim": droid.LOW_DIM[:2],
        "train.data_format": "droid_rlds",
        "train.data_path": data,
        "train.dataset_names": ["droid"],
        "train.sample_weights": [1],
        "train.shuffle_buffer_size": 4000,
        "train.subsample_length": 100,
        "train.num_parallel_calls": 2,
        "train.traj_transform_threads": 2,
        "train.traj_read_threads": 2,
        "train.batch_size": batch_size,
        "train.num_epochs": NUM_EPOCHS,
    }
    return droid.make_config(tree, Path(data), **settings)


def train(tree: Path, config: dict[str, Any], folder: Path, num_ranks: Optional[int], **environ: str) -> Training:
    """Train once: under torchrun on `num_ranks` processes; if None, without a launcher.

    In `environ`, FULL keeps the UNet's size, and UNSHARDED makes every rank read as octo does.
    """
    folder.mkdir(parents=True)
    config = {**config, "train": {**config["train"], "output_dir": str(folder / "out")}}
    (folder / "config.json").write_text(json.dumps(config))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    arguments = [*(torchrun if num_ranks else []), "-m", "evidence.rlds_train", "--rank-of", str(folder)]
    code, output = start_afresh(arguments, {**droid.environ_of(tree), **environ}, folder, RUN_DEADLINE_S)
    if code or "finished run successfully" not in output:
        raise RuntimeError(f"training in {folder} ended with {code}:\n{output[-6000:]}")
    ranks = range(num_ranks) if num_ranks else ["plain"]
    seen = [torch.load(folder / f"seen_{rank}.pt", weights_only=False) for rank in ranks]
    epochs = [json.JSONDecoder().raw_decode(part[part.index("{") :])[0] for part in output.split("\nTrain Epoch ")[1:]]
    return Training(*map(list, zip(*seen)), [epoch["Loss"] for epoch in epochs], output)  # type: ignore[arg-type]


def _be_a_rank(folder: str) -> None:
    """Train in this process, and write samples, networks and peak memory to `folder`/seen_RANK.pt."""
    droid.install_stand_ins()
    import robomimic.algo as algorithms
    import robomimic.algo.diffusion_policy as diffusion_policy

    rank = os.environ.get("RANK", "plain")  # a program on ranks does not see it
    samples: list[tuple[int, int]] = []
    models: list[Any] = []
    make, take = algorithms.algo_factory, diffusion_policy.DiffusionPolicyUNet.process_batch_for_training

    def observed_factory(**options: Any) -> Any:
        models.append(make(**options))
        return models[0]

    def observed_batch(model: Any, batch: Any) -> Any:
        position = batch["obs"]["robot_state/cartesian_position"]  # of all ranks; the rows that this one has read:
        own = position.block if isinstance(position, Rows) else position
        where = (128 * own[:, -1, :2]).round().int().tolist()
        samples.extend(map(tuple, where))
        return take(model, batch)

    algorithms.algo_factory = observed_factory
    diffusion_policy.DiffusionPolicyUNet.process_batch_for_training = observed_batch
    if "UNSHARDED" in os.environ:
        import octo.data.dataset as octo_data

        import ddpshim.robomimic.droid as by_rank

        by_rank.make_dataset_from_rlds = octo_data.make_dataset_from_rlds
        by_rank.make_interleaved_dataset = octo_data.make_interleaved_dataset
    if "FULL" not in os.environ:
        sizes = {"down_dims": [16, 32], "n_groups": 4, "diffusion_step_embed_dim": 16}
        whole = diffusion_policy.ConditionalUnet1D
        diffusion_policy.ConditionalUnet1D = lambda **options: whole(**options, **sizes)

    sys.argv = ["train.py", "--config", f"{folder}/config.json"]
    runpy.run_module("robomimic.scripts.train", run_name="__main__")
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ddpshim.cleanup()  # until then the main rank alone writes
    torch.save((samples, droid.networks(models[0]), peak), f"{folder}/seen_{rank}.pt")


def differing(networks: list[dict[str, torch.Tensor]]) -> list[str]:
    """Return the names of the weights that are not equal, bit for bit, on all ranks."""
    first, *others = networks
    return [name for name in first if any(not torch.equal(first[name], other[name]) for other in others)]


def report(trainings: dict[str, Training]) -> str:
    """Return the comparison as lines of Markdown."""
    rows = [f"| | {' | '.join(trainings)} |", "|---" * (1 + len(trainings)) + "|"]

    def row(what: str, show: Any) -> None:
        rows.append(f"| {what} | {' | '.join(str(show(training)) for training in trainings.values())} |")

    def episodes(training: Training) -> list[set[int]]:
        return [{episode for episode, _ in samples} for samples in training.samples]

    row("samples trained on", lambda t: " + ".join(str(len(samples)) for samples in t.samples))
    row("different episodes among them", lambda t: " + ".join(str(len(found)) for found in episodes(t)))
    row("episodes that more than one rank read", lambda t: sum(map(len, episodes(t))) - len(set.union(*episodes(t))))
    row("weights that differ between ranks", lambda t: f"{len(differing(t.networks))} of {len(t.networks[0])}")
    row("loss of each epoch", lambda t: ", ".join(f"{loss:.3f}" for loss in t.losses))
    row("peak memory of a process", lambda t: " + ".join(f"{peak / 1e6:.0f} MB" for peak in t.peak_bytes))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of training, on batches of 8")
    parser.add_argument("--full", action="store_true", help="train DROID's own UNet (66 million parameters)")
    parser.add_argument("--rank-of", metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        _be_a_rank(given.rank_of)
        return
    lacking = rlds.missing()
    if lacking is not None:
        sys.exit(f"needs {lacking}: see requirements/rlds.txt")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rlds.build(name, height=64)
        plain, patched = (droid.copy_tree(droid.DROID, folder, way) for way in ("plain", "patched"))
        config = make_config(plain, name, given.steps)
        size = {"FULL": "1"} if given.full else {}
        trainings = {
            "unpatched, 1 process": train(plain, config, folder / "one", None, **size),
            "patched, 2 ranks": train(patched, config, folder / "two", 2, **size),
            "2 ranks that read as octo does": train(patched, config, folder / "hand", 2, UNSHARDED="1", **size),
        }
        print(report(trainings))


if __name__ == "__main__":
    main()
