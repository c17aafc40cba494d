"""Makes a phase of a training on ranks slow, and checks whether the diagnosis after 20 steps names it.

    python -m benchmarks --only diagnosis

Compute is emulated by sleeps, so that four ranks run on two cores; loaders, reductions, saves and optimizers are real.
Each phase is slowed by 5, 10 and 20% of a step, on one of four ranks (communication: between all of them). An equal
number of runs is healthy.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.distributed as dist

import ddpshim
import ddpshim.checkpoint
from benchmarks.emulated import SleepingPolicy
from ddpshim.process import events
from tests.ranks import run_ranks

NUM_RANKS, NUM_STEPS, STEP_S, OPTIMIZER_S = 4, 24, 0.25, 0.01
PHASES = ("data", "transfer", "forward", "backward", "communication", "optimizer", "save", "rollout")
SHARES = (0.05, 0.1, 0.2)
EVERY = 10  # steps to a save, or a rollout


class Case(NamedTuple):
    """The phase that is slow, if any, and where."""

    phase: Optional[str]
    share: float = 0.0
    rank: int = 0
    step_s: float = STEP_S

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault: none for communication, the main rank for saves."""
        return () if self.phase == "communication" else (0 if self.phase == "save" else self.rank,)


class Notes:
    """Collects a rank's records of some kinds."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds, self.found = kinds, list[dict[str, Any]]()

    def note(self, kind: str, **values: Any) -> None:
        if kind in self.kinds:
            self.found.append(values)

    def end(self, how: str, **values: Any) -> None:
        pass


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """`number` samples, for each of which `read` is called."""

    def __init__(self, read: Callable[[], None], number: int) -> None:
        self.read, self.number = read, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read()
        return torch.ones(2)


class _SGD(torch.optim.SGD):
    sleep_s = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(self.sleep_s)
        super().step(closure)


class _SlowToPickle:
    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def __getstate__(self) -> dict[str, Any]:
        time.sleep(self.sleep_s)
        return {}


class _Env:
    """Each episode is one step."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def reset(self, *, seed: Optional[int] = None) -> tuple[list[float], dict[str, Any]]:
        return [0.0], {}

    def step(self, action: int) -> tuple[list[float], float, bool, bool, dict[str, Any]]:
        time.sleep(self.sleep_s)
        return [0.0], 0.0, True, False, {"success": True}


def _slow_network(sleep_s, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotation but its own
    """Return the mean over ranks, `sleep_s` later."""

    def arrive(future: Any) -> torch.Tensor:
        time.sleep(sleep_s)
        return future.value()[0] / NUM_RANKS  # type: ignore[no-any-return]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(arrive)  # type: ignore[union-attr]


def train(case: Case) -> list[dict[str, Any]]:
    """Train with the slow phase; return the findings of the diagnosis (collective)."""
    notes, here = Notes(("slow",)), ddpshim.world()
    events.record_to(notes)
    extra = case.share * case.step_s
    slow = {case.phase: extra} if case.phase == "communication" or here.rank in case.ranks else {}
    compute_s = case.step_s - OPTIMIZER_S
    more = {f"more_{phase}_s": slow.get(phase, 0.0) for phase in ("forward", "backward")}
    net = SleepingPolicy(1000, 4, compute_s, **more)
    policy = ddpshim.wrap_parallel(net, comm_hook=_slow_network, comm_hook_state=slow.get("communication", 0.0))
    optimizer = _SGD(policy.parameters(), lr=0.0)
    optimizer.sleep_s = OPTIMIZER_S + slow.get("optimizer", 0.0)
    read = functools.partial(time.sleep, slow.get("data", 0.0))
    loader = ddpshim.make_loader(Samples(read, NUM_RANKS * (NUM_STEPS + 1)), batch_size=NUM_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        for step, batch in enumerate(loader, start=1):
            time.sleep(slow.get("transfer", 0.0))
            optimizer.zero_grad()
            policy(batch[0, :1]).backward()
            optimizer.step()
            if step % EVERY == 0 and "save" in slow:
                ddpshim.checkpoint.save(_SlowToPickle(EVERY * extra), Path(folder, "policy.pth"))
            if step % EVERY == 0 and case.phase == "rollout":
                make_env = functools.partial(_Env, EVERY * slow.get("rollout", 0.0))
                ddpshim.evaluate(make_env, lambda observation: 0, NUM_RANKS)
            if step == NUM_STEPS:
                break
    events.record_to(None)
    return notes.found


def look(case: Case) -> Optional[dict[str, Any]]:
    """Run the case on ranks, and return the first finding, or None."""
    found = run_ranks(train, NUM_RANKS, case, timeout_s=120)[0]
    return found[0] if found else None


def is_right(case: Case, found: Optional[dict[str, Any]]) -> bool:
    """Whether the finding names the slow phase and its ranks; for a healthy run, whether there is none."""
    if case.phase is None or found is None:
        return case.phase is None and found is None
    return found["phase"] == case.phase and tuple(found["ranks"]) == case.ranks


def cases(num_rounds: int) -> Iterator[Case]:
    """Yield every phase and share `num_rounds` times, on ranks in turn, and as many healthy runs."""
    ranks = itertools.cycle(range(NUM_RANKS))
    for _ in range(num_rounds):
        for phase, share in itertools.product(PHASES, SHARES):
            yield Case(phase, share, next(ranks))
            yield Case(None)


def measure(of: Iterable[Case], num_at_once: int = 1) -> list[tuple[Case, Optional[dict[str, Any]]]]:
    """Return each case with its finding."""
    rows = list(of)
    with ThreadPoolExecutor(num_at_once) as pool:
        return list(zip(rows, pool.map(look, rows)))
