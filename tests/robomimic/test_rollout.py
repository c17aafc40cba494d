"""Evaluation split over the ranks, through the real patched trainer and an environment without a simulator."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable

import h5py
import numpy as np
import pytest
import torch

import ddpshim
from ddpshim.checkpoint import resume
from ddpshim.checkpoint.resume import Resumable
from ddpshim.evaluation import dealing, environments
from ddpshim.job.world import World
from ddpshim.robomimic import calls, rollout
from ddpshim.robomimic.session import session
from evidence.equivalence import Run, copy_release, make_config, make_data, train
from tests.ranks import run_ranks
from tests.robomimic import check_statistics, episodes, require, statistics, trainings

RELEASE = "0.3.0"
NUM_EPISODES = 5
SETTINGS: dict[str, Any] = {
    "algo__optim_params__policy__learning_rate__initial": 0.0,
    "experiment__render_video": False,
    "experiment__rollout__enabled": True,
    "experiment__rollout__n": NUM_EPISODES,
    "experiment__rollout__horizon": 5,
    "experiment__rollout__rate": 1,
    "experiment__save__on_best_rollout_success_rate": True,
}
Evaluator = Callable[..., Run]
needs_robomimic = pytest.mark.robomimic


@pytest.fixture(scope="session")
def evaluate(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> Evaluator:
    """Trains for one step without learning, with rollouts, and keeps the run: weights are equal, to the last bit."""
    trained = trainings(tmp_path_factory.mktemp("rollouts"), releases, RELEASE, 1)

    def run(num_ranks: int | None, *, fault: str = "toy_env::0", check: bool = True, **more: Any) -> Run:
        settings = {**SETTINGS, "experiment__keep_all_videos": True, **more}
        # A job that is to fail has the launcher, whose words are looked at.
        how: dict[str, Any] = {"module": "tests.faults", "fault": fault, "check": check, "forked": check}
        return trained("bc_gmm", num_ranks, **how, **settings)

    return run


def _checkpoints(run: Run) -> list[str]:
    return sorted(p.name for p in run.folder.glob("out/*/*/models/*.pth"))


def _videos(run: Run) -> dict[str, np.ndarray]:
    return {p.name: np.load(p) for p in sorted(run.folder.glob("out/*/*/videos/*"))}


@needs_robomimic
def test_statistics_and_videos_do_not_depend_on_the_number_of_ranks(evaluate: Evaluator) -> None:
    more = {
        "train__batch_size": 96,
        "experiment__render_video": True,
        "experiment__video_skip": 2,
        "experiment__rollout__terminate_on_success": False,
    }
    one, many = evaluate(1, **more), evaluate(3, **more)
    (alone,) = episodes(one)
    assert len(set(alone)) == len(alone) == 2 * NUM_EPISODES
    for rank, played in enumerate(episodes(many)):
        assert played == [alone[e * NUM_EPISODES + i] for e in (0, 1) for i in range(rank, NUM_EPISODES, 3)]
    check_statistics(one, many)
    first, second = statistics(many)
    for found in (first, second):
        assert found["Time_Episode"] == pytest.approx(found["time"] * NUM_EPISODES / 60)
    assert first["Return"] != second["Return"], "both epochs played the same episodes"
    assert 0 < first["Success_Rate"] < 1
    assert _checkpoints(many) == _checkpoints(one)
    assert f"model_epoch_1_Toy_success_{first['Success_Rate']}.pth" in _checkpoints(many)
    assert many.log.count(f"num_episodes={NUM_EPISODES}\n") == 2
    made = _videos(many)
    assert list(made) == ["Toy_epoch_1.mp4", "Toy_epoch_2.mp4"]
    shown = [int(255 * (sum(draws) / 3)) for draws in alone]
    assert made["Toy_epoch_1.mp4"][::3, 0, 0, 0].tolist() == shown[:NUM_EPISODES]
    assert made["Toy_epoch_2.mp4"][::3, 0, 0, 0].tolist() == shown[NUM_EPISODES:]
    for name, frames in _videos(one).items():
        assert frames.shape == (3 * NUM_EPISODES, 8, 8, 3)
        assert np.array_equal(made[name], frames)
    kept = evaluate(2, **more, experiment__keep_all_videos=False, experiment__save__on_best_rollout_success_rate=False)
    assert list(_videos(kept)) == ["Toy_epoch_2.mp4"]


@needs_robomimic
def test_an_environment_that_fails_on_one_rank_ends_the_job(evaluate: Evaluator) -> None:
    run = evaluate(2, fault="toy_env:1:2", check=False)
    assert run.exit_code != 0
    text = "environment 'Toy', episode 3 failed on rank 1 (ValueError: the toy broke on purpose ("
    ours = run.log.split("ddpshim: rank 1 (")[1].split("Root Cause")[0]
    assert text in ours
    assert ", in reset\n" in ours, "the environment's own traceback is gone"
    assert run.log.count(") failed:\nTraceback (most recent call last)") == 1, run.log
    assert text in run.log.split("Root Cause (first observed failure):")[1]
    assert "finished run successfully" not in run.log


@needs_robomimic
@pytest.mark.parametrize("num_episodes", [0, 1])
def test_fewer_episodes_than_ranks(evaluate: Evaluator, num_episodes: int) -> None:
    run = evaluate(2, experiment__rollout__n=num_episodes, experiment__render_video=True)
    assert [len(played) for played in episodes(run)] == [2 * num_episodes, 0]
    assert len(statistics(run)) == len(_videos(run)) == 2 * num_episodes


@needs_robomimic
def test_without_a_launcher_it_is_upstreams_function(evaluate: Evaluator) -> None:
    run = evaluate(None)
    assert [len(played) for played in episodes(run)] == [2 * NUM_EPISODES]
    assert len(statistics(run)) == 2


class _Walk:
    """An environment that starts and succeeds at random; where its random numbers come from differs."""

    name = "Walk"

    def __init__(self, draw: Callable[[], Any] = random.random, **held: Any) -> None:
        self.draw = draw
        vars(self).update(held)

    def reset(self) -> dict[str, np.ndarray]:
        self.start = float(self.draw())
        return {"object": np.array([self.start])}


def _with_private_generator() -> _Walk:
    generator = np.random.default_rng()
    return _Walk(lambda: generator.random(), _parts={"sampler": [SimpleNamespace(generator=generator)]})


def _with_generator_of_its_own(generator: Any) -> _Walk:
    inner: Any = _Walk(lambda: generator.random(), np_random="not a generator", rng=generator)
    inner.env = inner
    return _Walk(inner.draw, env=inner)


def _with_torchs_generator() -> _Walk:
    generator = torch.Generator()
    generator.seed()
    return _Walk(lambda: torch.rand((), generator=generator), generator=generator)


class _Hidden(_Walk):
    """Its generator is in nobody's sight, as one in C++."""

    def __init__(self) -> None:
        generator = np.random.default_rng()
        super().__init__(lambda: generator.random())
        self._set = lambda seed: setattr(generator.bit_generator, "state", np.random.PCG64(seed).state)


