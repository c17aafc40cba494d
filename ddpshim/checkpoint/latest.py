"""Keeps a link that names the newest of several files."""

from __future__ import annotations

import os
from pathlib import Path

from ddpshim.checkpoint import files
from ddpshim.job.group import world
from ddpshim.job.say import say_once


def link_latest(path: files.PathLike, name: str = "latest.pth") -> None:
    """Have the link `name`, in the folder of `path`, name `path` as soon as it is on the disk. Local.

    The main rank links. Whoever opens the link gets the file before or the new one, never a part. On a disk without
    links a line says so.
    """
    if world().is_main:
        files.afterwards(link, Path(path), name)


def link(path: Path, name: str) -> None:
    """Make the link, also in the process that writes in the background. Local."""
    made = path.with_name(f".{name}.{os.getpid()}")
    try:
        os.symlink(path.name, made)
        os.replace(made, path.with_name(name))
    except OSError as error:
        say_once(f"{path.with_name(name)} could not be linked to {path.name} ({error}); find_latest finds the newest")
