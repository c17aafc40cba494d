# %% [markdown]
# # 4. Checkpoints
#
# A long training is interrupted: by the scheduler's time limit, by a failing node, by a full disk. This chapter shows
# files that survive this, and how to resume with the same result on any number of ranks.

# %%
import json
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from pictures import GREY, RANK_COLOURS, draw
from ranks import REQUEUE, run, run_failing
from reach import Policy, demonstrations
from torch.nn.parallel import DistributedDataParallel

import ddpshim
from ddpshim import checkpoint

NUM_EPOCHS = 4 if "--quick" in sys.argv else 8
TRAINING = demonstrations(64, seed=1, dtype=torch.float64)
_held = tempfile.TemporaryDirectory()  # until the end of the program
FOLDER = Path(_held.name)

# %% [markdown]
# ## Keys without `module.`
#
# By hand: DataParallel and DistributedDataParallel put `module.` before each key. The robot's inference script, which
# has no wrapper, does not find its weights; with `strict=False` it silently starts from random ones.


# %%
def wrapped_both_ways():
    ddpshim.setup(seed=1)
    return ddpshim.wrap_parallel(Policy()).state_dict(), DistributedDataParallel(Policy()).state_dict()


def load_into_wrapped(state):
    ddpshim.setup(seed=1)
    policy = ddpshim.wrap_parallel(Policy())
    policy.load_state_dict(state)
    return policy.state_dict()


ours, by_hand = run(wrapped_both_ways, 2)[0]
print(f"ddpshim: {next(iter(ours))}; by hand: {next(iter(by_hand))}")
assert list(ours) == list(Policy().state_dict())
Policy().load_state_dict(ours)  # strictly: every key, and no other
try:
    Policy().load_state_dict(by_hand)
except RuntimeError as error:
    print(f"by hand, without a wrapper: {str(error).splitlines()[1].strip()}")
loaded = run(load_into_wrapped, 2, by_hand)[0]  # training can continue from old files with `module.`
assert list(loaded) == list(ours)
assert all(torch.equal(loaded[name], by_hand[f"module.{name}"]) for name in ours)

# %% [markdown]
# ## A file is complete or absent
#
# Here the main rank is killed while it saves, after a million bytes. (A limit of the system does this at exactly that
# byte; a full disk, a timeout or a power cut would do it at another.)


# %%
def save_and_die(save, path):
    world = ddpshim.setup(seed=1)
    if world.is_main:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    save({"epoch": 2, "weights": torch.ones(1_000_000)}, path)
    world.barrier()


def save_by_hand(content, path):
    if ddpshim.world().is_main:
        torch.save(content, path)


for name, save in (("by_hand", save_by_hand), ("ddpshim", checkpoint.save)):
    path = FOLDER / f"{name}.pth"
    torch.save({"epoch": 1}, path)
    failed = run_failing(save_and_die, 2, save, path)
    assert failed.exit_codes[0] == -signal.SIGXFSZ, failed
    damage = checkpoint.find_damage(path)
    print(f"{name}: {path.stat().st_size} bytes, {'damaged: ' + damage if damage else torch.load(path)}")
    assert (damage is None) == (name == "ddpshim")

# %% [markdown]
# By hand the last checkpoint is lost *and* the new one is half. `checkpoint.save` writes a temporary file and renames
# it when it is complete. Loading skips files that were damaged otherwise:

# %%
(FOLDER / "ddpshim.pth").rename(FOLDER / "epoch_1.pth")
os.utime((FOLDER / "by_hand.pth").rename(FOLDER / "epoch_2.pth"))  # the newest
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    newest = checkpoint.find_latest(FOLDER, "epoch_*.pth")
print(f"{newest.name}, because: {str(caught[0].message).replace(str(FOLDER) + '/', '')}")
assert newest.name == "epoch_1.pth"

# %% [markdown]
# ## Saving while training continues
#
# A diffusion policy with its EMA and optimizer has a gigabyte; by hand all GPUs wait for the disk. With
# `save_in_background` they wait only for a copy in memory, and a thread writes the file. (Files below 32 MB are
# written directly. The robomimic patches save in this way.)


