"""Workspaces in diffusion_policy's style: a small one here, the published ones in `python -m evidence.field`."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence import compare
from evidence.field.left import without_clock
from tests.launch.test_unedited import Ran, run

WORKSPACE = Path(__file__).parents[1] / "workspace.py"
NEEDED = ["hydra", "zarr", "numba", "diffusers", "einops", "dill", "pandas", "wandb"]


def left(ran: Ran) -> tuple[dict[str, Path], list[dict[str, float]], dict[str, Any]]:
    """The files without the time in their names, the rows of the log, and the last checkpoint."""
    (output,) = (ran.folder / "outputs").iterdir()
    files = {str(path.relative_to(output)): path for path in output.rglob("*") if path.is_file()}
    rows = [json.loads(line) for line in files["logs.json.txt"].read_text().splitlines()]
    return files, rows, torch.load(files["checkpoints/latest.ckpt"])


def test_a_workspace_on_two_ranks_leaves_what_one_process_leaves(tmp_path: Path) -> None:
    one = run(tmp_path, str(WORKSPACE), 1, is_plain=True)
    two = run(tmp_path, str(WORKSPACE), 2)
    assert two.exit_codes == [0, 0], two.logs
    files, rows, states = left(one)
    files_2, rows_2, states_2 = left(two)
    assert sorted(files) == sorted(files_2)
    assert len([name for name in files if "score=" in name]) == 2
    assert [list(row) for row in rows] == [list(row) for row in rows_2]
    assert len(rows) == 3 * 4 + 3
    for row, row_2 in zip(rows, rows_2):
        assert row_2 == pytest.approx(row, rel=1e-5)
    for key in ("model", "ema_model"):
        for name, value in states[key].items():
            torch.testing.assert_close(states_2[key][name], value, rtol=0, atol=1e-6)
    for number, state in states["optimizer"]["state"].items():
        torch.testing.assert_close(states_2["optimizer"]["state"][number], state, rtol=0, atol=1e-6)


def test_comparing_sees_what_differs(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    assert compare.difference(tensor, tensor + 0.5) == 0.5
    assert compare.difference(tensor, torch.ones(3)) == float("inf")
    assert compare.difference(tensor, tensor / 0 - tensor / 0) == float("inf")
    assert compare.numbers_differ([[1.0], [2.0]], [[1.0], [2.5]]) == 0.25
    assert compare.numbers_differ([[1.0]], [[1.0], [1.0]]) == float("inf")
    assert compare.nested_difference([{"a": tensor}], [{"a": tensor + 0.5}]) == 0.5
    assert compare.nested_difference([{"a": tensor}], [{"b": tensor}]) == float("inf")
    assert compare.nested_difference([tensor], []) == float("inf")
    assert compare.is_rounding(1e-4, 2e-5)
    assert not compare.is_rounding(1e-3, 2e-5)
    assert compare.shown(1e-3, 1e-5) == "**1e-03**"
    assert without_clock("outputs/2026.11.23/12.38.11_run/0.pth") == "outputs/TIME/TIME_run/0.pth"
    assert without_clock("runs/ppo__1__1700000000/a-0f3e2d1c/1.pt") == "runs/ppo__1__TIME/a-TIME/1.pt"


@pytest.mark.upstream
def test_a_published_workspace(tmp_path: Path) -> None:
    """One of those that `python -m evidence.field` compares; a minute."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"lacking {', '.join(lacking)}: requirements/trainers.txt says how to install them")
    upstream = os.environ.get("DDPSHIM_UPSTREAM", "")
    if not (Path(upstream) / "real-stanford+diffusion_policy").is_dir():
        pytest.skip("DDPSHIM_UPSTREAM has no real-stanford+diffusion_policy; patches/README.md says how to get it")
    from evidence.field import __main__ as field

    trainer = next(trainer for trainer in field.TRAINERS if trainer.name == "unet_lowdim")
    one, two = (field.play(trainer, Path(upstream), tmp_path / str(num_ranks), num_ranks) for num_ranks in (0, 2))
    row = field.compared(trainer, one, [one], two, 2)
    assert row.verdict == "equal", row
