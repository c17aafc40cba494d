"""A codebase that ddpshim knows by a third party's adapter alone (docs/other_codebases.md): tests/toybot."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

from evidence.equivalence import largest_difference
from tests.preloaded import START_DEADLINE_S, environment, start_afresh

TOYBOT = Path(__file__).parents[1] / "toybot"
pytestmark = pytest.mark.launch


class Toybot:
    """A copy of the codebase and its adapter, installed by the search path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(TOYBOT, folder / "site", ignore=shutil.ignore_patterns("__pycache__"))

    def python(self, *arguments: str, **variables: str) -> tuple[int, str]:
        inherited = {**environment(), **variables}
        environ = {**inherited, "PYTHONPATH": os.pathsep.join([str(self.folder / "site"), inherited["PYTHONPATH"]])}
        return start_afresh(arguments, environ, self.folder, START_DEADLINE_S)

    def train(self, name: str, num_ranks: Optional[int] = None, *more: str) -> tuple[dict[str, Any], list[float], str]:
        """The checkpoint, the losses and what was printed, plainly or under `run`."""
        run = () if num_ranks is None else ("-m", "ddpshim", "run", f"--nproc={num_ranks}")
        code, said = self.python(*run, "-m", "toybot.train", "--out", name, *more)
        assert code == 0, said
        assert len([line for line in said.splitlines() if line.startswith("trained")]) == 1
        logged = [json.loads(line) for line in (self.folder / name / "log.jsonl").read_text().splitlines()]
        return torch.load(self.folder / name / "policy.pth"), [epoch["loss"] for epoch in logged], said


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(largest_difference(one[name], other[name]) for name in ("policy", "average"))


def test_unedited_on_three_ranks_it_is_the_patched_trainer_and_one_process(tmp_path: Path) -> None:
    toybot = Toybot(tmp_path)
    plain, plain_losses, _ = toybot.train("plain")
    three, three_losses, said = toybot.train("three", 3)
    assert "is trained by all ranks together" in said
    code, status = toybot.python("-m", "ddpshim", "patch", "status", "--target", "toybot")
    assert (code, "toybot/1.0" in status, "not applied" in status) == (0, True, True)

    code, said = toybot.python("-m", "ddpshim", "patch", "apply", "--target", "toybot")
    assert code == 0, said
    patched, patched_losses, _ = toybot.train("patched", 3)
    alone, alone_losses, _ = toybot.train("alone")

    assert _difference(three, patched) == 0
    assert three_losses == patched_losses
    assert _difference(plain, three) < 1e-5
    assert three_losses == pytest.approx(plain_losses, rel=1e-5)
    assert _difference(plain, alone) == 0, "the patched trainer in one process is the plain one"
    assert plain_losses == alone_losses
    assert plain_losses[-1] < plain_losses[0] / 3