class _TakesSeedInReset(_Hidden):
    def reset(self, *, seed: int | None = None, options: Any = None) -> dict[str, np.ndarray]:
        if seed is not None:
            self._set(seed)
        return super().reset()


class _HasSeed(_Hidden):
    def seed(self, seed: int) -> None:
        self._set(seed)


class _IgnoresItsSeed(_Hidden):
    def reset(self, *, seed: int | None = None) -> dict[str, np.ndarray]:
        return super().reset()


class _Wrapper:
    def __init__(self, env: Any) -> None:
        self.env, self.name = env, env.name

    def reset(self) -> Any:
        return self.env.reset()

    @property
    def start(self) -> float:
        return float(self.env.start)


SEEDED = [
    *(_with_private_generator, _with_torchs_generator, _Walk, _TakesSeedInReset, _HasSeed, lambda: _Walk(lambda: 0.7)),
    *(lambda kind=kind: _with_generator_of_its_own(kind()) for kind in (random.Random, np.random.RandomState)),
    *(lambda: _Wrapper(_TakesSeedInReset()), lambda: _Wrapper(_HasSeed())),
]
NAMED = [
    *(_Hidden, _IgnoresItsSeed, lambda: _Wrapper(_Hidden())),
    lambda: _Walk(lambda: np.random.default_rng().random()),  # a new one for each episode
]


