"""Holds the state of an Algo for resuming, and reads the norms of its gradients at once.

robomimic is imported inside the functions only.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import torch

from ddpshim.errors import CheckpointError
from ddpshim.process.replaced import replaced
from ddpshim.robomimic.batches import digest

_BACKPROP_DIGEST = "33cd2d929a81b581"  # of TorchUtils.backprop_for_loss in 0.3.0, 0.4.0, 0.5.0, and master at d309eae


def algos(model: Any) -> Iterator[Any]:
    """Yield `model` and the algorithms inside it (hbc and iris hold planners, actors and value functions)."""
    from robomimic.algo.algo import Algo

    inner = [value for value in vars(model).values() if isinstance(value, Algo)]
    for algo in inner:
        yield from algos(algo)
    if "nets" in vars(model):
        yield model


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


@contextlib.contextmanager
def norms_read_at_once() -> Iterator[None]:
    """In this block, robomimic's `backprop_for_loss` reads all norms at once, if its code is known. Local.

    Upstream reads the norm of every gradient separately, 94 in a step of a transformer: a GPU waits for each.
    """
    import robomimic.utils.torch_utils as TorchUtils

    upstreams = vars(TorchUtils).get("backprop_for_loss")
    if not hasattr(upstreams, "__code__") or digest(upstreams) != _BACKPROP_DIGEST:
        yield  # unknown code may do something else
        return
    with replaced(TorchUtils, "backprop_for_loss", backprop_for_loss):
        yield


def backprop_for_loss(
    net: torch.nn.Module,
    optim: torch.optim.Optimizer,
    loss: torch.Tensor,
    max_grad_norm: Optional[float] = None,
    retain_graph: bool = False,
) -> Any:
    """Do the same as upstream's, but read all norms at once. Local."""
    optim.zero_grad()
    loss.backward(retain_graph=retain_graph)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
    gradients = [p.grad.detach() for p in net.parameters() if p.grad is not None]
    total = _sum_of_squares(gradients)  # before the step: an optimizer may write to gradients
    optim.step()
    return total


def _sum_of_squares(gradients: list[torch.Tensor]) -> float:
    kinds = {(g.device, g.dtype, g.layout) for g in gradients}
    if len(kinds) != 1 or gradients[0].is_sparse:
        squares = [g.norm(2).pow(2).item() for g in gradients]
    else:
        squares = torch.stack(torch._foreach_norm(gradients, 2)).pow(2).tolist()
    return float(sum(squares))
