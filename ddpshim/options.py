"""Defines `Options`, and reads and checks them from arguments, variables and a config's section.

Imports no torch: `python -m ddpshim docs options` answers at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Callable, NamedTuple, Optional, TypeVar

from ddpshim import variables
from ddpshim.errors import OptionsError
from ddpshim.variables import PREFIX

SECTION = "ddpshim"
FLAGS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}
_Own = TypeVar("_Own", bound="Options")
_LONGEST_SHOWN = 200  # characters of a value that is not allowed


class Kind(NamedTuple):
    """The type of an option: a description of its allowed values, and a parser that raises ValueError for others."""

    allowed: str
    parse: Callable[[Any], Any]


def _flag() -> Kind:
    def parse(raw: Any) -> bool:
        value = FLAGS.get(raw.strip().lower()) if isinstance(raw, str) else raw
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Kind("true or false (yes/no, on/off, 1/0)", parse)


def _ascii(text: str) -> str:
    """Return `text`; refuse digits of other scripts, and 1_0, which int() would read as ten."""
    if not text.isascii() or "_" in text:
        raise ValueError
    return text


def whole(least: int) -> Kind:
    def parse(raw: Any) -> int:
        value = int(_ascii(raw)) if isinstance(raw, str) else raw
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError
        return value

    return Kind(f"a whole number of at least {least}", parse)


def _positive() -> Kind:
    def parse(raw: Any) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
            raise ValueError
        value = float(_ascii(raw) if isinstance(raw, str) else raw)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    return Kind("a number above 0", parse)


def _choice(*names: str) -> Kind:
    def parse(raw: Any) -> str:
        value = raw.strip().lower() if isinstance(raw, str) else raw
        if value not in names:
            raise ValueError
        return str(value)

    return Kind(", ".join(names[:-1]) + f" or {names[-1]}", parse)


def or_none(kind: Kind) -> Kind:
    def parse(raw: Any) -> Any:
        is_none = raw is None or (isinstance(raw, str) and raw.strip().lower() in ("none", "null"))
        return None if is_none else kind.parse(raw)

    return Kind(f"{kind.allowed}, or none", parse)


def option(default: Any, kind: Kind, effect: str) -> Any:
    return field(default=default, metadata={"kind": kind, "effect": effect})


@dataclass(frozen=True, eq=False)
class Options:
    """All options of a run. `setup()` reads them once and keeps them as `World.options`.

    All ranks must have the same options. Arguments of `setup`, `make_loader` and `scale_lr` override them.

    Raises:
        OptionsError: values that are not allowed, all in one message.
    """

    backend: Optional[str] = option(
        None,
        or_none(_choice("nccl", "gloo", "mpi", "ucc")),
        "what carries gradients; none: nccl if each rank has its own GPU, else gloo",
    )
    timeout_s: float = option(1800.0, _positive(), "how long a rank waits for other ranks in a training collective")
    side_timeout_s: float = option(
        86400.0, _positive(), "how long ranks wait while one rank works alone (saves, rollouts)"
    )
    trust_peers: bool = option(
        True,
        _flag(),
        "false: ranks do not unpickle objects that other ranks send (`World.gather`, `broadcast`, `run_on_main`)",
    )
    per_rank_batch: bool = option(False, _flag(), "batch sizes are per rank, not global")
    noise: str = option(
        "one_process",
        _choice("one_process", "per_rank"),
        "one_process: each rank gets its rows of the noise of one process; per_rank: it has its own random streams",
    )
    exact: Optional[int] = option(
        None,
        or_none(whole(1)),
        "number of pieces of a batch: any number of ranks that divides it trains the same weights, to the last bit; "
        "for programs that hold whole batches",
    )
    capture: str = option(
        "auto",
        _choice("auto", "force", "off"),
        "under `run`: replay networks without Python, once that pays; force: from the second call on",
    )
    lr_rule: str = option(
        "none",
        _choice("linear", "sqrt", "none"),
        "with per_rank_batch: multiply learning rates by the number of ranks, by its square root, or not at all "
        "(robomimic: every optimizer; elsewhere: the default of `scale_lr`)",
    )
    precision: str = option(
        "float32",
        _choice("float32", "bf16", "fp16"),
        "bf16, fp16: autocast around robomimic's epochs, in the training forward of what `wrap_parallel` returns, "
        "and in `World.autocast()`; fp16 also needs `World.grad_scaler()`, and is refused for robomimic",
    )
    checkpoint_every_n_steps: Optional[int] = option(None, or_none(whole(1)), "save training progress every N steps")
    checkpoint_every_s: Optional[float] = option(600.0, or_none(_positive()), "save training progress every N seconds")
    keep_checkpoints: int = option(2, whole(1), "number of progress files to keep")
    background_save: bool = option(
        True,
        _flag(),
        "write checkpoints of 32 MB or more in a thread; ranks wait until they are copied in memory",
    )
    resume: str = option(
        "auto",
        _choice("auto", "always", "never"),
        "resume from saved progress: if torchrun or a scheduler has started this job before (auto), always, or "
        "never (then signals also end a training at once)",
    )
    trust_progress: bool = option(
        False,
        _flag(),
        "true: progress files may contain pickled objects; then anyone who can write to their folder can run code "
        "in the job",
    )
    rollouts: str = option("all", _choice("all", "main"), "robomimic: which ranks play the episodes of an evaluation")
    guard: bool = option(
        True,
        _flag(),
        "compare weights and random streams, check optimizer steps, name ranks that are missing in a collective",
    )
    record: bool = option(
        True,
        _flag(),
        "robomimic, and `ddpshim.record`: each rank writes records for `python -m ddpshim report`, in the folder "
        "ddpshim beside config.json",
    )

    def __post_init__(self) -> None:
        # A frozen dataclass's own constructor writes its fields in the same way.
        given = {name: ("argument", value) for name, value in vars(self).items()}
        for name, value in _parse(type(self), given, []).items():
            object.__setattr__(self, name, value)

    @classmethod
    def names(cls) -> list[str]:
        """The names of all options."""
        return [f.name for f in fields(cls)]

    @classmethod
    def read(
        cls: type[_Own],
        config_section: Optional[Mapping[str, Any]] = None,
        environ: Optional[Mapping[str, str]] = None,
        **arguments: Any,
    ) -> _Own:
        """Return the options of a run: from arguments, else variables, else the config's section, else the defaults.

        Local. The variable of option `name` is `DDPSHIM_NAME`. An empty variable counts as not set, and so does an
        argument that is None.

        >>> Options.read({"timeout_s": 60, "guard": True}, {"DDPSHIM_GUARD": "no"}).guard
        False

        Args:
            config_section: the `ddpshim` section of the trainer's own config.
            environ: used instead of os.environ.

        Raises:
            OptionsError: unknown keys, variables or arguments (with the nearest name) and values that are not allowed,
                all in one message. A DDPSHIM_* variable that resembles no option only causes a warning, since it may
                belong to another program.
        """
        environ = os.environ if environ is None else environ
        names = cls.names()
        problems: list[str] = []
        found: dict[str, tuple[str, Any]] = {}

        def take(source: str, section: Mapping[str, Any]) -> None:
            for key, value in section.items():
                if key in names:
                    found[key] = (f"{source}, {key}" if source != "argument" else source, value)
                else:
                    from ddpshim.near_names import nearest

                    problems.append(f"{source}: no option {key!r}{nearest(str(key), names)}")

        if isinstance(config_section, Mapping):
            take(f"section {SECTION}", config_section)
        elif config_section is not None:
            problems.append(f"section {SECTION} holds a {type(config_section).__name__}; allowed: a mapping")
        for key, text in environ.items():
            if key.startswith(PREFIX) and text.strip():
                name = key[len(PREFIX) :].lower()
                if name in names:
                    found[name] = (f"variable {key}", text)
                elif key not in variables.ALL:
                    from ddpshim.near_names import unknown

                    problems.extend(unknown(key, names))
        take("argument", {k: v for k, v in arguments.items() if v is not None})
        return cls(**_parse(cls, found, problems))

    def __str__(self) -> str:
        """Return the options whose values differ from their defaults, as one line."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changed().items()) or "all at their defaults"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self.changed() == other.changed()

    def __hash__(self) -> int:
        return hash(str(self))

    def changed(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


def _parse(kind: type[Options], found: Mapping[str, tuple[str, Any]], problems: list[str]) -> dict[str, Any]:
    """Return the parsed values of `found`, a (source, raw value) by name; raise one OptionsError for all problems."""
    values, problems = {}, list(problems)
    for f in fields(kind):
        if f.name in found:
            source, raw = found[f.name]
            try:
                values[f.name] = f.metadata["kind"].parse(raw)
            except (TypeError, ValueError, OverflowError):
                source = f"argument {f.name}" if source == "argument" else source
                problems.append(f"{source}: {_short(raw)}; allowed: {f.metadata['kind'].allowed}")
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


def _short(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