def _import_a_small_upstream() -> None:
    def run_rollout(policy: Any, env: Any, **options: Any) -> dict[str, float]:
        env.reset()
        return {"Return": env.start, "Horizon": 1, "Success_Rate": float(env.start > 0.5)}

    def rollout_with_stats(envs: Any, num_episodes: int, **options: Any) -> tuple[Any, Any]:  # as upstream's
        from robomimic.utils import train_utils

        logs = {}
        for name, env in envs.items():
            found = [
                train_utils.run_rollout(policy=None, env=env)
                for _ in train_utils.LogUtils.custom_tqdm(range(num_episodes), total=num_episodes)
            ]
            logs[name] = {key: np.mean([one[key] for one in found]) for key in found[0]}
        return logs, {}

    bar = SimpleNamespace(n=0, update=lambda by: None, close=lambda: None)
    for name, held in {
        "log_utils": {"custom_tqdm": lambda **options: bar},
        "train_utils": {"run_rollout": run_rollout, "rollout_with_stats": rollout_with_stats},
    }.items():
        module: Any = ModuleType(f"robomimic.utils.{name}")
        vars(module).update(held)
        for path in ("robomimic", "robomimic.utils"):
            sys.modules.setdefault(path, ModuleType(path))
        sys.modules[module.__name__] = module
        setattr(sys.modules["robomimic.utils"], name, module)


def _rank_evaluates(envs: str) -> tuple[list[float], list[str]]:
    _import_a_small_upstream()
    said: list[str] = []
    environments.say_once = said.append  # type: ignore[assignment]
    played = []
    for number, make in enumerate({"seeded": SEEDED, "named": NAMED}[envs]):
        made = make()
        said.append(f"{number}")
        logs, _, returns = rollout.rollout_with_stats(
            policy=None, envs={"Walk": made}, horizon=1, num_episodes=6, epoch=1, video_dir=None
        )
        assert sum(returns["Walk"]) / 6 == pytest.approx(logs["Walk"]["Return"])
        assert len(returns["Walk"]) == 6
        played.append(logs["Walk"]["Return"])
    return played, said


def test_each_episode_has_a_seed_of_its_own_wherever_an_environment_draws() -> None:
    (one, _), *_ = run_ranks(_rank_evaluates, 1, "seeded")
    (two, said), (again, _) = run_ranks(_rank_evaluates, 2, "seeded")
    assert one == two == again
    assert said == [f"{number}" for number in range(len(SEEDED))]


def _rank_gets_a_signal(folder: Path) -> tuple[Any, int, int]:
    _import_a_small_upstream()
    here, played = ddpshim.world(), 0

    def draw() -> float:
        nonlocal played
        played += 1
        if here.rank == 1 and played == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        return 0.5

    session().progress = training = Resumable(folder, {})
    training.epoch = 3
    with pytest.raises(SystemExit) as left:
        calls.rollout_with_stats(policy=None, envs={"Walk": _Walk(draw)}, horizon=1, num_episodes=1000, epoch=1)
    ddpshim.setup()
    again = Resumable(folder, {})
    assert again.restore()
    return left.value.code, played, again.epoch


def test_a_signal_ends_the_rollouts_of_all_ranks_which_save(tmp_path: Path) -> None:
    said = run_ranks(_rank_gets_a_signal, 2, tmp_path)
    assert [(code, epoch) for code, _, epoch in said] == [(75, 3)] * 2
    assert all(played < 500 for _, played, _ in said)


def _rank_gets_a_signal_in_validation(folder: Path) -> tuple[Any, int]:
    resume._LOOK_EVERY_S = 0.0
    here, training = ddpshim.world(), session()
    training.progress = Resumable(folder, {})
    batches, _ = training.begin_epoch([torch.ones(1)] * 50, 1, None, True, ())
    code = None
    try:
        for number, _ in enumerate(batches):
            if (here.rank, number) == (1, 3):
                os.kill(os.getpid(), signal.SIGUSR1)
            assert training.note_step({"Loss": 0.5}) == {"Loss": 0.5}
    except SystemExit as left:
        code = left.code
    ddpshim.setup()
    assert Resumable(folder, {}).restore()
    return code, number


