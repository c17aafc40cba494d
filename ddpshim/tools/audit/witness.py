"""Reads the records of one rank of an audited job (see recording.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Optional

Record = dict[str, Any]


class Pass:
    """One iteration of a rank over a DataLoader."""

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
        def of(kind: str) -> list[Record]:
            return [record for record in records if record["kind"] == kind]

        last = {record["kind"]: record for record in records}
        self.rank = rank
        self.steps, self.files = of("step"), of("file")
        self.optimizers: dict[int, Record] = {record["optimizer"]: record for record in of("optimizer")}
        self.exit_code: Optional[int] = last.get("end", {}).get("code")
        self.has_stopped = "stopped" in last
        self.stack: str = last.get("stack", {}).get("place", "")
        self.batch_before: dict[int, Record] = {}  # index in `steps` -> the last batch before that step
        self.sizes: list[int] = []  # samples of each step
        passes = {record["number"]: Pass(record) for record in of("pass")}
        for record in of("pass ended"):
            passes[record["number"]].has_ended = True
        num_steps, waiting = 0, []
        for record in records:
            if record["kind"] == "batch":
                passes[record["number"]].batches.append(record)
                waiting.append(record)
            elif record["kind"] == "step":
                if waiting:
                    passes[waiting[-1]["number"]].trains = True
                    self.batch_before[num_steps] = waiting[-1]
                    mine = [batch["size"] for batch in waiting if batch["number"] == waiting[-1]["number"]]
                    self.sizes.append(sum(mine))
                    waiting = []
                num_steps += 1
        self.training = [each for each in passes.values() if each.trains]
        self.num_left = sum(passes[batch["number"]].trains for batch in waiting)  # training batches after the last step

    def without_gradient(self) -> dict[int, list[int]]:
        """Return optimizer number -> indices of its parameters that had no gradient in any step."""
        out = {}
        for number, optimizer in self.optimizers.items():
            looked = [step["gradients"] for step in self.steps if step["optimizer"] == number and "gradients" in step]
            places = range(len(optimizer["names"]))
            out[number] = [i for i in places if all(i < len(each) and each[i] is None for each in looked)]
        return out

    def num_steps(self) -> int:
        return max((step["step"] for step in self.steps), default=0)


def common_steps(ranks: Sequence[Seen]) -> Iterator[tuple[tuple[int, int], list[Record]]]:
    """Yield ((optimizer number, step number), each rank's record) for steps that all ranks made, in rank 0's order."""
    tables = [{(step["optimizer"], step["step"]): step for step in seen.steps} for seen in ranks]
    for key in tables[0]:
        if all(key in table for table in tables):
            yield key, [table[key] for table in tables]


def usual(values: Sequence[int]) -> int:
    return Counter(values).most_common(1)[0][0] if values else 0
