"""Defines the options that only robomimic's adapter reads; its config's section and variables also set the others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpshim.options import Kind, Options, option

if TYPE_CHECKING:
    from ddpshim.job.world import World


def _path_or(*words: str) -> Kind:
    def parse(raw: Any) -> str:
        word = raw.strip().lower() if isinstance(raw, str) else None
        if not isinstance(raw, (str, os.PathLike)) or not os.fspath(raw):
            raise ValueError
        return word if word in words else str(os.fspath(raw))

    return Kind(f"{', '.join(words)} or a path", parse)


@dataclass(frozen=True, eq=False)
class RobomimicOptions(Options):
    """All options of a run of robomimic."""

    node_memory: str = option(
        "auto",
        _path_or("auto", "off"),
        "robomimic: the data cached by `hdf5_cache_mode` is one copy per node, shared by its ranks and workers; a "
        "path: in a file in this folder on a local disk, if memory is short; off: one copy per rank",
    )


def options_of(here: World) -> RobomimicOptions:
    """Return the options of a run; if the program itself called `setup`, robomimic's own are read from variables."""
    options = here.options
    return options if isinstance(options, RobomimicOptions) else RobomimicOptions.read(**vars(options))
