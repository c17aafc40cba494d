"""The API reference has every public name, and functions say whether ranks must call them together."""

from __future__ import annotations

import inspect
import re

import pytest

import ddpshim


@pytest.mark.launch
def test_it_has_every_public_name_and_its_links_lead_somewhere() -> None:
    pytest.importorskip("griffe")
    from tests.reference import index, page

    text = page()
    headings = re.findall(r"^### ddpshim\.(.+)$", text, re.MULTILINE)
    assert set(ddpshim.__all__) <= set(headings)
    links = re.findall(r"\[`([^`]+)`\]\(#([\w-]+)\)", text)
    assert [name for name, _ in links] == headings
    assert len({anchor for _, anchor in links}) == len(links)
    assert re.search(r"\| \[job\.py\]\(.*\) \| .*\w", index())


def test_each_function_says_whether_ranks_must_call_it_together() -> None:
    functions = [name for name in ddpshim.__all__ if inspect.isroutine(getattr(ddpshim, name))]
    word = re.compile(r"\b(collective|local)\b", re.IGNORECASE)
    assert [name for name in functions if not word.search(getattr(ddpshim, name).__doc__)] == []
