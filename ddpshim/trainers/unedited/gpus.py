"""Gives each rank one GPU, which the program takes for cuda:0."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ddpshim.process.replaced import replaced
from ddpshim.process.say import say_on_main
from ddpshim.process.users_line import users_line

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def shown(num_gpus: int) -> Iterator[None]:
    """Within this block, `device_count()` is `num_gpus` for the program, but not for torch. Local.

    Many programs wrap their network only if there are several. Changes of CUDA_VISIBLE_DEVICES are ignored.
    """
    count, kind = torch.cuda.device_count, type(os.environ)
    set_one = kind.__setitem__

    def device_count() -> int:
        asks = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        return count() if asks in ("torch", "ddpshim") else num_gpus

    def set_item(self: Any, name: Any, value: Any) -> None:
        if self is not os.environ or name != VISIBLE or value == self.get(VISIBLE):
            set_one(self, name, value)
        else:
            say_on_main(
                f"{users_line()}: {VISIBLE}={value} was ignored: each rank has its own GPU. To choose "
                f"GPUs, set {VISIBLE} for `ddpshim run`"
            )

    with replaced(torch.cuda, "device_count", device_count), replaced(kind, "__setitem__", set_item):
        yield
