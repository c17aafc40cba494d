"""Compares openpi's unedited PyTorch trainer on N ranks with one process without a launcher, with noise.

Run it: DDPSHIM_UPSTREAM=… python -m evidence.openpi_equivalence [--ranks 2,3] [--write evidence/other_codebases.md]

`scripts/train_pytorch.py` and `src/openpi/training/data_loader.py` are those of $DDPSHIM_UPSTREAM/openpi-15a9616. The
rest is replaced by stand-ins: a small policy with pi0's noise and times, and dropout; its config, data, jax, wandb.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from evidence import pages
from evidence.compare import largest_difference, shown
from evidence.results import ran

ROOT = Path(__file__).parent.parent
TREE = "openpi-15a9616"
START = (
    "<!-- what follows is written by python -m evidence.openpi_equivalence --write evidence/other_codebases.md -->\n"
)
END = "<!-- end of openpi -->\n"
DEADLINE_S = 240
STEPS, LEFT_AT = 12, 7  # a pass has 5 steps of 8 samples

_STAND_INS = {
    "jax/__init__.py": """
import dataclasses, types
import numpy as np
def _map(f, first, *rest):
    if isinstance(first, dict):
        return {k: _map(f, first[k], *(r[k] for r in rest)) for k in first}
    if dataclasses.is_dataclass(first):
        return type(first)(**{k: _map(f, v, *(getattr(r, k) for r in rest)) for k, v in vars(first).items()})
    return f(first, *rest)
tree = types.SimpleNamespace(map=_map)
class Sharding: ...
sharding = types.SimpleNamespace(Sharding=Sharding, NamedSharding=Sharding, Mesh=None, PartitionSpec=None)
class ShapeDtypeStruct: ...
def process_count(): return 1
""",
    "jax/numpy.py": "",
    "wandb.py": """
import json, types
_state = types.SimpleNamespace(on=False)
run = types.SimpleNamespace(id="run1")
class Image:
    def __init__(self, data): self.shape = data.shape
def init(mode="online", **options):
    _state.on = mode != "disabled"
    if _state.on:
        open("wandb.jsonl", "a").write(json.dumps({"init": options.get("name", options.get("id"))}) + "\\n")
def log(values, step):
    if _state.on:
        kept = {k: v for k, v in values.items() if isinstance(v, (int, float)) and "time" not in k}
        open("wandb.jsonl", "a").write(json.dumps({"step": step, **kept}) + "\\n")
def finish(): ...
""",
    "lerobot/__init__.py": "",
    "lerobot/common/__init__.py": "",
    "lerobot/common/datasets/__init__.py": "",
    "lerobot/common/datasets/lerobot_dataset.py": """
import numpy as np
class LeRobotDatasetMetadata:
    def __init__(self, repo_id): self.fps, self.tasks = 10, {}
class LeRobotDataset:
    def __init__(self, repo_id, delta_timestamps):
        draws = np.random.default_rng(0)
        self.state = draws.normal(size=(43, 4)).astype("float32")
        self.actions = draws.normal(size=(43, 6, 2)).astype("float32")
    def __len__(self): return len(self.state)
    def __getitem__(self, index):
        return {"state": self.state[index], "actions": self.actions[index],
                "image": {"front": np.zeros((3, 4, 4), "float32")}}
""",
    "openpi/__init__.py": "",
    "openpi/models/__init__.py": "",
    "openpi/models/model.py": """
import dataclasses, typing
from typing import Any
class BaseModelConfig: ...
Actions = typing.TypeVar("Actions")
@dataclasses.dataclass
class Observation:
    state: Any
    image: Any
    @classmethod
    def from_dict(cls, data): return cls(data["state"], data["image"])
    def to_dict(self): return {"state": self.state, "image": self.image}
""",
    "openpi/models/pi0_config.py": """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Pi0Config:
    dtype: str = "float32"
    action_horizon: int = 6
""",
    "openpi/models_pytorch/__init__.py": "",
    "openpi/models_pytorch/pi0_pytorch.py": """
