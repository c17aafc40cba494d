"""Runs robomimic's trainer unchanged, and records each rank's samples and final networks.

Started by evidence/equivalence.py:

- `python -m tests.observed FOLDER PRECISION [trainer arguments]` is one process of a training;
- `python -m tests.observed --load FILE` loads checkpoints in a process that cannot import ddpshim.

DDPSHIM_FAULT names a fault (see tests/faults.py). With OBSERVED_CLOCK the clock counts calls and samples instead of
seconds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

import ddpshim
from ddpshim.process.random_streams import global_states
from examples.recorded_train import record_samples
from tests import faults, trainer


def _in_float64() -> None:
    """Make robomimic compute in float64 where it casts to float32, to distinguish rounding from errors."""
    import robomimic.utils.tensor_utils as TensorUtils

    torch.set_default_dtype(torch.float64)
    torch.nn.Module.float = torch.nn.Module.double  # type: ignore[method-assign]
    TensorUtils.to_float = lambda x: TensorUtils.recursive_dict_list_tuple_apply(
        x, {torch.Tensor: torch.Tensor.double, np.ndarray: lambda a: a.astype(np.float64), type(None): lambda n: n}
    )


class _Clock:
    """Replaces both clocks of a process: a microsecond passes at each call, a millisecond for each fetched sample."""

    def __init__(self) -> None:
        self._ticks = int(time.time()) << 20  # in 2**-20 s, so that sums are exact
        time.time = time.perf_counter = self._read

    def _read(self) -> float:
        self._ticks += 1
        return self._ticks / 2**20

    def fetched(self) -> None:
        self._ticks += 1 << 10


def _write_down_networks(out: dict[str, Any]) -> None:
    import robomimic.algo

    factory = robomimic.algo.algo_factory

    def observed_factory(*args: Any, **options: Any) -> Any:
        out["model"] = model = factory(*args, **options)
        out["initial"] = networks(model)
        torch.set_num_threads(1)  # with small networks on busy cores, threads are ten times slower
        return model

    robomimic.algo.algo_factory = observed_factory


class _Noted:
    """A loader that records the indices of each batch; also with workers and datasets of datasets."""

    def __init__(self, loader: Any, batches: list[list[int]]) -> None:
        self._loader, self._batches = loader, batches

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        return map(self._note, self._loader)

    def _note(self, batch: Any) -> Any:
        if "index" in batch:
            self._batches.append(batch["index"].tolist())
        return batch


def _write_down_data(out: dict[str, Any]) -> None:
    """Record each phase's batches in order, and the normalisation statistics."""
    import robomimic.utils.train_utils as TrainUtils

    run_epoch, fetch = TrainUtils.run_epoch, _MapDatasetFetcher.fetch
    batches = out.setdefault("batches", {"Train": [], "Validation": []})

    def observed_run_epoch(*, data_loader: Any, **options: Any) -> Any:
        if options.get("validate"):
            return run_epoch(data_loader=_Noted(data_loader, batches["Validation"]), **options)
        actions = getattr(data_loader.dataset, "action_normalization_stats", None)
        out["statistics"] = {"obs": options["obs_normalization_stats"], "action": actions}
        return run_epoch(data_loader=_Noted(data_loader, batches["Train"]), **options)

    def indexed(fetcher: Any, indices: list[int]) -> Any:
        batch = fetch(fetcher, indices)
        if isinstance(batch, dict):
            batch.setdefault("index", torch.tensor(indices))  # as 0.5.0 does; 0.3.0 and 0.4.0 don't
        return batch

    TrainUtils.run_epoch, _MapDatasetFetcher.fetch = observed_run_epoch, indexed


def _with_small_unet() -> None:
    """Make the diffusion policy's UNet small: it has 66M parameters with any config, too many for a test."""
    for module in ("robomimic.models.diffusion_policy_nets", "robomimic.algo.diffusion_policy"):
        try:
            holder: Any = importlib.import_module(module)
        except ImportError:
            continue
        if hasattr(holder, "ConditionalUnet1D"):
            holder.ConditionalUnet1D = functools.partial(
                holder.ConditionalUnet1D, down_dims=[16, 32], n_groups=4, diffusion_step_embed_dim=16
            )


