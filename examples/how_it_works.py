"""Trains an MLP on any number of ranks with the numbers of one process, in plain torch: what ddpshim does, in one file.

    python examples/how_it_works.py
    python -m torch.distributed.run --standalone --nproc_per_node=3 examples/how_it_works.py

Every rank runs the whole program and holds whole batches, as row tensors:

1. A row tensor is the whole batch, of which this rank has a block of rows.
2. A function that computes each row by itself (a layer, a difference) is computed on the block only.
3. Any other function (a mean, `len`, `print`) gets the whole batch: ranks gather their blocks, and each computes it.
4. Backwards, a gather gives each rank the gradient of its rows. Then the ranks average the gradients of the weights.

Losses of 1 and of 3 ranks differ by rounding only. tests/house/test_examples.py trains the same MLP after ddpshim's
setup(batch="global") on 1, 2 and 3 ranks: weights and losses equal those of this file to the last bit.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 222, 40, 5  # 3 ranks do not divide 40 rows: they get 13, 13 and 14
OF_EACH_ROW = {"linear", "relu", "add", "sub", "square"}  # ddpshim knows some 600 functions


def own(num_rows):
    """Return which of `num_rows` rows are this rank's."""
    return slice(*(num_rows * rank // dist.get_world_size() for rank in (dist.get_rank(), dist.get_rank() + 1)))


class Gather(torch.autograd.Function):
    """This rank's block -> the whole batch, equal on all ranks."""

    @staticmethod
    def forward(ctx, block, num_rows):
        ctx.own = own(num_rows)
        whole = block.new_zeros(num_rows, *block.shape[1:])
        whole[ctx.own] = block
        dist.all_reduce(whole)  # adds zeros to each row: nothing is rounded
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.own] * dist.get_world_size(), None  # `finish` divides by the number of ranks


class Rows(torch.Tensor):
    """A row tensor of `num_rows` rows, of which this rank has `block`."""

    def __new__(cls, block, num_rows):
        rows = block.as_subclass(cls)
        rows.block, rows.num_rows = block, num_rows
        return rows

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Compute `function` of a row tensor: torch calls this in its place."""
        num, kwargs = next(x.num_rows for x in args if type(x) is Rows), kwargs or {}
        if function.__name__ in OF_EACH_ROW:  # a plain tensor is a whole batch, such as noise; a Parameter is a weight
            blocks = [x.block if type(x) is Rows else x[own(num)] if type(x) is torch.Tensor else x for x in args]
            return Rows(function(*blocks, **kwargs), num)
        return function(*[Gather.apply(x.block, num) if type(x) is Rows else x for x in args], **kwargs)


class MeanGradients:
    """Averages gradients over the ranks. They are complete in one order on all ranks, which run the same program."""

    def __init__(self, parameters):
        self.complete = []
        self.hooks = [p.register_post_accumulate_grad_hook(self.complete.append) for p in parameters]

    def finish(self):
        """Write the means into the gradients. ddpshim sends large ones while the backward pass goes on."""
        message = torch.cat([p.grad.flatten() for p in self.complete]) / dist.get_world_size()
        dist.all_reduce(message)
        for p in self.complete:
            p.grad, message = message[: p.numel()].view_as(p), message[p.numel() :]
        self.complete.clear()


def make():
    """Return observations (N, 8), actions (N, 2) and a policy: from one seed, the same on every rank."""
    torch.manual_seed(1)
    obs = torch.randn(NUM_SAMPLES, 8)
    policy = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    return obs, torch.stack([obs.sum(1), obs.prod(1)], 1), policy


def main():
    """Return the loss of each step, and the trained policy."""
    if "WORLD_SIZE" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")
    elif not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.tanh(torch.zeros(16))  # MKL chooses in its first call how it rounds; ddpshim.setup() does this too
    all_obs, all_actions, policy = make()
    optimizer, gradients = torch.optim.Adam(policy.parameters(), lr=1e-2), MeanGradients(policy.parameters())
    losses = []
    for _ in range(NUM_EPOCHS):
        for batch in DataLoader(range(NUM_SAMPLES), BATCH_SIZE, shuffle=True):
            rows = batch[own(len(batch))]  # a rank loads its own samples only
            obs, action = Rows(all_obs[rows], len(batch)), Rows(all_actions[rows], len(batch))
            loss = (policy(obs + 0.1 * torch.randn(len(batch), 8)) - action).square().mean()
            optimizer.zero_grad()
            loss.backward()
            gradients.finish()
            optimizer.step()
            losses.append(loss.item())
    if dist.get_rank() == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in policy.parameters())
        print(f"losses {losses[0]:.6f} to {losses[-1]:.6f}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()
    return losses, policy


if __name__ == "__main__":
    main()
