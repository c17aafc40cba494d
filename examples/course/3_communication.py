# %% [markdown]
# # 3. Communication
#
# After each backward pass the ranks average their gradients: one number per parameter of the policy, in every step.
# This chapter shows what that costs, when it matters, and what helps. The times are measured on your machine. On a
# laptop messages go through memory, and ranks compete for its cores.

# %%
import statistics
import sys
import time

import torch
import torch.distributed as dist
from pictures import GREY, RANK_COLOURS, draw
from ranks import run
from torch import nn
from torch.utils.data import Dataset

import ddpshim

QUICK = "--quick" in sys.argv
NUM_STEPS, LAYER_SIZE = (4, 300_000) if QUICK else (10, 1_000_000)

# %% [markdown]
# ## Where the time of a step goes
#
# Measure before you tune: put `with ddpshim.profile():` around the training loop. It counts three times of a
# step, and the main rank prints a table at the end. The policy has a million parameters. The first training has small
# batches, the second large ones, the third slow samples, as from a disk or a video decoder, and the fourth is the third
# with one data worker per rank.


# %%
class Samples(Dataset):
    def __init__(self, seconds_each=0.0):
        self.seconds_each = seconds_each

    def __len__(self):
        return 8192

    def __getitem__(self, index):
        if self.seconds_each:
            time.sleep(self.seconds_each)
        return torch.full((64,), index / 8192)


def make_policy():
    return nn.Sequential(nn.Linear(64, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 700))


def profiled(batch_size, seconds_each=0.0, num_workers=0):
    world = ddpshim.setup(seed=1)
    policy = ddpshim.wrap_parallel(make_policy())
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    loader = ddpshim.make_loader(
        Samples(seconds_each), batch_size, num_workers=num_workers, persistent_workers=num_workers > 0
    )

    def train(num_steps):
        for _, batch in zip(range(num_steps), loader):
            optimizer.zero_grad()
            policy(batch).square().mean().backward()
            optimizer.step()

    train(2)  # the first steps warm up
    with ddpshim.profile() as ranks:
        train(NUM_STEPS)
    return ranks[world.rank]


TRAININGS = {
    "small batches": (64,),
    "large batches": (512,),
    "slow samples": (64, 0.5e-3),
    "slow samples, a worker": (64, 0.5e-3, 1),
}
times = {}
for name, arguments in TRAININGS.items():
    print(f"\n{name}:")
    times[name] = run(profiled, 2, *arguments)[0]
slow = times["slow samples"]
assert slow["seconds"]["data_wait"] > NUM_STEPS * 32 * 0.5e-3, (
    "each rank waited for its 32 samples of half a millisecond"
)


# %%
def where_time_goes(figure):
    axes = figure.subplots()
    for y, row in enumerate(times.values()):
        left = 0.0
        for part, colour in zip(row["seconds"], ["#c53030", *RANK_COLOURS[:3], GREY]):
            milliseconds = 1000 * row["seconds"][part] / row["steps"]
            axes.barh(y, milliseconds, left=left, color=colour, label=None if y else part.replace("_", " "))
            left += milliseconds
    axes.set(yticks=range(len(times)), yticklabels=times, xlabel="milliseconds of a step, rank 0 of 2")
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.45, 1.0))


draw("3_parts", where_time_goes, width=8.5, height=2.6)

# %% [markdown]
# - *Data wait*: tuning communication does not help. More `num_workers` do, if there are cores, and so do samples that
#   are cheaper to make.
# - *Compute* includes communication that does not overlap backward, and the wait for slower ranks. The larger the
#   batch, the smaller their share, because 512 samples send as many gradients as 64.
#
# ## What a message costs
#
# A fixed time per message, plus a time per byte.


