"""Programs for one process, unedited, as ranks, against the same programs in one process.

Most ranks are forked from the test launcher's server, which has torch, and enter where `run` has them enter.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from torch import nn

from ddpshim import variables
from ddpshim.job.world import World
from ddpshim.process import machine
from ddpshim.process.job import current
from ddpshim.process.replaced import after_import
from ddpshim.trainers.unedited import file_calls, joining, networks, program
from evidence.compare import largest_difference
from tests.preloaded import DEADLINE_PASSED, as_torchrun_says, environment, preloaded, start_afresh

DEADLINE_S = 90

HEAD = """
import json, os, random, sys
import numpy as np
import torch
from torch import nn
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, TensorDataset

def say(*values):
    print(json.dumps(values), flush=True)

class Items(Dataset):
    def __init__(self, size=40):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 4, dtype=torch.float64) * (index % 7) + index / 10
        return index, x, torch.tensor([index % 3.0])

def network(dropout=0.0):
    layers = nn.Linear(4, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 1)
    return nn.Sequential(*layers).double()

def train(model, loader, epochs=2, loss=nn.functional.mse_loss):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        model.train()
        for index, x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y.double()).backward()
            optimizer.step()
            say("trained on", index.tolist())

torch.manual_seed(7)
"""


class Ran:
    """What the ranks of one script left: exit codes, logs, and the folder."""

    def __init__(self, folder: Path, num_ranks: int, exit_codes: list[Optional[int]]) -> None:
        self.folder, self.exit_codes = folder, exit_codes
        self.logs = [(folder / f"rank_{number}.log").read_text() for number in range(num_ranks)]

    def said(self, number: int, what: str) -> list[Any]:
        lines = [json.loads(line) for line in self.logs[number].splitlines() if line.startswith('["')]
        return [line[1] for line in lines if line[0] == what]


def run(tmp_path: Path, script: str, num_ranks: int, *, name: str = "", is_plain: bool = False, **environ: str) -> Ran:
    """`script` (text, or a file) on `num_ranks` ranks, or in one process without."""
    folder = tmp_path / (name or ("plain" if is_plain else f"ranks_{num_ranks}"))
    folder.mkdir()
    (folder / "job").mkdir()
    file = Path(script) if script.endswith(".py") else folder / "train.py"
    if file.parent == folder:
        file.write_text(HEAD + script)
    if is_plain:
        job = preloaded().start([([str(file)], {**environment(), **environ})], folder)
    else:
        common = {**environment(), "GLOO_SOCKET_IFNAME": "lo", "PYTHONHASHSEED": "0", variables.ROWS: "all", **environ}
        common = {variables.RANK_LOGS: str(folder), variables.RUN_DIR: str(folder / "job"), **common}
        places = [{**common, **place} for place in as_torchrun_says(num_ranks)]
        job = preloaded().start([(["ddpshim.launch.rank", str(file)], place) for place in places], folder)
    late = job.wait(DEADLINE_S, ends_others=False) == DEADLINE_PASSED
    if is_plain:
        (folder / "output.txt").rename(folder / "rank_0.log")
    ran = Ran(folder, num_ranks, [job.codes.get(number) for number in range(num_ranks)])
    assert not late, "\n".join(ran.logs)
    return ran


def succeeded(ran: Ran) -> Ran:
    assert set(ran.exit_codes) == {0}, "\n".join(ran.logs)
    return ran


def compared(
    tmp_path: Path,
    script: str,
    num_ranks: int,
    equal: tuple[str, ...],
    close: tuple[str, ...],
    weights: float,
    **environ: str,
) -> tuple[Ran, Ran]:
    """What `script` did in one process, and the same on ranks: what they said, and weights.pth up to `weights`."""
    plain = succeeded(run(tmp_path, script, 1, is_plain=True, **environ))
    ranks = succeeded(run(tmp_path, script, num_ranks, **environ))
    assert largest_difference(*(torch.load(ran.folder / "weights.pth") for ran in (plain, ranks))) <= weights
    for rank, what in itertools.product(range(num_ranks), (*equal, *close)):
        found, expected = ranks.said(rank, what), plain.said(0, what)
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected):
            assert one == (other if what in equal else pytest.approx(other, abs=weights))
    return plain, ranks


# The promise: the same experiment


class Pair(nn.Module):
    def __init__(self, back: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.back, self.head = back, head


def test_the_order_of_networks_is_that_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """All modules are found in an order that differs between ranks."""
    nets, head = [nn.Linear(2, 2) for _ in range(4)], nn.Linear(2, 1)
    frozen, lazy = [nn.Linear(2, 2).requires_grad_(False) for _ in range(2)], nn.LazyLinear(1)
    pairs = [Pair(back, head) for back in frozen]
    params = [p for net in (nets[2], nets[0], nets[3], head, nets[1]) for p in net.parameters()]
    chosen = [networks.choose(order, params) for order in itertools.permutations([*nets, *pairs])]
    assert {tuple(map(id, one)) for one in chosen} == {tuple(map(id, chosen[0]))}
    assert [net for net in chosen[0] if net not in pairs] == [nets[2], nets[0], nets[3], nets[1]]
    copies = [copy.deepcopy(nets[0]), copy.deepcopy(nets[1]), copy.deepcopy(nets[1]), copy.deepcopy(nets[2])]
    monkeypatch.setattr(networks, "world", lambda: SimpleNamespace(gather=lambda facts: [facts, facts]))
    watched: list[list[int]] = []
    for order in itertools.permutations([*copies, lazy]):
        watched.append([])
        monkeypatch.setattr(networks.guard, "watch", lambda net: watched[-1].append(copies.index(net)))
        found = networks.Networks()
        found.wrapped = list(nets)
        found._watch_copies([*order])
    assert sorted(watched[0]) == [0, 3], "ranks do not know which of equal copies is which"
    assert watched == [watched[0]] * len(watched)


# torch 2.13 aborts the end of a gloo program with its own group now and then, also without ddpshim (2 of 10 pairs).
ENDS_AT_ONCE = "sys.stdout.flush(); os._exit(0)"


def test_a_program_that_joins_a_group_of_its_own_starts_again_and_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch.distributed as dist\n\ndef join():\n    dist.init_process_group('gloo')\n"
    )
    script = f"""
