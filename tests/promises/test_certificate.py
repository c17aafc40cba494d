"""Certificate: others repeat a part of a certified run on any number of ranks; a change is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.promises.running import TRAINER, command

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certified")
    shutil.copy(TRAINER, folder)
    run = ("-m", "ddpshim", "run", "--nproc", "2", "--certify", "run.json", "--certify-every", "2")
    code, said = command(folder, *run, "trainer.py", "out", DDPSHIM_EXACT="4")
    assert code == 0, said
    return folder


def _check(certified: Path, folder: Path, ranks: int, old: str = "", new: str = "") -> tuple[int, str]:
    for name in ("trainer.py", "run.json"):
        shutil.copy(certified / name, folder)
    program = folder / "trainer.py"
    assert old in program.read_text()
    program.write_text(program.read_text().replace(old, new) if old else program.read_text())
    return command(folder, "-m", "ddpshim", "check", "--certificate", "run.json", "--nproc", str(ranks))


def test_it_is_verified_on_other_ranks(certified: Path, tmp_path: Path) -> None:
    code, said = _check(certified, tmp_path, 4)
    assert code == 0, said
    assert "verified: steps" in said, said


def test_a_change_is_named(certified: Path, tmp_path: Path) -> None:
    code, said = _check(certified, tmp_path, 1, "0.1 * noise", "0.2 * noise")
    assert code == 1, said
    assert "trainer.py" in said, said
