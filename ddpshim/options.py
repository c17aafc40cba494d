"""Defines `Options`, and reads and checks them from arguments and variables.

Imports no torch: `python -m ddpshim docs options` answers at once.
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Callable, NamedTuple, Optional

from ddpshim import variables
from ddpshim.errors import OptionsError
from ddpshim.lazy import nearest
from ddpshim.variables import PREFIX

FLAGS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}


class Kind(NamedTuple):
    """The type of an option: a description of its allowed values, and a parser that raises ValueError for others."""

    allowed: str
    parse: Callable[[Any], Any]


def _one_of(values: Mapping[str, Any], raw: Any) -> Any:
    value = values.get(raw.strip().lower()) if isinstance(raw, str) else raw
    if not any(value is known for known in values.values()):
        raise ValueError
    return value


def _number(kind: type, raw: Any) -> Any:
    """A number above 0; not True, digits of other scripts, or 1_0, which int() would read as ten."""
    is_plain = raw.isascii() and "_" not in raw if isinstance(raw, str) else isinstance(raw, (int, kind))
    value = kind(raw) if is_plain and not isinstance(raw, bool) else 0
    if not 0 < value < math.inf:
        raise ValueError
    return value


_FLAG = Kind("true or false (yes/no, on/off, 1/0)", partial(_one_of, FLAGS))
_WHOLE = Kind("a whole number of at least 1", partial(_number, int))
_POSITIVE = Kind("a number above 0", partial(_number, float))


def choice(*names: str) -> Kind:
    return Kind(", ".join(names[:-1]) + f" or {names[-1]}", partial(_one_of, {name: name for name in names}))


def _or_none(kind: Kind) -> Kind:
    def parse(raw: Any) -> Any:
        is_none = raw is None or (isinstance(raw, str) and raw.strip().lower() in ("none", "null"))
        return None if is_none else kind.parse(raw)

    return Kind(f"{kind.allowed}, or none", parse)


def option(default: Any, kind: Kind, effect: str) -> Any:
    return field(default=default, metadata={"kind": kind, "effect": effect})


@dataclass(frozen=True)
class Options:
    """All options of a run. `setup()` reads them once and keeps them as `World.options`.

    All ranks must have the same options. Arguments of `setup`, `make_loader` and `scale_lr` override them. Raises
    OptionsError for values that are not allowed, all in one message.
    """

    backend: Optional[str] = option(
        None,
        _or_none(choice("nccl", "gloo", "mpi", "ucc")),
        "what carries gradients; none: nccl if each rank has its own GPU, else gloo",
    )
    timeout_s: float = option(1800.0, _POSITIVE, "how long a rank waits for other ranks in a training collective")
    side_timeout_s: float = option(
        86400.0, _POSITIVE, "how long ranks wait while one rank works alone (saves, rollouts)"
    )
    trust_peers: bool = option(
        True, _FLAG, "false: ranks do not unpickle objects of other ranks (`World.gather`, `broadcast`, `run_on_main`)"
    )
    per_rank_batch: bool = option(
        False, _FLAG, 'batch sizes of `make_loader` are per rank, not global; not with `run` or `setup(batch="global")`'
    )
    exact: Optional[int] = option(
        None,
        _or_none(_WHOLE),
        "number of virtual ranks: any world size that divides it gives bitwise identical weights; with `run` or "
        '`setup(batch="global")`',
    )
    rows_at_once: Optional[int] = option(
        None, _or_none(_WHOLE), "under `run`: networks are computed on so many rows of a rank at once, in less memory"
    )
    capture: str = option(
        "auto",
        choice("auto", "force", "off"),
        "under `run`: trace networks once, replay them without Python where that pays; force: from the second call on",
    )
    graphs: str = option(
        "auto",
        choice("auto", "on", "off"),
        "under `run`: replay what `capture` traced as CUDA graphs; auto: not yet, as no GPU has shown equal bits",
    )
    draws: str = option(
        "one_process",
        choice("one_process", "sample"),
        "under `run`: sample: random numbers of a sample depend on its epoch and index alone, so each rank loads only "
        "its local shard; others than those of the plain program, but equal on any number of ranks and data workers",
    )
    lr_rule: str = option(
        "none",
        choice("linear", "sqrt", "none"),
        "with per_rank_batch, `scale_lr` multiplies by the number of ranks, by its square root, or by 1",
    )
    precision: str = option(
        "float32",
        choice("float32", "bf16"),
        "bf16: autocast around robomimic's epochs, in the training forward of what `wrap_parallel` returns, and in "
        "`World.autocast()`; for float16 a program has torch's own autocast and GradScaler",
    )
    checkpoint_every_n_steps: Optional[int] = option(None, _or_none(_WHOLE), "save the training state every N steps")
    checkpoint_every_s: Optional[float] = option(600.0, _or_none(_POSITIVE), "save the training state every N seconds")
    keep_checkpoints: int = option(2, _WHOLE, "number of saved training states to keep")
    background_save: bool = option(
        True, _FLAG, "write training states of 32 MB or more in a thread; ranks wait for the copy in memory"
    )
    resume: str = option(
        "auto",
        choice("auto", "always", "never"),
        "resume from the saved training state: if torchrun or a scheduler has started this job before (auto), always, "
        "or never (then signals also end a training at once)",
    )
    trust_progress: bool = option(
        False,
        _FLAG,
        "true: saved training states may contain pickled objects; then who can write to their folder can run code in "
        "the job",
    )
    guard: bool = option(
        True, _FLAG, "compare weights and RNG state, check optimizer steps, name ranks missing in a collective"
    )
    record: bool = option(
        True,
        _FLAG,
        "robomimic, and `ddpshim.record`: each rank writes records for `python -m ddpshim report`, in the folder "
        "ddpshim beside config.json",
    )
    node_memory: bool = option(True, _FLAG, "robomimic: ranks of a node share one copy of what hdf5_cache_mode caches")

    def __post_init__(self) -> None:
        # A frozen dataclass's own constructor writes its fields in the same way.
        given = {name: ("argument", value) for name, value in vars(self).items()}
        for name, value in _parse(given, []).items():
            object.__setattr__(self, name, value)

    @classmethod
    def names(cls) -> list[str]:
        """The names of all options."""
        return [f.name for f in fields(cls)]

    @classmethod
    def read(cls, environ: Optional[Mapping[str, str]] = None, **arguments: Any) -> Options:
        """Return the options of a run: from arguments, else variables (of `environ`), else the defaults.

        Local. The variable of option `name` is `DDPSHIM_NAME`. An empty variable counts as not set, and so does an
        argument that is None.

        >>> Options.read({"DDPSHIM_GUARD": "no"}, timeout_s=60).guard
        False

        Raises OptionsError for unknown variables or arguments (with the nearest name) and values that are not
        allowed, all in one message. A DDPSHIM_* variable that resembles no option only causes a warning, since it may
        belong to another program.
        """
        environ = os.environ if environ is None else environ
        names = cls.names()
        problems: list[str] = []
        found: dict[str, tuple[str, Any]] = {}

        for key, text in environ.items():
            if key.startswith(PREFIX) and text.strip():
                name = key[len(PREFIX) :].lower()
                if name in names:
                    found[name] = (f"variable {key}", text)
                elif key not in variables.ALL:
                    problems += _unknown(key, names)
                elif key in variables.ALLOWED and text.strip().lower() not in variables.ALLOWED[key]:
                    problems.append(f"variable {key}: {text!r:.200}; allowed: {', '.join(variables.ALLOWED[key])}")
        for name, value in arguments.items():
            if name not in names:
                problems.append(f"argument: no option {name!r}{nearest(name, names)}")
            elif value is not None:
                found[name] = ("argument", value)
        return cls(**_parse(found, problems))

    def __str__(self) -> str:
        """Return the options whose values differ from their defaults, as one line."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changed().items()) or "all at their defaults"

    def changed(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


def _parse(found: Mapping[str, tuple[str, Any]], problems: list[str]) -> dict[str, Any]:
    """Return the parsed values of `found`, a (source, raw value) by name; raise one OptionsError for all problems."""
    values: dict[str, Any] = {}
    for f in fields(Options):
        if f.name in found:
            source, raw = found[f.name]
            try:
                values[f.name] = f.metadata["kind"].parse(raw)
            except (TypeError, ValueError, OverflowError):
                source = f"argument {f.name}" if source == "argument" else source
                problems.append(f"{source}: {raw!r:.200}; allowed: {f.metadata['kind'].allowed}")
    if values.get("lr_rule", "none") != "none" and not values.get("per_rank_batch", False):
        problems.append(
            f"{found['lr_rule'][0]}: lr_rule={values['lr_rule']} without per_rank_batch: the global batch is "
            "unchanged, so the learning rate must be too. Set per_rank_batch as well, or leave lr_rule out"
        )
    if problems:
        count = f"{len(problems)} options are" if len(problems) > 1 else "1 option is"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise OptionsError(
            f"{count} wrong:{lines}\nNothing was started, since the run would not be the one you meant. `python -m "
            "ddpshim docs options` lists all options."
        )
    return values


def _unknown(variable: str, options: list[str]) -> list[str]:
    """Return the problem if an unknown variable resembles an option; otherwise only warn. Local."""
    known = [name.upper() for name in options] + [name[len(PREFIX) :] for name in variables.OF_USERS]
    # Compared without the common prefix, which would make all names similar.
    near = difflib.get_close_matches(variable[len(PREFIX) :], known, n=1, cutoff=0.7)
    if near:
        return [f"variable {variable}: no such option; did you mean {PREFIX}{near[0]}?"]
    text = f"{variable} is not an option and is ignored. `python -m ddpshim docs options` lists all options."
    warnings.warn(text, stacklevel=3)
    return []
