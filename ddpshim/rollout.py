"""Evaluation rollouts of robomimic, the episodes of each environment dealt to all ranks.

Episode e is played by rank e % W, from a seed of its own: the statistics do not depend on W. robomimic and
numpy are imported inside the functions only.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

from ddpshim.errors import RolloutError
from ddpshim.failure import caused_by
from ddpshim.group import World, world
from ddpshim.streams import derive_seed, shared_random_streams

_evaluations = itertools.count()  # every rank counts alike


def plays_rollouts() -> bool:
    """Whether this rank plays episodes, and needs environments; call it before they are made. Local.

    All ranks do, unless the option `rollouts` is "main". Where the rank computes on a GPU, renderers
    that open a display through EGL are pointed at the same one (MUJOCO_EGL_DEVICE_ID and EGL_DEVICE_ID are set
    in `os.environ`, where nobody has set them).
    """
    here = world()
    if not here.is_launched:
        return True
    if here.device.type == "cuda":
        _render_on(here.device.index or 0)
    return _on_all_ranks() or here.is_main


def rollout_with_stats(
    *, policy: Any, envs: Mapping[str, Any], is_told_to_end: Callable[[], bool] = lambda: False, **options: Any
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Upstream's rollout_with_stats on all ranks: the same statistics on every rank (collective).

    Without a launcher it is upstream's function. With the option rollouts=main the main rank calls it alone, and
    other ranks return at once, with nothing. `video_paths` is empty on all but the main rank: what it names is
    there, to be kept or removed there.

    An episode's random numbers (torch's, numpy's and random's global generators, and numpy generators that an
    environment holds as `rng` or `np_random`) depend on the seed of the world, `epoch`, the environment's name
    and the episode. An environment with randomness elsewhere, or that remembers earlier episodes, has
    statistics that depend on the number of ranks.

    "Time_Episode" is the sum over all episodes, as upstream has it: W ranks take about a W-th of it.

    Where `is_told_to_end` turns true on a rank, ranks finish the episode they are in and raise Interrupted.

    Raises RolloutError on all ranks where an episode fails on one, naming environment, episode and rank; peers
    finish the episode they are in. An environment without episodes is left out.
    """
    import robomimic.utils.train_utils as TrainUtils

    here = world()
    if not here.is_launched:
        return TrainUtils.rollout_with_stats(policy=policy, envs=envs, **options)  # type: ignore[no-any-return]
    if not _on_all_ranks():
        return TrainUtils.rollout_with_stats(policy=policy, envs=envs, **options) if here.is_main else ({}, {})
    return _Evaluation(here, policy, is_told_to_end=is_told_to_end, **options).run(envs)


class Interrupted(Exception):
    """The evaluation was left because a rank was told to end; on all ranks alike."""