import torch
from torch import nn
class PI0Pytorch(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.reads, self.drops, self.acts = nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16 + 2 + 1, 16)
        self.last, self.unused = nn.Linear(16, 2), nn.Linear(3, 3)
    def forward(self, observation, actions):
        noise = torch.normal(0.0, 1.0, size=actions.shape, dtype=torch.float32, device=actions.device)
        one = torch.ones((), device=actions.device)
        time = torch.distributions.Beta(1.5 * one, one).sample((len(actions),)) * 0.999 + 0.001
        time = time[:, None, None]
        seen = self.drops(self.reads(observation.state))[:, None].expand(-1, actions.shape[1], -1)
        mixed = time * noise + (1 - time) * actions
        hidden = self.acts(torch.cat([seen, mixed, time.expand(-1, actions.shape[1], 1)], -1)).relu()
        return torch.nn.functional.mse_loss(self.last(hidden), noise - actions, reduction="none")
""",
    "openpi/shared/__init__.py": "",
    "openpi/shared/normalize.py": "def save(folder, stats): ...\n",
    "openpi/training/__init__.py": "",
    "openpi/training/droid_rlds_dataset.py": "class DroidRldsDataset: ...\n",
    "openpi/transforms.py": """
class DataTransformFn: ...
class PromptFromLeRobotTask: ...
def compose(transforms):
    def run(item):
        for transform in transforms: item = transform(item)
        return item
    return run
class Normalize:
    def __init__(self, stats, use_quantiles): ...
    def __call__(self, item): return item
""",
    "openpi/training/config.py": """
import dataclasses, pathlib, sys
from openpi.models.pi0_config import Pi0Config
class Group: inputs = ()
class DataConfig:
    repo_id, rlds_data_dir, norm_stats, asset_id, use_quantile_norm = "toy", None, {}, None, False
    action_sequence_keys, prompt_from_task = ("actions",), False
    repack_transforms = data_transforms = model_transforms = Group
@dataclasses.dataclass(frozen=True)
class Factory:
    def create(self, folder, model): return DataConfig()
@dataclasses.dataclass(frozen=True)
class Schedule:
    warmup_steps: int = 3
    peak_lr: float = 1e-3
    decay_steps: int = 30
    decay_lr: float = 1e-4
@dataclasses.dataclass(frozen=True)
class AdamW:
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 1e-10
    clip_gradient_norm: float = 1.0
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    exp_name: str
    resume: bool = False
    overwrite: bool = False
    num_train_steps: int = 12
    batch_size: int = 8
    num_workers: int = 0
    seed: int = 42
    log_interval: int = 1
    save_interval: int = 7
    project_name: str = "openpi"
    wandb_enabled: bool = True
    pytorch_training_precision: str = "float32"
    pytorch_weight_path: str = None
    model: Pi0Config = Pi0Config()
    data: Factory = Factory()
    lr_schedule: Schedule = Schedule()
    optimizer: AdamW = AdamW()
    assets_dirs = None
    @property
    def checkpoint_dir(self): return pathlib.Path("checkpoints", self.exp_name).resolve()
def cli():
    name, *flags = sys.argv[1:]
    return TrainConfig(name, resume="--resume" in flags, overwrite="--overwrite" in flags)
""",
}


def tree() -> Path | None:
    """Return openpi's tree; None if it does not exist."""
    upstream = os.environ.get("DDPSHIM_UPSTREAM")
    found = Path(upstream or ROOT / "absent", TREE)
    return found if (found / "scripts" / "train_pytorch.py").is_file() else None


def copy_tree(folder: Path) -> None:
    """Write openpi's two files and the stand-ins around them to `folder`."""
    of_upstream = tree()
    assert of_upstream is not None
    for name, text in _STAND_INS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copy(of_upstream / "scripts" / "train_pytorch.py", folder / "train_pytorch.py")
    shutil.copy(of_upstream / "src" / "openpi" / "training" / "data_loader.py", folder / "openpi" / "training")


