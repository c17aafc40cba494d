"""Trains an MLP on any number of ranks with the numbers of one process, in plain torch: what ddpshim does, in one file.

    python examples/how_it_works.py
    python -m torch.distributed.run --standalone --nproc_per_node=3 examples/how_it_works.py

Every rank runs the whole program and holds whole batches, as row tensors:

1. A row tensor is the whole batch, of which this rank has a block of rows.
2. A function that computes each row by itself (a layer, a difference) is computed on the block only.
3. Any other function (a mean, `len`, `print`) gets the whole batch: ranks gather their blocks, and each computes it.
4. Backwards, a gather gives each rank the gradient of its rows. From them it computes its part of the gradient of each
   weight, and the ranks add up their parts.

Losses of 1 and of 3 ranks differ by rounding only. tests/house/test_examples.py trains the same MLP with ddpshim's
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
NUM_MORE = 34  # numbers that ddpshim sends with the gradients, beside one for each parameter; for the last bit only


def own(num_rows):
    """Return which of `num_rows` rows are this rank's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return slice(num_rows * rank // size, num_rows * (rank + 1) // size)


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
        return gradient[ctx.own] * dist.get_world_size(), None  # `add_up_gradients` divides by the number of ranks


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


def add_up_gradients(parameters, is_first):
    """Replace each rank's gradients by their sum over ranks, divided by the number of ranks, as torch's DDP does."""
    # gloo's last bit depends on the place in the message. This is DDP's layout; any other is right too, up to rounding.
    order = parameters if is_first else parameters[::-1]
    gradients, more = [p.grad.flatten() for p in order], torch.zeros(len(order) + NUM_MORE)
    parts = [more, *gradients] if is_first else [*gradients, more]
    message = torch.cat(parts) * (1 / dist.get_world_size())
    dist.all_reduce(message)
    for p, gradient in zip(order, message.split([len(part) for part in parts])[is_first:]):
        p.grad = gradient.view_as(p)


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
    optimizer, losses = torch.optim.Adam(policy.parameters(), lr=1e-2), []
    for _ in range(NUM_EPOCHS):
        for batch in DataLoader(range(NUM_SAMPLES), BATCH_SIZE, shuffle=True):
            rows = batch[own(len(batch))]  # a rank loads its own samples only
            obs, action = Rows(all_obs[rows], len(batch)), Rows(all_actions[rows], len(batch))
            loss = (policy(obs + 0.1 * torch.randn(len(batch), 8)) - action).square().mean()
            optimizer.zero_grad()
            loss.backward()
            add_up_gradients([*policy.parameters()], is_first=not losses)
            optimizer.step()
            losses.append(loss.item())
    if dist.get_rank() == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in policy.parameters())
        print(f"losses {losses[0]:.6f} to {losses[-1]:.6f}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()
    return losses, policy


if __name__ == "__main__":
    main()
