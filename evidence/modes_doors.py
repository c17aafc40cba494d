"""The trainer of evidence/modes_train.py with the calls that the README names: its first word is global or shares."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import modes_train

import ddpshim
from ddpshim import checkpoint


class Global(modes_train.Door):
    """The program holds the whole batch: it joins, wraps, and loses nothing else."""

    def start(self, words: Any) -> None:
        self.world = ddpshim.setup(batch="global")
        super().start(words)
        if words["resume"].startswith("signal"):
            self.loader = ddpshim.make_loader

    def wrap(self, net: Any) -> Any:
        return ddpshim.wrap_parallel(net)

    def resume(self, objects: Any, values: Any) -> Any:
        self.training = ddpshim.Resumable("progress", objects)
        self.training.values.update(values)
        self.training.restore()
        return self.training.values

    def interrupt(self, is_now: bool) -> None:
        """Send the signal of a scheduler; then make steps long enough for the ranks to agree on one."""
        if is_now and self.world.is_main:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.4)

    def end(self) -> None:
        ddpshim.cleanup()


class Shares(Global):
    """The loader gives each rank its share of a batch."""

    loader = staticmethod(ddpshim.make_loader)

    def start(self, words: Any) -> None:
        self.world = ddpshim.setup(seed=1)
        self.is_main = self.world.is_main

    def mean(self, total: Any, count: Any) -> Any:
        return self.world.mean_over(total, count)

    def whole(self, loss: Any) -> Any:
        return lambda *of_rows: loss(*map(self.world.all_gather, of_rows))

    def rows(self, values: Any) -> Any:
        return self.world.all_gather(values)

    def parts(self, batch: Any, nets: Any) -> Any:
        return ddpshim.accumulate(batch, *nets, steps=2)

    def save(self, content: Any, path: Path) -> None:
        checkpoint.save(content, path)

    def wait(self) -> None:
        self.world.barrier()


if __name__ == "__main__":
    modes_train.main({"global": Global, "shares": Shares}[sys.argv[1]](), sys.argv[2:])
