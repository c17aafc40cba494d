"""What `python -m evidence.field` compares of published workspaces, and one of them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from evidence import compare
from evidence.field.left import without_clock

NEEDED = ["hydra", "zarr", "numba", "diffusers", "einops", "dill", "pandas", "wandb"]


def test_comparing_sees_what_differs() -> None:
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
