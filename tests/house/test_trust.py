"""Nothing that somebody else may have written runs: files of progress, messages, what is in the job's store.

Docs: docs/same_experiment.md.
"""

from __future__ import annotations

import io
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpshim
from ddpshim import Options
from ddpshim.checkpoint import progress_folder
from ddpshim.checkpoint.resume import FORMAT, Resumable
from ddpshim.errors import CheckpointError, WorldError
from ddpshim.job.world import World
from ddpshim.process import devices, job_store, messages
from ddpshim.process.job import current
from ddpshim.robomimic.session import FOLDER, STREAMS, Session
from tests.ranks import run_ranks

_OF_TORCH = torch.optim.lr_scheduler
SCHEDULES: list[Any] = [
    (_OF_TORCH.LambdaLR, lambda epoch: 1.0),
    (_OF_TORCH.MultiStepLR, [1, 2]),
    (_OF_TORCH.OneCycleLR, 0.1, 10),
    (_OF_TORCH.ReduceLROnPlateau,),
]


class _Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def _sent(value: Any) -> Any:
    return messages.unpacked(messages.packed(value), 0)


@pytest.mark.unit
def test_plain_values_come_back_as_they_were() -> None:
    numpy = pytest.importorskip("numpy")
    normed = torch.nn.BatchNorm1d(2).state_dict()
    value = {
        "a": (1, -2.5, None, True, "\ud800", b"\0\1", bytearray(b"")),
        3: [{1}, frozenset([2]), Fraction(2, 3), 1j, -(1 << 9000), Path("a"), torch.Size([2]), torch.float16],
        (1, 2): {"none": {}, "special": {"tuple": 1}, "device": torch.device("cuda:1")},
        "random": ddpshim.process.random_streams.global_states(),
        "scalar": numpy.float64(0.1),
    }
    back = _sent(value)
    states, expected = back.pop("random"), value.pop("random")
    assert back == value
    assert list(map(type, back["a"])) == list(map(type, value["a"]))
    assert type(back["scalar"]) is numpy.float64
    assert all(map(ddpshim.process.random_streams.is_same_state, states.values(), expected.values()))
    array = _sent(numpy.arange(6.0).reshape(2, 3).T)
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]]
    array[0, 0] = 9  # a copy of its own
    assert _sent(normed)._metadata == normed._metadata
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    schedules: list[Any] = [kind(optimizer, *args) for kind, *args in SCHEDULES]
    schedules.append(torch.optim.lr_scheduler.SequentialLR(optimizer, schedules[:2], [3]))
    for stateful in (optimizer, *schedules):
        if "anneal_func" in stateful.state_dict():
            continue  # OneCycleLR of torch 2.1 keeps a function, for which `trust_progress` is asked
        stateful.load_state_dict(_sent(stateful.state_dict()))
    tied = torch.zeros(2)
    _, tensors = messages.take_apart([tied, tied])
    assert [tensor is tied for tensor in tensors] == [True, True]


@pytest.mark.unit
def test_objects_are_named_and_junk_is_no_value(tmp_path: Path) -> None:
    with pytest.raises(messages.NotPlain, match=r"\['a'\]\[1\] is a .*_Bomb"):
        messages.take_apart({"a": [1, _Bomb(tmp_path)]})
    deep: list[Any] = []
    for _ in range(20000):
        deep = [deep]
    with pytest.raises(messages.NotPlain, match="nested too deeply"):
        messages.take_apart(deep)
    bomb = pickle.dumps(_Bomb(tmp_path / "ran"))
    for outline in (
        *(bomb, pickle.dumps(eval), pickle.dumps(torch.load), pickle.dumps(Path.touch)),
        b"cos\nsystem\n(S'true'\ntR.",
        b"cddpshim.process.messages\nimportlib\n.",
    ):
        with pytest.raises(messages.NotPlain):
            messages.put_together(outline, [])
    torch.save([torch.zeros(2)], a_tensor := io.BytesIO())
    told = "rank 3 sent bytes that are not a message of ddpshim"
    bytes_of, array = pickle.dumps(torch.zeros)[:-1], pickle.dumps(messages._array)[:-1]
    no_arrays = [array + b"(" + pickle.dumps(args)[2:-1] + b"tR." for args in (("O", [1]), ("f8", [9]), ())]
    for outline in (*no_arrays, bytes_of[:9], pickle.dumps([1])[:-1], b"", b"K\x07Q.", b"\x8c\x01xQ."):
        with pytest.raises(WorldError, match=told):
            messages.unpacked(len(outline).to_bytes(8, "little") + outline + a_tensor.getvalue(), 3)
    for message in (b"", b"\0" * 8, (1 << 62).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"N." + bomb):
        for trusts_peers in (False, True):
            with pytest.raises(WorldError, match=told):
                messages.unpacked(message, 3, trusts_peers)
    packed = messages.packed([_Bomb(tmp_path / "ran")], trusts_peers=True)
    with pytest.raises(WorldError, match="rank 1 sent an object: with trust_peers=no"):
        messages.unpacked(packed, 1)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(WorldError, match=r"cannot be sent to other ranks \(\[0\] is a .*_Bomb\): with trust_peers=no"):
        messages.packed([_Bomb(tmp_path)])


