"""Finds out which parameters no rank used in a backward pass: they keep no gradient, as in one process.

Which ones a rank used travels with its last bucket of gradients. To read that, a host waits for its GPU, which then has
nothing to do until the next kernel comes. So where some rank leaves a parameter out, the hosts tell each other in the
passes from then on, and no host waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpshim.errors import SyncError
from ddpshim.job import devices
from ddpshim.job.group import new_group
from ddpshim.job.job import current


class _Hosts:
    """Of a job: the group over which hosts tell each other, made with the first network on a GPU."""

    def __init__(self) -> None:
        self.group: Any = None


class Unused:
    """The parameters of one wrapper.

    Attributes:
        hosts_tell: hosts tell each other what their ranks used; set in the same pass on all ranks.
    """

    def __init__(self, num: int, device: torch.device, group: Any) -> None:
        """Of `num` parameters on `device`, whose gradients are reduced over `group` (collective)."""
        self._num, self._device, self._hosts, self.hosts_tell = num, device, None, False
        self._told: Any = None  # on its way: (work, what each rank used)
        self._own: Sequence[int] = ()
        if device.type != "cpu" and group is dist.group.WORLD:
            hosts = current().part(_Hosts)
            hosts.group = self._hosts = hosts.group or new_group("gloo")

    def tell(self, row: torch.Tensor, own: Sequence[int]) -> None:
        """Write a one for each parameter into `row`, a zero for those in `own`, without gradient here. Local."""
        self._own = own
        row.fill_(1)
        if own:
            row[own] = 0
        if self._hosts is not None and (self.hosts_tell or devices.is_capturing(self._device)):
            used = torch.ones(self._num, dtype=torch.uint8, device="cpu")
            used[list(own)] = 0
            self._told = dist.all_reduce(used, dist.ReduceOp.MAX, self._hosts, async_op=True), used

    def of_all(self, row: torch.Tensor) -> list[int]:
        """Those of `own` that no rank used; `row` is the reduced one. The host may wait for other hosts."""
        if self._told is not None:
            (work, used), self._told = self._told, None
            work.wait()
        elif not self._own:
            return []
        elif devices.is_capturing(self._device):
            raise SyncError(
                f"{len(self._own)} parameters without gradient during CUDA graph capture, in a process group other "
                "than the default: whether another rank used them is unknown. Freeze them, or capture with the "
                "default process group."
            )
        else:
            used = row
        are_used = used.tolist() if self._own else []
        return [i for i in self._own if not are_used[i]]
