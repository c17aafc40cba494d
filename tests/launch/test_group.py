"""setup, cleanup and World: in one process, on forked ranks, and under the real torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import re
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Optional, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import ddpshim
from ddpshim import LaunchError, World, WorldError, cleanup, setup
from ddpshim.errors import OptionsError, RankError
from ddpshim.failures import failure, failure_notes
from ddpshim.job import process_group
from ddpshim.job.collectives import main_sets
from ddpshim.launch import spawning
from ddpshim.observe import records
from ddpshim.options import Options
from ddpshim.process import devices, job_store, messages
from ddpshim.process.devices import backend_of, choose_backend
from ddpshim.process.job import current
from tests.preloaded import as_torchrun_says, preloaded, working_in
from tests.preloaded_commands import patience
from tests.ranks import _server, free_port, run_ranks

ROOT = Path(__file__).parents[2]
LAUNCHER_VARIABLES = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|(MASTER|SLURM|OMPI|PMI|PMIX|MV2|MPI|TORCHELASTIC|DDPSHIM)_.*"
)
DEADLINE_S = 60.0
KILLED_AFTER_S = 30.0  # by torchrun: ranks that it has told to end, and did not


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, and a store of no job; the other tests' after the test."""
    for name in filter(LAUNCHER_VARIABLES.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setattr(job_store, "_stores", {})
    yield
    cleanup()
    assert not dist.is_initialized()


# --- one process


def test_plain_process_starts_nothing_and_everything_works(capfd: pytest.CaptureFixture[str]) -> None:
    before, drawn = dict(os.environ), (torch.get_rng_state(), random.getstate())
    hook = sys.excepthook
    assert ddpshim.world() == World(device=ddpshim.world().device)
    ddpshim.split_random_streams()
    here = setup()
    ddpshim.split_random_streams()
    assert (here.rank, here.local_rank, here.world_size, here.local_world_size, here.node_rank) == (0, 0, 1, 1, 0)
    assert (here.is_main, here.is_launched, here.launcher, here.backend) == (True, False, "none", None)
    assert setup() is here
    assert ddpshim.world() is here
    here.barrier()
    assert here.gather({1, 2}) == [{1, 2}]
    assert here.broadcast(here) is here
    assert here.sum({"a": 2**53 + 1, "b": 0.1}) == {"a": 2**53 + 1, "b": 0.1}
    assert here.mean(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
    assert here.run_on_main(divmod, 7, 2) == (3, 1)
    assert callable(here.run_on_main(lambda: lambda: None))
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert sys.excepthook is hook
    assert capfd.readouterr().err == ""
    cleanup()
    cleanup()


def test_rounding_is_settled_before_the_first_network(monkeypatch: pytest.MonkeyPatch) -> None:
    tanh, asked = torch.tanh, []
    monkeypatch.setattr(torch, "tanh", lambda x: asked.append((x.dtype, x.device.type)) or tanh(x))
    with torch.device("meta"):  # as torch.set_default_device: a GPU must not be touched before ranks know theirs
        ddpshim.setup(device="cpu")
    assert asked == [(torch.float32, "cpu"), (torch.float64, "cpu")]
    ddpshim.setup()
    assert len(asked) == 2, "once is enough"


def test_what_many_claim_at_once_one_gets() -> None:
    store, start = dist.HashStore(), threading.Barrier(10)

    def claim(rank: int) -> str:
        start.wait(patience(DEADLINE_S))
        return job_store.claim(store, "failed", str(rank))  # of one character: it ended Python 3.10 with torch 2.1

    with ThreadPoolExecutor(10) as ranks:
        told = list(ranks.map(claim, range(10)))
    assert set(told) == {store.get("failed").decode()}
    assert told[int(told[0])] == told[0]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"backend": "gloo", "seed": 3}, {"backend": "gloo", "seed": 3}, None),  # of a launched run
        ({"seed": 1}, {"seed": 2}, "setup(seed='2'), but there is a world with seed='1' already"),
        ({"device": "cpu"}, {"device": "cuda:1"}, "setup(device='cuda:1'), but there is a world with device='cpu'"),
        ({"device": "cpu"}, {"seed": 1, "device": "meta"}, "setup(device='meta')"),
    ],
)
def test_a_second_setup(first: dict[str, Any], second: dict[str, Any], said: Optional[str]) -> None:
    here = setup(**first)
    with pytest.raises(WorldError, match=re.escape(said)) if said else contextlib.nullcontext():
        setup(**second)
    assert ddpshim.world() is here


