"""What fine-tuning by reinforcement learning needs: dealt tasks, running statistics, what only the main rank has."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch

import ddpshim
from ddpshim.checkpoint.resume import Resumable
from ddpshim.errors import DataError, RankError, WorldError
from ddpshim.evaluation.dealing import _holders
from ddpshim.job.collectives import StandIn
from ddpshim.job.running import Running
from ddpshim.job.world import World
from tests.ranks import run_ranks


@pytest.mark.unit
@pytest.mark.parametrize(
    ("costs", "num_ranks", "holders"),
    [
        ([5, 3, 2], 2, [[0], [1], [1]]),
        ([1, 1, 1, 1, 1], 2, [[0], [1], [0], [1], [0]]),
        ([9, 1, 1, 1], 2, [[0], [1], [1], [1]]),
        ([9, 0, 0], 3, [[0], [1], [2]]),
        ([4], 2, [[0, 1]]),
        ([6, 1], 4, [[0, 1, 2], [3]]),  # the costliest is shared by most
        ([0, 9], 3, [[2], [0, 1]]),
        ([], 2, []),
    ],
)
def test_tasks_are_dealt_by_cost(costs: list[float], num_ranks: int, holders: list[list[int]]) -> None:
    assert _holders(costs, num_ranks) == holders


def _deal(tasks: Any, costs: Any) -> Any:
    here = ddpshim.world()
    mine = ddpshim.deal(tasks[here.rank], None if costs is None else [cost + here.rank for cost in costs])
    return [(task, [*range(4)[part]]) for task, part in mine]


@pytest.mark.ranks
def test_ranks_deal_by_the_main_ranks_costs_and_refuse_different_tasks() -> None:
    every = [0, 1, 2, 3]
    assert run_ranks(_deal, 2, [["a", "b", "c"]] * 2, [3, 1, 1]) == [[("a", every)], [("b", every), ("c", every)]]
    assert run_ranks(_deal, 2, [["a"]] * 2, None) == [[("a", [0, 2])], [("a", [1, 3])]]
    with pytest.raises(RankError, match="some would be done twice"):
        run_ranks(_deal, 2, [["a", "b"], ["b", "a"]], None)
    with pytest.raises(DataError, match="each task a cost of at least 0"):
        ddpshim.deal(["a"], [-1.0])
    assert [task for task, _ in ddpshim.deal([3, 4])] == [3, 4]


VALUES = np.random.default_rng(3).normal(1000.0, 1.0, (40, 2))  # far from 0: a sum of squares would cancel


def _keep_statistics(folder: str, is_resumed: bool) -> Any:
    """40 entries in 20 steps, of which rank 0 of 2 has three quarters; interrupted after 9 steps where asked."""
    here = ddpshim.world()
    running, seen = here.running(every_n_steps=4), []
    training = Resumable(folder, {"running": running}, every_s=1e9)
    if is_resumed:
        assert training.restore()
    for iteration in training.iterations(20):
        for number, value in enumerate(VALUES[2 * iteration : 2 * iteration + 2]):
            owner = 0 if iteration % 2 else number
            if owner % here.world_size == here.rank:
                running.add("obs", value[None])
                running.add("return", value[0])
                running.count("steps", 3)
                running.episode(f"task {number}", value[1] > 1000)
        new = running.step()
        if new is not None:
            seen.append((iteration, new["counts"]["steps"]))
        if folder and iteration == 9 and not is_resumed:
            training.epoch += 1
            training.save()
            break
    return running.results(), seen


@pytest.mark.ranks
def test_statistics_are_those_of_one_process_also_after_an_interruption(tmp_path: Path) -> None:
    kind = VALUES[:, 1] > 1000
    expected = {f"task {k}": (int(kind[k::2].sum()), 20) for k in (0, 1)}
    first = run_ranks(_keep_statistics, 2, str(tmp_path / "resume"), False)
    assert first[0][1] == [(3, 24), (7, 24)], "a merge takes what is new, and no more"
    assert first[0][0]["num_entries"]["return"] == 16  # of the last 4 no merge has heard
    for size in (1, 3):
        for results, seen in run_ranks(_keep_statistics, size, str(tmp_path / "resume"), True):
            assert seen == [(11, 24), (15, 24), (19, 24)]  # 4 of those 24 come from before
            np.testing.assert_allclose(results["means"]["obs"], VALUES.mean(0), rtol=1e-14)
            assert results["means"]["return"] == pytest.approx(VALUES[:, 0].mean(), rel=1e-14)
            np.testing.assert_allclose(results["deviations"]["obs"], VALUES.std(0), rtol=1e-10)
            assert results["counts"] == {"steps": 120}
            found = {task: (r["num_successes"], r["num_episodes"]) for task, r in results["success_rates"].items()}
            assert found == expected
            assert json.loads(json.dumps(results)) == results


@pytest.mark.unit
def test_statistics_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(WorldError, match="never be merged"):
        World().running(every_n_steps=0)
    running = Running(World(), 1)
    running.add("x", [1.0])
    with pytest.raises(WorldError, match="cannot be averaged"):
        running.add("x", np.zeros((2, 3)))
    running.add("x", [])
    assert running.merge()["num_entries"] == {"x": 1}
    with pytest.raises(KeyError):
        running.mean("y")


def _endless(folder: str, num: int) -> Any:
    training = Resumable(folder, {}, every_n_steps=3, num_kept=2)
    training.restore()
    done = []
    for iteration in training.iterations():
        done.append(iteration)
        if len(done) == num:
            break
    return done, sorted(p.name for p in Path(folder).iterdir())


@pytest.mark.ranks
def test_a_loop_without_an_end_goes_on_and_keeps_the_newest(tmp_path: Path) -> None:
    assert [found[0] for found in run_ranks(_endless, 2, str(tmp_path), 10)] == [list(range(10))] * 2
    done, files = run_ranks(_endless, 1, str(tmp_path), 5)[0]
    assert done == [9, 10, 11, 12, 13]
    assert files == [f"epoch_0000{n}_step_000000000.pth" for n in ("09", "12")]


def _log() -> Any:
    here = ddpshim.world()
    made: list[Any] = []

    class Log(dict):  # type: ignore[type-arg]
        def __init__(self, name: str) -> None:
            super().__init__()
            made.append(name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *exception: Any) -> None: ...

    with here.only_main(Log)("run") as log:
        log["loss"] = 1
        log.config = {"a": 1}
        log.update(step=2)
    best = here.broadcast(log.get("loss"))
    return made, type(log).__name__, best, bool(log), len(log), "loss" in log, list(log)


@pytest.mark.ranks
def test_what_only_the_main_rank_has() -> None:
    main, other = run_ranks(_log, 2)
    assert main == (["run"], "Log", 1, True, 2, True, ["loss", "step"])
    assert other == ([], "StandIn", 1, False, 0, False, [])


@pytest.mark.unit
def test_a_stand_in_is_no_value() -> None:
    nothing: Any = StandIn()
    assert nothing.a.b(1)["c"] is nothing
    del nothing.a, nothing["b"]
    assert isinstance(copy.deepcopy(nothing), StandIn)
    assert next(nothing, None) is None
    with pytest.raises(ValueError, match="seen"), nothing:
        raise ValueError("seen")
    for use in (lambda: nothing + 1, lambda: nothing > 0, lambda: Path(nothing), lambda: torch.ones(1) * nothing):
        with pytest.raises(TypeError):
            use()


RLOO = Path(__file__).resolve().parents[2] / "examples" / "rloo"


def _example() -> Any:
    sys.path.insert(0, str(RLOO))
    return importlib.import_module("train")


def _fine_tune(out: str, ends_before: int) -> None:
    words = "--toy --groups 1 --episodes 6 --epochs 4 --lr 1e-3 --merge-every 2 --save-every 4 --bc-steps 60 --out"
    sys.argv = ["train.py", *words.split(), out, "--iterations", "10"]
    numbers = Resumable.iterations

    def until(training: Resumable, num: Optional[int] = None) -> Iterator[int]:
        for iteration in numbers(training, num):
            if iteration == ends_before:
                ddpshim.world().barrier()
                raise SystemExit
            yield iteration

    Resumable.iterations = until  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        _example().main()


@pytest.mark.ranks
def test_reinforcement_learning_on_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for out, num_ranks, ends_before in ((alone, 1, 10), (together, 2, 7), (together, 3, 10)):
        run_ranks(_fine_tune, num_ranks, str(out), ends_before, seed=None)
    one, three = (torch.load(out / "policy_000008.pth", weights_only=True) for out in (alone, together))
    for name, value in one.items():
        torch.testing.assert_close(three[name], value, rtol=1e-9, atol=1e-11)
    one, three = (json.loads((out / "distributed_training_results.json").read_text()) for out in (alone, together))
    assert [one["world_size"], three["world_size"]] == [1, 3]
    for part in ("curve", "success_rates", "counts", "num_entries"):
        assert one[part] == three[part]
    assert one["counts"]["groups"] == 10 * 5
    assert sum(found["num_episodes"] for found in one["success_rates"].values()) == 10 * 5 * 6
    rates = [point["success_rate"] for point in one["curve"]]
    assert sum(rates[-2:]) / 2 > sum(rates[:2]) / 2 + 0.1, "success does not go up"
    logs = [(together / "ranks" / f"rank_{rank}.jsonl").read_text().splitlines() for rank in range(3)]
    by_rank = [{told["iteration"]: told for told in map(json.loads, lines)} for lines in logs]
    assert [json.loads(line)["iteration"] for line in logs[0]] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9]
    for iteration in range(4, 10):
        dealt = [task for told in by_rank for task in told[iteration]["tasks"]]
        assert sorted(dealt) == sorted(one["success_rates"]), "each task once"
    assert sorted(path.name for path in alone.glob("policy_*")) == ["policy_000004.pth", "policy_000008.pth"]


def _update(num_groups: list[int]) -> Any:
    """The weights after two epochs on five groups, of which each rank has so many."""
    here, train = ddpshim.world(), _example()
    torch.set_default_dtype(torch.float64)
    env = train.Toy()
    torch.manual_seed(0)
    policy = ddpshim.wrap_parallel(train.Policy(env, torch.from_numpy(env.demonstrations()[0])))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    groups = [train.play(policy.module, env, "east", [0, number], 3 + number) for number in range(5)]
    for number, group in enumerate(groups):  # some success in each
        group[number % 3] = group[number % 3]._replace(is_success=True)
    first = sum(num_groups[: here.rank])
    args = argparse.Namespace(groups_at_once=2, epochs=2, clip=0.2, max_norm=1.0)
    num_passes = train.update(policy, optimizer, groups[first : first + num_groups[here.rank]], args)
    assert train.update(policy, optimizer, [], args) == 0
    return num_passes, torch.cat([p.detach().reshape(-1) for p in policy.parameters()])


@pytest.mark.ranks
def test_a_rank_without_valid_groups_takes_part() -> None:
    ((_, alone),) = run_ranks(_update, 1, [5], seed=None)
    found = run_ranks(_update, 2, [5, 0], seed=None)
    assert [num_passes for num_passes, _ in found] == [6, 2]
    for _, weights in found:
        torch.testing.assert_close(weights, alone, rtol=1e-12, atol=1e-14)