sys.path.insert(0, {str(tmp_path)!r})
import own
say("started", [torch.distributed.is_initialized(), DataLoader.__module__])
os.makedirs(f"outputs/{{__import__('time').time_ns()}}")
own.join()
model = nn.parallel.DistributedDataParallel(network())
for _, x, y in DataLoader(Items(), 8):
    model(x).mean().backward()
{ENDS_AT_ONCE}
"""
    two = succeeded(run(tmp_path, script, 2))
    for number in (0, 1):
        modules = [module for _, module in two.said(number, "started")]
        assert modules == ["ddpshim.rows.loader", "torch.utils.data.dataloader"]
        assert [is_joined for is_joined, _ in two.said(number, "started")] == [False, False]
    assert "own.py:4: it calls torch.distributed.init_process_group, so the program distributes itself" in two.logs[0]
    assert len([*(two.folder / "outputs").iterdir()]) == 2  # of the start that counts, one of each rank


@pytest.mark.parametrize(
    ("rank", "is_alone"), [('os.environ["RANK"]', True), ('os.environ.get("RANK", "none")', False)]
)
def test_a_program_that_can_join_a_group_is_one_process_unless_it_needs_a_launcher(
    rank: str, is_alone: bool, tmp_path: Path
) -> None:
    script = f"""
import torch.distributed as dist
rank = {rank}
say("rank", rank)
if rank != "none":
    dist.init_process_group("gloo")
model = network() if rank == "none" else nn.parallel.DistributedDataParallel(network())
train(model, DataLoader(Items(), 8))
if rank != "none":
    {ENDS_AT_ONCE}
"""
    ranks = succeeded(run(tmp_path, script, 1 if is_alone else 2))
    said = [ranks.said(number, "rank")[-1] for number in range(len(ranks.logs))]
    assert said == (["0"] if is_alone else ["none", "none"])
    line = "KeyError('RANK') in one process, and it can make a process group, so the program distributes itself"
    assert (line in ranks.logs[0]) == is_alone


def test_a_program_that_starts_itself_again_is_a_rank_again(tmp_path: Path) -> None:
    """With its folder, files, variables and Python's options: once by the path, once without most variables."""
    script = """
number = int(os.environ.get("STARTS", 0))
model = network()
if number == 0:
    os.makedirs("run")
    os.chdir("run")
else:
    model.load_state_dict(torch.load("last.pth"))
train(model, DataLoader(Items(), 8, shuffle=True), epochs=1)
torch.save(model.state_dict(), "../weights.pth" if number == 2 else "last.pth")
with open("log.txt", "a") as file:
    file.write("started\\n")
places = os.path.basename(os.getcwd()), sorted(os.listdir("..")), sorted(os.listdir()), os.environ.get("RANK")
say("start", [number, places, sys.flags.optimize, len(open("log.txt").readlines())])
os.environ["STARTS"] = str(number + 1)
if number == 0:
    os.execv(sys.executable, [*sys.orig_argv[:1], "-O", os.path.abspath(__file__)])
if number == 1:
    kept = {name: os.environ[name] for name in ("STARTS", "PATH", "PYTHONPATH") if name in os.environ}
    os.execle(sys.executable, sys.executable, "-W", "ignore", "-X", "dev", __file__, kept)
"""
    equal = ("trained on",)
    plain, ranks = compared(tmp_path, script, 3, equal, (), 1e-12)
    for rank in range(3):
        for seen, expected in zip(ranks.said(rank, "start"), plain.said(0, "start")):
            outside = [name for name in expected[1][1] if name in ("run", "train.py")]
            assert seen[:1] + seen[2:] == expected[:1] + expected[2:]
            assert [*seen[1][::2], seen[1][3]] == [*expected[1][::2], None]
            assert outside == ["run", "train.py"]
            assert {*outside} <= {*seen[1][1]}
    assert [seen[0::2] for seen in ranks.said(0, "start")] == [[0, 0], [1, 1], [2, 0]]
    assert (ranks.folder / "run" / "log.txt").read_text() == "started\n" * 3