def test_seed_is_given_late_but_not_after_the_split() -> None:
    assert setup().seed is None
    assert setup(seed=5).seed == 5
    drawn = (torch.rand(1).item(), random.random())
    torch.manual_seed(5)
    random.seed(5)
    assert drawn == (torch.rand(1).item(), random.random())
    current().world, current().is_split = World(launcher="torchrun"), True
    with pytest.raises(WorldError, match="every rank would now use the same random numbers"):
        setup(seed=6)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a launcher started as the only rank of a job."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.mark.usefixtures("launched")
def test_a_world_of_one_is_launched_and_left(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorldError, match=r"Call ddpshim\.setup\(\) first"):
        ddpshim.world()
    for _ in range(2):
        here = setup(device="cpu")
        assert (here.is_launched, here.launcher, here.backend) == (True, "torchrun", "gloo")
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert dist.is_initialized()
        cleanup()
        assert not dist.is_initialized()
        assert ddpshim.world() is here
    assert capfd.readouterr().err == "ddpshim: 1 rank on this machine, CPU (torchrun, gloo)\n" * 2


@pytest.mark.usefixtures("launched")
def test_cleanup_leaves_a_group_that_replaced_ours() -> None:
    setup(device="cpu")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        cleanup()
        assert dist.is_initialized()
        assert setup(device="cpu").launcher == "adopted"
        cleanup()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


# --- backend and device


@pytest.mark.parametrize(
    ("gpus", "backend", "reason"),
    [
        (["a:0", "a:1", "b:0", "b:1"], "nccl", None),
        ([None, None], "gloo", None),
        (["a:0", "a:1", "a:0", "a:1"], "gloo", "4 ranks share 2 GPUs"),
        (["a:0", "a:1", None], "gloo", "1 of 3 ranks have no GPU"),
    ],
)
def test_choose_backend(gpus: list[Optional[str]], backend: str, reason: Optional[str]) -> None:
    assert choose_backend(gpus) == (backend, reason)


@pytest.mark.unit
def test_accelerators_other_than_cudas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "mps": "gloo"}
    monkeypatch.setattr(torch.distributed.Backend, "default_device_backend_map", listed)
    assert backend_of(torch.device("xpu", 0)) == "xccl"
    assert backend_of(torch.device("cuda", 0)) is None
    for device in (torch.device("mps"), torch.device("hpu")):
        with pytest.raises(LaunchError, match=f"several ranks on {device.type}, for which this torch has no backend"):
            backend_of(device)
    parts = SimpleNamespace(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid="one of its own")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: parts)
    gpus = [devices._gpu_identity(torch.device("cuda", 0)) for _ in range(2)]
    assert choose_backend(gpus) == ("gloo", "2 ranks share 1 GPU")
    store = dist.HashStore()
    store.set("gpu/1", messages.packed(None))
    assert devices.agree_on_backend(store, 0, 2, torch.device("cuda", 0)) == "gloo"
    assert capsys.readouterr().err == "ddpshim: 1 of 2 ranks have no GPU: gloo instead of nccl\n"


@pytest.mark.parametrize(
    ("num_visible", "device", "bound"), [(4, None, 2), (1, None, 0), (2, None, 0), (4, "cuda", 2), (4, "cuda:3", 3)]
)
def test_device_is_bound_before_all_else(
    monkeypatch: pytest.MonkeyPatch, num_visible: int, device: Optional[str], bound: int
) -> None:
    seen: list[Any] = []

    def stop(*_: Any) -> None:
        seen.append("rendezvous")
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    for name in ("init", "_lazy_init", "current_device", "get_device_properties", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: seen.append(name))
    monkeypatch.setattr(job_store, "meet", stop)
    place = {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "h", "MASTER_PORT": 9}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InterruptedError):
        setup(device=device)
    assert seen == [bound, "rendezvous"]


