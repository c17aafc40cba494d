"""Patch round trip: exact contents only, all files or none, and back byte for byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.preloaded import environment
from tests.promises.running import command

pytestmark = pytest.mark.launch
TOYBOT = Path(__file__).parents[1] / "toybot"  # a codebase, and a third party's patch set for it


@pytest.fixture
def site(tmp_path: Path) -> Path:
    shutil.copytree(TOYBOT, tmp_path / "site", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "site"


def _patch(action: str, site: Path) -> tuple[int, str]:
    path = os.pathsep.join([str(site), environment()["PYTHONPATH"]])
    return command(site.parent, "-m", "ddpshim", "patch", action, "--target", "toybot", PYTHONPATH=path)


def _contents(site: Path) -> dict[str, bytes]:
    files = (path for path in (site / "toybot").rglob("*") if path.is_file())
    return {str(path.relative_to(site)): path.read_bytes() for path in files}


def test_applied_and_reverted_it_is_byte_for_byte_what_it_was(site: Path) -> None:
    before = _contents(site)
    code, said = _patch("status", site)
    assert (code, "not applied" in said) == (0, True), said
    assert _patch("apply", site)[0] == 0
    patched = _contents(site)
    assert {name for name in before if before[name] != patched[name]} == {"toybot/train.py"}
    assert _patch("apply", site)[0] == 0, "a second time changes nothing"
    assert _contents(site) == patched
    assert _patch("revert", site)[0] == 0
    assert _contents(site) == before


@pytest.mark.parametrize("action", ["apply", "check"])
def test_other_contents_are_refused_and_stay(action: str, site: Path) -> None:
    file = site / "toybot" / "train.py"
    file.write_bytes(file.read_bytes() + b"# mine\n")
    before = _contents(site)
    code, said = _patch(action, site)
    assert (code, "toybot/train.py" in said) == (1, True), said
    assert _contents(site) == before