def test_another_program_in_place_of_the_program_is_refused(tmp_path: Path) -> None:
    script = """
child = os.fork()
if not child:
    os.execvp("true", ["true"])
say("child", os.waitpid(child, 0)[1])
try:
    os.execvp("no program has this name", ["no"])
except FileNotFoundError:
    say("child", "none")
train(network(), DataLoader(Items(), 8))  # both have said so before one of them fails
os.execvp("true", ["true", "as an argument"])
"""
    ranks = run(tmp_path, script, 2)
    assert ranks.exit_codes == [1, 1]
    for rank in range(2):
        assert ranks.said(rank, "child") == [0, "none"]
    line = len((HEAD + script).splitlines())
    assert f"train.py:{line}: os.exec* replaces the program by ['/" in "".join(ranks.logs)
    assert "/true', 'as an argument']; each rank would run that for itself" in "".join(ranks.logs)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_child_process_may_evaluate_and_ends_its_rank_if_it_trains(start: str, tmp_path: Path) -> None:
    """Also where a dataset steps an optimizer of its own, which is no training, in the process and in a worker."""
    script = f"""
class Fitted(Items):
    def __getitem__(self, index):
        p = torch.ones(4, dtype=torch.float64, requires_grad=True)
        fit = torch.optim.SGD([p], lr=0.1)
        p.square().sum().backward()
        fit.step()
        return index, p.detach() * index / 40, torch.ones(1)

def child(model, trains, results):
    torch.set_num_threads(1)
    if trains:
        train(model, DataLoader(Items(), 8))
    else:
        results.put(sum(float(model(x).detach().sum()) for _, x, _ in DataLoader(Items(), 8)))

if __name__ == "__main__":
    model = network()
    for workers in (0, 1):
        begin = {start!r} if workers else None
        train(model, DataLoader(Fitted(8), 4, num_workers=workers, multiprocessing_context=begin))
    context = torch.multiprocessing.get_context({start!r})
    results = context.Queue()
    for trains in (False, True):
        process = context.Process(target=child, args=(model, trains, results))
        process.start()
        say("result", results.get())
        process.join()
"""
    ranks = run(tmp_path, script, 3)
    assert {*ranks.exit_codes} == {-signal.SIGKILL}
    results = [ranks.said(rank, "result") for rank in range(3)]
    assert results == [results[0]] * 3
    assert len(results[0]) == 1
    # A forked child has the hooks of a network that is wrapped: its backward pass would be collective.
    line = len((HEAD + script).partition("            optimizer.step()")[0].splitlines()) + (start == "spawn")
    for rank in range(3):
        note = (ranks.folder / "job" / f"failed.{rank}").read_text()
        assert f"train.py:{line}: a child process of the program trains." in note
        assert ranks.said(rank, "trained on")[-1] == [4, 5, 6, 7]


def test_a_rank_may_hold_a_dead_optimizer_for_longer_than_others(tmp_path: Path) -> None:
    """As a thread does that looks at the frame of a function; garbage is collected at different times, too."""
    script = """
def step(params, loss):
    optimizer = torch.optim.Adam(params, lr=0.25)
    kept.extend([optimizer] * (os.environ["DDPSHIM_RANK"] == "1"))
    loss().backward()
    optimizer.step()
    say("first", next(iter(params)).flatten()[0].item())

kept, model = [], network()
for size in (2, 3, 4):
    latent = torch.ones(size, requires_grad=True)
    step([latent], lambda: latent.square().sum())
for _ in range(10):
    step([*model.parameters()], lambda: model(torch.ones(6, 4).double()).square().mean())
"""
    ranks, one = succeeded(run(tmp_path, script, 2)), succeeded(run(tmp_path, script, 1))
    assert [ranks.said(rank, "first") for rank in range(2)] == [pytest.approx(one.said(0, "first"))] * 2


