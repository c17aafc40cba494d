"""Spreads the batches of one process over several GPUs, with torch's DataParallel."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel

from ddpshim.model.wrapper import BareModule


class DataParallelModule(BareModule):
    """A wrapper for one process on several GPUs: `forward` is spread over them, any other method runs on the first.

    torch's DataParallel is an attribute and not a base class: it looks up `dim`, `gather` and others on itself, and a
    module may have attributes of these names.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.__dict__["_spread"] = DataParallel(module)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._spread(*args, **kwargs)
