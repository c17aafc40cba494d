# %% [markdown]
# # 2. Training
#
# The batch is split: each rank computes the gradient of its rows, the gradients are added up over the ranks, and every
# rank makes the same optimizer step. With `setup(batch="global")` this *is* the training of one process, with the same
# curve. Plain DDP, with `setup()`, trains on the samples in another order. With a small mistake it is a worse training,
# without an error. This chapter shows all three.
#
# The task ([reach.py](reach.py)): learn from demonstrations of a scripted expert to move a gripper above an object and
# down to it. `error` is the error of the actions on held-out demonstrations, `success_rate` that of 200 episodes.

# %%
import sys

import torch
import torch.distributed as dist
from pictures import GREY, RANK_COLOURS, draw
from ranks import run, run_failing
from reach import Policy, demonstrations, error, success_rate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ddpshim

NUM_EPOCHS = 2 if "--quick" in sys.argv else 8
TRAINING, HELD_OUT = demonstrations(64, seed=1), demonstrations(20, seed=2)

# %% [markdown]
# ## The trainer
#
# Three lines are ddpshim's: the import, `setup` and `wrap_parallel`. The program holds whole batches, as with
# `nn.DataParallel`, and the network computes a rank's rows. So the loader, the learning rate, the number of steps and
# the curve stay the same. It trains through `forward_train`, as robomimic does.