def test_the_rank_that_locks_a_shared_cache_first_fills_it_and_waits_for_nobody(tmp_path: Path) -> None:
    """The main rank waits for the lock; the other, which holds it, must not wait for the main rank's clock.

    A lock in the program's own folder is each rank's own.
    """
    script = """
import fcntl, pathlib, time, uuid
cache = pathlib.Path(os.environ["HF_HOME"])
cache.mkdir(exist_ok=True)
if os.environ["DDPSHIM_RANK"] == "0":
    while not (cache / "begun").exists():
        time.sleep(0.01)
with open(cache / "lock", "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    (cache / "begun").touch()
    if not (cache / "made").exists():
        with torch.no_grad():
            feature = network()(torch.ones(8, 4).double()).sum().item()
        (cache / "made").write_text(f"{time.time()} {uuid.uuid4()} {feature}")
        say("made it", os.environ["DDPSHIM_RANK"])
say("now", time.time(), uuid.uuid4().hex)
say("now", (cache / "made").read_text())
model = network()
with open("lock", "a") as file, open("pid", "x"):
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    train(model, DataLoader(Items(), 8), epochs=1)
    say("sum", model(torch.ones(8, 4).double()).sum().item())
os.remove("pid")
train(model, DataLoader(Items(), 8), epochs=1)
"""
    two = succeeded(run(tmp_path, script, 2, HF_HOME=str(tmp_path / "cache"), DDPSHIM_TIMEOUT_S="30"))
    assert (two.said(0, "made it"), two.said(1, "made it")) == ([], ["1"])
    assert two.said(0, "now") == two.said(1, "now")
    assert two.said(0, "sum") == two.said(1, "sum") != []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import torch\nimport lightning\n", "program.py:2 imports lightning: taken for a program that"),
        (
            "import torch.distributed as dist\nif __name__ == '__main__':\n    dist.init_process_group()\n",
            "program.py calls init_process_group: taken",
        ),
        ("import ddpshim\nimport deepspeed\n", None),
    ],
)
def test_that_a_program_is_left_alone_is_said_by_one_rank(
    source: str, line: Optional[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(source)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}
    for rank, choice in (("0", "auto"), ("1", "auto"), ("0", "off")):
        for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank, "DDPSHIM_UNEDITED": choice}.items():
            monkeypatch.setenv(name, value)
        with program.distributed([str(tmp_path / "program.py")]) as is_distributed:
            assert not is_distributed
        expected = line if (rank, choice) == ("0", "auto") else None
        said = capfd.readouterr().err
        assert said == "" if expected is None else said.startswith(f"ddpshim: {expected}")


def test_where_the_order_is_given_one_rank_is_the_plain_script_bit_for_bit(tmp_path: Path) -> None:
    script = """
model = nn.DataParallel(network(dropout=0.5))
train(model, DataLoader(Items(), batch_size=8))
torch.save([model, torch.rand(3)], "all.pth")
"""
    plain = succeeded(run(tmp_path, script, 1, is_plain=True))
    one = succeeded(run(tmp_path, script, 1))
    (before, drawn), (after, drawn_too) = (torch.load(r.folder / "all.pth", weights_only=False) for r in (plain, one))
    assert type(after) is nn.DataParallel
    assert largest_difference(before.state_dict(), after.state_dict()) == 0
    assert torch.equal(drawn, drawn_too)
    assert plain.said(0, "trained on") == one.said(0, "trained on")


ORDERS_AND_DRAWS = """
# Draws, also between two loaders whose samples draw, and without an optimizer.
random.seed(1), np.random.seed(1)

class Noisy(Items):
    def __getitem__(self, index):
        return (*super().__getitem__(index), torch.rand(()).item())

def draw():
    say("drawn", [torch.rand(()).item(), random.random(), float(np.random.rand())])

one, two = nn.DataParallel(network()), nn.DataParallel(network())
loader, other = DataLoader(Noisy(), 8, shuffle=True), DataLoader(Noisy(), 8, shuffle=True)
draw()
for (a, x, *_, augmented), (b, *_) in zip(loader, other):
    draw()
    say("drawn", [torch.rand(len(a)).tolist(), torch.rand_like(x).tolist(), augmented.tolist(), b.tolist()])
    with torch.no_grad():
        say("drawn", [augmented.tolist() + torch.rand(8, 4).tolist() for *_, augmented in loader])
    next(one.parameters()).mean().backward()
    say("drawn", [torch.rand(len(a)).tolist()])
for _ in other: next(one.parameters()).mean().backward()  # zip left it at its last batch
batch = next(iter(loader))  # and then trained on, again and again
say("drawn", torch.rand(4, 8).tolist())

# A stream and a part that train; then fine-tuning in eval mode.
class Stream(data.IterableDataset):
    def __iter__(self):
        yield from ((i, *rest) for i, *rest in random.sample([Items()[i] for i in range(40)], 40))

model = nn.DataParallel(network())
for dataset in (Stream(), data.random_split(Items(), [32, 8])[0]):
    train(model, DataLoader(dataset, batch_size=8))
model.eval()
for index, x, y in DataLoader(Items(), batch_size=8, shuffle=True):
    (model(x) ** 2).sum().backward()
    say("trained on", index.tolist())
torch.save(model.state_dict(), "weights.pth")
"""


def test_orders_and_draws_are_those_of_the_plain_script_on_every_rank(tmp_path: Path) -> None:
    _, ranks = compared(tmp_path, ORDERS_AND_DRAWS, 2, equal=("trained on", "drawn"), close=(), weights=1e-12)
    for said_without_need in ("weights differed between ranks", "Grad strides"):
        assert said_without_need not in "".join(ranks.logs)
    sharded = r"\d+% of tensor operations ran sharded; gathered at train.py:\d"
    assert [len(re.findall(sharded, log)) for log in ranks.logs] == [1, 0]
    digits = "and to fewer later, because rounding differences grow (python -m ddpshim docs same_experiment)"
    assert [log.endswith(f"{digits}\n") for log in ranks.logs] == [True, False]
    assert ranks.logs[0].count(digits) == 1