@dataclass
class _Evaluation:
    """One call of rollout_with_stats, with its arguments."""

    here: World
    policy: Any
    horizon: int
    use_goals: bool = False
    num_episodes: int = 0
    render: bool = False
    video_dir: Optional[str] = None
    video_path: Optional[str] = None
    epoch: Optional[int] = None
    video_skip: int = 5
    terminate_on_success: bool = False
    verbose: bool = False
    is_told_to_end: Callable[[], bool] = lambda: False

    def run(self, envs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """What upstream returns."""
        names = self.here.gather(list(envs))
        if any(other != names[0] for other in names):
            raise RolloutError(
                f"ranks evaluate different environments ({names}, in rank order); episodes would be played twice or "
                "not at all. Make the environments on every rank: under `plays_rollouts()`."
            )
        seed = self.here.broadcast(torch.initial_seed() if self.here.seed is None else self.here.seed)
        videos = _Videos(self._paths(list(envs))) if self.here.is_main else None
        logs = {}
        try:
            for name, env in envs.items():
                episodes, frames = self._play(name, env, seed)
                if self.video_dir or self.video_path:
                    self._write(videos, name, frames)
                if episodes:
                    logs[name] = _mean(episodes)
        finally:
            if videos is not None:
                videos.close()
        return logs, videos.written if videos is not None else {}

    def _play(self, name: str, env: Any, seed: int) -> tuple[list[dict[str, float]], dict[int, bytes]]:
        """The results of all episodes, in order, and the packed frames of this rank's."""
        import robomimic.utils.log_utils as LogUtils

        here, num_episodes = self.here, self.num_episodes
        counter = f"rollouts/{next(_evaluations)}"
        print(
            f"rollout: env={env.name}, horizon={self.horizon}, use_goals={self.use_goals}, "
            f"num_episodes={num_episodes}, ranks={here.world_size}"
        )
        results: dict[int, dict[str, float]] = {}
        frames: dict[int, bytes] = {}
        found: Optional[Exception] = None
        text = ""
        bar = LogUtils.custom_tqdm(total=num_episodes, disable=self.verbose or not here.is_main)
        for episode in range(here.rank, num_episodes, here.world_size):
            if here.count(f"{counter}/told to end", self.is_told_to_end()):
                break
            if here.count(f"{counter}/failed"):
                break
            try:
                own = derive_seed(seed, "rollout", str(self.epoch), name, episode)
                results[episode], frames[episode] = self._play_episode(env, own)
            except Exception as error:
                here.count(f"{counter}/failed", 1)
                found = error
                text = (
                    f"environment {name!r}, episode {episode} failed on rank {here.rank} "
                    f"({type(error).__name__}: {error}); statistics without it would not be those of "
                    f"{num_episodes} episodes. See that rank's traceback."
                )
                break
            bar.update(here.count(f"{counter}/played", 1) - bar.n)
        outcomes = here.gather((results, text))
        failed = [rank for rank, (_, said) in enumerate(outcomes) if said]
        bar.update(0 if failed else num_episodes - bar.n)
        bar.close()
        if failed:
            failure = RolloutError(outcomes[failed[0]][1])
            raise (failure if failed[0] == here.rank else caused_by(failed[0], failure)) from found
        if here.count(f"{counter}/told to end"):
            raise Interrupted(f"a signal during the rollouts in {name!r}")
        results = {episode: result for part, _ in outcomes for episode, result in part.items()}
        ordered = [results[episode] for episode in range(num_episodes)]
        if self.verbose:
            for episode, result in enumerate(ordered):
                print(f"Episode {episode + 1}", json.dumps(result, sort_keys=True, indent=4, default=float))
        return ordered, frames

    def _play_episode(self, env: Any, seed: int) -> tuple[dict[str, float], bytes]:
        """Upstream's result of one episode, and its packed frames."""
        import robomimic.utils.train_utils as TrainUtils

        shown = _Frames() if self.video_dir or self.video_path else None
        start = time.time()
        with shared_random_streams(seed):
            for number, generator in enumerate(_own_generators(env)):
                _reseed(generator, derive_seed(seed, "environment", number))
            result = TrainUtils.run_rollout(
                policy=self.policy,
                env=env,
                horizon=self.horizon,
                use_goals=self.use_goals,
                render=self.render,
                video_writer=shown,
                video_skip=self.video_skip,
                terminate_on_success=self.terminate_on_success,
            )
        result["time"] = time.time() - start
        # Packed, because a rank keeps them until all episodes of the environment are played.
        return result, zlib.compress(pickle.dumps(shown.frames), 1) if shown is not None else b""

    def _paths(self, names: list[str]) -> dict[str, str]:
        """The video of each environment, named as upstream names it."""
        if self.video_path is not None:
            return dict.fromkeys(names, self.video_path)
        suffix = "" if self.epoch is None else f"_epoch_{self.epoch}"
        return {n: os.path.join(self.video_dir, f"{n}{suffix}.mp4") for n in names} if self.video_dir else {}

    def _write(self, videos: Optional[_Videos], name: str, frames: dict[int, bytes]) -> None:
        """Have the main rank append all episodes to the video of `name`, one in memory at a time (collective)."""
        for episode in range(self.num_episodes):
            packed = self.here.broadcast(frames.pop(episode, b""), src=episode % self.here.world_size)
            self.here.run_on_main(_append, videos, name, packed)


class _Frames:
    """A video writer for upstream that keeps what it is given."""

    def __init__(self) -> None:
        self.frames: list[Any] = []

    def append_data(self, frame: Any) -> None:
        self.frames.append(frame)


@dataclass
class _Videos:
    """The video files of an evaluation, on the main rank: opened for the first frame, as ffmpeg makes no empty file."""

    paths: dict[str, str]
    written: dict[str, str] = field(default_factory=dict)
    _writers: dict[str, Any] = field(default_factory=dict)

    def append(self, name: str, frames: list[Any]) -> None:
        import imageio

        path = self.paths[name]
        for frame in frames:
            if path not in self._writers:
                self._writers[path] = imageio.get_writer(path, fps=20)
            self.written[name] = path
            self._writers[path].append_data(frame)

    def close(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()


def _append(videos: _Videos, name: str, packed: bytes) -> None:
    """Write a video, as the main rank does for an evaluation."""
    videos.append(name, pickle.loads(zlib.decompress(packed)))


def _mean(episodes: list[dict[str, float]]) -> dict[str, Any]:
    """The statistics that upstream makes of its episodes, in their order: float sums depend on it."""
    import numpy

    columns = {key: [episode[key] for episode in episodes] for key in episodes[0]}
    minutes = numpy.sum(columns["time"]) / 60.0
    return {**{key: numpy.mean(column) for key, column in columns.items()}, "Time_Episode": minutes}


def _own_generators(env: Any) -> Iterator[Any]:
    """The numpy generators held by `env` and by the environments that it wraps (robosuite 1.5, gymnasium)."""
    import numpy

    seen: dict[int, Any] = {}
    layer = env
    while layer is not None and id(layer) not in seen:
        seen[id(layer)] = layer
        for name in ("rng", "np_random"):
            held = getattr(layer, name, None)
            if isinstance(held, (numpy.random.Generator, numpy.random.RandomState)) and id(held) not in seen:
                seen[id(held)] = held
                yield held
        layer = getattr(layer, "env", None)


def _reseed(generator: Any, seed: int) -> None:
    """Seed a numpy generator in place: parts of the environment hold the same object."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)


def _on_all_ranks() -> bool:
    return world().options.rollouts == "all"


def _render_on(gpu: int) -> None:
    """Point EGL renderers at the GPU that torch numbers `gpu`; they count as if all were visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = visible[gpu].strip() if gpu < len(visible) and visible[0].strip() else str(gpu)
    if number.isdigit():  # not a UUID, which EGL does not know
        os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", number)
        os.environ.setdefault("EGL_DEVICE_ID", number)
