"""The trainer of evidence/modes_train.py with `setup(batch="global")` and the calls that go with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import modes_train

import ddpshim


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


if __name__ == "__main__":
    modes_train.main(Global(), sys.argv[1:])
