"""robomimic, DROID and their forks: patch sets, data, rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.equivalence import source


def require(release: str) -> Path:
    """Return the tree of a release of robomimic; skip the test where it is not here."""
    tree = source(release)
    if tree is None:
        how = "pip install --no-deps robomimic==0.3.0" if release == "0.3.0" else "see patches/README.md"
        pytest.skip(f"robomimic {release} is neither installed nor under DDPSHIM_UPSTREAM ({how})")
    return tree