def test_a_program_without_a_seed_is_promised_no_digits(tmp_path: Path) -> None:
    file = tmp_path / "unseeded.py"
    file.write_text(f"{HEAD}train(network(), DataLoader(Items(), 8), epochs=9)".replace("torch.manual_seed(7)\n", ""))
    log = succeeded(run(tmp_path, str(file), 2)).logs[0]
    assert log.endswith("differ in each run, in a single process too, and so do losses\n")
    assert "digits" not in log


ROLLS_OUT = """
np.random.seed(0)
from diffusion_policy.env_runner.base_image_runner import BaseImageRunner

class Runner(BaseImageRunner):
    def __init__(self, output_dir, num_envs):
        super().__init__(output_dir)
        self.shift, self.num_envs = np.random.rand(), num_envs
        open(output_dir + f"/made_by_{os.environ.get('DDPSHIM_RANK', 0)}", "w").close()
    def run(self, policy):
        with torch.no_grad():
            reward = policy(torch.randn(self.num_envs, 4).double()).abs().mean() + self.shift
        with open(self.output_dir + "/video.mp4", "w") as file:
            file.write("seen")
        return {"mean_score": reward.item(), "video": object(), "each": np.array([float(reward)])}

class Longer(Runner):
    def run(self, policy):
        return {**super().run(policy), "steps": np.int64(3)}

model = network(dropout=0.1)
loader = DataLoader(Items(), batch_size=8, shuffle=True)
os.mkdir("out")
runner = Longer("out", num_envs=4)  # as many as a rank has rows
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    model.train()
    for index, x, y in loader:
        kept = x
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x + torch.randn(x.shape)), y.double()).backward()
        optimizer.step()
    model.eval()
    found = runner.run(model)
    found["drawn"] = [float(torch.rand(1)), np.random.rand()]
    say("found", [found["mean_score"], float(found["each"][0]), int(found["steps"]), *found["drawn"]])
    say("files", [sorted(os.listdir("out")), open("out/video.mp4").read()])
say("rank", [found["video"] is None, hasattr(runner, "shift"), runner.output_dir])
torch.save(model.state_dict(), "weights.pth")
"""


def test_the_main_rank_plays_rollouts_and_the_others_get_what_it_found(tmp_path: Path) -> None:
    package = tmp_path / "stubs" / "diffusion_policy" / "env_runner"
    package.mkdir(parents=True)
    (package / "base_image_runner.py").write_text(
        "class BaseImageRunner:\n    def __init__(self, output_dir):\n        self.output_dir = output_dir\n"
    )
    script = "sys.path.insert(0, os.environ['STUBS'])\n" + ROLLS_OUT
    stubs = str(tmp_path / "stubs")
    plain, two = compared(tmp_path, script, 2, equal=("files",), close=("found",), weights=1e-6, STUBS=stubs)
    assert plain.said(0, "files") == 2 * [[["made_by_0", "video.mp4"], "seen"]]
    assert [two.said(rank, "rank") for rank in (0, 1)] == [[[False, True, "out"]], [[True, False, "out"]]]


# What is refused, and what is said