# %%
def save_twice():
    world = ddpshim.setup(seed=1)
    content = {"weights": torch.randn(9_000_000)}
    for name, save in (("at once", checkpoint.save), ("in the background", checkpoint.save_in_background)):
        started = time.perf_counter()
        save(content, FOLDER / name / "large.pth")
        waited_s = time.perf_counter() - started
        if world.is_main:
            print(f"{name}: the ranks waited for {1000 * waited_s:.0f} ms")
    content["weights"].zero_()  # training continues; the file has the weights of the save


for name in ("at once", "in the background"):
    (FOLDER / name).mkdir()
run(save_twice, 2)
first, second = (torch.load(FOLDER / name / "large.pth")["weights"] for name in ("at once", "in the background"))
assert torch.equal(first, second)
assert first.any()

# %% [markdown]
# ## Resuming
#
# `Resumable` keeps the progress of a training: networks, optimizers, epoch, step and each rank's random streams. On
# SIGTERM, which schedulers send before they kill, all ranks save at the same step and exit with code 75 ("start me
# again"). After a SIGKILL the last regular save is used. A new start resumes in the middle of the epoch, with exactly
# the samples that were left, on any number of ranks.
#
# In float64, where rounding is too small to be seen:


# %%
def train(folder, log, disturb=None):
    """`disturb`: (rank, epoch, step, signal); at this step the rank sends itself the signal."""
    world = ddpshim.setup(seed=1)
    policy = ddpshim.wrap_parallel(Policy().double())
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    loader = ddpshim.make_loader(TRAINING, batch_size=128, shuffle=True)
    training = ddpshim.Resumable(folder, {"policy": policy, "optimizer": optimizer}, every_n_steps=7)
    training.restore()
    for epoch in range(training.epoch, NUM_EPOCHS):
        for obs, action in training.steps(loader, epoch):
            if disturb is not None and disturb[:3] == (world.rank, epoch, training.step):
                os.kill(os.getpid(), disturb[3])
            loss = -policy.forward_train(obs).log_prob(action).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = world.mean(loss.item())
            if world.is_main:
                with open(log, "a") as file:
                    file.write(json.dumps([epoch * len(loader) + training.step, mean]) + "\n")
    training.finish()


def losses(log):
    """Return the loss by step; for a step repeated after a kill, the last one."""
    return dict(json.loads(line) for line in log.read_text().splitlines())


NUM_STEPS = len(TRAINING) // 128 * NUM_EPOCHS
KILLED_AT = NUM_STEPS // 2 + 15
per_epoch = NUM_STEPS // NUM_EPOCHS

run(train, 2, FOLDER / "unbroken", FOLDER / "unbroken.log")
unbroken = losses(FOLDER / "unbroken.log")

resumed = FOLDER / "resumed"
disturb = 1, 1, 5, signal.SIGTERM
failed = run_failing(train, 2, resumed, FOLDER / "first.log", disturb)
assert failed.exit_codes == [REQUEUE, REQUEUE], failed
print(next(line for line in failed.output.splitlines() if "exit code 75" in line))
disturb = 0, *divmod(KILLED_AT, per_epoch), signal.SIGKILL
failed = run_failing(train, 4, resumed, FOLDER / "second.log", disturb)
assert failed.exit_codes[0] == -signal.SIGKILL, failed
run(train, 1, resumed, FOLDER / "third.log")

# %%
parts = {"2 ranks": "first.log", "4 ranks": "second.log", "1 rank": "third.log"}
parts = {name: losses(FOLDER / log) for name, log in parts.items()}
first, second, third = parts.values()
assert min(first) == 0
assert min(second) == max(first) + 1, "SIGTERM: not a step is lost"
assert max(second) == KILLED_AT - 1
assert KILLED_AT - 7 <= min(third) <= KILLED_AT, "SIGKILL: at most the steps since the last save are made again"
assert max(third) == NUM_STEPS - 1
joined = {**first, **second, **third}
apart = max(abs(joined[step] - loss) for step, loss in unbroken.items())
print(f"{NUM_STEPS} steps on 2, 4 and 1 ranks, ended by SIGTERM and SIGKILL: from the unbroken run {apart:.0e}")
assert apart < 1e-9


