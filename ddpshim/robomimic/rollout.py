"""Runs robomimic's evaluation rollouts on all ranks, each episode with its own seed.

Episode e is played by rank e % W, with the episode's own seed, so the statistics do not depend on W. robomimic and
numpy are imported inside the functions only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import sys
import time
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Callable, Optional, Union

from ddpshim.errors import RolloutError
from ddpshim.evaluation import environments
from ddpshim.evaluation.dealing import Deal, render_on_own_gpu
from ddpshim.job.world import World, world
from ddpshim.process import messages
from ddpshim.process.job import current, derive_seed, seed_everything
from ddpshim.process.random_streams import shared_random_streams
from ddpshim.process.replaced import replaced
from ddpshim.process.say import say
from ddpshim.robomimic.session import session
from ddpshim.rows.tensor import Counts


def deal_episodes(make: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Return the functions in `make`, so that each environment they make is seeded for the episodes it will play.

    For the environments of a vector environment. In turn t of an evaluation, played by rank t % W, the i-th of n
    environments plays episode t * n + i, with that episode's seed. Otherwise all ranks would play the same episodes:
    upstream gives the i-th environment the same seed on every rank, and later its generators cannot be reached, in
    another process. Local; without a launcher returns `make`.
    """
    here = world()
    if not here.is_launched:
        return list(make)
    episodes = [range(here.rank * len(make) + i, sys.maxsize, here.world_size * len(make)) for i in range(len(make))]
    return [functools.partial(_make_seeded, one, own, session().seed) for one, own in zip(make, episodes)]


def _make_seeded(make: Callable[[], Any], episodes: Iterable[int], seed: int) -> Any:
    env, left = make(), iter(episodes)
    reset = env.reset

    def seeded_reset(**options: Any) -> Any:
        own = _seed_of_environment(seed, env.name, next(left))
        seed_everything(own)
        with replaced(env, "reset", reset), environments.seeded(env, own):
            return env.reset(**options)

    env.reset = seeded_reset
    return env


def rollout_with_stats(
    *,
    policy: Any,
    envs: Union[Mapping[str, Any], Iterable[Any]],
    is_told_to_end: Callable[[], bool] = lambda: False,
    **options: Any,
) -> tuple[Mapping[str, Any], Optional[Mapping[str, str]], dict[str, list[float]]]:
    """Run upstream's rollout_with_stats on all ranks; return the same statistics on every rank (collective).

    Returns upstream's statistics and paths of videos, and the return of each episode by environment. Without a launcher
    it is upstream's function, and there are no returns. The paths of videos are empty on all but the main rank, which
    keeps or removes the videos.

    An episode's random numbers (torch's, numpy's and random's global generators, an environment's own from its seed,
    and generators in its attributes) depend on the trainer's seed, `epoch`, the environment's name and the episode.
    If an environment has other randomness or remembers earlier episodes, its statistics depend on the number of ranks;
    where that can be detected, a message names it.

    "Time_Episode" is the sum over all episodes, as in upstream: W ranks take about 1/W of it.

    If `is_told_to_end` returns True on a rank, ranks finish their current episodes and raise Interrupted.

    Raises RolloutError on all ranks if an episode fails on one, naming environment, episode and rank; the others finish
    their current episodes. An environment without episodes is left out.

    If `envs` makes one environment after the other, robocasa's rules apply: an environment's seeds are the same in each
    evaluation, so all evaluations start from the same states; an environment that cannot be made is left out; a failed
    episode is printed, and the statistics are those of the episodes before it, or -1 if there are none.
    """
    import robomimic.utils.train_utils as TrainUtils

    here = world()
    if not here.is_launched:
        return (*TrainUtils.rollout_with_stats(policy=policy, envs=envs, **options), {})
    render_on_own_gpu(here)  # robocasa makes its environments during this call
    own = {name: options.pop(name) for name in [*options] if name in _RolloutsOfEpoch.__dataclass_fields__}
    played = _RolloutsOfEpoch(here, policy, **own, is_told_to_end=is_told_to_end, options=options)
    return (*played.run(envs), played.returns)


class Interrupted(Exception):
    """The evaluation ended early because a rank was told to end; raised on all ranks."""


