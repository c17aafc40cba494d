"""Environments in their own processes, with the part of tianshou's interface that robomimic uses."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

import numpy as np


def _serve(make: Callable[[], Any], pipe: Any) -> None:
    env = make()
    while True:
        name, arguments = pipe.recv()
        found = getattr(env, name, None)
        pipe.send(found(*arguments) if callable(found) else found)
        if name == "close":
            return


class SubprocVectorEnv:
    def __init__(self, env_fns: Sequence[Callable[[], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for make in env_fns:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(make, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._pipes)

    def _ask(self, name: str, arguments: Iterable[tuple[Any, ...]], which: Optional[Sequence[int]] = None) -> list[Any]:
        pipes = [self._pipes[i] for i in (range(len(self)) if which is None else which)]
        for pipe, given in zip(pipes, arguments):
            pipe.send((name, given))
        return [pipe.recv() for pipe in pipes]

    def reset(self) -> np.ndarray:
        return np.array(self._ask("reset", [()] * len(self)), dtype=object)

    def step(self, action: np.ndarray) -> list[np.ndarray]:
        return [np.stack(column) for column in zip(*self._ask("step", [(one,) for one in action]))]

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:
        which = [id] if isinstance(id, int) else id
        return self._ask(key, [()] * len(self), which)

    def close(self) -> None:
        self._ask("close", [()] * len(self))
        for process in self._processes:
            process.join()
