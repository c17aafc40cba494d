# %% [markdown]
# # 1. Setup and process groups
#
# Training on several GPUs means that the same program runs several times. Each copy (a *rank*) has its own GPU and its
# own share of the data, and the copies communicate. This chapter shows what a rank is, how ranks communicate, and what
# they draw at random. It needs no GPU: here the ranks are processes on your CPU.
#
# Run it with `python examples/course/1_setup.py`, or cell by cell. `run(function, 4)` starts four ranks and returns
# what the function returned on each. In your own work a launcher (torchrun, `python -m ddpshim run`, srun) does that
# with your script.

# %%
import os
import sys
import time
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from pictures import GREY, RANK_COLOURS, draw
from ranks import run, run_failing

import ddpshim

# %% [markdown]
# ## The whole idea in plain torch
#
# Read [how_it_works.py](../how_it_works.py) first. In 120 lines, without ddpshim, it trains an MLP on any number of
# ranks with the numbers of one process: every rank runs the whole program, whose tensors are the whole batch, of which
# a rank computes its rows; the ranks add up their gradients. The losses of one and of three ranks differ by rounding. A
# test trains the same MLP with `ddpshim.setup(batch="global")`: weights and losses are equal to the last bit.

# %%
sys.path.append(str(Path(ranks.__file__).parent.parent))
from how_it_works import main

(one, _), (three, _) = (run(main, num_ranks)[0] for num_ranks in (1, 3))
assert max(abs(a - b) for a, b in zip(one, three)) < 1e-5

# %% [markdown]
# ## Ranks and the world
#
# A launcher starts the copies and sets environment variables that identify each one. `ddpshim.setup()` reads them once
# and returns a `World`. Here are four ranks on two machines with two GPUs each.


# %%
def who_am_i():
    variables = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")}
    world = ddpshim.setup(seed=1)
    print(f"variables {variables}; device {world.device}, backend {world.backend}")
    return world.rank, world.local_rank, world.node_rank, world.is_main


places = run(who_am_i, 4, nodes=2)
assert places == [(0, 0, 0, True), (1, 1, 0, False), (2, 0, 1, False), (3, 1, 1, False)]

# %% [markdown]
# - `rank` (0 to 3) counts over all machines. Rank 0 is the *main* rank: it prints, saves and decides.
# - `local_rank` (0 to 1) counts on one machine and selects the GPU. Code by hand often says `cuda:0`, so that all ranks
#   of a machine share its first GPU; `world.device` is the right one.
# - `backend` carries the messages: nccl if each rank has its own GPU, otherwise gloo.
#
# Without a launcher there is one process, nothing is started, and the script runs as before:


# %%
def typed_by_hand():
    world = ddpshim.setup(seed=1)
    assert not dist.is_initialized()
    return world.rank, world.world_size, world.is_launched


assert run(typed_by_hand, 1, launched=False) == [(0, 1, False)]
print("python train.py: rank 0 of 1, no launcher, no process group")

# %% [markdown]
# ## Collectives
#
# All ranks take part in a *collective*, and each waits for the others. So every rank must reach it: a collective under
# `if rank == 0:` waits forever. `World` has those that a trainer needs, for any Python value.


# %%
def talk():
    world = ddpshim.setup(seed=1)
    loss = (world.rank + 1) / 4  # each rank has different samples, so a different loss
    everyones = world.gather(loss)
    mean = world.mean(loss)
    chosen = world.broadcast(f"the checkpoint that rank {world.rank} likes")
    world.barrier()  # all ranks wait for the last one
    return everyones, mean, chosen


answers = run(talk, 4)
assert answers == [([0.25, 0.5, 0.75, 1.0], 0.625, "the checkpoint that rank 0 likes")] * 4
print(f"on every rank: gather {answers[0][0]}, mean {answers[0][1]}, broadcast {answers[0][2]!r}")


# %%
def who_sends_what(figure):
    kinds = {
        "gather: everyone gets every value": (["1", "2", "3", "4"], ["1 2 3 4"] * 4, None),
        "mean: everyone gets the mean": (["1", "2", "3", "4"], ["2.5"] * 4, None),
        "broadcast: everyone gets rank 0's": (["1", "2", "3", "4"], ["1"] * 4, 0),
        "barrier: everyone waits for all": ([""] * 4, [""] * 4, None),
    }
    for axes, (title, (before, after, source)) in zip(figure.subplots(1, 4), kinds.items()):
        for rank, colour in enumerate(RANK_COLOURS):
            for y, text in ((1, before[rank]), (0, after[rank])):
                box = {"boxstyle": "round,pad=0.35", "color": colour, "alpha": 0.95 if y else 0.75}
                axes.text(rank, y, text or " ", ha="center", va="center", color="white", fontsize=8, bbox=box)
            for to in range(4) if source in (None, rank) else ():
                arrow = {"arrowstyle": "->", "color": colour, "alpha": 0.55}
                axes.annotate("", (to, 0.17), (rank, 0.83), arrowprops=arrow)
            axes.text(rank, 1.3, f"rank {rank}", ha="center", fontsize=7, color=GREY)
        axes.set(title=title, xlim=(-0.6, 3.6), ylim=(-0.35, 1.45))
        axes.title.set_fontsize(9)
        axes.axis("off")


