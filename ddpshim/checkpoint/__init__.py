"""Writes and finds checkpoint files, in the background if asked, and resumes trainings."""

from ddpshim.checkpoint.files import (
    copy,
    find_damage,
    find_latest,
    flush,
    keep_newest,
    save,
    save_in_background,
    written,
)

__all__ = ["copy", "find_damage", "find_latest", "flush", "keep_newest", "save", "save_in_background", "written"]
