"""Finds the networks of a robomimic Algo that train together, and all state that a resumed run needs.

robomimic is imported inside the functions only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from torch import nn

from ddpshim.errors import CheckpointError


def algos(model: Any) -> Iterator[Any]:
    """Yield `model` and the algorithms inside it (hbc and iris hold planners, actors and value functions)."""
    from robomimic.algo.algo import Algo

    inner = [value for value in vars(model).values() if isinstance(value, Algo)]
    for algo in inner:
        yield from algos(algo)
    if "nets" in vars(model):
        yield model


def trained_together(algo: Any) -> Iterator[nn.Module]:
    """Yield the networks that the optimizers of `algo` train, without target networks.

    A ModuleList with an optimizer for each of its parts is yielded part by part.
    """
    optimizers: Mapping[str, Any] = vars(algo).get("optimizers", {})
    trained = {id(p) for optimizer in flat(optimizers) for group in optimizer.param_groups for p in group["params"]}
    for name, net in algo.nets.items():
        cut = isinstance(net, nn.ModuleList) and isinstance(optimizers.get(name), list)
        yield from (part for part in (net if cut else [net]) if any(id(p) in trained for p in part.parameters()))


class AlgoState:
    """All state of an Algo and its inner ones that training changes: networks, EMA, optimizers, schedules, counters."""

    def __init__(self, model: Any) -> None:
        self._algos = list(algos(model))
        self._before = [_counters(algo) for algo in self._algos]
        self._held: Optional[list[dict[str, Any]]] = None

    def hold(self) -> None:
        """Save schedules and counters as they are now: a resumed trainer repeats its changes after an epoch."""
        self._held = copy.deepcopy([self._light(*pair) for pair in zip(self._algos, self._before)])

    def release(self) -> None:
        """Save the current schedules and counters again."""
        self._held = None

    def state_dict(self) -> list[dict[str, Any]]:
        out = []
        for i, algo in enumerate(self._algos):
            light = self._light(algo, self._before[i]) if self._held is None else self._held[i]
            ema = getattr(algo, "ema", None)
            optimizers = [o.state_dict()["state"] for o in flat(vars(algo).get("optimizers"))]
            heavy = {
                "nets": algo.nets.state_dict(),
                "ema": None if ema is None else ema.averaged_model.state_dict(),
                "optimizers": optimizers,
            }
            out.append({**heavy, **light})
        return out

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        current = self.state_dict()
        for kind in ("optimizers", "lr_schedulers", "ema"):
            was, now = ([len(part[kind] or ()) for part in parts] for parts in (state, current))
            if was != now:
                raise CheckpointError(
                    f"the progress has {kind} of sizes {was}, the algorithm {now}; a part of it would start over. "
                    "Resume with the config that the run was started with, or set DDPSHIM_RESUME=never."
                )
        for algo, saved in zip(self._algos, state):
            algo.nets.load_state_dict(saved["nets"])
            for o, held, groups in zip(flat(vars(algo).get("optimizers")), saved["optimizers"], saved["param_groups"]):
                o.load_state_dict({"state": held, "param_groups": groups})
            for schedule, held in zip(flat(vars(algo).get("lr_schedulers")), saved["lr_schedulers"]):
                schedule.load_state_dict(held)
            vars(algo).update(saved["counters"])
            if saved["ema"] is not None:
                algo.ema.averaged_model.load_state_dict(saved["ema"])
                vars(algo.ema).update(saved["ema_counters"])

    @staticmethod
    def _light(algo: Any, before: dict[str, Any]) -> dict[str, Any]:
        ema = getattr(algo, "ema", None)
        return {
            "param_groups": [o.state_dict()["param_groups"] for o in flat(vars(algo).get("optimizers"))],
            "lr_schedulers": [s.state_dict() for s in flat(vars(algo).get("lr_schedulers"))],
            # Only those that training has changed: the others come from the config, which may differ after a resume.
            "counters": {name: n for name, n in _counters(algo).items() if before.get(name) != n},
            "ema_counters": {} if ema is None else _counters(ema),
        }


def _counters(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if type(value) in (int, float)}


def flat(made: Any) -> list[Any]:
    """Return the optimizers or schedules of an Algo as one list; it keeps them by name, in lists, or as None."""
    if isinstance(made, Mapping):
        made = list(made.values())
    if isinstance(made, list):
        return [inner for value in made for inner in flat(value)]
    return [] if made is None else [made]
