"""Same gradients: weights after training are those of one process but for rounding, however the optimizer is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.compare import largest_difference
from tests.promises.running import trained, weights_of

pytestmark = pytest.mark.launch
HOW = ("plainly", "clipped", "accumulated", "by_momentum", "with_critic")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("ranks", "batch"), [(2, 16), (3, 7)])
def test_unedited(how: str, ranks: int, batch: int, tmp_path: Path) -> None:
    options = ("--how", how, "--batch", str(batch))
    trained(tmp_path / "one", *options)
    trained(tmp_path / "ranks", *options, ranks=ranks)
    assert largest_difference(weights_of(tmp_path / "one"), weights_of(tmp_path / "ranks")) < 1e-13


@pytest.mark.parametrize(("door", "ranks"), [("global", 3), ("shares", 2)])
@pytest.mark.parametrize("how", ["clipped", "with_critic"])
def test_by_calls(door: str, ranks: int, how: str, tmp_path: Path) -> None:
    options = ("--how", how, "--drop-last")
    trained(tmp_path / "one", *options)
    trained(tmp_path / "ranks", *options, door=door, ranks=ranks)
    assert largest_difference(weights_of(tmp_path / "one"), weights_of(tmp_path / "ranks")) < 1e-13


def test_without_a_launcher_the_calls_change_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "one")
    for door in ("global", "shares"):
        trained(tmp_path / door, door=door)
        assert largest_difference(weights_of(tmp_path / "one"), weights_of(tmp_path / door)) == 0
