"""Makes pdb on several ranks one debugger, when a program first reaches it (`ddpshim.job.debugger`)."""

from __future__ import annotations

import os
import pdb
from contextlib import ExitStack
from typing import Any

from ddpshim.process.replaced import replaced


def share(until: ExitStack) -> None:
    """Until the end of `until`, a `pdb.Pdb` without streams of its own is a `Debugger`; not in a data worker. Local."""
    process, original = os.getpid(), pdb.Pdb.__init__

    def init(self: pdb.Pdb, *args: Any, **kwargs: Any) -> None:
        has_streams = args or kwargs.keys() & {"stdin", "stdout"}
        if type(self) is pdb.Pdb and os.getpid() == process and not has_streams:
            from ddpshim.job.debugger import changed

            kwargs = changed(self, kwargs)
        original(self, *args, **kwargs)

    until.enter_context(replaced(pdb.Pdb, "__init__", init))
