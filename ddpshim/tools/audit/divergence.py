"""Finds in the records of an audit where the ranks' models start to differ, or ranks draw the same noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ddpshim.tools.audit.verdict import Incident, error, found, of_ranks
from ddpshim.tools.audit.witness import Record, Seen, common_steps

_MAX_NAMED = 3


def divergences(ranks: Sequence[Seen]) -> Iterator[Incident]:
    """Yield causes, and not what follows from them."""
    without_group = list(_group([seen for seen in ranks if seen.steps], len(ranks)))
    yield from without_group
    if all(seen.steps for seen in ranks):
        yield from () if without_group else _weights(ranks)
        yield from _untrained(ranks[0])
        yield from _rates(ranks)
        yield from _streams(ranks)


def _group(ranks: Sequence[Seen], world_size: int) -> Iterator[Incident]:
    sizes = {seen.rank: seen.steps[0].get("group_size") for seen in ranks}
    if any(size != world_size for size in sizes.values()):
        said = of_ranks({rank: "no process group" if not size else f"one of {size}" for rank, size in sizes.items()})
        yield error(
            "no-process-group",
            f"at the first step there was {said}, where {world_size} ranks were started; each rank trains its own "
            f"model, {world_size} times the same work.",
            "Call torch.distributed.init_process_group() before building the network, and wrap the network.",
        )


def _weights(ranks: Sequence[Seen]) -> Iterator[Incident]:
    """Yield at most one finding: the first difference causes all later ones."""
    rates_differ = False  # `_rates` reports this; it explains why weights differ although gradients are equal
    for key, steps in common_steps(ranks):
        rates_differ = rates_differ or any(step["lr"] != steps[0]["lr"] for step in steps)
        if any("values" not in step for step in steps):
            continue
        names = ranks[0].optimizers[key[0]]
        lengths = {seen.rank: f"{len(step['values'])} parameters" for seen, step in zip(ranks, steps)}
        if len(set(lengths.values())) > 1:
            yield error(
                "unequal-optimizers",
                f"the {steps[0]['type']} at {steps[0]['place']} has {of_ranks(lengths)}; parameters missing on some "
                "ranks are trained by the others alone.",
                "Build the same network and optimizer on all ranks.",
            )
            return
        gradients, values = (_differing([step[what] for step in steps]) for what in ("gradients", "values"))
        if gradients:
            code, how = "DDP107", "no DistributedDataParallel holds them"
            if all(names["is_wrapped"][i] for i in gradients):
                code = "DDP102"
                how = (
                    "DistributedDataParallel holds them, and did not reduce them: the training went past its forward "
                    "(through .module, a method, or under no_sync() in the last backward pass)"
                )
            shown = _show(ranks, steps, "gradients", gradients, names["names"])
            yield found(
                code,
                f"in step {key[1]} of {steps[0]['type']} ({steps[0]['place']}) gradients of {shown}; {how}. Each "
                "rank trains its own model, and only rank 0's is saved.",
            )
            return
        if values and not rates_differ:
            shown = _show(ranks, steps, "values", values, names["names"])
            yield error(
                "unequal-weights",
                f"after step {key[1]} of {steps[0]['type']} ({steps[0]['place']}) {shown}, though the gradients of "
                "all steps so far were equal: the weights differed from the start. Gradients are averaged over "
                "different models.",
                "Load checkpoints and change weights on all ranks alike, before the network is wrapped.",
            )
        if values:
            return


def _untrained(seen: Seen) -> Iterator[Incident]:
    """Yield optimizers that hold parameters of a network other than the trained one."""
    for number, places in seen.without_gradient().items():
        names, is_wrapped = seen.optimizers[number]["names"], seen.optimizers[number]["is_wrapped"]
        step = next(step for step in seen.steps if step["optimizer"] == number)
        # Parameters that belong to a trained network may be frozen for a while; these are not reported.
        is_of_another = len(places) == len(names) and not any(is_wrapped)
        strange = [i for i in places if is_of_another or not names[i]]
        if strange:
            yield found(
                "DDP106",
                f"{len(strange)} of {len(names)} parameters of {step['type']} ({step['place']}) never had a "
                "gradient and do not belong to the network in training, so that network does not change.",
            )


def _differing(rows: Sequence[Sequence[Any]]) -> list[int]:
    first = rows[0]
    return [i for i, one in enumerate(first) if any((row[i] and row[i][0]) != (one and one[0]) for row in rows[1:])]


def _show(ranks: Sequence[Seen], steps: Sequence[Record], what: str, places: Sequence[int], names: list[str]) -> str:
    shown = ", ".join(f"'{names[i]}'" if names[i] else f"number {i}" for i in places[:_MAX_NAMED])
    more = f" and {len(places) - _MAX_NAMED} more" if len(places) > _MAX_NAMED else ""
    i = places[0]
    sums = of_ranks({s.rank: f"{step[what][i][1]:.8g}" if step[what][i] else "none" for s, step in zip(ranks, steps)})
    total = len(steps[0][what])
    return f"{len(places)} of {total} parameters differ between ranks ({shown}{more}; the first sums to {sums})"


def _rates(ranks: Sequence[Seen]) -> Iterator[Incident]:
    for key, steps in common_steps(ranks):
        if any(step["lr"] != steps[0]["lr"] for step in steps):
            rates = of_ranks({seen.rank: step["lr"] for seen, step in zip(ranks, steps)})
            yield error(
                "unequal-learning-rates",
                f"in step {key[1]} of {steps[0]['type']} ({steps[0]['place']}) the learning rates are {rates}; with "
                "equal gradients, ranks still train different models.",
                "Make schedules depend on values that are equal on all ranks: the number of steps, or a reduced "
                "loss (dist.all_reduce).",
            )
            return


def _streams(ranks: Sequence[Seen]) -> Iterator[Incident]:
    """Yield the random streams that several ranks advanced to the same state between a batch and its step."""
    alike: Counter[str] = Counter()
    total = 0
    for i in range(min(len(seen.steps) for seen in ranks)):
        after = [seen.steps[i].get("streams") for seen in ranks]
        before = [seen.batch_before.get(i) for seen in ranks]
        if None in after or None in before:
            continue
        total += 1
        for name in after[0]:  # type: ignore[union-attr]
            states = [streams.get(name) for streams in after]  # type: ignore[union-attr]
            was = [batch["streams"].get(name) for batch in before]  # type: ignore[index]
            has_moved = all(old is not None and old != new for old, new in zip(was, states))
            alike[name] += has_moved and len(set(states)) < len(states)
    drawn = {name: count for name, count in alike.items() if count}
    if drawn:
        said = ", ".join(f"{name} in {count} of {total} steps" for name, count in drawn.items())
        yield found(
            "DDP301",
            f"ranks drew random numbers between a batch and its step, and their streams stood at the same place "
            f"afterwards ({said}): they dropped the same units and added the same noise, each to its own samples, as "
            "if there were fewer samples.",
        )