def _with_act() -> None:
    """Make act train, on a CPU and without network access.

    Its package moves the network to a GPU, and downloads a backbone in the main process only; its config in the
    robocasa branch at 271a76c lacks a key that every algorithm there requires.
    """
    if importlib.util.find_spec("act") is None:
        return
    import torchvision
    from robomimic.config import ACTConfig

    algo_config = ACTConfig.algo_config

    def completed(config: Any) -> None:
        algo_config(config)
        config.algo.language_conditioned = False

    ACTConfig.algo_config = completed

    def downloaded(weights: Any, **options: Any) -> dict[str, torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            state: dict[str, torch.Tensor] = torchvision.models.resnet18().state_dict()
        return state

    torchvision.models.ResNet18_Weights.get_state_dict = downloaded
    if not torch.cuda.is_available():
        torch.nn.Module.cuda = lambda module, device=None: module  # type: ignore[method-assign]
        torch.Tensor.cuda = lambda tensor: tensor  # type: ignore[assignment, method-assign]


def networks(model: Any) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of an Algo and its inner ones by name: networks, targets and the EMA."""
    from ddpshim.robomimic.session import algos

    out = {}
    for number, algo in enumerate(algos(model)):
        modules = {"": algo.nets}
        if getattr(algo, "ema", None) is not None:
            modules["ema."] = algo.ema.averaged_model
        for prefix, module in modules.items():
            out.update({f"{number}.{prefix}{key}": value.clone() for key, value in module.state_dict().items()})
    return out


def moments(model: Any) -> dict[str, torch.Tensor]:
    """Return the optimizer state of an Algo and its inner ones, by name."""
    from ddpshim.robomimic.session import algos

    out = {}
    for number, algo in enumerate(algos(model)):
        for name, optimizer in flat(algo.optimizers).items():
            for listed, one in enumerate(optimizer if isinstance(optimizer, list) else [optimizer]):
                held = flat({f"{number}.{name}.{listed}": one.state_dict()["state"]} if one is not None else {})
                out.update({key: value for key, value in held.items() if isinstance(value, torch.Tensor)})
    return out


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {name: leaf for key, value in tree.items() for name, leaf in flat(value, f"{prefix}{key}.").items()}


def observe(folder: str, precision: str, arguments: list[str]) -> None:
    rank = os.environ.get("RANK", "plain")
    out: dict[str, Any] = {}
    trainer.activate()
    if precision == "float64":
        _in_float64()
    _with_small_unet()
    _with_act()
    samples, clock = out.setdefault("samples", {}), _Clock() if "OBSERVED_CLOCK" in os.environ else None

    def fetched(key: str, index: int) -> None:
        samples.setdefault(key, []).append(index)
        if clock is not None:
            clock.fetched()

    record_samples(fetched)
    _write_down_data(out)
    _write_down_networks(out)
    if "DDPSHIM_FAULT" in os.environ:
        faults.install()
    sys.argv = ["train.py", *arguments]
    trainer.run_trainer()
    out["states"] = global_states()
    out["networks"], out["moments"] = networks(out["model"]), moments(out.pop("model"))
    ddpshim.cleanup()  # until then the main rank alone writes
    torch.save(out, os.path.join(folder, f"observed_{rank}.pt"))


def load(checkpoints: list[str]) -> dict[str, str]:
    """Return, for each checkpoint, "yes" if this release loads it with its weights, otherwise the problem."""
    sys.modules["ddpshim"] = None  # type: ignore[assignment]
    import robomimic.utils.file_utils as FileUtils

    torch.load = functools.partial(torch.load, weights_only=False)
    _with_small_unet()
    _with_act()
    found = {}
    for path in checkpoints:
        try:
            policy, held = FileUtils.policy_from_checkpoint(ckpt_path=path, device=torch.device("cpu"))
            loaded = policy.policy.serialize()
            found[path] = "yes" if _same_weights(loaded, held["model"]) else "loads other weights"
        except Exception as error:
            found[path] = f"{type(error).__name__}: {error}"[:300]
    return found


def _same_weights(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        names = [name for name in one if "optim" not in name and "lr_" not in name]
        return bool(names) and all(name in other and _same_weights(one[name], other[name]) for name in names)
    return torch.equal(one, other.to(one.dtype)) if isinstance(one, torch.Tensor) else True


def main() -> None:
    if sys.argv[1] == "--load":
        found = load(json.loads(Path(sys.argv[2]).read_text()))
        Path(sys.argv[2]).with_suffix(".found.json").write_text(json.dumps(found))
    else:
        folder, precision, *arguments = sys.argv[1:]
        observe(folder, precision, arguments)


if __name__ == "__main__":
    main()
