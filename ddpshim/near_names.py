"""Finds the name that was probably meant, for errors about unknown options, variables, arguments and commands."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator

from ddpshim import variables
from ddpshim.variables import PREFIX

# Names that module files (`module load`) give to a package's folders and version, as in DDPSHIM_ROOT.
_OF_MODULE_FILES = (
    *("ROOT", "HOME", "DIR", "BASE", "PREFIX", "PATH", "VERSION", "BIN"),
    *("LIB", "LIBDIR", "INC", "INCLUDE", "SHARE", "MAN", "DOC", "SRC"),
)
_OF_NO_OPTION = ("EVERY", "RANK")  # words that do not identify an option
_OF_DDP = (
    *("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"),
    "sync_batchnorm",
)
# Commands and options under another name, where the nearest name would mislead.
_INSTEAD = {
    "audit": "check",
    "doctor": "check",
    "env": "selftest --env",
    "options": "docs options",
    "prove": "check",
    **{name: f"wrap_parallel(..., {name}=...)" for name in _OF_DDP},
    "accumulation_steps": "accumulate(..., steps=...)",
    "batched_fetch": "leaving it out (batches are fetched in one read where that is proven)",
    "config": "one variable for each option",
    "debug": "NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=INFO",
    "logs": "run --log-dir, or srun --output",
    "metrics_every_n_epochs": "leaving it out (metrics are averaged in every epoch)",
}


def unknown(variable: str, options: list[str]) -> Iterator[str]:
    """Yield the problem if an unknown variable resembles an option; otherwise only warn. Local."""
    own = variable[len(PREFIX) :]
    if own in _OF_MODULE_FILES or variable.startswith(variables.MODULE_PREFIX):
        return
    known = [name.upper() for name in options] + [name[len(PREFIX) :] for name in variables.OF_USERS]
    # Compared without the common prefix, which would make all names similar.
    near = difflib.get_close_matches(own, known, n=1, cutoff=0.7)
    near = near or difflib.get_close_matches(own, [name for name in known if _share_a_word(own, name)], n=1, cutoff=0)
    if own.lower() in _INSTEAD or near:
        instead = _INSTEAD.get(own.lower()) or f"{PREFIX}{near[0]}"
        yield f"variable {variable}: no such option; did you mean {instead}?"
    else:
        warnings.warn(
            f"{variable} is not an option and is ignored. `python -m ddpshim docs options` lists all options. To use "
            f"a variable of your own without this warning, call it {variables.MODULE_PREFIX}{own}.",
            stacklevel=3,
        )


def _share_a_word(name: str, other: str) -> bool:
    """Whether a word of one name equals or begins a word of the other, as in LOG_DIR and LOGS."""
    pairs = ((a, b) for a in name.split("_") for b in other.split("_") if min(len(a), len(b)) > 2)
    return any((a.startswith(b) or b.startswith(a)) and a not in _OF_NO_OPTION for a, b in pairs)


# Other launchers' words for the number of ranks.
_OF_OTHER_LAUNCHERS = {
    *("-n", "-np", "--gpus", "--ngpus", "--num-gpus", "--num-processes", "--num_processes", "--world-size"),
}


def nearest(name: str, known: list[str]) -> str:
    """Return the end of a message about an unknown name, which suggests the nearest known one; may be empty."""
    near = [_INSTEAD[name]] if name in _INSTEAD else difflib.get_close_matches(name, known, n=1)
    near = near or [other for other in known if len(name) > 3 and other.startswith(name)]  # --gpus: --gpus-per-node
    if not near and name in _OF_OTHER_LAUNCHERS and "--nproc" in known:
        near = ["--nproc"]
    if name.endswith(".py") and "run" in known:
        near = [f"run {name}"]
    return f"; did you mean {near[0]}?" if near else ""
