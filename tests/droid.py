"""Runs the trainers of DROID on the CPU, with small data in their formats and stand-ins for missing packages.

`python -m tests.droid FOLDER SCRIPT [its arguments]` is one process of a training: SCRIPT (train or train_rlds of
robomimic.scripts) as it is in the tree; each rank records the samples of its rows, its noise and networks.

DistilBERT is small here, with random weights; modules of tensorflow, octo, cv2 and transformers that are not installed
are replaced by ones that do nothing. With IN_FLOAT64 everything is computed in float64. FAIL_AT or SIGNAL_AT
(rank:number) is the sample of a rank at which it fails, or gets SIGUSR1.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import random
import runpy
import signal
import sys
import types
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import numpy as np
import torch

import ddpshim
from ddpshim.trainers import patching
from evidence.equivalence import DATA, ROOT, Run, set_dotted
from examples.recorded_train import record_samples
from tests import trainer
from tests.preloaded import start_afresh

DROID, FORK = "droid_policy_learning/9a29c83", "yufengjin_droid_policy_learning/fdbdf4a"  # patch sets
TREES = {DROID: "droid-9a29c83", FORK: "yufengjin-fdbdf4a"}  # sub-folders of DDPSHIM_UPSTREAM, beside octo and dlimp
RUN_DEADLINE_S = 240
IMAGE_SIZE = 16
CAMERAS = ["camera/image/varied_camera_1_left_image", "camera/image/varied_camera_2_left_image"]
LOW_DIM = ["robot_state/cartesian_position", "robot_state/gripper_position", "lang_fixed/language_distilbert"]
ACTIONS = {"action/abs_pos": 3, "action/abs_rot_6d": 6, "action/gripper_position": 1}
BATCH_SIZE = 8
WAYS = ("patched", "two lines", "unedited", "plain")  # on disk, by the first patch alone, in memory, not at all
_STAND_INS = [
    *("cv2", "scipy", "scipy.spatial", "scipy.spatial.transform", "transformers", "tensorflow"),
    *("tensorflow_graphics", "tensorflow_graphics.geometry", "tensorflow_graphics.geometry.transformation"),
    *("octo", "octo.data", "octo.data.dataset", "octo.data.utils", "octo.data.utils.data_utils"),
    *("octo.utils", "octo.utils.spec"),
]


def source(patch_set: str) -> Optional[Path]:
    """Return the folder with the `robomimic` package that a patch set is for, or None if it is not available."""
    tree = Path(os.environ.get("DDPSHIM_UPSTREAM", "/nowhere")) / TREES[patch_set]
    return tree if (tree / "robomimic").is_dir() else None


def make_data(folder: Path, num_trajectories: int = 4) -> list[str]:
    """Write trajectories of Lift in the format of DROID's converted HDF5 files, one file each; images are noise."""
    import h5py

    noise, paths = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(DATA) as given:
        for number in range(num_trajectories):
            demo = given[f"data/demo_{number}"]
            position, length = demo["obs/robot0_eef_pos"][()], len(demo["actions"])
            low_dim = {
                "robot_state/cartesian_position": np.concatenate([position, demo["actions"][:, 3:6]], axis=1),
                "robot_state/gripper_position": demo["obs/robot0_gripper_qpos"][:, 0],
                "lang_fixed/language_distilbert": np.tile(noise.normal(size=4), (length, 1)),
                "action/abs_pos": demo["actions"][:, :3],
                "action/abs_rot_6d": np.concatenate([demo["actions"][:, 3:6], position], axis=1),
                "action/gripper_position": demo["actions"][:, 6:],
            }
            paths.append(str(folder / f"trajectory_{number}.h5"))
            with h5py.File(paths[-1], "w") as made:
                for key, value in low_dim.items():
                    made[key if key in ACTIONS else f"observation/{key}"] = value.astype(np.float64)
                for key in [*CAMERAS, "camera/image/hand_camera_left_image"]:
                    shape = (length, IMAGE_SIZE, IMAGE_SIZE, 3)
                    made[f"observation/{key}"] = noise.integers(0, 256, shape, dtype=np.uint8)
                made["observation/lang_fixed/language_raw"] = np.array([[b"lift the cube"]] * length)
    return paths


