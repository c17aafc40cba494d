"""One writer: files, databases, checkpoints and the screen get what one process writes, once."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from evidence.compare import largest_difference
from tests.promises.running import result, weights_of

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def both() -> tuple[Path, Path, str]:
    one, ranks = result("--batch", "7"), result("--batch", "7", ranks=3)
    return one / "out", ranks / "out", (ranks / "output.txt").read_text()


def test_the_folder_has_the_same_files(both: tuple[Path, Path, str]) -> None:
    one, ranks, _ = both
    assert sorted(path.name for path in ranks.iterdir()) == sorted(path.name for path in one.iterdir())


@pytest.mark.parametrize("name", ["log.csv", "steps.jsonl"])
def test_files_have_each_line_once(both: tuple[Path, Path, str], name: str) -> None:
    one, ranks, _ = both
    assert len((ranks / name).read_text().splitlines()) == len((one / name).read_text().splitlines())


def test_a_database_has_each_row_once(both: tuple[Path, Path, str]) -> None:
    found = []
    for folder in both[:2]:
        with sqlite3.connect(folder / "runs.db") as runs:
            found.append(runs.execute("select epoch from losses").fetchall())
    assert found == [[(0,), (1,)]] * 2


def test_the_screen_has_each_line_once(both: tuple[Path, Path, str]) -> None:
    said = both[2]
    assert [sum(line.startswith(f"epoch {n}: ") for line in said.splitlines()) for n in (0, 1)] == [1, 1]


def test_a_checkpoint_is_plain_torchs(both: tuple[Path, Path, str]) -> None:
    one, ranks = (weights_of(folder.parent) for folder in both[:2])
    assert largest_difference(one, ranks) < 1e-13