@dataclass
class _RolloutsOfEpoch:
    """One call of rollout_with_stats, with its arguments."""

    here: World
    policy: Any
    horizon: Union[int, list[int]]  # a list: one for each environment
    num_episodes: int = 0
    video_dir: Optional[str] = None
    video_path: Optional[str] = None
    epoch: Optional[int] = None
    verbose: bool = False
    del_envs_after_rollouts: bool = False
    data_logger: Any = None
    is_told_to_end: Callable[[], bool] = lambda: False
    options: dict[str, Any] = field(default_factory=dict)  # further ones of upstream's run_rollout
    returns: dict[str, list[float]] = field(default_factory=dict)  # each episode's, by environment
    _shown: list[environments.Shown] = field(default_factory=list)  # of this rank's episodes
    _videos: dict[str, str] = field(default_factory=dict)  # path by environment, on the main rank
    _writers: dict[str, Any] = field(default_factory=dict)  # of open videos, by path

    def run(self, envs: Union[Mapping[str, Any], Iterable[Any]]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return upstream's statistics and paths of videos."""
        seed = self.here.broadcast(session().seed)
        in_turn = not isinstance(envs, Mapping)
        logs: dict[str, Any] = {}
        try:
            for name, env, horizon in self._each(envs):
                with contextlib.closing(env) if self.del_envs_after_rollouts else contextlib.nullcontext():
                    turns, frames = self._play(name, env, horizon, seed, in_turn)
                if self.video_dir or self.video_path:
                    self._write(name, frames, len(turns))
                if turns:
                    episodes = list(itertools.chain(*turns))
                    logs[name] = _mean(episodes)
                    self.returns[name] = [float(episode["Return"]) for episode in episodes if "Return" in episode]
                elif in_turn:
                    logs[name] = dict.fromkeys(("Time_Episode", "Return", "Success_Rate", "time"), -1)
                if self.data_logger is not None:
                    self._record(name, logs[name])
        finally:
            while self._writers:
                self._writers.popitem()[1].close()
        return logs, self._videos

    def _each(self, envs: Union[Mapping[str, Any], Iterable[Any]]) -> Iterator[tuple[str, Any, int]]:
        """Yield name, environment and horizon; checks that names are the same on all ranks (collective)."""
        if isinstance(envs, Mapping):
            self._check_names(list(envs))
            yield from ((name, env, self.horizon) for name, env in envs.items())  # type: ignore[misc]
            return
        horizons = self.horizon if isinstance(self.horizon, list) else [self.horizon]
        for env, horizon in zip(envs, horizons):
            name: Any = env.get_env_attr(key="name", id=0)[0] if _is_vector(env) else getattr(env, "name", None)
            self._check_names([name])
            if env is not None:
                yield name, env, horizon

    def _check_names(self, own: list[Any]) -> None:
        names = self.here.gather(own)
        if any(other != names[0] for other in names):
            raise RolloutError(
                f"ranks evaluate different environments ({names}, in rank order); episodes would be played twice or "
                "not at all. Make the same ones on every rank. None means that one could not be made; that rank's "
                "output says why."
            )

    def _play(
        self, name: str, env: Any, horizon: int, seed: int, in_turn: bool
    ) -> tuple[list[list[dict[str, float]]], dict[int, bytes]]:
        """Return the results of each turn's episodes, in order, and the packed frames of this rank's turns.

        A turn is one episode, or in a vector environment one episode in each of its parts.
        """
        import robomimic.utils.log_utils as LogUtils

        here, num_episodes = self.here, self.num_episodes
        num_at_once = len(env) if _is_vector(env) else 1
        num_turns = math.ceil(num_episodes / num_at_once)
        print(
            f"rollout: env={name}, horizon={horizon}, use_goals={self.options.get('use_goals', False)}, "
            f"num_episodes={num_episodes}, ranks={here.world_size}"
        )
        frames: dict[int, bytes] = {}
        bar = LogUtils.custom_tqdm(total=num_turns, disable=self.verbose or not here.is_main)

        def play(turn: int) -> list[dict[str, float]]:
            own = derive_seed(seed, "rollout", str(self.epoch), name, turn)
            of_env = _seed_of_environment(seed, name, turn) if in_turn else own
            result, shown = self._play_turn(env, horizon, own, of_env, turn < here.world_size)
            if shown:
                # Compressed, because a rank keeps them until all episodes of the environment are played.
                frames[turn] = zlib.compress(messages.packed(shown), 1)
            return result

        # Fixed turns: each part of a vector environment is seeded for certain episodes.
        deal = Deal(here, num_turns, is_fixed=True)
        deal.play(
            play,
            lambda turn: f"environment {name!r}, episode {turn * num_at_once}",
            is_told_to_end=self.is_told_to_end,
            ends_at_failure=not in_turn,  # robocasa uses the turns before the one that failed
            played=lambda so_far: bar.update(so_far - bar.n),
        )
        shown, self._shown = self._shown, []
        environments.name_unseeded(f"environment {name!r}", itertools.chain(*here.gather(shown)), here)
        bar.update(0 if deal.text else num_turns - bar.n)
        bar.close()
        if not in_turn:
            deal.raise_failure()
        if deal.is_told_to_end():
            raise Interrupted(f"a signal during the rollouts in {name!r}")
        if deal.own is not None:
            # Directly: other ranks' output is that of the main rank, and discarded.
            where = None if here.is_main else sys.__stderr__
            traceback.print_exception(type(deal.own), deal.own, deal.own.__traceback__, file=where)
        if deal.text and here.is_main:
            num_kept = deal.failed_at * num_at_once
            say(f"{deal.text} As without ddpshim, the statistics are of the {num_kept} before it.", directly=True)
        ordered = [deal.results[turn] for turn in range(deal.failed_at)]
        if self.verbose:
            for number, result in enumerate(itertools.chain(*ordered)):
                print(f"Episode {number + 1}", json.dumps(result, sort_keys=True, indent=4, default=float))
        return ordered, frames

    def _play_turn(
        self, env: Any, horizon: int, seed: int, seed_of_env: int, is_checked: bool
    ) -> tuple[list[dict[str, float]], list[Any]]:
        """Return upstream's results of a turn's episodes, and their frames."""
        import robomimic.utils.train_utils as TrainUtils

        frames: list[Any] = []
        writer = SimpleNamespace(append_data=frames.append) if self.video_dir or self.video_path else None
        start = time.time()
        # The parts of a vector environment seed themselves, see `deal_episodes`.
        seeding = contextlib.nullcontext() if _is_vector(env) else environments.seeded(env, seed_of_env, is_checked)
        with current().part(Counts).alone(), shared_random_streams(seed), seeding as shown:
            result = TrainUtils.run_rollout(
                policy=self.policy, env=env, horizon=horizon, video_writer=writer, **self.options
            )
        if shown is not None:
            self._shown.append(shown)
        if not _is_vector(env):
            return [{**result, "time": time.time() - start}], frames
        share = (time.time() - start) / len(env)
        return [{**{key: of[i] for key, of in result.items()}, "time": share} for i in range(len(env))], frames

    def _write(self, name: str, frames: dict[int, bytes], num_turns: int) -> None:
        """Append all turns to the video of `name` on the main rank, one turn in memory at a time (collective)."""
        suffix = "" if self.epoch is None else f"_epoch_{self.epoch}"
        path = self.video_path or os.path.join(self.video_dir or "", f"{name}{suffix}.mp4")  # as upstream names it
        for turn in range(num_turns):
            src, packed = turn % self.here.world_size, frames.pop(turn, b"")
            if src != 0:  # the main rank has its own
                packed = self.here.broadcast(packed, src=src)
            self.here.run_on_main(self._append, name, path, packed, src)

    def _append(self, name: str, path: str, packed: bytes, src: int) -> None:
        """Append the frames of rank `src` to the video, opened at its first frame, as ffmpeg makes no empty file."""
        import imageio

        for frame in messages.unpacked(zlib.decompress(packed), src) if packed else ():
            if path not in self._writers:
                self._writers[path] = imageio.get_writer(path, fps=20)
            self._videos[name] = path
            self._writers[path].append_data(frame)

    def _record(self, name: str, statistics: Mapping[str, float]) -> None:
        """Log what robocasa's rollout_with_stats logs; in other releases the trainer does. Local."""
        for key, value in statistics.items():
            if key.startswith("Time_"):
                self.data_logger.record(f"Timing_Stats/Rollout_{name}_{key[5:]}", value, self.epoch)
            else:
                self.data_logger.record(f"Rollout/{key}/{name}", value, self.epoch, log_stats=True)
        print(f"\nEpoch {self.epoch} Rollouts took {statistics['time']}s (avg) with results:")
        print(f"Env: {name}\n{json.dumps(statistics, sort_keys=True, indent=4)}")


def _mean(episodes: list[dict[str, float]]) -> dict[str, Any]:
    """Return upstream's statistics of the episodes, in their order, on which float sums depend."""
    import numpy

    columns = {key: [episode[key] for episode in episodes] for key in episodes[0]}
    minutes = numpy.sum(columns["time"]) / 60.0
    return {**{key: numpy.mean(column) for key, column in columns.items()}, "Time_Episode": minutes}


def _is_vector(env: Any) -> bool:
    """Whether `env` is a vector environment of tianshou, which plays several episodes at once in other processes."""
    return hasattr(env, "get_env_attr")


def _seed_of_environment(seed: int, name: str, episode: int) -> int:
    """Return the environment's seed for an episode, the same in every evaluation."""
    return derive_seed(seed, "rollout", name, episode)
