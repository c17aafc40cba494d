"""LeRobot's trainer, unedited: what the hooks refuse, what ranks log, and where LeRobot is installed a training."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from ddpshim.errors import HookError
from ddpshim.job.group import cleanup, setup
from ddpshim.lerobot import ranks, stand_ins
from ddpshim.trainers.unedited import accelerators
from tests import lerobot_equivalence as real
from tests.ranks import run_ranks

TRAINER = """
def update_policy(train_metrics, policy, batch, optimizer, grad_clip_norm, accelerator, lr_scheduler=None, lock=None):
    accelerator.backward(batch)
def load_training_state(checkpoint_dir, optimizer, scheduler): ...
def save_checkpoint(checkpoint_dir, step, cfg, policy, optimizer, scheduler, preprocessor, postprocessor): ...
def eval_policy_all(): ...
def train(cfg, accelerator=None):
    look(sys._getframe())
    Accelerator().prepare(cfg)
"""


class Accelerator:
    """Has the names that accelerate's has, as far as they matter here."""

    prepare = backward = gather = None


Accelerator.__module__ = "accelerate.accelerator"


def call_train(source: str, *arguments: Any, **names: Any) -> None:
    """Have the hooks look at `train` of `source` when it is called."""
    look = stand_ins._refuse_unknown_trainer
    module: dict[str, Any] = {"__name__": "mine", "sys": sys, "look": look, "Accelerator": Accelerator, **names}
    exec(source, module)
    module["train"]("config", *arguments)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("Accelerator().prepare", "Accelerator().gather"), "asks its Accelerator for gather, which the hooks do not"),
        (("def update_policy(", "def step("), "its module has no update_policy: it is not the trainer that the hooks"),
        (("(checkpoint_dir, optimizer, scheduler)", "(checkpoint_dir, optimizer)"), "'scheduler' is missing"),
        (("lock=None", "lock=None, scaler=None"), "'scaler' is new to them"),
    ],
)
def test_a_trainer_that_is_not_known_is_refused_by_name(change: tuple[str, str], said: str) -> None:
    with pytest.raises(HookError, match=said):
        call_train(TRAINER.replace(*change))


@pytest.mark.unit
def test_somebody_elses_accelerator_is_refused() -> None:
    with pytest.raises(HookError, match="was given an Accelerator; it has joined its own process group"):
        call_train(TRAINER, Accelerator)
    with pytest.raises(HookError, match="something else has replaced it"):
        call_train(TRAINER, Accelerator=dict)
    with pytest.raises(TypeError, match="not callable"):  # known: it goes on, to a `prepare` that is None
        call_train(TRAINER)


@pytest.mark.unit
def test_accelerate_sees_no_launcher_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "RANKING"):
        monkeypatch.setenv(name, "1")
    with accelerators.in_one_process():
        assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"} & os.environ.keys()
    assert {os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")} == {"1"}


def _rank_updates() -> Any:
    here = setup()

    def original(train_metrics: Any, batch: torch.Tensor) -> Any:
        train_metrics.loss, train_metrics.lr = float(batch.mean()), 0.1
        return train_metrics, {"l1": float(batch.max()), "kind": "text", "scalar": batch.sum(), "each": batch}

    tracker = types.SimpleNamespace()
    try:
        returned, output = ranks.update_policy(original)(tracker, torch.tensor([1.0, 2.0]) + 10 * here.rank)
        assert returned is tracker
        each = output.pop("each").tolist()
        return vars(tracker), {key: value if key == "kind" else float(value) for key, value in output.items()}, each
    finally:
        cleanup()


@pytest.mark.ranks
def test_what_is_logged_is_of_the_whole_batch() -> None:
    for rank, (noted, output, own) in enumerate(run_ranks(_rank_updates, 2)):
        assert noted == {"loss": 6.5, "lr": 0.1}
        assert output == {"l1": 7.0, "kind": "text", "scalar": 13.0}
        assert own == [1.0 + 10 * rank, 2.0 + 10 * rank]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not real.is_there():
        pytest.skip(real.HOW_TO_GET)
    made = tmp_path_factory.mktemp("lerobot")
    real.make_data(made)
    real.make_backbone(made)
    return made


def _check(row: list[str]) -> None:
    _, name, moved, weights, optimizer, *same = row
    assert same == ["same text", "same", "same"], name
    assert float(moved) > 1e-4
    assert float(weights) < 1e-6
    assert float(optimizer) < 1e-5


@pytest.mark.launch
def test_smolvla_on_ranks_is_that_of_one_process(folder: Path) -> None:
    for row in real.rows("smolvla", folder, [2, 4]):
        _check(row)


REFUSED: dict[str, Callable[[], list[str]]] = {
    "use_rabc on several ranks": lambda: real.settings("act", "--use_rabc=true"),
    "dataset.streaming on several ranks": lambda: real.settings("act", "--dataset.streaming=true"),
}


@pytest.mark.launch
@pytest.mark.parametrize("said", REFUSED)
def test_what_ranks_would_do_otherwise_is_refused(folder: Path, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        real.start(folder, "refused", real.under_run(2), *REFUSED[said]())
    assert not (folder / "refused").exists()