@pytest.mark.parametrize("asked", [{"device": "cuda"}, {"backend": "nccl"}])
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in _by_hand(1, 9).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="rank 1"):
        setup(**asked)


# --- numbers, on ranks that adopt a group


def _numbers() -> None:
    here = ddpshim.world()
    rank = here.rank
    assert here.launcher == "adopted"
    floats = [0.1, 0.2, 0.7]
    assert here.sum(2**53 + 1 + rank) == 3 * 2**53 + 6
    assert here.sum(10**30 + rank) == 3 * 10**30 + 3
    assert here.mean(floats[rank]) == math.fsum(floats) / 3 == 1.0 / 3
    assert here.sum([1e16, 1.0, -1e16][rank]) == 1.0
    assert here.mean(rank) == 1.0
    assert here.mean(rank == 0) == 1 / 3
    rows = [[1.0, 2.0], [6.0], [6.0]][rank]
    assert here.mean(sum(rows) / len(rows)) == 4.5, "each rank counts once"
    assert here.sum(sum(rows)) / here.sum(len(rows)) == 3.75
    assert here.mean(here.mean_over(torch.tensor(sum(rows)), len(rows)).item()) == 3.75
    assert math.isnan(here.sum([math.inf, -math.inf, 0.0][rank]))
    assert here.mean([1.0, math.inf, 0.0][rank]) == math.inf
    ints = here.sum(torch.tensor([2**53 + 1, rank]))
    assert (ints.tolist(), ints.dtype) == ([3 * 2**53 + 3, 3], torch.int64)
    assert here.sum(torch.tensor(200, dtype=torch.uint8)).item() == 600
    averaged = here.mean(torch.tensor([2**51 + 1, rank]))
    assert (averaged.tolist(), averaged.dtype) == ([2.0**51 + 1, 1.0], torch.float64)
    doubles = here.mean(torch.tensor(floats, dtype=torch.float64) * (rank + 1))
    torch.testing.assert_close(doubles, torch.tensor(floats, dtype=torch.float64) * 2, rtol=4e-16, atol=0)
    halves = here.sum(torch.tensor([2048.0 if rank == 0 else 1.0], dtype=torch.float16))
    assert (halves.item(), halves.dtype) == (2050.0, torch.float16)
    mixed = here.sum(torch.tensor([0.5]) if rank else torch.tensor([1]))
    assert mixed.item() == 2.0
    nested = here.mean({"loss": 0.1, "n": {"x": rank, "t": torch.full((2, 1), rank)}})
    assert nested["loss"] == math.fsum([0.1] * 3) / 3
    assert nested["n"]["x"] == 1.0
    assert nested["n"]["t"].tolist() == [[1.0], [1.0]]
    assert here.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    for value in (2**53 + 1, 0.1, None, "text", b"\0", {"a": [1, (2, {3})]}, torch.float16, float("inf")):
        assert here.broadcast(value if rank == 2 else object(), src=2) == value
    assert here.broadcast(SimpleNamespace(value=torch.arange(3)) if rank == 0 else None).value.tolist() == [0, 1, 2]


@pytest.mark.ranks
def test_numbers_are_exact() -> None:
    run_ranks(_numbers, 3)


@pytest.mark.unit
def test_ranks_that_order_sets_differently_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """As srun's and torchrun's are, whose interpreters have started before anybody can set PYTHONHASHSEED."""
    for is_main, of_another in ((True, {}), (False, {process_group._ORDER: 1}), (True, {process_group._ORDER: 1})):
        assert capsys.readouterr().err == ""
        gather = lambda own: [own, {**own, **of_another}]  # noqa: B023, E731
        process_group._check_same_options(
            SimpleNamespace(is_main=is_main, options=Options(), gather=gather)  # type: ignore[arg-type]
        )
    assert "Sort the set, or set PYTHONHASHSEED=0 before Python starts" in capsys.readouterr().err


