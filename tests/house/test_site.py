"""The documentation site: every page and public name is in it, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import ddpshim
from docs.site import build, digits, drawing
from tests.house.test_printed import markdown


def test_every_page_is_in_a_list() -> None:
    listed = re.findall(r"^(?:.*<)?/([\w/*]+)>?$", (build.CONF / "index.md").read_text(), re.MULTILINE)
    pages = {page[: -len(".md")] for page in markdown()} - {"docs/site/index"} | {"docs/api"}  # which the site makes
    found = [{page for page in pages if re.fullmatch(entry.replace("*", "[^/]+"), page)} for entry in listed]
    assert set().union(*found) == pages
    assert all(found)


@pytest.mark.launch
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("myst_parser") is None:
        pytest.skip("needs sphinx: pip install -r requirements/site.txt")
    build.build(tmp_path / "site")
    built = {page.relative_to(tmp_path / "site") for page in (tmp_path / "site").rglob("*.html")}
    assert {Path("index.html"), Path("search.html"), Path("README.html"), Path("docs/check.html")} <= built


def test_pictures_are_what_their_commands_draw() -> None:
    assert drawing.FILE.read_text(encoding="utf-8") == drawing.one_batch()
    assert digits.FILE.read_text(encoding="utf-8") == digits.report()


@pytest.mark.launch
def test_the_reference_has_every_public_name() -> None:
    pytest.importorskip("griffe")
    from docs.site.reference import page

    headings = re.findall(r"^### ddpshim\.(.+)$", page(), re.MULTILINE)
    assert set(ddpshim.__all__) <= set(headings)


def test_each_function_says_whether_ranks_must_call_it_together() -> None:
    functions = [name for name in ddpshim.__all__ if inspect.isroutine(getattr(ddpshim, name))]
    word = re.compile(r"\b(collective|local)\b", re.IGNORECASE)
    assert [name for name in functions if not word.search(getattr(ddpshim, name).__doc__)] == []
