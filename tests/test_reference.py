"""The API reference is that of the docstrings, has every public name, and the docstrings' examples are run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ddpshim

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


@pytest.mark.launch
def test_the_page_is_what_the_docstrings_give() -> None:
    pytest.importorskip("griffe")
    from tests.reference import page

    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.reference`"


def test_the_index_of_files_is_what_their_first_sentences_say() -> None:
    pytest.importorskip("griffe")
    from tests.reference import FILES, index

    assert FILES.read_text(encoding="utf-8") == index(), "run `python -m tests.reference`"


def test_it_has_every_public_name_and_its_links_lead_somewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^### ddpshim\.(.+)$", text, re.MULTILINE)
    assert set(ddpshim.__all__) <= set(headings)
    links = re.findall(r"\[`([^`]+)`\]\(#([\w-]+)\)", text)
    assert [name for name, _ in links] == headings
    assert len({anchor for _, anchor in links}) == len(links)


@pytest.mark.parametrize("name", [name for name in ddpshim.__all__ if inspect.isroutine(getattr(ddpshim, name))])
def test_each_function_says_whether_ranks_must_call_it_together(name: str) -> None:
    assert re.search(r"\b(collective|local)\b", getattr(ddpshim, name).__doc__, re.IGNORECASE)
