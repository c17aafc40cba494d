"""Reads what one rank of an audited job did from the records that it wrote (see recording.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Optional

Record = dict[str, Any]


class Pass:
    """One way of a rank through a DataLoader."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.batches: list[Record] = []
        self.has_ended = self.trains = False

    @property
    def samples(self) -> list[str]:
        return [name for batch in self.batches for name in batch["samples"] or ()]

    @property
    def tells_samples_apart(self) -> bool:
        return len(set(self.samples)) > 1

    @property
    def place(self) -> str:
        return f"the DataLoader read at {self.record['place']}" if self.record["place"] else "a DataLoader"


class Seen:
    """What one rank did."""

    def __init__(self, rank: int, records: Sequence[Record]) -> None:
        self.rank = rank
        self.steps: list[Record] = []
        self.optimizers: dict[int, Record] = {}
        self.files: list[Record] = []
        self.exit_code: Optional[int] = None
        self.has_stopped = False
        self.stack = ""
        self.batch_before: dict[int, Record] = {}  # each step, by its place in `steps`: the batch that it was made on
        self.sizes: list[int] = []  # samples of each step
        self.num_left = 0  # batches of training passes since the last step
        passes: dict[int, Pass] = {}
        waiting: list[Record] = []
        for record in records:
            kind = record["kind"]
            if kind == "pass":
                passes[record["number"]] = Pass(record)
            elif kind == "batch":
                passes[record["number"]].batches.append(record)
                waiting.append(record)
            elif kind == "pass ended":
                passes[record["number"]].has_ended = True
            elif kind == "step":
                if waiting:
                    passes[waiting[-1]["number"]].trains = True
                    self.batch_before[len(self.steps)] = waiting[-1]
                    mine = [batch["size"] for batch in waiting if batch["number"] == waiting[-1]["number"]]
                    self.sizes.append(sum(mine))
                    waiting = []
                self.steps.append(record)
            elif kind == "optimizer":
                self.optimizers[record["optimizer"]] = record
            elif kind == "file":
                self.files.append(record)
            elif kind == "end":
                self.exit_code = record["code"]
            elif kind == "stopped":
                self.has_stopped = True
            elif kind == "stack":
                self.stack = record["place"]
        self.training = [each for each in passes.values() if each.trains]
        self.num_left = sum(passes[batch["number"]].trains for batch in waiting)

    def at(self) -> dict[tuple[int, int], Record]:
        """Its steps by the number of the optimizer, and of the step among that one's."""
        return {(step["optimizer"], step["step"]): step for step in self.steps}

    def without_gradient(self) -> dict[int, list[int]]:
        """By the number of the optimizer: the places of its parameters that had no gradient in any step."""
        out = {}
        for number, optimizer in self.optimizers.items():
            looked = [step["gradients"] for step in self.steps if step["optimizer"] == number and "gradients" in step]
            places = range(len(optimizer["names"]))
            out[number] = [i for i in places if all(i < len(each) and each[i] is None for each in looked)]
        return out

    def num_steps(self) -> int:
        return max((step["step"] for step in self.steps), default=0)


def common_steps(ranks: Sequence[Seen]) -> Iterator[tuple[tuple[int, int], list[Record]]]:
    """Each step that all ranks made, in the order of the first one."""
    tables = [seen.at() for seen in ranks]
    for key in tables[0]:
        if all(key in table for table in tables):
            yield key, [table[key] for table in tables]


def usual(values: Sequence[int]) -> int:
    return Counter(values).most_common(1)[0][0] if values else 0
