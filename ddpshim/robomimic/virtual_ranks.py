"""Trains robomimic's unedited algorithms on the virtual ranks of a process (option exact)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

from ddpshim.job.group import world
from ddpshim.model.virtual_step import Players
from ddpshim.process.job import current
from ddpshim.process.replaced import replaced


class _Batch:
    """A batch between the calls of run_epoch: each virtual rank processes its rows later, in the step."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.options: Any = None  # arguments of postprocess_batch_for_training


class _Kept:
    """The virtual ranks of a job."""

    players: Optional[Players] = None


@contextlib.contextmanager
def playing(model: Any, note: Callable[..., Any]) -> Iterator[None]:
    """In this block, run_epoch's calls of `model` also run on its copies, one for each virtual rank of this process.

    Args:
        note: called with the metrics of a step, one argument for each virtual rank.
    """
    kept = current().part(_Kept)
    if kept.players is None or kept.players.copies[0][0] is not model:
        kept.players = Players([model])
    players = kept.players
    if players.size > 1:
        players.refresh()
    with contextlib.ExitStack() as changed:
        changed.callback(players.close)
        for name, stand_in in _stand_ins(model, players, note).items():
            if hasattr(model, name):
                changed.enter_context(replaced(model, name, stand_in))
        yield


def _stand_ins(model: Any, players: Players, note: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    kind = type(model)  # for its original methods: the stand-ins are attributes of the model, but not of its copies

    def process(batch: Any) -> _Batch:
        return _Batch(batch)

    def postprocess(batch: _Batch, **options: Any) -> _Batch:
        batch.options = options
        return batch

    def train(batch: _Batch, epoch: int, validate: bool = False) -> list[Any]:
        parts = players.divided(batch.rows)

        def step(objects: tuple[Any, ...], i: int) -> Any:
            own = objects[0]
            with world().autocast():  # in torch autocast is set per thread
                rows = kind.process_batch_for_training(own, parts[i])
                if batch.options is not None:
                    rows = kind.postprocess_batch_for_training(own, rows, **batch.options)
                return kind.train_on_batch(own, rows, epoch, validate=validate)

        return players.play(step)

    def of_each(name: str) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            for (own,) in players.copies:
                getattr(kind, name)(own, *arguments, **options)

        return call

    def log(infos: list[Any]) -> dict[str, Any]:
        logs = [kind.log_info(own, info) for (own,), info in zip(players.copies, infos)]
        note(*logs)
        return {key: math.fsum(float(each[key]) for each in logs) / len(logs) for key in logs[0]}

    return {
        "process_batch_for_training": process,
        "postprocess_batch_for_training": postprocess,
        "train_on_batch": train,
        "log_info": log,
        **{name: of_each(name) for name in ("on_gradient_step", "set_train", "set_eval")},
    }
