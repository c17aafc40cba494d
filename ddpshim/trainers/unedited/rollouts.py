"""Plays rollouts on the main rank only, and gives the other ranks what it found, for the classes of some codebases.

Otherwise each rank would need as many simulators as one process, and would decide differently if one of them is not
deterministic.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Callable

from ddpshim.job.world import World
from ddpshim.process.job import current
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.rows.tensor import Counts
from ddpshim.trainers.unedited.private_files import PrivateFiles


class Rollouts:
    """The rollouts of a job by subclasses of `base`: made, and their `run` called, only on the main rank."""

    def __init__(self, base: Any, world: World, files: PrivateFiles) -> None:
        self._base, self._world, self._files, self._counts = base, world, files, current().part(Counts)

    def hook(self) -> Any:
        """Return the `__init_subclass__` of the base that replaces `__init__` and `run` of each subclass."""
        base = self._base

        def made(kind: Any, /, **arguments: Any) -> None:
            super(base, kind).__init_subclass__(**arguments)
            for name, instead in (("__init__", self._make), ("run", self._play)):
                method = getattr(kind, name)
                if not hasattr(method, "is_on_main"):
                    setattr(kind, name, instead(method))
                    getattr(kind, name).is_on_main = True

        return classmethod(made)

    def _make(self, method: Callable[..., None]) -> Callable[..., None]:
        """Return the stand-in for `__init__`. Other ranks run only that of the base, so they make no environments."""
        play, base = self._play(method), self._base

        @functools.wraps(method)
        def make(runner: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_for_all() and not self._world.is_main:
                given = {**kwargs, **inspect.signature(method).bind(runner, *args, **kwargs).arguments}
                names = [name for name in [*inspect.signature(base.__init__).parameters][1:] if name in given]
                base.__init__(runner, **{name: given[name] for name in names})
            play(runner, *args, **kwargs)

        return make

    def _play(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def play(runner: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_for_all():
                return method(runner, *args, **kwargs)
            own, device = [], self._world.device

            def alone() -> Any:
                with self._counts.alone():
                    own.append(method(runner, *args, **kwargs))
                return _portable(own[0]), rank_states(device)

            with self._files.apart():
                found, states = self._world.run_on_main(alone)
            if not self._world.is_main:
                restore_rank_states(states, device)
            return own[0] if own else found

        return play

    def _is_for_all(self) -> bool:
        """Whether all ranks make this call, and none is playing yet."""
        return self._world.world_size > 1 and self._counts.is_in_lock_step()


def _portable(value: Any) -> Any:
    """Return `value` with only numbers, text, tensors and arrays; None replaces others, such as a video to log."""
    if isinstance(value, Mapping):
        return {key: _portable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_portable, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value).__module__ in ("numpy", "torch"):
        return value.item() if not getattr(value, "shape", (1,)) else value
    return None
