"""zarr replay buffers: windows are those of diffusion_policy's sampler, by the batch and in one copy for all ranks."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import ddpshim
from ddpshim.errors import DataError
from tests.ranks import run_ranks

ENDS = np.array([3, 4, 11])


class _Array(np.ndarray):
    """As zarr has it."""

    chunks = (4,)


def _store(**odd: Any) -> dict[str, Any]:
    steps = np.arange(11)
    data = {
        "action": steps[:, None] + np.array([0.0, 0.5]),
        "image": np.full((11, 2, 2, 3), steps[:, None, None, None]),
    }
    held = {"data": {**data, **odd.pop("data", {})}, "meta": {"episode_ends": ENDS, **odd.pop("meta", {})}, **odd}
    held["data"] = {key: value.view(_Array) for key, value in held["data"].items() if value is not None}
    return held


def _as_zarr(store: dict[str, Any]) -> types.ModuleType:
    module: Any = types.ModuleType("zarr")
    module.open = lambda path, mode: store
    return module  # type: ignore[no-any-return]


def _windows_of(array: np.ndarray, horizon: int, before: int, after: int, ends: list[int]) -> list[np.ndarray]:
    """By their definition, one after the other."""
    out, begin = [], 0
    for end in ends:
        for start in range(begin - before, end - horizon + after + 1):
            out.append(np.stack([array[min(max(step, begin), end - 1)] for step in range(start, start + horizon)]))
        begin = end
    return out


@pytest.mark.unit
@pytest.mark.parametrize(("horizon", "before", "after"), [(1, 0, 0), (3, 1, 2), (4, 0, 3), (4, 9, 9), (9, 0, 0)])
def test_windows_are_those_of_their_definition(
    monkeypatch: pytest.MonkeyPatch, horizon: int, before: int, after: int
) -> None:
    store = _store()
    monkeypatch.setitem(sys.modules, "zarr", _as_zarr(store))
    buffer = ddpshim.load_replay_buffer("lift.zarr")
    assert list(buffer) == ["action", "image"]
    assert buffer.as_root()["data"]["image"].dtype == np.int64
    windows = ddpshim.Windows(buffer, horizon, pad_before=before, pad_after=after, first={"image": 2})
    cut = (min(before, horizon - 1), min(after, horizon - 1), list(ENDS))
    actions = _windows_of(store["data"]["action"], horizon, *cut)
    images = _windows_of(store["data"]["image"], horizon, *cut)
    assert len(windows) == len(actions)
    for whole in DataLoader(windows, max(1, len(windows))):
        assert np.array_equal(whole["action"], np.stack(actions))
        assert np.array_equal(whole["image"], np.stack(images)[:, :2])
    for index, (action, image) in enumerate(zip(actions, images)):
        assert np.array_equal(windows[index]["action"], action)
        assert np.array_equal(windows[index]["image"], image[:2])


@pytest.mark.unit
def test_a_mask_of_episodes_leaves_windows_out() -> None:
    buffer = {"step": torch.arange(11)}
    some = ddpshim.Windows(buffer, 2, episodes=[True, False, True], episode_ends=torch.from_numpy(ENDS))
    assert [window["step"].tolist() for window in some][:3] == [[0, 1], [1, 2], [4, 5]]
    assert len(some) == 8
    assert len(ddpshim.Windows(buffer, 2, episodes=[False] * 3, episode_ends=torch.from_numpy(ENDS))) == 0
    with pytest.raises(IndexError):
        some[8]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("odd", "keys", "text"),
    [
        ({}, ["actions"], "has no data/actions; it has action, image"),
        (
            {"meta": {"episode_ends": np.array([3, 12])}},
            None,
            "has 11 steps of action, but its episodes end at step 12",
        ),
        ({"meta": {"episode_ends": np.array([4, 3, 11])}}, None, "but its episodes end at step 11"),
        (
            {"data": {"text": np.array(["lift"] * 11)}},
            None,
            "data/text of lift.zarr is of type <U4, which torch does not",
        ),
        ({"meta": {"episode_ends": None}}, None, "lift.zarr is not a replay buffer (TypeError"),
    ],
)
def test_what_is_no_replay_buffer_is_refused(
    monkeypatch: pytest.MonkeyPatch, odd: dict[str, Any], keys: Any, text: str
) -> None:
    monkeypatch.setitem(sys.modules, "zarr", _as_zarr(_store(**odd)))
    with pytest.raises(DataError) as refused:
        ddpshim.load_replay_buffer("lift.zarr", keys)
    assert text in str(refused.value)


@pytest.mark.unit
def test_without_zarr_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(DataError, match="pip install zarr"):
        ddpshim.load_replay_buffer("lift.zarr")


def _rank_loads() -> tuple[Any, ...]:
    sys.modules["zarr"] = _as_zarr(_store())
    buffer = ddpshim.load_replay_buffer("lift.zarr", ["action"])
    windows = ddpshim.Windows(buffer, 2, pad_after=1)
    loader = ddpshim.make_loader(windows, 4, shuffle=True)
    batches = [batch["action"] for batch in loader]
    here = ddpshim.world()
    if here.is_main:
        buffer["action"][0, 0] = 77.0
    here.barrier()
    one_by_one = default_collate([windows[0], windows[10]])["action"]
    is_same = torch.equal(windows.batch([0, 10])["action"], one_by_one)
    return batches, float(buffer["action"][0, 0]), loader.fetches_whole_batches, is_same


@pytest.mark.ranks
def test_ranks_share_one_copy_and_fetch_their_part_of_each_batch() -> None:
    ((whole, *_),) = run_ranks(_rank_loads, 1)
    one, two = run_ranks(_rank_loads, 2)
    assert len(whole) == 2
    for batch, mine, other in zip(whole, one[0], two[0]):
        assert batch.shape == (4, 2, 2)
        assert torch.equal(batch[0::2], mine)
        assert torch.equal(batch[1::2], other)
    assert one[1:] == two[1:] == (77.0, True, True)