def _raises(act: Callable[[], Any], kind: type[BaseException], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        act()
    assert type(caught.value) is kind


def _odd_values() -> float:
    here = ddpshim.world()
    started = time.monotonic()
    rank = here.rank
    odd: list[list[Any]] = [
        [{"a": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1, "b": 2}],
        [{"a": 1, "b": 2}, {"a": 1}],
        [{"a": 1}, 1],
        [1, {"a": 1}],
        [{"a": {"b": 1}}, {"a": {"c": 1}}],
    ]
    for values in odd:
        _raises(lambda values=values: here.mean(values[rank]), WorldError, "different keys")  # type: ignore[misc]
    _raises(lambda: here.sum(torch.zeros(1 + rank)), WorldError, r"different shapes \(\[\(1,\), \(2,\)\]\)")
    _raises(lambda: here.sum(torch.zeros(1) if rank else 1), WorldError, "cannot add")
    _raises(lambda: here.sum(1 if rank else torch.zeros(1)), WorldError, "different shapes")
    _raises(lambda: here.sum(torch.ones(1) * 1j), WorldError, "cannot add")
    _raises(lambda: here.sum("a"), WorldError, "cannot add values of type .*str")
    _raises(lambda: here.mean({"a": None}), WorldError, "cannot add")
    for src in (-1, 2):
        _raises(lambda src=src: here.broadcast(1, src=src), WorldError, f"src={src} in a world of 2")  # type: ignore[misc]
    assert here.gather(rank) == [0, 1]
    return time.monotonic() - started


@pytest.mark.ranks
def test_values_that_do_not_add_raise_on_every_rank() -> None:
    assert max(run_ranks(_odd_values, 2)) < patience(30)


def _fail(error: BaseException) -> None:
    raise error


def _on_main() -> tuple[Any, ...]:
    here = ddpshim.world()
    kind: type[BaseException] = KeyError if here.is_main else WorldError
    _raises(lambda: here.run_on_main(_fail, KeyError("k")), kind, "k")
    kind = SystemExit if here.is_main else WorldError
    _raises(lambda: here.run_on_main(_fail, SystemExit(3)), kind, "3")
    with pytest.raises(Exception, match=r"[Pp]ickle|_on_main"):  # the class of the error is pickle's business
        here.run_on_main(lambda: lambda: None)
    ran: list[int] = []
    result = here.run_on_main(lambda: (ran.append(1), 0.1 + 0.2)[1])
    return result, len(ran)


@pytest.mark.ranks
def test_run_on_main() -> None:
    assert run_ranks(_on_main, 3) == [(0.1 + 0.2, 1), (0.1 + 0.2, 0), (0.1 + 0.2, 0)]


def _whole_batches() -> tuple[Any, ...]:
    with pytest.raises(WorldError, match="after setup"):
        setup(batch="global")
    cleanup()
    # Refused before the ranks meet, so that the next call can join.
    with pytest.raises(OptionsError, match=r"exact=3 with local batches.*batch=\"global\""):
        setup(options=Options(exact=3))
    for name, value in {"per_rank_batch": True, "lr_rule": "sqrt"}.items():
        asked = Options(**{"per_rank_batch": True, name: value})
        with pytest.raises(OptionsError, match=r"global batch.*for ddpshim\.setup\(\), make_loader"):
            setup(batch="global", options=asked)
    setup(batch="global")
    assert setup(batch="global") is setup() is ddpshim.world()
    data = torch.utils.data.TensorDataset(torch.arange(50.0)[:, None])
    with pytest.raises(ddpshim.DataError, match="per_rank_batch"):
        ddpshim.make_loader(data, 16, per_rank_batch=True)
    batches = [x for (x,) in ddpshim.make_loader(data, 16)]
    net = ddpshim.wrap_parallel(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(net.weight)
    loss = sum((net(x).sum() for x in batches), torch.zeros(()))
    loss.backward()
    kept = net.weight.grad
    net(batches[0]).sum().backward()  # adds to what the program holds, as in one process
    found = [len(x) for x in batches], type(batches[0]).__name__, loss.item(), kept.item()
    cleanup()
    assert torch.utils.data.DataLoader is DataLoader
    assert torch.nn.Module.__call__ is torch.nn.Linear.__call__
    return found


@pytest.mark.ranks
def test_setup_for_whole_batches() -> None:
    assert run_ranks(_whole_batches, 3) == [([16, 16, 16, 2], "Rows", 1225.0, 1225.0 + 120.0)] * 3


def test_setup_for_whole_batches_in_one_process() -> None:
    assert setup(batch="global").world_size == 1
    assert type(ddpshim.make_loader(range(3))) is DataLoader
    cleanup()
    assert setup(options=Options(per_rank_batch=True), batch="global").options.per_rank_batch
    cleanup()
    with pytest.raises(OptionsError, match=r"'whole'.*take a local batch.*\"local\".* or \"global\""):
        setup(batch="whole")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'sed'"):
        setup(sed=1)  # type: ignore[call-arg]
    assert current().world is None


def _adopted() -> tuple[int, int, int]:
    here = ddpshim.world()
    hook = sys.excepthook
    cleanup()
    assert sys.excepthook is not hook
    cleanup()
    tensor = torch.tensor([here.rank])
    dist.all_reduce(tensor)  # the user's group is alive
    assert ddpshim.world() is here
    again = setup(device="cpu", backend="gloo")
    assert again is not here
    assert again == dataclasses.replace(here, seed=None)
    assert again.sum(1) == here.world_size
    return int(tensor), again.local_rank, again.local_world_size


@pytest.mark.ranks
def test_adopts_and_leaves_the_users_group() -> None:
    assert run_ranks(_adopted, 2) == [(1, 0, 2), (1, 1, 2)]


def _streams() -> list[float]:
    built = torch.rand(1).item()
    ddpshim.split_random_streams()
    return [built, torch.rand(1).item(), random.random()]


@pytest.mark.ranks
def test_random_streams_split_without_a_seed() -> None:
    first, second = run_ranks(_streams, 2, seed=None)
    assert len({*first[1:], *second[1:]}) == 4


# --- processes that a launcher started, by its variables


def _enter(fn: Callable[..., Any], environ: Mapping[str, str], args: Any, folder: str, number: int) -> None:
    os.environ.update(environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    os.dup2(os.open(f"{folder}/stderr{number}", os.O_WRONLY | os.O_CREAT), 2)
    spawning.report(folder, number, lambda: fn(*args))


def run_environs(
    fn: Callable[..., Any], environs: list[dict[str, str]], tmp_path: Path, *args: Any, exit_code: int = 0
) -> tuple[list[Any], str]:
    """What `fn` returned in a process for each of the environments, and what they wrote to stderr."""
    processes, found = [], []

    def start(number: int) -> Any:
        entering = (fn, environs[number], args, str(tmp_path), number)
        processes.append(_server.Process(target=_enter, args=entering, daemon=True))
        processes[-1].start()
        return processes[-1]

    with pytest.raises(RankError, match="without an error message") if exit_code else contextlib.nullcontext():
        found = spawning.collect(
            map(start, range(len(environs))), len(environs), str(tmp_path), deadline_s=patience(DEADLINE_S)
        )
    assert {process.exitcode for process in processes} == {exit_code}
    return found, "".join((tmp_path / f"stderr{number}").read_text() for number in range(len(environs)))


def _facts(num_more: int) -> dict[str, Any]:
    """Set up, use, leave and set up again; what the first world was."""
    before = dict(os.environ)
    here = setup(device="cpu")
    for _ in range(num_more):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == here.world_size
        assert setup() is here
        # With torch 2.1.2 every second or third of them hung, as long as cleanup did not wait for gloo's threads.
        assert here.gather(here.rank) == list(range(here.world_size))
        cleanup()
        cleanup()
        assert not dist.is_initialized()
        assert ddpshim.world() is here
        here = setup(device="cpu")
    assert here.sum(1) == here.world_size
    cleanup()
    assert dict(os.environ) == before
    known = {name: value for name, value in vars(here).items() if name not in ("_job", "options")}
    return {**known, "device": str(here.device)}


def _expected(rank: int, launcher: str, **others: Any) -> dict[str, Any]:
    usual = {"rank": rank, "local_rank": rank, "world_size": 2, "local_world_size": 2, "node_rank": 0}
    made = {"device": "cpu", "backend": "gloo", "launcher": launcher, "seed": None, "num_restarts": 0}
    return {**usual, **made, **others}


def _by_hand(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _open_mpi(rank: int, port: int) -> dict[str, str]:
    prefix = "OMPI_COMM_WORLD_"
    local = {f"{prefix}LOCAL_RANK": str(rank), f"{prefix}LOCAL_SIZE": "2", "PMIX_NAMESPACE": f"job{port}"}
    return {f"{prefix}RANK": str(rank), f"{prefix}SIZE": "2", **local}


@pytest.mark.ranks
@pytest.mark.parametrize(("launcher", "environ"), [("torchrun", _by_hand), ("openmpi", _open_mpi)])
def test_two_processes_of(launcher: str, environ: Callable[[int, int], dict[str, str]], tmp_path: Path) -> None:
    port = free_port()
    found, log = run_environs(_facts, [environ(rank, port) for rank in range(2)], tmp_path, 8)
    assert found == [_expected(rank, launcher) for rank in range(2)]
    assert log == f"ddpshim: 2 ranks on this machine, CPU ({launcher}, gloo)\n" * 9


def _patient() -> float:
    setup(device="cpu", timeout_s=50).barrier()  # imports may take one of them longer than the timeout below
    cleanup()
    limit_s = patience(5)
    here = setup(device="cpu", timeout_s=limit_s, side_timeout_s=10 * limit_s)
    started = time.monotonic()
    here.broadcast(None)  # rank 1 waits when rank 0 has looked at the clock
    if here.rank == 1:
        threading.Event().wait(1.2 * limit_s)
    here.barrier()
    waited = (time.monotonic() - started) / limit_s
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert (here.sum(here.rank), tensor.item()) == (1, 2)
    cleanup()
    return waited


@pytest.mark.ranks
def test_side_work_outlasts_the_timeout_of_training(tmp_path: Path) -> None:
    found, _ = run_environs(_patient, as_torchrun_says(2), tmp_path)
    assert found[0] > 1.1


def _ranks_on_gpus() -> tuple[str, Optional[str]]:
    """Two ranks of a machine with one GPU, which the second does not see; nothing is ever put on it."""
    has_gpu = os.environ["RANK"] == "0"
    torch.cuda.is_available = lambda: has_gpu
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda _: None
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="GPU-1", name="A GPU")
    here = setup()
    assert here.sum(1) == 2
    cleanup()
    return str(here.device), here.backend


@pytest.mark.ranks
def test_gloo_where_a_gpu_is_missing(tmp_path: Path) -> None:
    found, log = run_environs(_ranks_on_gpus, as_torchrun_says(2), tmp_path)
    assert found == [("cuda:0", "gloo"), ("cpu", "gloo")]
    assert log.count("1 of 2 ranks have no GPU: gloo instead") == log.count("instead of nccl") == 1


def _fail_without_a_text() -> None:
    num_boom = 0
    assert num_boom


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


@pytest.mark.unit
def test_a_rank_ends_also_where_it_cannot_say_why(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ddpshim.abort(_Unprintable(), 3)
    assert codes == [3]
    assert "TypeError: no text" in capfd.readouterr().err


def _fail_and_abort(bad: int, waits_in: str) -> None:
    here = setup(device="cpu", timeout_s=50, side_timeout_s=50)
    try:
        here.barrier()
        try:
            if waits_in == "run_on_main":
                try:
                    here.run_on_main(_fail_without_a_text)
                finally:
                    threading.Event().wait(0.5 if here.is_main else 0)  # so that the peer is the faster one
            if here.rank == bad:
                _fail_without_a_text()
            here.barrier()
        finally:
            cleanup()
    except Exception as error:
        ddpshim.abort(error)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("bad", "waits_in", "said"),
    [
        (1, "barrier", "RuntimeError: "),
        (0, "run_on_main", "WorldError: _fail_without_a_text failed on the main rank (AssertionError ("),
    ],
)
def test_the_peer_says_in_one_line_who_failed_first(bad: int, waits_in: str, said: str, tmp_path: Path) -> None:
    _, log = run_environs(_fail_and_abort, as_torchrun_says(2), tmp_path, bad, waits_in, exit_code=1)
    assert log.count("Traceback (most recent call last)") == log.count("\nAssertionError\n") == 1
    assert f"ddpshim: rank {bad} ({socket.gethostname()}) failed:\nTraceback" in log
    (line,) = (line for line in log.splitlines() if "stops because" in line)
    # Where the first one failed may not be in the store yet.
    first = rf"ddpshim: rank {1 - bad} stops because rank {bad} failed first( \(AssertionError in .*?\))?; "
    assert re.match(rf"{first}rank {1 - bad}'s own error: {re.escape(said)}", line)
    assert re.search(rf"AssertionError (\(|in ){__file__}, line \d+, in _fail_without_a_text: assert num_boom", line)


def _abort_while_the_launcher_ends_this_rank(folder: str) -> None:
    def claim(*args: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return "1"

    failure_notes.claim = claim
    current().store = dist.HashStore()
    failure.arm(current())
    records.begin(folder, 0)
    ddpshim.abort(RuntimeError("closed by peer"))


@pytest.mark.ranks
def test_a_rank_that_the_launcher_ends_has_written_down_why_first(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_environs(_abort_while_the_launcher_ends_this_rank, [{}], tmp_path, folder, exit_code=-signal.SIGTERM)
    _, end = map(json.loads, (tmp_path / "ddpshim" / "rank_0.jsonl").read_text().splitlines())
    assert (end["how"], end["first"], end["error"]) == ("failed", 1, "RuntimeError: closed by peer")


def _leave_at_once_or_begin_late() -> float:
    began, begin = time.monotonic(), process_group.begin
    if os.environ["RANK"] == "1":
        process_group.begin = lambda *args: (time.sleep(1.5), begin(*args))  # type: ignore[assignment]
    setup(device="cpu")
    cleanup()
    return time.monotonic() - began


@pytest.mark.ranks
def test_the_rank_that_serves_the_store_may_end_before_another_has_begun(tmp_path: Path) -> None:
    environs = [{**place, "DDPSHIM_GUARD": "1"} for place in as_torchrun_says(2)]
    (first, last), log = run_environs(_leave_at_once_or_begin_late, environs, tmp_path)
    assert last > first + 1
    assert "failed to connect" not in log


def test_a_store_on_a_busy_host_is_asked_until_it_answers() -> None:
    late = SimpleNamespace(wait=lambda *_: _fail(RuntimeError("Wait timeout")), check=lambda keys: keys == ["here/1"])
    assert job_store.is_there(late, "here/1")
    assert not job_store.is_there(late, "here/2")


# --- the real torchrun, and ranks that are forked by it


def torchrun(folder: Path, body: str, is_interrupted: bool = False) -> tuple[int, str]:
    """The exit code and the output of two ranks that run `body`, when the job and all of its processes have ended.

    `is_interrupted`: Ctrl-C is pressed where they are ready.
    """
    environ = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.fullmatch(name)}
    environ |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    (folder / "script.py").write_text(HEAD + textwrap.dedent(body))
    options = "--monitor_interval=0.1", "--standalone", "--nproc_per_node=2"
    agent = preloaded().start([(["torch.distributed.run", *options, str(folder / "script.py")], environ)], folder)
    started = ready = time.monotonic()
    try:
        while agent.pids or working_in(folder):
            assert time.monotonic() < started + patience(2 * DEADLINE_S), (folder / "output.txt").read_text()
            if not (folder / "ready").exists():
                ready = time.monotonic()
            elif is_interrupted:
                agent.send(signal.SIGINT)
                is_interrupted = False
            agent.see(0.05)
    finally:
        agent.kill()
    assert time.monotonic() < ready + patience(KILLED_AFTER_S)
    return agent.codes[0], (folder / "output.txt").read_text()


HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
import ddpshim
here = Path(__file__).parent
"""


FAILING = """
    world = ddpshim.setup(device="cpu", timeout_s=50, side_timeout_s=50)
    world.barrier()
    (here / "ready").touch()

    def fail():
        raise ValueError(f"boom of rank {world.rank}")

"""
FAILURES = {
    "in a thread's company, in a group of the user's": (1, """
    if world.rank == 1:
        threading.Thread(target=time.sleep, args=(100,)).start()
        fail()
    dist.all_reduce(torch.ones(1))
    """),
    "where others wait for its answer": (0, """
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)  # as of a program that saves first
        from ddpshim.job.collectives import main_sets
        fail() if world.rank == 0 else main_sets(world, "an answer", time.monotonic() + 50)
    finally:
        ddpshim.cleanup()
    """),
}  # fmt: skip


@pytest.mark.launch
@pytest.mark.parametrize("where", FAILURES)
def test_a_failing_rank_ends_the_job(where: str, tmp_path: Path) -> None:
    """Its traceback is printed once, its peer prints one line, and torchrun's summary names the rank that failed."""
    bad, body = FAILURES[where]
    first = '    dist.init_process_group("gloo")\n' if "group" in where else ""
    code, log = torchrun(tmp_path, first + FAILING + body)
    assert code != 0
    said = f"ValueError: boom of rank {bad}"
    ranks, _, summary = log.partition("ChildFailedError")
    assert re.findall(r"ddpshim: rank (\d) \(.*\) failed:", ranks) == [str(bad)], log
    assert ranks.count(said) - ranks.count(f"({said}") == 1, log
    stopped = re.findall(r"ddpshim: rank (\d) stops because rank (\d) failed first(?: \(\w+ in .*?\))?; rank", ranks)
    assert stopped in ([], [(str(1 - bad), str(bad))]), log  # torchrun may be faster to end the peer
    assert ranks.count("Traceback (most recent call last)") - ranks.count("/torch/distributed/run.py") <= 1, log
    root = summary.partition("Root Cause")[2]
    assert re.search(rf"rank +: {bad} ", root), log
    assert "Traceback (most recent call last)" in root, log
    assert said in root, log


def test_a_rank_that_waits_for_the_main_rank_notices_that_it_was_killed() -> None:
    def check(keys: list[str]) -> bool:
        raise dist.DistStoreError("Broken pipe")  # the store was the main rank's

    job: Any = SimpleNamespace(store=SimpleNamespace(check=check))
    with pytest.raises(WorldError, match="rank 1 waits for the main rank, and it has ended"):
        main_sets(cast(World, SimpleNamespace(rank=1, _job=job)), "an answer", time.monotonic() + 50)


@pytest.mark.launch
@pytest.mark.parametrize("end", ["sys.exit(3)", "interrupted"])
def test_a_rank_that_leaves_ends_the_job(end: str, tmp_path: Path) -> None:
    body = f"""
        try:
            world = ddpshim.setup(device="cpu", timeout_s=50, side_timeout_s=50)
            world.barrier()
            if world.rank == 1:
                (here / "ready").touch()
                {end.replace("interrupted", "pass")}
                threading.Event().wait(50)
            world.barrier()
        finally:
            ddpshim.cleanup()
    """
    code, log = torchrun(tmp_path, body, is_interrupted=end == "interrupted")
    assert code != 0, log
