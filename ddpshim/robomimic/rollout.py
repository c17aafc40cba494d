"""Runs robomimic's evaluation rollouts on all ranks, each episode with its own seed.

Episode e is played by rank e % W, with the episode's own seed, so the statistics do not depend on W. robomimic and
numpy are imported inside the functions only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
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
from ddpshim.evaluation.dealing import Deal
from ddpshim.failures import preemption
from ddpshim.job.world import World, world
from ddpshim.process import messages
from ddpshim.process.job import current, derive_seed, seed_everything
from ddpshim.process.random_streams import shared_random_streams
from ddpshim.process.replaced import replaced
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
        own = derive_seed(seed, "rollout", env.name, next(left))
        seed_everything(own)
        with replaced(env, "reset", reset), environments.seeded(env, own):
            return env.reset(**options)

    env.reset = seeded_reset
    return env


def rollout_with_stats(
    *, envs: Union[Mapping[str, Any], Iterable[Any]], **options: Any
) -> tuple[Mapping[str, Any], Optional[Mapping[str, str]], dict[str, list[float]]]:
    """Run upstream's rollout_with_stats with the episodes of all ranks, the same on every rank (collective).

    Returns what upstream's does, and the return of each episode by environment. Without a launcher it is upstream's
    function, and there are no returns. Only the main rank writes videos, and gets their paths.

    An episode's random numbers (torch's, numpy's and random's global generators, an environment's own from its seed,
    and generators in its attributes) depend on the trainer's seed, `epoch`, the environment's name and the episode.
    If an environment has other randomness or remembers earlier episodes, its statistics depend on the number of ranks;
    where that can be detected, a message names it.

    "Time_Episode" is the sum over all episodes, as in upstream: W ranks take about 1/W of it.

    If a signal asks a rank to end, and progress is saved, ranks finish their current episodes, save and exit.

    Raises RolloutError on all ranks if an episode fails on one, naming environment, episode and rank; the others finish
    their current episodes. Without episodes there are no statistics.

    If `envs` makes one environment after the other, robocasa's rules apply: an environment's seeds are the same in each
    evaluation, so all evaluations start from the same states; an environment that cannot be made is left out; a failed
    episode is printed, and the statistics are those of the episodes before it, or -1 if there are none.
    """
    import robomimic.utils.log_utils as LogUtils
    import robomimic.utils.train_utils as TrainUtils

    here, in_turn = world(), not isinstance(envs, Mapping)
    if not here.is_launched:
        return (*TrainUtils.rollout_with_stats(envs=envs, **options), {})
    if not (in_turn or options["num_episodes"]):
        return {}, {}, {}
    names = [] if in_turn else list(envs)
    played = _Rollouts(here, in_turn, {**options}, TrainUtils.run_rollout, names)
    envs = played.made(envs) if in_turn else envs
    if not here.is_main:
        options.update(video_dir=None, video_path=None)
    log_utils = SimpleNamespace(**{**vars(LogUtils), "custom_tqdm": lambda turns, **_: turns})
    without_bar = replaced(TrainUtils, "LogUtils", log_utils)  # `played` shows its own
    with contextlib.suppress(_Ended), without_bar, replaced(TrainUtils, "run_rollout", played.run_rollout):
        logs, videos = TrainUtils.rollout_with_stats(envs=envs, **options)
        return logs, videos or {}, played.returns
    raise played.error


class _Ended(BaseException):
    """Goes through robocasa's `except Exception`, which is for an episode that fails."""


