"""Finds the name that was probably meant, for errors about unknown options, variables, arguments and commands."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator

from ddpshim import variables
from ddpshim.variables import PREFIX


def unknown(variable: str, options: list[str]) -> Iterator[str]:
    """Yield the problem if an unknown variable resembles an option; otherwise only warn. Local."""
    known = [name.upper() for name in options] + [name[len(PREFIX) :] for name in variables.OF_USERS]
    # Compared without the common prefix, which would make all names similar.
    near = difflib.get_close_matches(variable[len(PREFIX) :], known, n=1, cutoff=0.7)
    if near:
        yield f"variable {variable}: no such option; did you mean {PREFIX}{near[0]}?"
    else:
        warnings.warn(
            f"{variable} is not an option and is ignored. `python -m ddpshim docs options` lists all options.",
            stacklevel=3,
        )


def nearest(name: str, known: list[str]) -> str:
    """Return the end of a message about an unknown name, which suggests the nearest known one; may be empty."""
    is_program = name.endswith(".py") and "run" in known
    near = [f"run {name}"] if is_program else difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
