"""Simulates two GPUs for a CPU build of torch, and records a program's calls on them, with place and order.

    python -m tests.simulated_gpus PROGRAM.py ARGS      # or: -m MODULE ARGS
    SIMULATED_GPUS=4 python -m tests.simulated_gpus -m ddpshim run --nproc 4 train.py

runs a program, and all Python processes that it starts, with two (or four) GPUs that torch.cuda sees. From Python:
`environment()` returns the variables for that, `why_not()` the reason why it is impossible here (None: it is possible).

In such a process `with recorded() as log:` records events: `log.syncs` (the host waits, each with the Python stack that
caused it), `log.launches` (collectives: communicator, bytes, stream, thread) and `log.races` (work that uses memory of
another stream or of a collective without waiting for it). Other variables:

    SIMULATED_GPUS_GENERATOR=cpu    random numbers on GPUs are drawn by the CPU's generator, to compare with CPU ranks
                                    (gpu, the default: by the GPUs' own)
    SIMULATED_GPUS_LOG=FOLDER       each process writes all events there, to rank<RANK>-<pid>.jsonl (`read_log`)

Its limits: CONTRIBUTING.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

from tests.simulated_gpus import building

LIBRARY = "SIMULATED_GPUS_LIBRARY"  # the variable with the folder of the built library
NUM = "SIMULATED_GPUS"


def why_not() -> Optional[str]:
    """Return why simulated GPUs are impossible here, or None; builds them if needed."""
    return building.built()[1]


def environment(num: int = 2, **more: str) -> dict[str, str]:
    """Return the variables of a process with `num` simulated GPUs; raise RuntimeError if they cannot be built."""
    folder, reason = building.built()
    if folder is None:
        raise RuntimeError(f"no simulated GPUs: {reason}")
    site, repository = Path(__file__).with_name("site"), Path(__file__).parents[2]
    path = [str(site), str(repository), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {NUM: str(num), LIBRARY: str(folder), "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), **more}


class Event(NamedTuple):
    kind: str  # sync, launch, race, communicator
    what: str
    communicator: str
    bytes: int
    device: int
    stream: int
    thread: str  # "main", or the name of another
    stack: list[str]  # "file:line function", innermost first; of syncs and races

    @property
    def cause(self) -> str:
        """The innermost line of its stack that is not torch's; "" if there is none."""
        return next((line for line in self.stack if "/torch/" not in line), "")

    def __str__(self) -> str:
        where = " < ".join(line.rpartition("/")[2] for line in self.stack[:6])
        what = f"{self.what} of {self.communicator}" if self.communicator else self.what
        return f"{what} ({self.bytes} bytes, thread {self.thread}, stream {self.stream}) {where}".rstrip()


class Log:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def syncs(self) -> list[Event]:
        return self.of("sync")

    @property
    def launches(self) -> list[Event]:
        return self.of("launch")

    @property
    def races(self) -> list[Event]:
        return self.of("race")


def library() -> Any:
    if "simulated_gpus_c" not in sys.modules:
        raise RuntimeError("this process has no simulated GPUs: start it by `python -m tests.simulated_gpus PROGRAM`")
    return sys.modules["simulated_gpus_c"]


@contextlib.contextmanager
def recorded() -> Iterator[Log]:
    """Record events in this block; the log is filled at its end."""
    log, device = Log(), library()
    begin = device.begin_log()
    try:
        yield log
    finally:
        log.events = [Event(**event) for event in device.end_log(begin)]


def read_log(folder: Path) -> dict[str, Log]:
    """Return the logs that processes wrote into SIMULATED_GPUS_LOG, by rank ("-": without a rank)."""
    logs: dict[str, Log] = {}
    for file in sorted(folder.glob("rank*.jsonl"), key=lambda file: file.stat().st_mtime):
        log = logs.setdefault(file.name[len("rank") :].split("-")[0] or "-", Log())
        log.events += [Event(**json.loads(line)) for line in file.read_text().splitlines() if line.endswith("}")]
    return logs