# %%
def train():
    ddpshim.setup(batch="global")
    torch.manual_seed(1)
    policy = ddpshim.wrap_parallel(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    loader = DataLoader(TRAINING, batch_size=128, shuffle=True, drop_last=True)
    curve = []
    for _ in range(NUM_EPOCHS):
        for obs, action in loader:
            loss = -policy.forward_train(obs).log_prob(action).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append(error(policy.module, HELD_OUT))
    return curve, success_rate(policy.module), policy.state_dict()


results = {num_ranks: run(train, num_ranks) for num_ranks in (1, 2, 4)}


# %%
def largest_difference(these, those):
    return max(float((these[name] - those[name]).abs().max()) for name in those)


alone, successes, weights = results[1][0]
for num_ranks, ranks in results.items():
    assert all(largest_difference(state, ranks[0][2]) == 0 for _, _, state in ranks), "ranks have equal weights"
    apart = max(abs(a - b) for a, b in zip(ranks[0][0], alone))
    print(
        f"{num_ranks} rank{'s' * (num_ranks > 1)}: error {ranks[0][0][-1]:.8f}, success {ranks[0][1]:.0%}, "
        f"from one process: curve {apart:.0e}, weights {largest_difference(ranks[0][2], weights):.0e}"
    )
    assert apart < 1e-5
    assert abs(ranks[0][1] - successes) < 0.02

# %% [markdown]
# The remaining difference is rounding: the sum of two halves is not bitwise the whole, and training amplifies this.
#
# ## The second way: shares
#
# With `setup()` and `make_loader` each rank holds its share of a batch, as with torch's own DDP. It is faster, because
# nothing is gathered. The batch of 128 is still that of all ranks, but the order of the samples and the noise are not
# those of one process: it is another run of the same experiment. A loss, a metric or a decision of the program is now
# about a rank's samples: you average those that you log or decide by. Here the loss needs no such line, because the
# gradient of a mean over samples is the mean of the ranks' gradients.


# %%
def train_on_shares():
    world = ddpshim.setup(seed=1)
    policy = ddpshim.wrap_parallel(Policy().to(world.device))
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    loader = ddpshim.make_loader(TRAINING, batch_size=128, shuffle=True)
    for _ in range(NUM_EPOCHS):
        for obs, action in loader:
            loss = -policy.forward_train(obs).log_prob(action).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return error(policy.module, HELD_OUT), policy.state_dict()


by_shares = {num_ranks: run(train_on_shares, num_ranks)[0] for num_ranks in (2, 4)}
apart = largest_difference(by_shares[2][1], by_shares[4][1])
print(
    f"on shares: error {by_shares[4][0]:.4f}, one process {alone[-1]:.4f}; weights on 2 and 4 ranks {apart:.0e} apart"
)
assert apart < 1e-4, "the order of the samples does not depend on the number of ranks"
assert abs(by_shares[4][0] - alone[-1]) < 0.5 * alone[-1]

# %% [markdown]
# ## The same, with a mistake
#
# Three common mistakes of migrations by hand, with torch's own tools on four ranks. Each runs to its end without an
# error, and rank 0 saves a policy.


# %%
class Loss(torch.nn.Module):
    """Computes the loss in `forward`: DistributedDataParallel averages only gradients of its own forward pass."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, obs, action):
        return -self.policy.forward_train(obs).log_prob(action).mean()


def train_by_hand(mistake):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    policy = Policy()
    loss_of = DistributedDataParallel(Loss(policy))
    if mistake == "trained past DDP":
        loss_of = loss_of.module  # a usual fix for "no attribute 'policy'"
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    sampler = None if mistake == "same samples on all ranks" else DistributedSampler(TRAINING)
    batch_size = 128 if mistake == "batch of 128 on each rank" else 128 // dist.get_world_size()
    loader = DataLoader(TRAINING, batch_size, sampler=sampler, shuffle=sampler is None)
    curve = []
    for epoch in range(NUM_EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for _, (obs, action) in zip(range(len(TRAINING) // 128), loader):
            loss = loss_of(obs, action)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append(error(policy, HELD_OUT))
    del loss_of  # before the group: torch may hang if DDP holds the last reference to it
    dist.destroy_process_group()
    return curve, success_rate(policy), policy.state_dict()


MISTAKES = ["trained past DDP", "same samples on all ranks", "batch of 128 on each rank"]
mistaken = {mistake: run(train_by_hand, 4, mistake) for mistake in MISTAKES}

# %%
print(f"{'one process':<26} error {alone[-1]:.4f}, success {successes:.0%}")
for mistake, ranks in mistaken.items():
    (curve, success, state), *others = ranks
    apart = max(largest_difference(other, state) for _, _, other in others)
    print(f"{mistake:<26} error {curve[-1]:.4f}, success {success:.0%}, weights of ranks differ by {apart:.2g}")
    assert max(abs(a - b) for a, b in zip(curve, alone)) > 1e-4
    assert (apart > 1e-3) == (mistake == "trained past DDP")


# %%
def curves(figure):
    left, right = figure.subplots(1, 2)
    epochs = range(1, NUM_EPOCHS + 1)
    left.plot(epochs, alone, color="0.75", linewidth=6, label="one process")
    shown = {"ddpshim, 4 ranks": results[4][0][0], **{mistake: ranks[0][0] for mistake, ranks in mistaken.items()}}
    for (name, curve), colour in zip(shown.items(), RANK_COLOURS):
        left.plot(epochs, curve, color=colour, label=name)
        apart = [max(abs(a - b), 1e-10) for a, b in zip(curve, alone)]  # a logarithmic axis has no 0
        right.plot(epochs, apart, color=colour, marker="o", markersize=3)
        right.annotate(name, (NUM_EPOCHS, apart[-1]), (4, 0), textcoords="offset points", color=colour, fontsize=7)
    left.set(xlabel="epoch", ylabel="error on held-out demonstrations", ylim=(0, None))
    left.legend(frameon=False, fontsize=8)
    right.set(xlabel="epoch", ylabel="difference from one process", yscale="log", ylim=(1e-10, 1))


draw("2_curves", curves, width=10, height=3.6)

# %% [markdown]
# - *Trained past DDP*: four policies, each trained on a quarter of the data; three are thrown away.
# - *Same samples on all ranks*: without a sampler all ranks draw the same samples, so the global batch is 32.
# - *Batch of 128 on each rank*: a global batch of 512 and a quarter of the steps, at the learning rate for 128.
#
# `wrap_parallel` averages gradients of any method, and `make_loader` splits data and batch. What ddpshim cannot make
# correct, it refuses at the first step. Here half of the policy is frozen when it is wrapped, and unfrozen later, as in
# fine-tuning:


# %%
def thaw_after_the_wrap():
    ddpshim.setup(seed=1)
    policy = Policy()
    policy.net[0].requires_grad_(False)
    wrapped = ddpshim.wrap_parallel(policy)
    optimizer = torch.optim.Adam(policy.parameters())
    policy.net[0].requires_grad_(True)  # torch's DDP would never average it
    wrapped.forward_train(torch.randn(8, 6)).mean.sum().backward()
    optimizer.step()


failed = run_failing(thaw_after_the_wrap, 2)
print(failed.error)
assert "gradient that is this rank's alone" in failed.error

# %% [markdown]
# ## Which rank sees which sample
#
# `make_loader` draws one order for each epoch, from the seed and the epoch, and rank r of W takes samples r, r + W, ...
# of each batch. So step t uses the same samples on one, two or four ranks. They are the samples that torch's
# DistributedSampler gives a rank, which repeats its order in every epoch unless you call `set_epoch`.


# %%
def see(batch_size, drop_last=True, num_samples=16):
    ddpshim.setup(seed=1)
    loader = ddpshim.make_loader(range(num_samples), batch_size, shuffle=True, drop_last=drop_last)
    return [[batch.tolist() for batch in loader] for _ in range(3)]  # three epochs


def see_by_hand():
    dist.init_process_group("gloo")
    loader = DataLoader(range(16), 4, sampler=DistributedSampler(range(16)))  # and set_epoch forgotten
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    dist.barrier()  # otherwise this rank may leave while the other is still connecting to it
    dist.destroy_process_group()
    return epochs


seen = {num_ranks: run(see, num_ranks, 8) for num_ranks in (1, 2, 4)}
for ranks in seen.values():
    for epoch in range(3):
        for step in range(2):
            together = sorted(sample for rank in ranks for sample in rank[epoch][step])
            assert together == sorted(seen[1][0][epoch][step]), "the same samples in each step"
        assert sorted(sample for rank in ranks for step in rank[epoch] for sample in step) == list(range(16))
by_hand = run(see_by_hand, 2)
assert all(rank[0] == rank[1] == rank[2] for rank in by_hand)
print("each epoch every sample once, each step the same samples on 1, 2 and 4 ranks; by hand all epochs are alike")


# %%
def grid(figure):
    shown = {"ddpshim, 2 ranks": seen[2], "ddpshim, 4 ranks": seen[4], "by hand, 2 ranks, no set_epoch": by_hand}
    for axes, (title, ranks) in zip(figure.subplots(1, 3), shown.items()):
        for rank, epochs in enumerate(ranks):
            for epoch, steps in enumerate(epochs):
                width = 16 // len(steps) // len(ranks)
                for place, sample in enumerate(sample for step in steps for sample in step):
                    step, number = divmod(place, width)
                    x = step * width * len(ranks) + number * len(ranks) + rank
                    axes.bar(x, 0.7, 0.9, epoch - 0.35, color=RANK_COLOURS[rank])
                    axes.text(x, epoch, sample, ha="center", va="center", color="white", fontsize=8)
        axes.axvline(7.5, color=GREY, linewidth=1, linestyle=":")
        axes.set(title=title, xlim=(-0.8, 15.8), ylim=(2.6, -0.6), yticks=range(3), xticks=[3.5, 11.5])
        axes.set(yticklabels=[f"epoch {epoch}" for epoch in range(3)], xticklabels=["step 0", "step 1"])
        axes.title.set_fontsize(9)
        axes.tick_params(labelsize=8, length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
    figure.suptitle("samples of rank 0 in blue, 1 in orange, 2 in green, 3 in violet", fontsize=9, color=GREY)


draw("2_samples", grid, width=12, height=2.1)

# %% [markdown]
# Pass weighted samplers and your own samplers to `make_loader` unchanged
# (`examples/weighted_datasets.py`).
#
# ## Batch and learning rate
#
# If the batch is split, there is nothing to choose. If you want to fill the GPUs instead, `per_rank_batch=True` makes
# `batch_size` the batch of each rank: W times the batch, 1/W of the steps, and a learning rate that you must choose.

# %%
for rule in ("linear", "sqrt", "none"):
    rates = {num_ranks: ddpshim.scale_lr(1e-3, rule, world_size=num_ranks) for num_ranks in (1, 2, 4, 8)}
    print(f"{rule:>6}: " + ", ".join(f"{num_ranks} ranks {rate:.4f}" for num_ranks, rate in rates.items()))
assert ddpshim.scale_lr(1e-3, "linear", world_size=4) == 0.004  # the usual rule for SGD, with a warm-up
assert ddpshim.scale_lr(1e-3, "sqrt", world_size=4) == 0.002  # the usual rule for Adam

failed = run_failing(see, 4, 3)
print(failed.error)
assert "Global batch 3 does not split over 4 ranks" in failed.error

# %% [markdown]
# ## The end of an epoch
#
# 10 samples in batches of 4 on two ranks leave 2 over. If one rank made one more step than the other, it would wait for
# gradients that the other never sends. By default all ranks drop the remaining samples. With `drop_last=False` all
# ranks make the last step, if they divide its samples; else an error names the other door.

# %%
for num_samples, drop_last in ((10, True), (10, False)):
    first, second = (rank[0] for rank in run(see, 2, 4, drop_last, num_samples))
    print(f"{num_samples} samples, drop_last={drop_last}: rank 0 sees {first}, rank 1 sees {second}")
    assert [len(batch) for batch in first] == [len(batch) for batch in second]
    assert len({sample for batch in first + second for sample in batch}) == (8 if drop_last else num_samples)

# %% [markdown]
# More silent mistakes: [MIGRATION.md](../../MIGRATION.md). A diffusion policy with its EMA:
# `examples/diffusion_ema.py`. Next: [3_communication.py](3_communication.py), where the time of a step goes.
