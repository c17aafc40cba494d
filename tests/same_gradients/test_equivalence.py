"""The algorithms that draw noise while they train, through the patched robomimic: what holds, and what equals.

The whole matrix is run on demand, by `python -m evidence.equivalence`; its results are in evidence/equivalence.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evidence.equivalence import compare, deviations, write
from evidence.variants import WHY
from tests.robomimic import require

RELEASE = "0.3.0"
VARIANTS = ["iql", "cql", "bcq", "td3_bc", "hbc", "bc_transformer"]  # iql logs maxima; a VAE is in bcq and hbc


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> dict[str, dict[str, Any]]:
    require(RELEASE)
    folder = tmp_path_factory.mktemp("equivalence")
    compared = compare(RELEASE, VARIANTS, [2], folder, "float64", steps=5, releases=releases)
    return {row["algorithm"]: row for row in compared}


@pytest.mark.robomimic
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_equal_the_release_as_it_is_with_its_noise_on(rows: dict[str, dict[str, Any]], variant: str) -> None:
    row = rows[variant]
    assert deviations([row]) == []
    assert row["steps"] == 10
    assert row["moved"] > 5e-4, "nothing was trained"
    for kind in ("networks", "target networks", "moments", "loss"):
        assert (row[kind] or 0) < 1e-12, kind
    assert (row["target networks"] is not None) == (variant in ("iql", "cql", "bcq", "td3_bc"))


@pytest.mark.robomimic
def test_in_float32_an_image_encoder_is_as_near_as_its_rounding(tmp_path: Path, releases: Path) -> None:
    require(RELEASE)
    (row,) = compare(RELEASE, ["bc_image"], [2], tmp_path, steps=5, releases=releases)
    assert row["networks"] < WHY["bc_image"][0]
    assert row["same samples"]
    assert row["same states"]


GOOD: dict[str, Any] = {
    **{"algorithm": "cql", "ranks": 2, "moved": 1e-2, "ema": None, "start": 0.0, "between ranks": 0.0},
    **dict.fromkeys(("networks", "target networks", "loss", "moments"), 1e-8),
    **dict.fromkeys(("same samples", "same states", "checkpoint keys"), True),
    "unpatched loads it": "yes",
}


WRONG: list[dict[str, Any]] = [
    *({name: 1e-3} for name in ("networks", "ema", "loss", "moments")),
    *({name: False} for name in ("same samples", "checkpoint keys", "same states")),
    *({"between ranks": 1e-9}, {"start": 1e-9}, {"moved": 0.0}, {"unpatched loads it": "loads other weights"}),
    *({"failed": "ValueError", "upstream": False}, {"algorithm": "td3_bc", "between ranks": 1e-3}),
    {"algorithm": "bc_image", "networks": 1e-3},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_deviation_is_reported(wrong: dict[str, Any]) -> None:
    assert deviations([GOOD]) == []
    assert deviations([{**GOOD, **wrong}])[0].startswith("**unexplained** ")


@pytest.mark.unit
def test_other_releases_keep_their_section(tmp_path: Path) -> None:
    page = tmp_path / "evidence" / "equivalence.md"
    for release, text in (("0.5.0", "five"), ("0.3.0", "old"), ("0.3.0", "three")):
        write(page, release, f"## robomimic {release}\n\n{text}\n")
    assert page.read_text().endswith("\n## robomimic 0.3.0\n\nthree\n\n## robomimic 0.5.0\n\nfive\n")