draw("1_collectives", who_sends_what, width=11, height=2.4)

# %% [markdown]
# ## Doing something once
#
# A trainer creates a folder named by the time, asks whether to overwrite it, downloads a file. By hand every rank does
# this, at its own time: W folders, or a race. `run_on_main` does it once and gives all ranks the result (or the error).


# %%
def name_the_run():
    world = ddpshim.setup(seed=1)

    def folder():
        return f"runs/{time.time_ns()}"

    return folder(), world.run_on_main(folder)


by_hand, by_main = zip(*run(name_the_run, 4))
print(f"by hand {len(set(by_hand))} folders, with run_on_main {len(set(by_main))}")
assert (len(set(by_hand)), len(set(by_main))) == (4, 1)

# %% [markdown]
# ## Process groups
#
# All this uses torch's process groups. `setup()` creates one for gradients (nccl or gloo; a rank that waits longer than
# `timeout_s`, half an hour, gives up) and one for the small values above (always gloo; it waits up to a day, so that
# the main rank may play rollouts or save meanwhile). Torch's own functions still work, also on a group of some ranks,
# such as those of one machine. One rule: *every* rank creates *every* group, in the same order, also those without it.


# %%
def sum_on_each_machine():
    world = ddpshim.setup(seed=1)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = torch.tensor([10.0**world.rank])
    dist.all_reduce(number, group=groups[world.node_rank])
    return number.item()


sums = run(sum_on_each_machine, 4, nodes=2)
print(f"1, 10 on the first machine and 100, 1000 on the second add up to {sums}")
assert sums == [11.0, 11.0, 1100.0, 1100.0]

# %% [markdown]
# ## Random numbers
#
# All ranks must build the *same* network (and its EMA and target copies), so they need the same seed. But then they
# must draw *different* noise, timesteps, dropout and augmentation. Otherwise four ranks use the noise of one, and three
# quarters of it is missing, without an error or a visible change in the loss curve. `setup(seed=)` seeds all ranks
# equally, and `split_random_streams()`, once all networks are built, gives each rank its own streams. If you forget it,
# ddpshim prints a line. What must stay equal, such as a permutation that each rank slices, you draw from a generator
# with an equal seed. None of these numbers are those of one process: for these, use `setup(batch="global")`.


# %%
def draw_noise():
    ddpshim.setup(seed=1)
    network = ddpshim.wrap_parallel(torch.nn.Linear(4, 4))
    before = torch.randn(24)
    ddpshim.split_random_streams()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    return network.weight.detach().clone(), order, before, torch.randn(24)


weights, orders, before, after = zip(*run(draw_noise, 4))
assert all(torch.equal(weight, weights[0]) for weight in weights)
assert all(torch.equal(order, orders[0]) for order in orders)
assert all(torch.equal(noise, before[0]) for noise in before)
assert len({noise.item() for drawn in after for noise in drawn}) == 4 * 24
print("weights and permutations equal on all ranks; after split_random_streams() each draws its own noise")


# %%
def noise_of_ranks(figure):
    titles = "seeded equally: alike, for weights", "after split_random_streams(): each rank's own"
    for axes, title, noise in zip(figure.subplots(1, 2), titles, (before, after)):
        axes.imshow(torch.stack(noise).numpy(), cmap="RdBu", vmin=-2.5, vmax=2.5, aspect="auto")
        axes.set(title=title, yticks=range(4), yticklabels=[f"rank {rank}" for rank in range(4)], xlabel="draw")
        axes.title.set_fontsize(10)
        axes.hlines([0.5, 1.5, 2.5], -0.5, 23.5, color="white", linewidth=3)


draw("1_noise", noise_of_ranks, width=9, height=2.2)

# %% [markdown]
# ## When a rank fails
#
# By hand: rank 1 raises, the trainer's `except Exception: print(...)` swallows the error, the other ranks wait for half
# an hour, and the exit code is 0. With ddpshim the traceback of the first failing rank is printed once, and the job
# ends.


# %%
def fail_on_rank_1():
    world = ddpshim.setup(seed=1)
    if world.rank == 1:
        raise ValueError("demonstration 17 has no actions")
    world.barrier()  # would wait for rank 1


started = time.monotonic()
failed = run_failing(fail_on_rank_1, 2)
print(f"after {time.monotonic() - started:.1f} s: {failed}")
assert failed.exit_codes[1] == 1
assert 0 not in failed.exit_codes
assert failed.output.count("Traceback") == failed.output.count("\nrank 1 | ValueError: demonstration 17") == 1

# %% [markdown]
# How to start your own script: [docs/launch.md](../../docs/launch.md). Two machines emulated on one:
# `examples/two_nodes.py`. Next: [2_training.py](2_training.py), how to train a network on these ranks.
