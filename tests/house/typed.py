"""What a type checker says of a trainer that uses ddpshim: mypy reads this file; comments name the errors."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpshim


class Policy(nn.Module):
    def act(self) -> int:
        return 1


policy: Policy = ddpshim.wrap_parallel(Policy())
action: int = policy.act()
loaders = [
    ddpshim.make_loader(TensorDataset(torch.ones(3)), batch_size=2, in_order=True),
    ddpshim.make_loader([1, 2, 3], 2),
    ddpshim.make_loader(iter([1]), 2),
    ddpshim.make_loader(5),  # type: ignore[arg-type]
    ddpshim.make_loader([1], batchsize=2),  # type: ignore[call-arg]
]
ddpshim.wrap_paralel(policy)  # type: ignore[attr-defined]
ddpshim.setup(batch="global", seed=1, options=ddpshim.Options())
ddpshim.setup(batch="whole")  # type: ignore[arg-type]
ddpshim.setup(sed=1)  # type: ignore[call-arg]
ddpshim.setup(seed="1")  # type: ignore[arg-type]