def make_config(tree: Path, folder: Path, **extra: Any) -> dict[str, Any]:
    """Return a config from the tree's own template; `extra` overrides by dotted path ('__' for '.')."""
    config: dict[str, Any] = json.loads((tree / "robomimic/exps/templates/diffusion_policy.json").read_text())
    crop = {"crop_height": IMAGE_SIZE - 2, "crop_width": IMAGE_SIZE - 2, "num_crops": 1, "pos_enc": False}
    settings = {
        "experiment.name": "droid",
        "experiment.rollout.enabled": False,
        "experiment.epoch_every_n_steps": 5,
        "experiment.save.every_n_epochs": 2,
        "experiment.logging.log_tb": False,
        "train.data_format": "droid",
        "train.output_dir": str(folder / "out"),
        "train.num_epochs": 2,
        "train.batch_size": BATCH_SIZE,
        "train.cuda": False,
        "train.hdf5_cache_mode": None,
        "train.action_keys": list(ACTIONS),
        "train.action_shapes": [[1, size] for size in ACTIONS.values()],
        "train.dataset_keys": [],
        "train.action_config": {key: {"normalization": "min_max"} for key in ACTIONS},
        "algo.noise_samples": 2,
        "observation.image_dim": [IMAGE_SIZE, IMAGE_SIZE],
        "observation.modalities.obs.low_dim": LOW_DIM,
        "observation.modalities.obs.rgb": CAMERAS,
        "observation.encoder.rgb.core_kwargs": {
            "feature_dimension": 8,
            "flatten": True,
            "backbone_class": "ShallowConv",
            "backbone_kwargs": {},
            "pool_class": None,
            "pool_kwargs": {},
        },
        "observation.encoder.rgb.obs_randomizer_class": ["ColorRandomizer", "CropRandomizer"],
        "observation.encoder.rgb.obs_randomizer_kwargs": [{}, crop],
        **{key.replace("__", "."): value for key, value in extra.items()},
    }
    set_dotted(config, settings)
    return config


def copy_tree(patch_set: str, folder: Path, way: str = "patched") -> Path:
    """Copy the package that a set is for under `folder`, for a `way` of WAYS."""
    found = source(patch_set)
    assert found is not None
    tree = folder / f"{TREES[patch_set]}-{way.replace(' ', '-')}"
    if not tree.exists():
        names = [p for p in (found / "robomimic").rglob("*") if p.suffix in (".py", ".json", ".yaml")]
        for path in names:
            made = tree / path.relative_to(found)
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_bytes(path.read_bytes())
        # Upstream reads this file if it exists, and one tree was published with its author's file.
        (tree / "robomimic" / "macros_private.py").write_text("WANDB_ENTITY = WANDB_API_KEY = None\n")
        if way == "patched":
            patching.apply(str(tree), set_name=patch_set)
        elif way == "two lines":
            whole = next(each for each in patching.load_sets() if each.name == patch_set)
            first = {name: hunks for name, hunks in whole.patches.items() if name.endswith("01-two-lines.patch")}
            for name in {hunk.path for hunks in first.values() for hunk in hunks}:
                path = tree / name
                path.write_bytes(patching.transform(first, name, path.read_bytes(), "patched")[0])
    return tree


def train(
    tree: Path,
    config: dict[str, Any],
    folder: Path,
    num_ranks: Optional[int],
    environ: Optional[dict[str, str]] = None,
    check: bool = True,
    script: str = "train",
) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, "train": {**config["train"], "output_dir": str(folder / "out")}}
    (folder / "config.json").write_text(json.dumps(config))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    given = ["--config", str(folder / "config.json")] if script == "train" else [f"load_from={folder}/config.json"]
    arguments = [*(torchrun if num_ranks else []), "-m", "tests.droid", str(folder), script, *given]
    code, output = start_afresh(arguments, {**environ_of(tree), **(environ or {})}, folder, RUN_DEADLINE_S)
    files = [folder / f"observed_{rank}.pt" for rank in (range(num_ranks) if num_ranks else ["plain"])]
    if check and (code or "finished run successfully" not in output):
        raise RuntimeError(f"training in {folder} ended with {code}:\n{output[-6000:]}")
    observed = [torch.load(f, weights_only=False) for f in files if f.exists()]
    return Run(observed, folder, output, code)