def start(folder: Path, name: str, before: list[str], *flags: str) -> list[str]:
    """Run `python BEFORE train_pytorch.py NAME`; return its log's lines without times."""
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"DDPSHIM_ROWS": "all", "PYTHONPATH": path}
    said = ran([*before, "train_pytorch.py", name, *flags], folder, DEADLINE_S, variables)
    return re.findall(r"step=\d+ loss=\S+ lr=\S+ grad_norm=\S+", said)


def under_run(num_ranks: int) -> list[str]:
    """Return the arguments before the trainer's, to start it on `num_ranks` ranks."""
    return ["-m", "ddpshim", "run", f"--nproc={num_ranks}", "--log-dir=logs"]


def weights(folder: Path, name: str, step: int = STEPS - 1) -> tuple[dict[str, torch.Tensor], ...]:
    """Return the weights of a checkpoint, and the optimizer's moments."""
    from safetensors.torch import load_file

    at = folder / "checkpoints" / name / str(step)
    moments = torch.load(at / "optimizer.pt", weights_only=False)["state"]
    return (
        load_file(at / "model.safetensors"),
        {f"{i} {key}": value for i, kept in moments.items() for key, value in kept.items()},
    )


def rows(folder: Path, ranks: list[int]) -> Iterator[list[str]]:
    """Train in all ways, and yield the rows of the table."""
    copy_tree(folder)

    def train(
        name: str, before: list[str], *flags: str
    ) -> tuple[list[str], list[str], tuple[dict[str, torch.Tensor], ...]]:
        """Return the lines of the log, those of W&B, and the weights and moments."""
        (folder / "wandb.jsonl").unlink(missing_ok=True)
        log = start(folder, name, before, *flags)
        sent = [json.loads(line) for line in (folder / "wandb.jsonl").read_text().splitlines()]
        losses = [f"{line['step']} {line['loss']:.5f}" for line in sent if "loss" in line]
        return log, losses, weights(folder, name)

    def row(text: str, own: Any, plain: Any) -> list[str]:
        moved = largest_difference(weights(folder, "plain", LEFT_AT)[0], plain[2][0])
        differences = map(largest_difference, own[2], plain[2])
        assert own[0], "nothing was logged"
        same = (
            "same text" if own[0] == plain[0] else "**differs**",
            "one run" if own[1] == plain[1] else "**differs**",
        )
        return [text, f"{moved:.0e}", *(shown(by, 1e-6) for by in differences), *same]

    plain = train("plain", [])
    for n in ranks:
        (folder / "checkpoints" / f"on{n}").mkdir(parents=True)
        yield row(f"{n} ranks, `--overwrite`", train(f"on{n}", under_run(n), "--overwrite"), plain)
    for name in ("plain", f"on{ranks[0]}"):
        last = shutil.ignore_patterns(str(STEPS - 1))
        shutil.copytree(folder / "checkpoints" / name, folder / "checkpoints" / f"{name}-resumed", ignore=last)
    alone = train("plain-resumed", [], "--resume")
    resumed = train(f"on{ranks[0]}-resumed", under_run(ranks[-1]), "--resume")
    yield row(f"{ranks[0]} ranks to step {LEFT_AT}, resumed on {ranks[-1]}; one process resumed", resumed, alone)


def main() -> None:
    parser = pages.parser(__doc__)
    args = parser.parse_args()
    if tree() is None:
        parser.exit(1, f"no openpi: put its tree at commit 15a9616 into $DDPSHIM_UPSTREAM/{TREE}\n")
    columns = ["run", "moved by training", "weights", "optimizer", "log", "W&B"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        lines = pages.table(columns, rows(folder, [int(n) for n in args.ranks.split(",")]))
    made = f"torch {torch.__version__}, gloo on CPU, {STEPS} steps of 8 samples."
    pages.finish([*lines, "", made], args.write, START, END)


if __name__ == "__main__":
    main()