# %%
def time_messages(sizes, num_rounds):
    ddpshim.setup()
    seconds = []
    for size in sizes:
        message, rounds = torch.zeros(size // 4), []
        for _ in range(num_rounds + 1):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(message)
            rounds.append(time.perf_counter() - started)
        seconds.append(min(rounds[1:]))  # the round least disturbed by other programs
    return seconds


SIZES = [4**k for k in range(3, 12 if QUICK else 13)]  # bytes: 64 to 4 or 16 MB
message_s = run(time_messages, 2, SIZES, 9)[0]
latency_s, bytes_per_s = statistics.median(message_s[:4]), SIZES[-1] / message_s[-1]
print(f"here: {1e6 * latency_s:.0f} us for the smallest message, {bytes_per_s / 1e9:.2f} GB/s for the largest")


# %%
def message_times(figure):
    axes = figure.subplots()
    model = [1000 * (latency_s + size / bytes_per_s) for size in SIZES]
    axes.plot(SIZES, model, color="0.75", linewidth=5, label="latency + bytes / bandwidth")
    axes.plot(SIZES, [1000 * seconds for seconds in message_s], "o-", color=RANK_COLOURS[0], label="measured")
    axes.set(xscale="log", yscale="log", xlabel="bytes of an all-reduce between two ranks", ylabel="milliseconds")
    axes.legend(frameon=False, fontsize=8)


draw("3_message", message_times, width=6, height=2.8)

# %% [markdown]
# ## When does it matter?
#
# In a ring of W ranks each rank sends and receives 2 (W-1)/W times the bytes of the gradients. If that takes less time
# than a backward pass, it can overlap it, and training scales. So large policies and slow links need large batches.


# %%
def gradients_s(num_parameters, num_ranks, bytes_per_s, bytes_each=4):
    return 2 * (num_ranks - 1) / num_ranks * num_parameters * bytes_each / bytes_per_s


assert gradients_s(250e6, 2, 1e9) == 1.0
assert gradients_s(250e6, 4, 1e9) == 1.5

LINKS = {"NVLink": 450e9, "PCIe": 32e9, "10 Gbit Ethernet": 1.25e9, "here": bytes_per_s}
print("milliseconds to average the gradients of eight ranks:")
for num_parameters in (1e6, 20e6, 100e6):
    by_link = [f"{link} {1000 * gradients_s(num_parameters, 8, speed):.1f}" for link, speed in LINKS.items()]
    print(f"{num_parameters / 1e6:5.0f}M parameters: {', '.join(by_link)}")

# %% [markdown]
# ## Buckets and overlap
#
# During backward, gradients are computed one after the other, those of the last layer first. They are not sent one by
# one (that costs a latency each), nor all at the end (nothing would overlap), but in buckets: a bucket is sent when it
# is full, while backward continues. `bucket_cap_mb` is its size; ddpshim uses a sixteenth of the policy with gloo, and
# torch's 25 MB with nccl.
#
# To show this on a laptop, the layers here sleep where a GPU would compute: real cores would compute *and* send.
# torch's communication hooks show the buckets, and can change what is sent.


# %%
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, computed):
        ctx.shape, ctx.computed = weights.shape, computed
        return x + weights.mean()

    @staticmethod
    def backward(ctx, gradient):
        started = time.perf_counter()
        time.sleep(0.02)
        ctx.computed.append((started, time.perf_counter()))
        return gradient, gradient.expand(ctx.shape) / ctx.shape[0], None


class Sleeper(nn.Module):
    def __init__(self, num_layers=8, layer_size=LAYER_SIZE):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(layer_size)) for _ in range(num_layers)])
        self.computed = []  # when each layer's backward began and ended

    def forward(self, x):
        for weights in self.layers:
            x = Layer.apply(x, weights, self.computed)
        return x


def note_messages(sent, bucket):
    """Average a bucket as DDP does, and record when it was sent, when it arrived, and its bytes."""
    started, gradients = time.perf_counter(), bucket.buffer().div_(dist.get_world_size())

    def arrived(future):
        sent.append((started, time.perf_counter(), gradients.nbytes))
        return future.value()[0]

    return dist.all_reduce(gradients, async_op=True).get_future().then(arrived)


def watch_a_step(bucket_cap_mb):
    ddpshim.setup(seed=1)
    sent = []
    policy = ddpshim.wrap_parallel(
        Sleeper(), bucket_cap_mb=bucket_cap_mb, comm_hook=note_messages, comm_hook_state=sent
    )
    steps = []
    for _ in range(6):
        sent.clear()
        policy.computed.clear()
        started = time.perf_counter()
        policy(torch.ones(1)).sum().backward()
        total_s = time.perf_counter() - started
        spans = [[(a - started, b - started) for a, b, *_ in sorted(times)] for times in (policy.computed, sent)]
        steps.append((total_s, *spans, [num_bytes for *_, num_bytes in sent]))
    return min(steps)  # the step least disturbed by other programs


watched = {"a large bucket": run(watch_a_step, 2, 100)[0], "ddpshim's buckets": run(watch_a_step, 2, None)[0]}
for name, (total_s, computed, sent, sizes) in watched.items():
    assert sum(sizes) // 4 == 8 * LAYER_SIZE, "all gradients, and nothing else"
    hidden = sum(max(0.0, min(b, computed[-1][1]) - a) for a, b in sent)
    print(
        f"{name}: {len(sizes)} message{'s' * (len(sizes) > 1)}, backward took {1000 * total_s:.0f} ms, "
        f"{1000 * hidden:.0f} ms of sending were hidden behind it"
    )
one, many = (step[1:] for step in watched.values())
assert one[1][-1][0] > one[0][-1][0], "a large bucket waits for the last gradient"
assert many[1][0][0] < many[0][-1][0], "the first of many leaves before it"
assert len(many[1]) > len(one[1])


