"""Makes and plays a trainer's environments on the main rank only; the other ranks wait for its results.

An adapter names the classes that play. Otherwise each rank would need as many simulators as one process, and if a
simulator is not deterministic, ranks would decide differently.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from ddpshim import adapters
from ddpshim.job.world import World
from ddpshim.process.after_import import after_import
from ddpshim.process.job import current
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.process.replaced import replaced
from ddpshim.rows.tensor import Counts


class Rollouts:
    """The rollouts of a job.

    Attributes:
        is_playing: whether this rank is playing while the others wait.
    """

    def __init__(self, world: World) -> None:
        self.is_playing = False
        self._world, self._process = world, os.getpid()

    @contextlib.contextmanager
    def on_main(self, apart: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        """Within this block, classes that adapters name are made, and their `run` is called, only on the main rank.

        `apart`: makes a context in which the files that the main rank writes are shown to all ranks.
        """
        with contextlib.ExitStack() as until:

            def take(module: str, name: str) -> None:
                base = getattr(sys.modules[module], name)
                until.enter_context(replaced(base, "__init_subclass__", self._hook(base, apart)))

            for package in adapters.packages():
                offered = adapters.function(package, "rollouts")
                for module, name in [] if offered is None else offered():
                    if module.startswith(f"{package}."):
                        until.callback(after_import(module, functools.partial(take, module, name)))
            yield

    def _hook(self, base: Any, apart: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
        """Return the `__init_subclass__` of `base` that replaces `__init__` and `run` of each subclass."""

        def made(kind: Any, /, **arguments: Any) -> None:
            super(base, kind).__init_subclass__(**arguments)
            for name, instead in (("__init__", self._make), ("run", self._play)):
                method = getattr(kind, name)
                if not hasattr(method, "is_on_main"):
                    setattr(kind, name, instead(method, base, apart))
                    getattr(kind, name).is_on_main = True

        return classmethod(made)

    def _make(self, method: Callable[..., None], base: Any, apart: Any) -> Callable[..., None]:
        """Return the stand-in for `__init__`. Other ranks run only that of `base`, so they make no environments."""
        play = self._play(method, base, apart)

        @functools.wraps(method)
        def make(runner: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_for_all() and not self._world.is_main:
                given = {**kwargs, **inspect.signature(method).bind(runner, *args, **kwargs).arguments}
                names = [name for name in [*inspect.signature(base.__init__).parameters][1:] if name in given]
                base.__init__(runner, **{name: given[name] for name in names})
            play(runner, *args, **kwargs)

        return make

    def _play(self, method: Callable[..., Any], base: Any, apart: Any) -> Callable[..., Any]:
        @functools.wraps(method)
        def play(runner: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_for_all():
                return method(runner, *args, **kwargs)
            own, device = [], self._world.device

            def alone() -> Any:
                self.is_playing = True
                try:
                    with current().part(Counts).alone():
                        own.append(method(runner, *args, **kwargs))
                finally:
                    self.is_playing = False
                return _portable(own[0]), rank_states(device)

            with apart():
                found, states = self._world.run_on_main(alone)
            if not self._world.is_main:
                restore_rank_states(states, device)
            return own[0] if own else found

        return play

    def _is_for_all(self) -> bool:
        """Whether all ranks make this call, and none is playing yet."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        return self._world.world_size > 1 and is_main_thread and os.getpid() == self._process and not self.is_playing


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
