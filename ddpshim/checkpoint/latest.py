"""Maintains a link to the newest of several files."""

from __future__ import annotations

import os
from pathlib import Path

from ddpshim.checkpoint import files
from ddpshim.job.group import world
from ddpshim.job.say import say_once


def link_latest(path: files.PathLike, name: str = "latest.pth") -> None:
    """Point the link `name`, in the folder of `path`, to `path` once that is on disk. Local.

    The main rank links. Opening the link gives the previous or the new file, never a partial one. If the disk has no
    links, this is printed once.
    """
    if world().is_main:
        files.afterwards(link, Path(path), name)


def link(path: Path, name: str) -> None:
    """Create the link. Local; also runs in the background process."""
    made = path.with_name(f".{name}.{os.getpid()}")
    try:
        os.symlink(path.name, made)
        os.replace(made, path.with_name(name))
    except OSError as error:
        say_once(f"{path.with_name(name)} could not be linked to {path.name} ({error}); find_latest finds the newest")