def environ_of(tree: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    upstream = Path(os.environ.get("DDPSHIM_UPSTREAM", "/nowhere"))
    where = os.pathsep.join(map(str, [tree, ROOT, upstream / "octo", upstream / "dlimp"]))
    here = {trainer.UNEDITED: "unedited"} if tree.name.endswith("-unedited") else {}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    return {**inherited, "PYTHONPATH": where, "PYTHONDONTWRITEBYTECODE": "1", **quiet, **here}


class Tokens(dict):  # type: ignore[type-arg]
    def to(self, device: Any) -> Tokens:
        return Tokens({key: value.to(_there(device)) for key, value in self.items()})


class Tokenizer:
    """One token for each word, and padding to the longest text, or to `max_length`."""

    def __call__(self, texts: Any, padding: Any = False, max_length: int = 0, **options: Any) -> Any:
        words = [[1 + sum(map(ord, word)) % 98 for word in text.split()] for text in texts]
        if not padding:
            return {"input_ids": words}
        longest = max_length if padding == "max_length" else max(map(len, words))
        ids = torch.tensor([line + [0] * (longest - len(line)) for line in words])
        return Tokens(input_ids=ids, attention_mask=(ids > 0).long())


def _language_model(*args: Any, **options: Any) -> Any:
    """Return DistilBERT with random weights: the real class if it is installed, otherwise one with its interface."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if isinstance(sys.modules["transformers"], mock.NonCallableMock):
            made: Any = _LanguageModel()
        else:
            from transformers import DistilBertConfig, DistilBertModel

            made = DistilBertModel(DistilBertConfig(vocab_size=100, dim=768, n_layers=1, n_heads=2, hidden_dim=32))
        move = made.to
        made.to = lambda place: move(_there(place))
        return made.half().eval()


def _there(device: Any) -> Any:
    """Return the device; the CPU if upstream names a GPU and there is none."""
    return device if torch.cuda.is_available() else "cpu"


class _LanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(100, 768)

    @property
    def device(self) -> torch.device:
        return self.words.weight.device

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return types.SimpleNamespace(last_hidden_state=self.words(input_ids))


def install_stand_ins() -> None:
    """Replace modules that are not installed, and make a language model without a download."""
    has_tensorflow = importlib.util.find_spec("tensorflow") is not None  # octo cannot work without it
    absent = [
        name
        for name in _STAND_INS
        if importlib.util.find_spec(name.split(".")[0]) is None or (name.startswith("octo") and not has_tensorflow)
    ]
    for name in absent:
        sys.modules[name] = mock.NonCallableMagicMock(name=name, __spec__=importlib.machinery.ModuleSpec(name, None))
    import transformers

    transformers.AutoTokenizer.from_pretrained = lambda *args, **options: Tokenizer()
    transformers.AutoModel.from_pretrained = _language_model


def observe(folder: str, script: str, arguments: list[str]) -> None:
    from tests.observed import _in_float64, _with_small_unet

    rank = os.environ.get("RANK", "plain")  # a program on ranks does not see it
    install_stand_ins()
    trainer.activate()
    import robomimic.algo as algorithms
    import robomimic.algo.diffusion_policy as diffusion_policy

    if "IN_FLOAT64" in os.environ:
        _in_float64()
    out: dict[str, Any] = {"samples": [], "devices": [str(diffusion_policy.lang_model.device)]}
    models = []
    make = algorithms.algo_factory

    def observed_factory(**options: Any) -> Any:
        random.seed(0)  # upstream changes colours without a seed
        model = make(**options)
        models.append(model)
        out["initial"] = networks(model)
        return model

    def fetched(key: str, index: int) -> None:
        out["samples"].append(index)
        here = f"{rank}:{len(out['samples'])}"
        if os.environ.get("FAIL_AT") == here:
            raise ValueError(f"sample {index}")
        if os.environ.get("SIGNAL_AT") == here:
            os.kill(os.getpid(), signal.SIGUSR1)

    record_samples(fetched)
    algorithms.algo_factory = observed_factory
    _with_small_unet()
    sys.argv = [f"{script}.py", *arguments]
    runpy.run_module(f"robomimic.scripts.{script}", run_name="__main__", alter_sys=True)
    out["networks"], out["noise"] = networks(models[0]), torch.randn(4)
    ddpshim.cleanup()  # until then the main rank alone writes
    torch.save(out, os.path.join(folder, f"observed_{rank}.pt"))


def networks(model: Any) -> dict[str, torch.Tensor]:
    parts = model.serialize()
    return {f"{part}.{key}": value.clone() for part in ("nets", "ema") for key, value in parts[part].items()}


if __name__ == "__main__":
    observe(sys.argv[1], sys.argv[2], sys.argv[3:])
