"""Adapters: found by the package of an object, ours and those that others register by an entry point."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from ddpshim import adapters, robomimic
from ddpshim.launch.runner import problems_of_program
from ddpshim.rows import loader
from ddpshim.rows.samples import Numbered


class Squares(Dataset):  # type: ignore[type-arg]
    __module__ = "toybot.data"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


class Fetcher:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def attach(self) -> None:
        self._dataset.__getitems__ = lambda indices: ("whole", [index * index for index in indices])

    def collate(self) -> Any:
        return lambda samples: samples


@pytest.fixture
def toybot(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An adapter for the package toybot, as a third party's entry point registers it."""
    module: Any = types.ModuleType("toybot_adapter")
    module.fetcher = lambda dataset: Fetcher(dataset) if isinstance(dataset, Squares) else None
    monkeypatch.setitem(sys.modules, "toybot_adapter", module)
    point = metadata.EntryPoint("toybot", "toybot_adapter", adapters.GROUP)
    found: Any = metadata.EntryPoints([point]) if sys.version_info >= (3, 10) else {adapters.GROUP: (point,)}
    monkeypatch.setattr(metadata, "entry_points", lambda: found)
    adapters.packages.cache_clear()
    yield module
    adapters.packages.cache_clear()


def test_only_ours_without_entry_points() -> None:
    assert adapters.packages() == {"robomimic": "ddpshim.robomimic"}
    assert adapters.fetcher_of(Squares()) is None


@pytest.mark.ranks
@pytest.mark.usefixtures("toybot")
def test_a_third_partys_dataset_is_fetched_by_the_batch() -> None:
    fetcher = adapters.fetcher_of(Squares())
    assert isinstance(fetcher, Fetcher)
    given = loader.DataLoader(fetcher._dataset, batch_size=4)
    rows = loader.rows_loader(given, given)
    fetched = rows.dataset.__getitems__(Numbered([0, 1, 2, 3], range(4)))
    assert rows.collate_fn(fetched) == (4, ("whole", [0, 1, 4, 9]))


def test_an_adapter_need_not_offer_anything(toybot: types.ModuleType) -> None:
    del toybot.fetcher  # type: ignore[attr-defined]
    assert adapters.fetcher_of(Squares()) is None


def test_a_package_knows_why_its_trainer_cannot_start(
    toybot: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toybot.problems = lambda module, arguments: iter([f"{module} lacks {arguments}"])  # type: ignore[attr-defined]
    for option, known in ((["-m"], ["toybot.train lacks ['a']"]), ([], [])):
        assert [*problems_of_program([*option, "toybot.train", "a"])][1:] == known

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "robomimic" else 1)
    (tmp_path / "bc.json").touch()
    train = "robomimic.scripts.train"
    for given in (["--config", "bc.json"], ["--config=bc.json", "--debug"], ["--algo", "bc"], ["--config"]):
        assert [*robomimic.problems(train, given)] == []
    assert [*robomimic.problems("robomimic.scripts.other", ["--config", "bv.json"])] == []
    (problem,) = robomimic.problems(train, ["--name", "x", "--config", "bv.json"])
    assert problem.startswith(f"--config bv.json does not exist (in {tmp_path}): no rank could read it. Correct ")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else 1)
    (problem,) = robomimic.problems(train, ["--config", "bc.json"])
    assert problem.startswith("torchvision is not installed, which robomimic imports: no rank could start. Install")
    assert problem.endswith(robomimic.TORCHVISION)
