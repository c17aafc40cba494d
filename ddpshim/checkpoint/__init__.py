"""Writes and finds checkpoint files, in the background if asked, and resumes trainings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpshim import lazy

if TYPE_CHECKING:
    from ddpshim.checkpoint.files import copy as copy
    from ddpshim.checkpoint.files import find_damage as find_damage
    from ddpshim.checkpoint.files import find_latest as find_latest
    from ddpshim.checkpoint.files import flush as flush
    from ddpshim.checkpoint.files import keep_newest as keep_newest
    from ddpshim.checkpoint.files import save as save
    from ddpshim.checkpoint.files import save_in_background as save_in_background
    from ddpshim.checkpoint.files import written as written

__all__ = [
    "copy",
    "find_damage",
    "find_latest",
    "flush",
    "keep_newest",
    "save",
    "save_in_background",
    "written",
]


def __getattr__(name: str) -> Any:
    # On demand: files.py imports torch, which takes seconds.
    return lazy.load(__name__, dict.fromkeys(__all__, "files"), name, globals())
