"""The algorithms that draw noise while they train, through the patched robomimic: what holds, and what equals.

The whole matrix is run on demand, by `python -m tests.equivalence`; its results are in docs/equivalence.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.equivalence import compare, deviations, source, write
from tests.variants import WHY

RELEASE = "0.3.0"
VARIANTS = ["cql", "bcq", "td3_bc", "hbc", "bc_image"]
Rows = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> Rows:
    if source(RELEASE) is None:
        pytest.skip(f"robomimic {RELEASE} is neither installed nor under DDPSHIM_UPSTREAM")
    compared = compare(RELEASE, VARIANTS, [2], tmp_path_factory.mktemp("equivalence"), steps=5, releases=releases)
    assert [row for row in compared if "failed" in row] == []
    return {(row["algorithm"], row["noise"]): row for row in compared}


@pytest.mark.robomimic
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_draw_different_noise_and_hold_equal_weights(rows: Rows, variant: str) -> None:
    row = rows[variant, "own"]
    assert row["steps"] == 10
    assert row["streams of noise"] == 2
    assert row["networks"] > 1e-5, "with the same noise as one process the ranks have no streams of their own"
    assert row["start"] == row["between ranks"] == 0
    assert row["same samples"]
    assert row["checkpoint keys"]
    assert row["unpatched loads it"] == "yes"


@pytest.mark.robomimic
@pytest.mark.parametrize("variant", VARIANTS)
def test_with_noise_held_ranks_equal_one_process(rows: Rows, variant: str) -> None:
    row = rows[variant, "off"]
    assert row["moved"] > 5e-4, "nothing was trained"
    assert row["networks"] < WHY.get(variant, (1e-6, ""))[0]
    assert row["loss"] < 1e-5
    assert row["between ranks"] == 0
    assert row["same samples"]
    assert row["unpatched loads it"] == "yes"
    assert (row["target networks"] is not None) == (variant in ("cql", "bcq", "td3_bc"))
    assert (row["target networks"] or 0) < 1e-6


@pytest.mark.robomimic
def test_as_one_process_ranks_equal_the_release_as_it_is(tmp_path: Path, releases: Path) -> None:
    if source(RELEASE) is None:
        pytest.skip(f"robomimic {RELEASE} is neither installed nor under DDPSHIM_UPSTREAM")
    names = ["bc_vae", "iql"]  # iql logs maxima, minima and deviations of its batches
    rows = compare(RELEASE, names, [2], tmp_path, "float64", steps=5, noises=["plain"], releases=releases)
    assert [row["algorithm"] for row in rows] == names
    assert deviations(rows) == []
    for row in rows:
        assert row["moved"] > 5e-4
        assert row["networks"] < 1e-12
        assert row["loss"] < 1e-12, "all that is logged"
        assert row["same samples"]
        assert row["same states"]


GOOD: dict[str, Any] = {
    "algorithm": "cql",
    "ranks": 2,
    "noise": "off",
    "moved": 1e-2,
    "networks": 1e-8,
    "target networks": 1e-8,
    "ema": None,
    "start": 0.0,
    "between ranks": 0.0,
    "loss": 1e-8,
    "same samples": True,
    "streams of noise": 1,
    "checkpoint keys": True,
    "unpatched loads it": "yes",
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"networks": 1e-3},
        {"ema": 1e-3},
        {"loss": 1e-3},
        {"between ranks": 1e-9},
        {"start": 1e-9},
        {"moved": 0.0},
        {"same samples": False},
        {"checkpoint keys": False},
        {"noise": "own"},
        {"noise": "plain", "same states": False},
        {"unpatched loads it": "loads other weights"},
        {"failed": "ValueError", "upstream": False},
        {"algorithm": "td3_bc", "between ranks": 1e-3},
        {"algorithm": "bc_image", "networks": 1e-3},
    ],
)
def test_a_deviation_is_reported(wrong: dict[str, Any]) -> None:
    assert deviations([GOOD]) == []
    assert deviations([{**GOOD, **wrong}])[0].startswith("**unexplained** ")


@pytest.mark.unit
def test_other_releases_keep_their_section(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "equivalence.md"
    for release, text in (("0.5.0", "five"), ("0.3.0", "old"), ("0.3.0", "three")):
        write(page, release, f"## robomimic {release}\n\n{text}\n")
    assert page.read_text().endswith("\n## robomimic 0.3.0\n\nthree\n\n## robomimic 0.5.0\n\nfive\n")
