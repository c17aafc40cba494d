"""Patch round trip: exact contents only, all files or none, and back byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddpshim.__main__ import main

TOYBOT = Path(__file__).parents[1] / "toybot"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(TOYBOT, tmp_path / "site", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def _patch(action: str, site: Path) -> int:
    return main(["patch", action, "--target", str(site / "toybot")])


def _contents(site: Path) -> dict[str, bytes]:
    files = (path for path in (site / "toybot").rglob("*") if path.is_file())
    return {str(path.relative_to(site)): path.read_bytes() for path in files}


def test_applied_and_reverted_it_is_byte_for_byte_what_it_was(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _contents(site)
    assert _patch("status", site) == 0
    assert "not applied" in capsys.readouterr().out
    assert _patch("apply", site) == 0
    patched = _contents(site)
    assert {name for name in before if before[name] != patched[name]} == {"toybot/train.py"}
    assert _patch("apply", site) == 0, "a second time changes nothing"
    assert _contents(site) == patched
    assert _patch("revert", site) == 0
    assert _contents(site) == before


@pytest.mark.parametrize("action", ["apply", "check"])
def test_other_contents_are_refused_and_stay(action: str, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = site / "toybot" / "train.py"
    file.write_bytes(file.read_bytes() + b"# mine\n")
    before = _contents(site)
    assert _patch(action, site) == 1
    assert "toybot/train.py" in "".join(capsys.readouterr())
    assert _contents(site) == before
