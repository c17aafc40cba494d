"""The documentation site: every page is in it, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests import site

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "evidence").glob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    ROOT / "patches" / "README.md",
]


def test_every_page_is_in_a_list() -> None:
    index = site.CONF / "index.md"
    listed = re.findall(r"^(?:.*<)?/([\w/]+)>?$", index.read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT).with_suffix("")) for page in PAGES if page != index}
    assert sorted(listed) == sorted(pages | {"docs/api", "docs/files"})  # these two are made by the site


@pytest.mark.launch
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("myst_parser") is None:
        pytest.skip("needs sphinx: pip install -r requirements/site.txt")
    site.build(tmp_path / "site")
    built = {page.relative_to(tmp_path / "site") for page in (tmp_path / "site").rglob("*.html")}
    assert {Path("index.html"), Path("search.html"), Path("README.html"), Path("docs/check.html")} <= built