class _Result(dict[str, Any]):
    """What an episode gave, with the seconds that it took; upstream sets those that it took to ask for it."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "time":
            super().__setitem__(key, value)


@dataclass
class _Rollouts:
    """One call of rollout_with_stats: when upstream asks for an environment's first rollout, all are played."""

    here: World
    in_turn: bool
    options: Mapping[str, Any]
    upstreams: Callable[..., dict[str, Any]]
    names: list[Any]  # of environments that are still to be played
    returns: dict[str, list[float]] = field(default_factory=dict)  # each episode's, by environment
    # The results of this environment that upstream has not asked for.
    left: Iterator[dict[str, Any]] = field(default_factory=lambda: iter(()))
    error: Exception = field(init=False)  # before _Ended is raised

    def made(self, envs: Iterable[Any]) -> Iterator[Any]:
        """Yield the environments that each rank could make, and note their names (collective)."""
        for env in envs:
            name: Any = env.get_env_attr("name", id=0)[0] if _is_vector(env) else getattr(env, "name", None)
            names = self.here.gather(name)
            if any(other != name for other in names):
                raise RolloutError(
                    f"ranks evaluate different environments ({names}, in rank order); episodes would be played twice "
                    "or not at all. Make the same ones on every rank. None means that one could not be made; that "
                    "rank's output says why."
                )
            self.names += [] if env is None else [name]
            yield env

    def run_rollout(self, **options: Any) -> dict[str, Any]:
        """Return upstream's results of the next turn (collective at an environment's first, and with videos).

        A turn is one episode, or in a vector environment one episode in each of its parts.
        """
        try:
            result = next(self.left, None)
            if result is None:
                self.left = self._play(self.names.pop(0), **options)
                result = next(self.left)
        except RolloutError:
            raise
        except Exception as error:
            self.error = error
            raise _Ended from None
        return result

    def _play(self, name: str, *, env: Any, video_writer: Any = None, **options: Any) -> Iterator[dict[str, Any]]:
        """Play this rank's turns, and yield the results of all (collective)."""
        import numpy
        import robomimic.utils.log_utils as LogUtils

        here, training, num_at_once = self.here, session().progress, len(env) if _is_vector(env) else 1
        num_turns = math.ceil(self.options["num_episodes"] / num_at_once)
        has_video = bool(self.options.get("video_dir") or self.options.get("video_path"))
        all_shown: list[environments.Shown] = []  # of this rank's episodes
        packed: dict[int, bytes] = {}  # the frames of this rank's turns

        def play(turn: int) -> dict[str, Any]:
            seed = derive_seed(session().seed, "rollout", str(self.options.get("epoch")), name, turn)
            of_env = derive_seed(session().seed, "rollout", name, turn) if self.in_turn else seed  # in each evaluation
            is_checked, frames = turn < here.world_size, list[Any]()
            # The parts of a vector environment seed themselves, see `deal_episodes`.
            seeding = contextlib.nullcontext() if _is_vector(env) else environments.seeded(env, of_env, is_checked)
            writer = SimpleNamespace(append_data=frames.append) if has_video else None
            start = time.time()
            with current().part(Counts).alone(), shared_random_streams(seed), seeding as shown:
                result = self.upstreams(env=env, video_writer=writer, **options)
            seconds = time.time() - start
            if shown is not None:
                all_shown.append(shown)
            if frames:
                # Compressed, because a rank keeps them until all episodes of the environment are played.
                packed[turn] = zlib.compress(messages.packed(frames), 1)
            return {**result, "time": [seconds / len(env)] * len(env) if _is_vector(env) else seconds}

        is_quiet = self.options.get("verbose", False) or not here.is_main
        bar = LogUtils.custom_tqdm(total=num_turns, disable=is_quiet)
        # Fixed turns: each part of a vector environment is seeded for certain episodes.
        deal = Deal(here, num_turns, is_fixed=True)
        deal.play(
            play,
            lambda turn: f"environment {name!r}, episode {turn * num_at_once}",
            is_told_to_end=lambda: training is not None and preemption.asked() is not None,
            ends_at_failure=not self.in_turn,  # robocasa uses the turns before the one that failed
            played=lambda so_far: bar.update(so_far - bar.n),
        )
        environments.name_unseeded(f"environment {name!r}", itertools.chain(*here.gather(all_shown)), here)
        bar.update(0 if deal.text else num_turns - bar.n)
        bar.close()
        if not self.in_turn:
            deal.raise_failure()
        if training is not None and deal.is_told_to_end():
            training.leave(f"a signal during the rollouts in {name!r}")  # by SystemExit, which upstream does not catch
        if deal.own is not None and not here.is_main:
            # Directly: other ranks' output is that of the main rank, and discarded.
            traceback.print_exception(type(deal.own), deal.own, deal.own.__traceback__, file=sys.__stderr__)
        results = [_Result(deal.results[turn]) for turn in range(deal.failed_at)]
        self.returns[name] = [gain for result in results for gain in numpy.atleast_1d(result["Return"]).tolist()]
        for turn, result in enumerate(results):
            src, frames = turn % here.world_size, packed.pop(turn, b"")
            if has_video and src != 0:  # the main rank, which writes the video, has its own
                frames = here.broadcast(frames, src=src)
            for frame in messages.unpacked(zlib.decompress(frames), src) if frames and here.is_main else ():
                video_writer.append_data(frame)
            yield result
        deal.raise_failure()


def _is_vector(env: Any) -> bool:
    """Whether `env` is a vector environment of tianshou, which plays several episodes at once in other processes."""
    return hasattr(env, "get_env_attr")