# %%
def curve(figure):
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.3])
    top.plot(list(unbroken), list(unbroken.values()), color="0.8", linewidth=6, label="unbroken, 2 ranks")
    for (name, part), colour in zip(parts.items(), RANK_COLOURS):
        top.plot(list(part), list(part.values()), color=colour, label=f"on {name}")
        distances = [max(abs(loss - unbroken[step]), 1e-17) for step, loss in part.items()]
        bottom.plot(list(part), distances, ".", color=colour, markersize=3)
    for step, name in ((max(first) + 0.5, "SIGTERM"), (KILLED_AT - 0.5, "SIGKILL")):
        for axes in (top, bottom):
            axes.axvline(step, color=GREY, linewidth=1, linestyle=":")
        top.annotate(
            name, (step, 1), (3, -8), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8
        )
    top.set(ylabel="training loss")
    top.legend(frameon=False, fontsize=8, loc="upper right")
    bottom.set(yscale="log", ylim=(3e-18, 1e-6), yticks=[1e-16, 1e-12, 1e-8], ylabel="difference", xlabel="step")


draw("4_resumed", curve, width=9, height=4)

# %% [markdown]
# ## Resuming random streams, mixed precision and accumulation
#
# A policy that trains on noise depends on earlier draws. Resumed on the same number of ranks, the run has the same bits
# as an uninterrupted one.
#
# Here the training is in bf16, and each step has a batch in two parts. A method other than `forward` computes its loss
# in `world.autocast()`. (A trainer in float16 has torch's own autocast and GradScaler: the scale changes during
# training, so the file must contain the scaler, like the optimizer.)


# %%
def train_lean(folder, log, disturb=None):
    world = ddpshim.setup(seed=1, options=ddpshim.Options.read(precision="bf16"))
    policy = ddpshim.wrap_parallel(Policy())
    ddpshim.split_random_streams()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    loader = ddpshim.make_loader(demonstrations(64, seed=1), batch_size=128, shuffle=True)
    training = ddpshim.Resumable(folder, {"policy": policy, "optimizer": optimizer})
    training.restore()
    for epoch in range(training.epoch, 2):
        for batch in training.steps(loader, epoch):
            if disturb is not None and disturb[:3] == (world.rank, epoch, training.step):
                os.kill(os.getpid(), disturb[3])
            optimizer.zero_grad()
            total = 0.0
            for obs, action in ddpshim.accumulate(batch, policy, steps=2):  # gradients are averaged in the last part
                with world.autocast():
                    obs = obs + 0.05 * torch.randn_like(obs)
                    loss = -policy.forward_train(obs).log_prob(action).mean() / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
            mean = world.mean(total)
            if world.is_main:
                with open(log, "a") as file:
                    file.write(json.dumps([epoch * len(loader) + training.step, mean]) + "\n")
    training.finish()


run(train_lean, 2, FOLDER / "noise", FOLDER / "noise.log")
failed = run_failing(train_lean, 2, FOLDER / "noise_resumed", FOLDER / "noise_1.log", (0, 0, 5, signal.SIGTERM))
run(train_lean, 2, FOLDER / "noise_resumed", FOLDER / "noise_2.log")
joined = {**losses(FOLDER / "noise_1.log"), **losses(FOLDER / "noise_2.log")}
assert joined == losses(FOLDER / "noise.log")
print(f"{len(joined)} noisy bf16 steps, ended after {len(losses(FOLDER / 'noise_1.log'))}: equal to the last bit")

# %% [markdown]
# An example to copy: `examples/resume.py`. More: [docs/launch.md](../../docs/launch.md#preemption-and-resuming), and
# [evidence/faults.md](../../evidence/faults.md) for other failures.
#
# This was the last chapter. For your own trainer: [MIGRATION.md](../../MIGRATION.md).