def _files(tmp_path: Path) -> dict[str, Any]:
    """What a file of progress may hold that none of ours does."""
    bomb = _Bomb(tmp_path / "ran")
    outline, tensors = messages.take_apart({"epoch": bomb}, trusted=True)
    whole = {"format": FORMAT, "epoch": 9, "step": 0}
    return {
        "a pickle": bomb,
        "a pickle inside": {"outline": bomb, "tensors": []},
        "what ddpshim pickled": {"outline": messages.tensor_of(outline), "tensors": tensors},
        "another program's": {"model": {"w": torch.zeros(2)}, "epoch": 3},
        "no tensors": {"outline": messages.tensor_of(b"K\0Q."), "tensors": 4},
        "junk values": progress_folder.plain_content({"epoch": "3", "objects": []}, "", False),
        "no mapping": progress_folder.plain_content([1], "", False),
        "no state of net": progress_folder.plain_content({**whole, "objects": {"other": {}}}, "", False),
    }


@pytest.mark.unit
def test_a_file_of_progress_runs_nothing_and_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    for name, content in _files(tmp_path).items():
        torch.save(content, folder / "epoch_000001_step_000000002.pth")
        with pytest.raises(CheckpointError) as refused:
            Resumable(folder, {"net": torch.nn.Linear(1, 1)}).restore()
        said = str(refused.value)
        assert said.startswith(str(folder)), name
        assert "\n" not in said
        assert ("DDPSHIM_TRUST_PROGRESS=yes" in said) == (name == "what ddpshim pickled")
        torch.save(content, folder / STREAMS)
        session = Session()
        session._folder = folder
        if name not in ("junk values", "no mapping", "no state of net"):
            with pytest.raises(CheckpointError):
                session._restore_streams(3)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match="holds no RNG states"):
        progress_folder.restore_streams({"random": "x"}, torch.device("cpu"), "a.pth")


@pytest.mark.unit
def test_objects_in_progress_are_refused_where_they_are_saved_or_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Resumable(tmp_path, {})
    training.values["best"] = [complex(1), Options()]
    with pytest.raises(CheckpointError, match=r"\['values'\]\['best'\]\[1\] is a ddpshim.options.Options; reading it"):
        training.save()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(current(), "world", World(options=Options(trust_progress=True)))
    training = Resumable(tmp_path, {})
    training.values["best"] = [complex(1), Options()]
    training.save()
    again = Resumable(tmp_path, {})
    assert again.restore()
    assert again.values == training.values


def _ranks_meet_junk(folder: str) -> list[str]:
    """What rank 0 says of what somebody wrote to the store under rank 1's name; nothing of it runs."""
    here, said = ddpshim.world(), []
    bomb = pickle.dumps(_Bomb(Path(folder, "ran")))
    for number, junk in enumerate((bomb, b"", b"[" * 10**5, b"\xff")):
        if here.rank == 1:
            current().store.set(f"meet/junk/{number}/1", junk)
        here.barrier()
        if here.rank == 0:
            try:
                here.gather_with_deadline("junk", {"a": 1}, 5.0)
            except WorldError as error:
                said.append(str(error).partition("(")[0])
        here.barrier()
    # What ddpshim sends itself needs no pickle.
    assert here.gather({"rank": here.rank}) == [{"rank": 0}, {"rank": 1}]
    assert here.broadcast((1, torch.ones(2).sum()), src=1) == (1, 2.0)
    assert here.mean(torch.tensor([1.0 + here.rank])).item() == 1.5
    assert here.run_on_main(Path, "a") == Path("a")
    net = ddpshim.wrap_parallel(torch.nn.Linear(2, 1))
    for batch in ddpshim.make_loader([torch.ones(2)] * 8, batch_size=4, shuffle=True):
        net(batch).sum().backward()
    ddpshim.check_equal_steps()
    training = Resumable(Path(folder, "progress"), {"net": net})
    training.save()
    assert training.restore()
    try:
        here.gather(_Bomb(Path(folder, "ran")))
    except WorldError as error:
        said.append(str(error))
    return said


@pytest.mark.ranks
def test_what_somebody_wrote_to_the_store_is_junk_and_ddpshim_sends_no_pickle(tmp_path: Path) -> None:
    one, two = run_ranks(_ranks_meet_junk, 2, str(tmp_path), environ={"DDPSHIM_TRUST_PEERS": "no"})
    assert one[:-1] == ["rank 1 sent bytes that are not a message of ddpshim "] * 4
    assert all("it is a tests.house.test_trust._Bomb" in said[-1] for said in (one, two))
    assert not (tmp_path / "ran").exists()


@pytest.mark.unit
def test_the_store_tells_gpus_and_failures_as_text(tmp_path: Path) -> None:
    for junk in (pickle.dumps(_Bomb(tmp_path / "ran")), b"[[]]", b"3"):
        store = dist.HashStore()
        store.set("gpu/1", junk)
        with pytest.raises(WorldError, match="rank 1 sent bytes that are not a message of ddpshim"):
            devices.agree_on_backend(store, 0, 2, torch.device("cpu"))
    assert messages.unpacked(store.get("gpu/0"), 0) is None
    assert not (tmp_path / "ran").exists()
    assert [job_store.rank_in(claimed) for claimed in (b"3", "12", b"\xff", "", "²", "9" * 30)] == [
        3, 12, None, None, None, None]  # fmt: skip