def test_a_signal_in_a_validation_ends_it_on_all_ranks_in_the_same_step(tmp_path: Path) -> None:
    one, other = run_ranks(_rank_gets_a_signal_in_validation, 2, tmp_path)
    assert one == other
    assert one[0] == 75
    assert 3 <= one[1] < 49


@pytest.mark.unit
@pytest.mark.parametrize("make", [_TakesSeedInReset, _HasSeed, _with_private_generator])
def test_the_parts_of_a_vector_environment_seed_themselves(make: Callable[[], Any]) -> None:
    def starts(episodes: range) -> list[float]:
        env = rollout._make_seeded(make, episodes, 5)
        return [float(env.reset()["object"][0]) for _ in episodes]

    alone = starts(range(6))
    assert len(set(alone)) == 6
    assert [starts(range(rank, 6, 2)) for rank in (0, 1)] == [alone[::2], alone[1::2]]


def test_an_environment_that_nobody_can_seed_is_named() -> None:
    _, said = run_ranks(_rank_evaluates, 2, "named")[0]
    assert len(said) == 2 * len(NAMED)
    for number, (begins, named) in enumerate(zip(said[::2], said[1::2])):
        assert begins == f"{number}"
        assert named.startswith("environment 'Walk' uses an unseeded generator, or remembers"), number


@pytest.mark.unit
@pytest.mark.parametrize(
    ("visible", "gpu", "expected"),
    [(None, 1, "1"), ("", 1, "1"), ("4,6", 1, "6"), ("GPU-8f3a,GPU-11c0", 1, None)],
)
def test_renderers_use_the_gpu_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: int, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    here = World(world_size=2, device=torch.device("cuda", gpu), launcher="torchrun")
    dealing.render_on_own_gpu(here)
    assert os.environ.get("MUJOCO_EGL_DEVICE_ID") == os.environ.get("EGL_DEVICE_ID") == expected
    os.environ["MUJOCO_EGL_DEVICE_ID"] = "9"
    dealing.render_on_own_gpu(here)
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "9", "what the user set is gone"


# In robosuite, where it is installed

OF_SIMULATOR = "0.4.0"
IN_ROBOSUITE = {
    "algo__actor_layer_dims": [256, 256],
    "experiment__rollout__enabled": True,
    "experiment__rollout__n": 3,
    "experiment__rollout__horizon": 10,
    "experiment__rollout__rate": 1,
    "experiment__render_video": False,
}


def _in_robosuite(tree: Path, data: Path, folder: Path, num_ranks: int) -> dict[str, Any]:
    config = make_config(tree, "bc", data, folder, 20, 1, **IN_ROBOSUITE)
    run = train(tree, config, folder / str(num_ranks), num_ranks, environ={"OPENBLAS_NUM_THREADS": "1"})
    printed = json.JSONDecoder().raw_decode(run.log.split("Env: Lift\n")[1])[0]
    return {key: printed[key] for key in ("Return", "Success_Rate", "Horizon")}


@pytest.mark.simulator
def test_rollouts_in_robosuite_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    if importlib.util.find_spec("robosuite") is None:
        pytest.skip("robosuite is not installed (requirements/simulator.txt)")
    require(OF_SIMULATOR)
    tree, data = copy_release(OF_SIMULATOR, tmp_path), make_data(tmp_path)
    with h5py.File(data, "r+") as file:  # so that the return depends on every step of every episode
        described = json.loads(file["data"].attrs["env_args"])
        described["env_kwargs"]["reward_shaping"] = True
        file["data"].attrs["env_args"] = json.dumps(described)
    one, two = (_in_robosuite(tree, data, tmp_path, num_ranks) for num_ranks in (1, 2))
    assert one["Return"] > 0
    assert two == pytest.approx(one, rel=1e-4)
