"""openpi's PyTorch trainer, unedited: what the hooks refuse, and where openpi's files are, a training."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpshim.errors import HookError
from ddpshim.openpi import stand_ins
from ddpshim.trainers.swapping import swap_back
from tests import openpi_equivalence as real

CONFIG = "def cli():\n    return 'config'\n"
TRAINER = "\n".join(
    ["import torch", "def train_loop(config): ...", "def main():\n    return config.cli()"]
    + [f"def {name}({', '.join(parameters.split())}): ..." for name, parameters in stand_ins.FUNCTIONS.items()]
)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    made = types.ModuleType(stand_ins.CONFIG)
    exec(CONFIG, vars(made))
    monkeypatch.setitem(sys.modules, stand_ins.CONFIG, made)
    for name in ("openpi.training.data_loader", "openpi.models_pytorch.pi0_pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["openpi.models_pytorch.pi0_pytorch"].PI0Pytorch = object  # type: ignore[attr-defined]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert stand_ins.at_config.hook([made]) == [
        "openpi.training.config.cli: joins the job; the batch, the noise, the log and the checkpoints of one process"
    ]
    yield made
    swap_back()


def call_main(config: Any, source: str) -> Any:
    names: dict[str, Any] = {"__name__": "train_pytorch", "config": config}
    exec(source, names)
    return names["main"]()


@pytest.mark.unit
def test_a_trainer_that_is_not_known_is_refused_by_name(config: Any) -> None:
    with pytest.raises(HookError, match="it has no build_datasets, and only a part of it would be distributed"):
        call_main(config, TRAINER.replace("def build_datasets", "def make"))
    with pytest.raises(HookError, match="'rank' is new to them; 'local_rank' is missing"):
        call_main(config, TRAINER.replace("local_rank", "rank"))
    with pytest.raises(HookError, match=r"data_loader.create_torch_data_loader is None, not a plain function"):
        call_main(config, TRAINER)


@pytest.mark.unit
def test_without_a_launcher_or_from_elsewhere_nothing_changes(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call_main(config, TRAINER.replace("def train_loop", "def other")) == "config"  # some other program
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert call_main(config, TRAINER) == "config"


@pytest.mark.launch
def test_on_ranks_it_is_the_training_of_one_process(tmp_path: Path) -> None:
    if real.tree() is None:
        pytest.skip(real.HOW_TO_GET)
    for name, moved, weights, optimizer, log, wandb in real.rows(tmp_path, [2, 4]):
        assert (log, wandb) == ("same text", "one run"), name
        assert float(moved) > 1e-3
        assert max(float(weights), float(optimizer)) < 1e-6
