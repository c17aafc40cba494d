"""robomimic's robocasa branch, patched: what it does otherwise than the releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import pytest
import torch

from evidence.equivalence import Run, copy_release, largest_difference, source, train
from tests.robomimic import Trainer, check_statistics, check_weights, episodes, noted, statistics, trainings
from tests.robomimic.test_rollout import NUM_EPISODES, SETTINGS

pytestmark = [pytest.mark.robomimic, pytest.mark.upstream]
RELEASE = "robocasa"
TRAINER = "robomimic.scripts.train"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> Trainer:
    return trainings(tmp_path_factory.mktemp("robocasa"), releases, RELEASE, 5)


def test_without_a_launcher_it_is_the_unpatched_program(trainer: Trainer) -> None:
    plain, patched = (trainer("bc_language", None, patched=p, module=TRAINER) for p in (False, True))
    assert len(plain.losses()) == 2
    assert patched.losses() == plain.losses()
    check_weights(plain, patched)


def test_act_with_a_backbone_that_one_rank_loads(trainer: Trainer) -> None:
    found = source(RELEASE)
    if found is None or not (found / "act" / "detr").is_dir():
        pytest.skip("tonyzhaozh/act at 73071e1, a submodule of the branch, is not beside it under DDPSHIM_UPSTREAM")
    one, two = (trainer("act", n, steps=2, epochs=1) for n in (1, 2))
    assert all(observed["batches"]["Train"] == one.observed[0]["batches"]["Train"] for observed in two.observed)
    start, alone = one.observed[0]["initial"], one.observed[0]["networks"]
    moved = [key for key in start if not torch.equal(start[key], alone[key])]
    assert any("backbone" in key for key in moved)
    # Rounding is all that the gradient of a key's bias is, and Adam scales it up.
    compared = [key for key in alone if not key.endswith("in_proj_bias")]
    main, other = (observed["initial"] for observed in two.observed)
    assert largest_difference(main, start) == 0
    assert all("backbone" in key for key in start if not torch.equal(start[key], other[key])), "until its first step"
    assert not all(torch.equal(start[key], other[key]) for key in start), "both ranks have loaded it"
    for observed in two.observed:
        assert largest_difference(observed["networks"], two.observed[0]["networks"]) == 0
        assert (
            largest_difference({k: observed["networks"][k] for k in compared}, {k: alone[k] for k in compared}) < 1e-5
        )
    assert two.losses() == pytest.approx(one.losses(), rel=1e-5)


ROLLOUTS = {**SETTINGS, "steps": 1, "epochs": 2, "experiment__env": "Toy"}
BATCHED = {"experiment__rollout__batched": True, "experiment__rollout__num_batch_envs": 2, "train__batch_size": 96}


def _evaluate(trainer: Trainer, num_ranks: Optional[int], fault: str = "toy_env::0", **more: Any) -> Run:
    """A training that learns nothing, with rollouts."""
    return trainer("bc_gmm", num_ranks, fault=fault, module="tests.faults", **{**ROLLOUTS, **more})


def test_environments_made_in_turn_are_played_by_all_ranks(trainer: Trainer) -> None:
    one, two = (_evaluate(trainer, n) for n in (1, 2))
    (alone,) = episodes(one)
    assert len(alone) == 2 * NUM_EPISODES
    for rank, played in enumerate(episodes(two)):
        assert played == [alone[e * NUM_EPISODES + i] for e in (0, 1) for i in range(rank, NUM_EPISODES, 2)]
    check_statistics(one, two)
    first, second = ([draws[0] for draws in alone[e * NUM_EPISODES :][:NUM_EPISODES]] for e in (0, 1))
    assert first == second, "as upstream, every evaluation starts from the states of one seed"
    assert len(set(first)) == NUM_EPISODES
    for written in noted(two):
        assert [line for line in written if line[0] != "e"] == ["made", "closed"] * 2
    best = statistics(one)[0]["Success_Rate"]
    assert 0 < best < 1
    assert f"model_epoch_1_Toy_success_{best}.pth" in [p.name for p in two.folder.glob("out/*/*/models/*.pth")]


def test_several_episodes_at_once_are_dealt_to_the_ranks(trainer: Trainer) -> None:
    one, two = (_evaluate(trainer, n, **BATCHED) for n in (1, 3))
    (alone,) = episodes(one)
    assert len(alone) == 2 * 6, "three turns of two"
    assert len(set(alone)) == 6, "both evaluations, and no others"
    played = episodes(two)
    assert [len(rank) for rank in played] == [4, 4, 4]
    assert sorted(draws for rank in played for draws in rank) == sorted(alone)
    check_statistics(one, two)


def test_without_a_launcher_rollouts_are_upstreams_function(trainer: Trainer) -> None:
    plain, patched = (_evaluate(trainer, None, patched=p, train__seed=3) for p in (False, True))
    assert [draws[0] for draws in episodes(plain)[0]] == [draws[0] for draws in episodes(patched)[0]]
    at_once = _evaluate(trainer, None, **BATCHED)
    assert len(statistics(at_once)) == 2


def test_a_failing_episode_ends_its_evaluation_and_no_more(trainer: Trainer) -> None:
    run = _evaluate(trainer, 2, fault="toy_env:1:2")
    text = "RolloutError: environment 'Toy', episode 3 failed on rank 1 (ValueError: the toy broke on purpose ("
    assert run.log.count(text) == run.log.count("Rollout exception at episode number 3!") == 2
    assert ", in reset\n" in run.log, "the environment's own traceback is gone"
    check_statistics(_evaluate(trainer, 2, experiment__rollout__n=3), run)


def test_of_a_first_episode_that_fails_there_are_no_statistics(trainer: Trainer) -> None:
    run = _evaluate(trainer, 2, fault="toy_env:0:1")
    assert statistics(run) == [{"Return": -1, "Success_Rate": -1, "Time_Episode": -1, "time": -1}] * 2


def test_a_training_that_was_left_goes_on_in_its_directory(trainer: Trainer, releases: Path) -> None:
    whole = trainer("bc", 2)
    left = trainer("bc", 2, fault="SIGUSR1@model:1:3", module="tests.faults", check=False)
    assert "stopping with exit code 75" in left.log
    again = train(
        copy_release(RELEASE, releases),
        left.folder / "config.json",
        left.folder,
        2,
        environ={"DDPSHIM_RESUME": "always"},
    )
    assert "ddpshim: resuming at epoch" in again.log
    for observed in again.observed:
        assert largest_difference(observed["networks"], whole.observed[0]["networks"]) == 0
    assert again.losses()[-1] == pytest.approx(whole.losses()[-1], rel=1e-6)
    (parent,) = again.folder.glob("out/*/*")
    names = ["config.json", "ddpshim", "logs", "models", "resume.finished", "videos", "vis"]
    assert sorted(p.name for p in parent.iterdir()) == names