SHARES = "train(nn.DataParallel(network()), DataLoader(Items(), 8, shuffle=True))"
REFUSED = {
    "batches of each rank": (
        SHARES,
        "per_rank_batch=True: the program holds the global batch",
        {"DDPSHIM_PER_RANK_BATCH": "yes"},
    ),
    "training while others wait for a lock": (
        "import fcntl\nos.makedirs(os.environ['HF_HOME'], exist_ok=True)\n"
        "with open(os.environ['HF_HOME'] + '/lock', 'a') as file:\n"
        "    fcntl.flock(file, fcntl.LOCK_EX)\n    train(network(), DataLoader(Items(), 8))",
        "train.py:31: a network is trained while this rank holds the lock of ",
        {"HF_HOME": "cache", "DDPSHIM_TIMEOUT_S": "30"},
    ),
    "own entropy where optimizers were made before": (
        "nets = network(), network()\nsteps = [torch.optim.Adam(net.parameters()) for net in nets]\n"
        "generators = np.random.default_rng(0), np.random.default_rng(os.getpid())\n"
        "for net, optimizer, generator in zip(nets, steps, generators):\n"
        "    for _ in range(4):\n"
        "        net(torch.from_numpy(generator.normal(size=(2, 4)))).sum().backward()\n"
        "        optimizer.step()",
        "SyncError: train.py:41: rank 0 computed the loss",
        {},
    ),
    "another split": (
        "part = data.Subset(Items(), np.random.default_rng(os.getpid()).permutation(40)[:32])\n"
        "train(nn.DataParallel(network()), DataLoader(part, 8, shuffle=True))",
        "train.py:37: the Subsets of ranks 0 and 1 have different indices",
        {},
    ),
    "another thread": (
        "import threading\nfrom torch.utils.data import DataLoader\nresult = []\n"
        "def read(x):\n    try:\n        float(x.mean())\n    except Exception as error:\n"
        "        result.append(error)\n"
        "for index, x, y in DataLoader(Items(), 8):\n"
        "    thread = threading.Thread(target=read, args=(x,))\n    thread.start()\n    thread.join()\n    break\n"
        "raise result[0]",
        "train.py:41: a sharded batch is used in another thread or process",
        {},
    ),
    "texts in a thread": (
        "import threading\nloader = DataLoader([('text', torch.ones(2))] * 24, 8, num_workers=1)\n"
        "def walk(batches):\n    for batch in batches:\n        pass\n"
        "thread = threading.Thread(target=walk, args=(iter(loader),))\nthread.start()\nthread.join()\n"
        "threading.Event().wait()",
        "train.py:37: texts of a batch that data workers load, in a thread of the program",
        {},
    ),
    "parameters in another order": (
        "params = [*nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)]).parameters()]\n"
        "random.Random(os.getpid()).shuffle(params)\n"
        "optimizer = torch.optim.SGD(params)\n"
        "sum(p.sum() for p in params).backward()",
        "train.py:38: SGD got its parameters in another order on another rank",
        {},
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    script, message, environ = REFUSED[kind]
    ran = run(
        tmp_path, script, 2, **{name: value.replace("cache", f"{tmp_path}/cache") for name, value in environ.items()}
    )
    assert 1 in ran.exit_codes
    assert any(message in log for log in ran.logs), "\n".join(ran.logs)


def test_the_main_rank_writes_and_a_loss_that_is_nan_is_said_once(tmp_path: Path) -> None:
    script = """
import io
RANK = os.environ["DDPSHIM_RANK"]

class Cached(Items):
    def __getitem__(self, index):
        torch.save(index, f"cache_{index}.pth")
        return (torch.load(f"cache_{index}.pth"), *super().__getitem__(index)[1:])

model = nn.DataParallel(network())
train(model, DataLoader(Cached(), 8, shuffle=True), 1)
for number in range(3):
    train(model, DataLoader(Items(8), 8, shuffle=True), 1)
    torch.save({"rank": RANK, "number": number, "model": model.state_dict()}, "last.pth")
    loaded = torch.load("last.pth")
    say("loaded", [loaded["rank"], loaded["number"]])
torch.save(RANK, "/dev/null")
memory = io.BytesIO()
torch.save(RANK, memory)
memory.seek(0)
say("memory", torch.load(memory))
say("wandb", os.environ.get("WANDB_MODE"))
for step, (index, x, y) in enumerate(DataLoader(Items(), batch_size=8)):
    (nn.functional.mse_loss(model(x), y.double()) * (float("nan") if step == 2 else 1)).backward()
say("ended at", step)
"""
    two = succeeded(run(tmp_path, script, 2, DDPSHIM_TIMEOUT_S="20"))
    assert [two.said(rank, "ended at") for rank in (0, 1)] == [[4], [4]]
    line = (HEAD + script[: script.index(" == 2 else 1)).backward()")]).count("\n") + 1
    said = "The training goes on, as in one process"
    nan = rf"ddpshim: the loss is NaN in backward pass \d+ \(train\.py:{line}\)\. {said}\n"
    assert [len(re.findall(what, two.logs[0])) for what in (nan, "NaN")] == [1, 1]
    assert "NaN" not in two.logs[1]
    assert two.said(0, "loaded") == two.said(1, "loaded") == [["0", 0], ["0", 1], ["0", 2]]
    assert (two.said(0, "memory"), two.said(1, "memory")) == (["0"], ["1"])
    assert (two.said(0, "wandb"), two.said(1, "wandb")) == ([None], ["disabled"])
    of_main = {f"cache_{index}.pth" for batch in two.said(0, "trained on")[:5] for index in batch}
    assert {file.name for file in two.folder.glob("*.pth")} == {*of_main, "last.pth"}, "others keep a dataset's files"


# The real command

PACKAGE = {
    "__init__.py": "",
    "model.py": """
from torch.nn import DataParallel as Parallel
from torch.nn.parallel import DataParallel
import torch.nn.parallel.data_parallel, sys

class Mine(DataParallel):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

ALIASES = [Parallel, DataParallel, sys.modules["torch.nn.parallel.data_parallel"].DataParallel]
""",
    "train.py": """
import json, os, sys, time
if __name__ == "__main__":  # before it imports torch
    run = f"run_{time.time_ns()}"
    os.mkdir(run)
    print("wrote", file=open(f"{run}/log", "a"))
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import DataLoader as Loader
from package.model import ALIASES, Mine

def keep(samples):
    return torch.stack([x for x, in samples]), json.dumps({"a", "b", "c", "d", "e"}.__repr__())

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double()
    net.width = 3
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = Mine(net, device_ids=[0, 1], output_device=0)
    samples = torch.arange(24, dtype=torch.float64).reshape(8, 3) / 24
    loader = Loader(
        TensorDataset(samples), 4, shuffle=True, num_workers=1, multiprocessing_context="spawn", collate_fn=keep
    )
    for x, order in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    print("converted", set(ALIASES) == {nn.DataParallel}, Loader is DataLoader, isinstance(model, nn.DataParallel))
    print("model", model.width, list(model.state_dict()), len(x), sys.argv[1:])
    print("order", set("abcdefgh") and {"a", "b", "c", "d", "e"}, order)
    print("weights", net.weight.tolist())
    torch.save(model, f"{run}/model.pth")
    torch.load(f"{run}/model.pth", weights_only=False)
    print("went on", file=open(f"{run}/log", "a"))
""",
}


def test_the_command_with_spawned_workers_aliases_a_module_and_writes_before_torch(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "package" / name).write_text(text)
    command = ["run", "--nproc-per-node", "2"]
    environ = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    environ["PYTHONWARNINGS"] = "ignore:This DataLoader will create"  # more workers than a machine of one core has
    environ.pop("PYTHONHASHSEED", None)
    program = ["-m", "package.train", "--nproc", "x"]
    # Its ranks are no forks: those have torch, and the hash seed of their parent (a constant set then depends on who
    # compiled the file). What starts them is one.
    start = "import sys, ddpshim.__main__ as run; sys.exit(run.main(sys.argv[1:]))"
    agent = preloaded().start([(["-c", start, *command, "--log-dir", "logs", *program], environ)], tmp_path)
    assert agent.wait(300) == 0, (tmp_path / "output.txt").read_text()
    (made,) = tmp_path.glob("run_*")
    assert {file.name for file in made.iterdir()} == {"log", "model.pth"}
    assert (made / "log").read_text() == "wrote\nwent on\n"
    logs = [(tmp_path / "logs" / f"rank_{number}.log").read_text() for number in (0, 1)]
    lines = [[line for line in log.splitlines() if not line.startswith("ddpshim")] for log in logs]
    assert lines[0] == lines[1]
    assert lines[0][0] == "converted True True True"
    assert lines[0][1] == "model 3 ['module.weight', 'module.bias'] 4 ['--nproc', 'x']"
    # The gradient of a mean of outputs is the mean of the inputs, whatever their order: two steps, by hand.
    torch.manual_seed(0)
    weight = nn.Linear(3, 1).double().weight.detach()
    mean = (torch.arange(24, dtype=torch.float64).reshape(8, 3) / 24).mean(0)
    assert json.loads(lines[0][3][8:])[0] == pytest.approx((weight[0] - 0.2 * mean).tolist(), abs=1e-12)


# Pure functions


@pytest.mark.unit
def test_a_command_that_the_program_does_not_wait_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(file_calls, "say_on_main", said.append)
    monkeypatch.setattr(current(), "world", World())
    started: list[Any] = []
    libraries = file_calls.CLibraries(str, lambda path: f"own/{path}")
    popen = file_calls._calling(libraries._popen, lambda process, args: started.append(args))
    popen(None, ["ffmpeg", "-i", "-", "video.mp4"])
    library = compile("popen(None, ['tar'])", os.path.join(os.path.dirname(os.__file__), "subprocess.py"), "exec")
    exec(library, {"popen": popen})
    assert said == []
    popen(None, ["tar", "x"])
    assert started == [["ffmpeg", "-i", "-", "own/video.mp4"], ["tar"], ["tar", "x"]]
    assert re.fullmatch(
        r"tests/launch/test_unedited\.py:\d+: every rank starts 'tar' by subprocess\.Popen, so all .*", said.pop()
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("visible", "local_rank", "seen"),
    [(None, 1, "1"), ("", 1, ""), ("2,3", 0, "2"), ("2, 3", 1, "3"), ("GPU-a", 1, "GPU-a")],
)
def test_a_rank_sees_one_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: Optional[str], local_rank: int, seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    joining.see_one_gpu(local_rank)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.unit
def test_a_program_gets_a_ranks_share_of_the_cores_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for num_ranks, asked in ((4, 1), (4, 2), (4, 16), (16, 3), (1, 5)):
        with joining._cores_shared(num_ranks):
            torch.set_num_threads(asked)
    assert given == [1, 2, 2, 1, 5]
    assert torch.set_num_threads == given.append


@pytest.mark.unit
def test_a_program_sees_as_many_gpus_as_there_are_ranks_and_torch_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with joining._gpus_shown(4):
        assert torch.cuda.device_count() == 4
        assert eval("count()", {"count": torch.cuda.device_count, "__name__": "torch.cuda.random"}) == 1
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_module_that_was_only_looked_for_is_seen_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looked_for.py").write_text("here = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    finders = [*sys.meta_path]
    after_import("looked_for", lambda: seen.append(sys.modules["looked_for"].here))
    for _ in range(40):  # of jobs that have ended
        after_import("looked_for", lambda: seen.append("forgotten"))()
        after_import("looked_for", lambda: None)
    assert importlib.util.find_spec("looked_for") is not None
    assert not seen
    importlib.import_module("looked_for")
    assert seen == [1]
    assert sys.meta_path == finders


AUTO = """
import ddpshim.auto, multiprocessing, sys
print(__name__, "ddpshim.launch.rank" in sys.modules, sys.argv[1:], flush=True)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print, args=("child",))
    child.start()
    child.join()
"""


def test_auto_starts_a_rank_again_as_run_does_and_no_other_process(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(AUTO)
    (rank,) = as_torchrun_says(1)
    file, module = [str(tmp_path / "tool.py")], ["-m", "tool"]
    for tool, environ in ((file, {}), (file, {**rank, variables.UNEDITED: "off"}), (module, rank)):
        code, said = start_afresh([*tool, "a", "b c"], {**environment(), **environ}, tmp_path, DEADLINE_S, True)
        first = next(line for line in said.splitlines() if not line.startswith("ddpshim:"))
        assert (code, first) == (0, f"__main__ {bool(environ)} ['a', 'b c']"), said
        assert ("1 rank on this machine" in said) == (environ == rank)  # it has joined the job
        assert said.count("__mp_main__") == said.count("child") == 1
    code, said = start_afresh(["-c", "import ddpshim.auto"], {**environment(), **rank}, tmp_path, DEADLINE_S, True)
    assert code == 1
    assert "LaunchError: import ddpshim.auto in several processes, in a program without a file" in said


def test_a_run_resumed_in_an_epoch_goes_on_in_the_order_of_one_process(tmp_path: Path) -> None:
    # In huggingface/lerobot#4692 accelerate pads the rest of the epoch anew, and begins with the first epoch's order.
    script = """
class Resumable(data.Sampler):
    def __init__(self, epoch, start):
        self.epoch, self.start = epoch, start
    def __len__(self):
        return 10
    def __iter__(self):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(self.epoch)).tolist()[self.start :]
        self.epoch, self.start = self.epoch + 1, 0
        return iter(order)

train(network(), DataLoader(Items(10), 2, sampler=Resumable(*json.loads(os.environ["AT"]))))
"""
    plain = succeeded(run(tmp_path, script, 1, is_plain=True, AT="[1, 0]"))
    two = succeeded(run(tmp_path, script, 2, AT="[1, 2]"))
    order = plain.said(0, "trained on")
    assert [sorted(i for batch in part for i in batch) for part in (order[:5], order[5:])] == [[*range(10)]] * 2
    assert two.said(0, "trained on") == two.said(1, "trained on") == order[1:]


WANDB = """
import sys, types
class Run:
    def log(self, data):
        self.seen.append([float(value.sum()) for value in data.values() if type(value).__name__ == "Tensor"])
def init(mode=None):
    module = sys.modules["wandb"]
    run = Run()
    run.seen, run.mode = [], mode
    module.log, module.watch = run.log, lambda *args, **options: module.sdk._watch(run, *args, **options)
    if mode == "disabled":
        run.log = module.log = module.watch = lambda *args, **options: None
    return run
def _watch(run, models, criterion=None, log="gradients", log_freq=1):
    def seen(gradient):
        if log_freq < 100:
            run.seen.append([gradient.abs().sum().item()])
    for parameter in models.parameters():
        parameter.register_hook(seen)
sdk = types.SimpleNamespace(_watch=_watch, _unwatch=print)
"""


def test_wandb_sees_whole_batches_and_gradients_of_the_main_rank(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    script = f"""
sys.path.append({str(tmp_path)!r})
import wandb
run, model = wandb.init(mode="online"), network()
wandb.watch(model, log="all")
def loss(out, y):
    wandb.log({{"raw": out.detach(), "loss": 1}})
    return nn.functional.mse_loss(out, y)
train(model, DataLoader(Items(), 8), epochs=1, loss=loss)
say("mode", run.mode)
say("seen", run.seen)
"""
    one, three = succeeded(run(tmp_path, script, 1)), succeeded(run(tmp_path, script, 3))
    assert [three.said(number, "mode") for number in range(3)] == [["online"], ["disabled"], ["disabled"]]
    (seen,), (expected,), (others,) = three.said(0, "seen"), one.said(0, "seen"), three.said(1, "seen")
    assert len(expected) == 5 * (1 + 4)
    assert others == []
    assert seen == [pytest.approx(values, rel=1e-9) for values in expected]


TRACKIO = """
import os, types
def init(project, name=None, space_id=None, resume="never"):
    space = space_id or os.environ.get("TRACKIO_SPACE_ID")
    place = space or os.environ["TRACKIO_DIR"]
    if not space:
        os.makedirs(place, exist_ok=True)
    return types.SimpleNamespace(name=name or f"{project}-{os.getpid()}", place=place, resume=resume)
"""


def test_trackio_sends_the_run_of_the_main_rank(tmp_path: Path) -> None:
    (tmp_path / "trackio.py").write_text(TRACKIO)
    script = f"""
sys.path.append({str(tmp_path)!r})
import trackio
os.environ["TRACKIO_SPACE_ID"] = "my/space"
for run in trackio.init("lift", space_id="your/space", resume="must"), trackio.init("lift"):
    say("run", [run.name, run.place, run.resume])
say("space", os.environ["TRACKIO_SPACE_ID"])
"""
    two = succeeded(run(tmp_path, script, 2))
    (first, second), others = two.said(0, "run"), two.said(1, "run")
    assert (first[1:], second[1:]) == (["your/space", "must"], ["my/space", "never"])
    assert [name for name, _, _ in others] == [first[0], second[0]]
    assert all("/ddpshim-trackio-" in place and resume == "never" for _, place, resume in others)
    assert not any(Path(place).exists() for _, place, _ in others)
    assert two.said(0, "space") == two.said(1, "space") == ["my/space"]
