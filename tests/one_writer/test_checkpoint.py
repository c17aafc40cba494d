"""Checkpoints: whole or absent whenever the process dies, without a trace of the ranks that wrote them, resumable."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn

import ddpshim
from ddpshim import checkpoint
from evidence.equivalence import VALIDATION, Run, copy_release, largest_difference, make_config, make_data, train
from tests import ranks
from tests.ranks import run_ranks
from tests.robomimic import require


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_a_saved_file_is_the_object_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "last.pth"
    for number in (1, 2):
        checkpoint.save({"number": number}, path)
        assert _load(path) == {"number": number}
    checkpoint.copy(path, tmp_path / "last_bak.pth")
    assert _load(tmp_path / "last_bak.pth") == {"number": 2}
    assert sorted(os.listdir(tmp_path)) == ["last.pth", "last_bak.pth"]
    torch.save(1, tmp_path / "torchs.pth")
    assert path.stat().st_mode == (tmp_path / "torchs.pth").stat().st_mode, "who could read it before still can"
    (tmp_path / "link.pth").symlink_to(path)
    checkpoint.save(3, tmp_path / "link.pth")
    assert (tmp_path / "link.pth").is_symlink()
    assert _load(path) == 3


def test_two_jobs_that_save_to_one_path(tmp_path: Path) -> None:
    path = tmp_path / "last.pth"
    with checkpoint.written(path) as first:
        with checkpoint.written(path) as second:
            Path(second).write_text("second")
        assert path.read_text() == "second"
        Path(first).write_text("first")
    assert (path.read_text(), os.listdir(tmp_path)) == ("first", ["last.pth"])
    # of another machine, which does not see that this process runs
    text = "another job, which saves to the same path, has removed .* Give each job a folder of its own"
    with pytest.raises(ddpshim.CheckpointError, match=text), checkpoint.written(path) as partial:
        shutil.rmtree(Path(partial).parent)


def test_after_an_error_the_old_file_is_there_and_the_new_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "last.pth"
    checkpoint.save("old", path)
    with pytest.raises(Exception, match=r"[Pp]ickle|local object"):
        checkpoint.save(lambda: None, path)
    assert _load(path) == "old"
    with pytest.raises(ZeroDivisionError), checkpoint.written(path) as partial:
        _ = Path(partial).write_text("half") / 0
    assert _load(path) == "old"
    assert os.listdir(tmp_path) == ["last.pth"]
    text = r"nowhere/a.pth could not be written .* save to a writable directory"
    with pytest.raises(ddpshim.CheckpointError, match=text) as raised:
        checkpoint.save(1, tmp_path / "nowhere" / "a.pth")
    assert isinstance(raised.value, OSError)
    with pytest.raises(FileNotFoundError):
        checkpoint.copy(tmp_path / "nothing", tmp_path / "a.pth")


def _save_for_ever(path: str, first: int, started: Any) -> None:
    torch.set_num_threads(1)
    number = first
    while True:
        checkpoint.save({"number": number, "weights": torch.full((300_000,), float(number))}, path)
        checkpoint.copy(path, path.replace("last", "last_bak"))
        if number == first:
            started.send(first)
        number += 1


@pytest.mark.ranks
def test_a_loadable_file_is_there_whenever_the_process_is_killed(tmp_path: Path) -> None:
    path, newest, chance = tmp_path / "last.pth", -1, random.Random(0)
    caught = 0
    for _ in range(20):
        receive, send = ranks._server.Pipe(duplex=False)
        process = ranks._server.Process(target=_save_for_ever, args=(str(path), newest + 1, send), daemon=True)
        process.start()
        send.close()
        assert receive.poll(30)
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        process.join()
        caught += any(name.endswith(".partial") for name in os.listdir(tmp_path))
        for file in (path, tmp_path / "last_bak.pth"):
            loaded = _load(file)
            assert loaded["number"] > newest
            assert loaded["weights"].eq(loaded["number"]).all()
        newest = _load(path)["number"]
    assert caught > 0, "never killed in the middle of a write: nothing was tested"
    checkpoint.save(0, path)
    checkpoint.save(0, tmp_path / "last_bak.pth")
    assert sorted(os.listdir(tmp_path)) == ["last.pth", "last_bak.pth"], "what the killed left behind is still there"


def _make_files(folder: Path, *names: str) -> None:
    for age, name in enumerate(reversed(names)):
        checkpoint.save({"name": name, "weights": torch.arange(1000.0)}, folder / name)
        os.utime(folder / name, ns=(0, 10**9 * age))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    _make_files(tmp_path, "epoch_10.pth", "epoch_9.pth", "epoch_2.pth")
    (tmp_path / "log.txt").touch()
    assert checkpoint.keep_newest(tmp_path, "*.pth", 2) == [tmp_path / "epoch_2.pth"]
    assert checkpoint.keep_newest(tmp_path, "*.pth", 2) == []
    assert sorted(os.listdir(tmp_path)) == ["epoch_10.pth", "epoch_9.pth", "log.txt"]
    with pytest.raises(ddpshim.CheckpointError, match="num_kept=0 would remove every checkpoint"):
        checkpoint.keep_newest(tmp_path, "*.pth", 0)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-700],
    "empty": lambda content: b"",
    "a bit": lambda content: content.replace(b"\0\0\0@", b"\0\0\0A", 1),
    "another file": lambda content: b"not a checkpoint at all",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_file_is_found(tmp_path: Path, damage: str) -> None:
    assert checkpoint.find_latest(tmp_path, "*.pth") is None
    _make_files(tmp_path, "c.pth", "b.pth", "a.pth")
    (tmp_path / ".c.pth.1-2.partial").mkdir()
    assert checkpoint.find_latest(tmp_path, "*") == tmp_path / "c.pth"
    newest, whole = os.stat(tmp_path / "c.pth").st_mtime_ns, (tmp_path / "c.pth").read_bytes()
    (tmp_path / "c.pth").write_bytes(DAMAGES[damage](whole))
    assert (tmp_path / "c.pth").read_bytes() != whole
    os.utime(tmp_path / "c.pth", ns=(0, newest))
    with pytest.warns(UserWarning, match=r"c.pth is damaged .* was skipped"):
        found = checkpoint.find_latest(tmp_path, "*.pth")
    assert found == tmp_path / "b.pth"
    assert _load(found)["name"] == "b.pth"


def _net(value: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ModuleDict({"module": nn.Linear(4, 2)}))
    for tensor in net.state_dict().values():
        tensor.fill_(value)
    return net


def _save_and_load(folder: str, paths: dict[str, str]) -> list[bool]:
    rank = ddpshim.world().rank
    checkpoint.save(rank, Path(folder, "a.pth"))
    checkpoint.save(ddpshim.wrap_parallel(_net(1)).state_dict(), paths["ddpshim"])
    ddpshim.world().barrier()
    checkpoint.copy(Path(folder, "a.pth"), Path(folder, f"copied_by_{rank}.pth"))
    checkpoint.keep_newest(folder, "*a*.pth", 3 - 2 * rank)
    nets = [_net(0) for _ in paths]
    for net, path in zip(nets, paths.values()):
        ddpshim.wrap_parallel(net).load_state_dict(torch.load(path, weights_only=True))
    return [all(tensor.eq(1).all() for tensor in net.state_dict().values()) for net in nets]


@pytest.mark.ranks
def test_the_main_rank_writes_what_code_with_and_without_ddpshim_loads(tmp_path: Path) -> None:
    files = {writer: str(tmp_path / f"{writer}.pth") for writer in ("bare", "DataParallel", "ddpshim")}
    torch.save(_net(1).state_dict(), files["bare"])
    torch.save(nn.DataParallel(_net(1)).state_dict(), files["DataParallel"])
    assert run_ranks(_save_and_load, 2, str(tmp_path), files) == [[True] * 3] * 2
    assert {*os.listdir(tmp_path)} == {"a.pth", "copied_by_0.pth", *(Path(path).name for path in files.values())}
    assert _load(tmp_path / "a.pth") == 0
    for writer, reader in itertools.product(files, (lambda net: net, nn.DataParallel)):
        bare = _net(0)
        net, state = reader(bare), _load(Path(files[writer]))
        if writer == "ddpshim":
            bare.load_state_dict(state)  # as it is: DataParallel code reaches the network by `.module`
        else:
            ddpshim.wrap_parallel(net).load_state_dict(state)
        assert all(tensor.eq(1).all() for tensor in bare.state_dict().values())
        ddpshim.wrap_parallel(net).load_state_dict(state)


STEPS, BATCH = 5, 100
RESUMABLE = "0.5.0"
# What a training has beside its variant's settings.
KINDS: dict[str, dict[str, Any]] = {
    "td3_bc": {"algo__actor__update_freq": 3},  # no divisor of the steps before the break: the count matters
    "bc+rollouts": {
        "train__seed": 5,  # with which the best comes before the break
        "experiment__rollout__enabled": True,
        "experiment__rollout__n": 5,
        "experiment__rollout__horizon": 5,
        "experiment__rollout__rate": 1,
        "experiment__render_video": False,
    },
}


class Trainings:
    """Trains a variant, or a kind of it, for four epochs: without a break, killed in the third, and resumed there."""

    def __init__(self, folder: Path, releases: Path) -> None:
        self.folder, self.tree = folder, copy_release(RESUMABLE, releases)
        self.data = make_data(folder, num_demos=50)

    def run(self, kind: str, what: str, num_ranks: int, *options: str, killed_at: int = 0) -> Run:
        settings = {"train__data": [{"path": str(self.data)}], **VALIDATION, **KINDS.get(kind, {})}
        config = make_config(self.tree, kind.split("+")[0], self.data, self.folder, STEPS, 4, **settings)
        fault = f"{'kill' if killed_at else 'none'}{'+toy_env' if 'rollouts' in kind else ''}:1:{killed_at}"
        how: dict[str, Any] = {"environ": {"DDPSHIM_FAULT": fault}, "check": not killed_at, "forked": True}
        run = train(self.tree, config, self.folder / f"{kind}-{what}", num_ranks, options=options, **how)
        assert bool(run.exit_code) == bool(killed_at), run.log[-6000:]
        return run

    def whole(self, kind: str) -> Run:
        """The run without a break, and beside it what was left of one whose second rank was killed in epoch 3."""
        seen_until_then = 2 * (STEPS + 3) * BATCH // 2  # half of each batch, in training and validation
        self.run(kind, "killed", 2, killed_at=seen_until_then + STEPS * BATCH // 4)
        return self.run(kind, "whole", 2)

    def resumed(self, kind: str, num_ranks: int) -> Run:
        shutil.copytree(self.folder / f"{kind}-killed", self.folder / f"{kind}-resumed")
        return self.run(kind, "resumed", num_ranks, "--resume")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> Trainings:
    require(RESUMABLE)
    return Trainings(tmp_path_factory.mktemp("resume"), releases)


def _last(run: Run) -> Any:
    (path,) = run.folder.glob("out/*/*/last.pth")
    return torch.load(path, weights_only=False)


@pytest.mark.launch
@pytest.mark.upstream
@pytest.mark.robomimic
def test_the_best_rollouts_so_far_survive_another_number_of_ranks(trainings: Trainings) -> None:
    kind = "bc+rollouts"
    whole, resumed = trainings.whole(kind), trainings.resumed(kind, 4)
    before, after = (_last(run)["variable_state"] for run in (whole, resumed))
    assert after["epoch"] == 4
    assert after["best_success_rate"] == before["best_success_rate"]
    (name,) = before["best_return"]
    assert 0 < after["best_success_rate"][name] < 1
    assert after["best_return"] == pytest.approx(before["best_return"], rel=1e-6)
    every = [json.JSONDecoder().raw_decode(part)[0] for part in whole.log.split(f"Env: {name}\n")[1:]]
    assert len(every) == 4
    best = [max(epoch[key] for epoch in every) for key in ("Return", "Success_Rate")]
    assert [before["best_return"][name], before["best_success_rate"][name]] == best
    assert best[1] > max(epoch["Success_Rate"] for epoch in every[2:]), "the best came after the break"


@pytest.mark.launch
@pytest.mark.upstream
@pytest.mark.robomimic
@pytest.mark.parametrize("variant", ["td3_bc", "diffusion_policy"])
def test_resumed_on_as_many_ranks_the_noise_and_the_counters_are_the_same(trainings: Trainings, variant: str) -> None:
    whole, resumed = trainings.whole(variant), trainings.resumed(variant, 2)
    assert "resuming training from epoch 3" in resumed.log
    seen = whole.observed[0]["batches"]["Train"]
    assert len(seen) == 4 * STEPS
    for observed in resumed.observed:
        assert observed["batches"]["Train"] == seen[2 * STEPS :]
        assert largest_difference(observed["networks"], whole.observed[0]["networks"]) == 0
    assert largest_difference(whole.observed[0]["initial"], whole.observed[0]["networks"]) > 1e-5
    for phase in ("Train", "Validation"):
        assert resumed.losses(phase) == pytest.approx(whole.losses(phase)[2:], rel=1e-5)
    before, after = (_last(run)["variable_state"] for run in (whole, resumed))
    assert before.pop("best_valid_loss") == pytest.approx(after.pop("best_valid_loss"), rel=1e-6)
    assert before == after
    assert after["epoch"] == 4
    left = [path.name for path in resumed.folder.glob("out/*/*/*")]
    files = ["config.json", "ddpshim", "last.pth", "last_bak.pth", "logs", "models", "resume.finished", "videos"]
    assert sorted(left) == files