# %%
def timeline(figure):
    for axes, (name, (total_s, computed, sent, _)) in zip(figure.subplots(2, 1, sharex=True), watched.items()):
        for number, (start, end) in enumerate(computed):
            axes.barh(0, 1000 * (end - start), left=1000 * start, color=RANK_COLOURS[0], edgecolor="white")
            axes.text(500 * (start + end), 0, 8 - number, ha="center", va="center", color="white", fontsize=8)
        for start, end in sent:
            axes.barh(1, 1000 * (end - start), left=1000 * start, color=RANK_COLOURS[1], edgecolor="white", alpha=0.8)
        axes.axvline(1000 * total_s, color=GREY, linewidth=1, linestyle=":")
        axes.set(yticks=[0, 1], yticklabels=["gradients of layer", "messages"])
        axes.set_title(f"{name}: gradients averaged after {1000 * total_s:.0f} ms", fontsize=9, loc="left")
        axes.invert_yaxis()
    axes.set_xlabel("milliseconds since backward began, rank 0 of 2")
    axes.set_xlim(left=0)


draw("3_overlap", timeline, width=9, height=3.2)

# %% [markdown]
# ## Fewer messages: accumulation
#
# If a batch does not fit into memory, split it into parts and add up their gradients; they are averaged over the ranks
# once, in the last part. By hand each part's backward sends everything unless you use `no_sync()`. The gradients are
# the same, with a quarter of the bytes:


# %%
def accumulated(forgotten):
    ddpshim.setup(seed=1)
    sent = []
    policy = ddpshim.wrap_parallel(make_policy(), comm_hook=note_messages, comm_hook_state=sent)
    batch = torch.randn(32, 64)  # different on each rank
    policy(batch).square().mean().backward()
    whole, in_one = policy.module[0].weight.grad.clone(), sum(num_bytes for *_, num_bytes in sent)
    policy.zero_grad()
    sent.clear()
    for part in batch.split(8) if forgotten else ddpshim.accumulate(batch, policy, steps=4):
        (policy(part).square().mean() / 4).backward()
    gradient = policy.module[0].weight.grad
    return sum(num_bytes for *_, num_bytes in sent) / in_one, float((gradient - whole).abs().max() / whole.abs().max())


for forgotten, factor in ((False, 1), (True, 4)):
    sent, off = run(accumulated, 2, forgotten)[0]
    what = "no_sync() forgotten" if forgotten else "ddpshim.accumulate"
    print(f"{what}: {sent:.0f} x the bytes of one pass, gradients off by {off:.0e}")
    assert sent == factor
    assert off < 1e-5

# %% [markdown]
# ## Smaller messages: compression
#
# A communication hook may send 16 instead of 32 bits per gradient: half the bytes, and rounded gradients. That is a
# slightly different experiment; use it if you cannot get faster links. (The example uses float16, which every gloo
# supports; on GPUs use torch's `bf16_compress_hook`.)


# %%
def send_float16(sent, bucket):
    small = bucket.buffer().to(torch.float16).div_(dist.get_world_size())
    sent.append(small.nbytes)
    arriving = dist.all_reduce(small, async_op=True).get_future()
    return arriving.then(lambda arrived: bucket.buffer().copy_(arrived.value()[0]))


def compressed(hook):
    ddpshim.setup(seed=1)
    sent = []
    policy = ddpshim.wrap_parallel(make_policy(), comm_hook=hook, comm_hook_state=sent)
    policy(torch.randn(32, 64)).square().mean().backward()
    return policy.module[0].weight.grad, sent


(exact, sent), (rounded, sent_rounded) = (run(compressed, 2, hook)[0] for hook in (note_messages, send_float16))
num_bytes = sum(num_bytes for *_, num_bytes in sent)
off = float((rounded - exact).abs().max() / exact.abs().max())
print(
    f"float32: {num_bytes / 1e6:.1f} MB a step; float16: {sum(sent_rounded) / 1e6:.1f} MB, and gradients off by up to "
    f"{off:.1e} of the largest"
)
assert 2 * sum(sent_rounded) == num_bytes
assert 0 < off < 2**-9

# %% [markdown]
# ## What to tune first
#
# 1. Data wait: more workers, cheaper samples.
# 2. A batch that fills the GPU.
# 3. Accumulation, if the batch may grow.
# 4. Buckets, if the profile shows communication.
# 5. Compression.
#
# [evidence/benchmarks.md](../../evidence/benchmarks.md) has measurements of each.
#
# A complete trainer with accumulation and bf16: `examples/accumulation_bf16.py`. Next:
# [4_checkpoints.py](4_checkpoints.py), how a training survives interruptions.
