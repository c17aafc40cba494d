"""Files that are whole or absent, written in the background if asked, and going on after an interruption."""

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
