"""Defines `Options`, and reads and checks them from arguments, variables and a config's section.

Imports no torch: `python -m ddpshim options` answers at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Callable, NamedTuple, Optional

from ddpshim import variables
from ddpshim.errors import OptionsError
from ddpshim.variables import PREFIX

SECTION = "ddpshim"
FILE = f"{PREFIX}CONFIG"
# ddpshim's variables that are not options: the launcher, messages from `run` to its ranks, settings of the tests.
_OTHER_VARIABLES = {FILE, *variables.ALL}

_LONGEST_SHOWN = 200  # characters of a value that is not allowed

# The values that the option `exact` allows for other options; the first is the default.
_EXACT_NEEDS: dict[str, tuple[Any, ...]] = {
    "noise": ("one_process",),
    "per_rank_batch": (False,),
    "accumulation_steps": (1,),
    "sync_batchnorm": (True,),
}


class _Kind(NamedTuple):
    """The type of an option: a description of its allowed values, and a parser that raises ValueError for others."""

    allowed: str
    parse: Callable[[Any], Any]


def _flag() -> _Kind:
    words = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}

    def parse(raw: Any) -> bool:
        value = words.get(raw.strip().lower()) if isinstance(raw, str) else raw
        if not isinstance(value, bool):
            raise ValueError
        return value

    return _Kind("true or false (yes/no, on/off, 1/0)", parse)


def _ascii(text: str) -> str:
    """Return `text`; refuse digits of other scripts, and 1_0, which int() would read as ten."""
    if not text.isascii() or "_" in text:
        raise ValueError
    return text


def _whole(least: int) -> _Kind:
    def parse(raw: Any) -> int:
        value = int(_ascii(raw)) if isinstance(raw, str) else raw
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError
        return value

    return _Kind(f"a whole number of at least {least}", parse)


def _positive() -> _Kind:
    def parse(raw: Any) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
            raise ValueError
        value = float(_ascii(raw) if isinstance(raw, str) else raw)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    return _Kind("a number above 0", parse)


def _choice(*names: str) -> _Kind:
    def parse(raw: Any) -> str:
        value = raw.strip().lower() if isinstance(raw, str) else raw
        if value not in names:
            raise ValueError
        return str(value)

    return _Kind(", ".join(names[:-1]) + f" or {names[-1]}", parse)


def _path() -> _Kind:
    def parse(raw: Any) -> str:
        if not isinstance(raw, (str, os.PathLike)) or not os.fspath(raw):
            raise ValueError
        return str(os.fspath(raw))

    return _Kind("a path", parse)


def _path_or(*words: str) -> _Kind:
    def parse(raw: Any) -> str:
        word = raw.strip().lower() if isinstance(raw, str) else None
        return word if word in words else str(_path().parse(raw))

    return _Kind(f"{', '.join(words)} or a path", parse)


def _or_none(kind: _Kind) -> _Kind:
    def parse(raw: Any) -> Any:
        is_none = raw is None or (isinstance(raw, str) and raw.strip().lower() in ("none", "null"))
        return None if is_none else kind.parse(raw)

    return _Kind(f"{kind.allowed}, or none", parse)


def _option(default: Any, kind: _Kind, effect: str) -> Any:
    return field(default=default, metadata={"kind": kind, "effect": effect})


@dataclass(frozen=True)
class Options:
    """All options of a run. `setup()` reads them once and keeps them as `World.options`.

    All ranks must have the same options. Arguments of `setup`, `wrap_parallel`, `make_loader` and `scale_lr` override
    them.

    Raises:
        OptionsError: values that are not allowed, all in one message.
    """

    backend: Optional[str] = _option(
        None,
        _or_none(_choice("nccl", "gloo", "mpi", "ucc")),
        "what carries gradients; none: nccl if each rank has its own GPU, else gloo",
    )
    timeout_s: float = _option(1800.0, _positive(), "how long a rank waits for other ranks in a training collective")
    side_timeout_s: float = _option(
        86400.0, _positive(), "how long ranks wait while one rank works alone (saves, rollouts)"
    )
    trust_peers: bool = _option(
        True,
        _flag(),
        "false: ranks do not unpickle objects that other ranks send (`World.gather`, `broadcast`, `run_on_main`)",
    )
    bucket_cap_mb: Optional[float] = _option(
        None,
        _or_none(_positive()),
        "size of gradient buckets; none: 1 to 25 by model size under gloo, else torch's default",
    )
    find_unused_parameters: bool = _option(True, _flag(), "false: a parameter without a gradient is an error")
    static_graph: bool = _option(
        False, _flag(), "true: a backward pass that uses different parameters than the first is an error"
    )
    gradient_as_bucket_view: bool = _option(
        True, _flag(), "gradients are views of the buckets, which saves one copy of them"
    )
    broadcast_buffers: bool = _option(
        True, _flag(), "copy the main rank's buffers to all ranks after each backward pass"
    )
    sync_batchnorm: bool = _option(
        True, _flag(), "BatchNorm normalises over the global batch, as in one process; false: over each rank's share"
    )
    per_rank_batch: bool = _option(False, _flag(), "batch sizes are per rank, not global")
    noise: str = _option(
        "one_process",
        _choice("one_process", "per_rank"),
        "one_process: each rank gets its rows of the noise that one process would draw; per_rank: each rank has "
        "its own random streams",
    )
    data_draws: str = _option(
        "one_process",
        _choice("one_process", "by_sample"),
        "if a dataset draws random numbers: one_process: each rank loads whole batches and draws as one process; "
        "by_sample: each rank loads its rows only, with different draws",
    )
    exact: Optional[int] = _option(
        None,
        _or_none(_whole(1)),
        "number of virtual ranks: any number of ranks that divides it trains the same weights, to the last bit",
    )
    lr_rule: str = _option(
        "none",
        _choice("linear", "sqrt", "none"),
        "with per_rank_batch: multiply learning rates by the number of ranks, by its square root, or not at all "
        "(robomimic: every optimizer; elsewhere: the default of `scale_lr`)",
    )
    accumulation_steps: int = _option(
        1, _whole(1), "parts into which `ddpshim.accumulate` splits a batch; more than 1 is refused for robomimic"
    )
    precision: str = _option(
        "float32",
        _choice("float32", "bf16", "fp16"),
        "bf16, fp16: autocast around robomimic's epochs, in the training forward of what `wrap_parallel` returns, "
        "and in `World.autocast()`; fp16 also needs `World.grad_scaler()`, and is refused for robomimic",
    )
    max_memory_per_gpu_gb: Optional[float] = _option(
        None,
        _or_none(_positive()),
        "limit on torch's memory on a rank's GPU, in GB (2**30); beyond it torch raises an out-of-memory error; "
        "the rest is left to simulators and other programs",
    )
    metrics_every_n_epochs: int = _option(
        1,
        _whole(0),
        "robomimic: average training metrics over all ranks every N epochs; other epochs, or all with 0, log the "
        "main rank's. Validation metrics are always averaged",
    )
    checkpoint_every_n_steps: Optional[int] = _option(None, _or_none(_whole(1)), "save training progress every N steps")
    checkpoint_every_s: Optional[float] = _option(
        600.0, _or_none(_positive()), "save training progress every N seconds"
    )
    keep_checkpoints: int = _option(2, _whole(1), "number of progress files to keep")
    keep_models: Optional[int] = _option(
        None,
        _or_none(_whole(1)),
        "robomimic: keep the newest N of `models/model_epoch_N.pth`, and always those of best results and of "
        "`experiment.save.epochs`; latest.pth links to the last; none: keep all",
    )
    background_save: bool = _option(
        True,
        _flag(),
        "write robomimic's checkpoints and training progress of 32 MB or more in a separate process; ranks wait "
        "only until they are copied in memory",
    )
    resume: str = _option(
        "auto",
        _choice("auto", "always", "never"),
        "resume from saved progress: if torchrun or a scheduler has started this job before (auto), always, or "
        "never (then signals also end a training at once)",
    )
    trust_progress: bool = _option(
        False,
        _flag(),
        "true: progress files may contain pickled objects; then anyone who can write to their folder can run code "
        "in the job",
    )
    batched_fetch: bool = _option(
        True,
        _flag(),
        "robomimic: load sequence batches in one read, with the same values, where that is proven; loaders keep "
        "their workers over epochs, and pin batches for GPUs",
    )
    rollouts: str = _option("all", _choice("all", "main"), "robomimic: which ranks play the episodes of an evaluation")
    node_memory: str = _option(
        "auto",
        _path_or("auto", "off"),
        "robomimic: the data cached by `hdf5_cache_mode` is one copy per node, shared by its ranks and workers; a "
        "path: in a file in this folder on a local disk, if memory is short; off: one copy per rank",
    )
    node_memory_gb: Optional[float] = _option(
        None, _or_none(_positive()), "limit on this copy's share of a node's memory; none: what is available"
    )
    guard: bool = _option(
        True,
        _flag(),
        "compare weights and random streams over ranks, check optimizer steps, name ranks that are missing in a "
        "collective",
    )
    logs: Optional[str] = _option(None, _or_none(_path()), "folder for each rank's output and errors, as rank_N.log")
    debug: bool = _option(
        False,
        _flag(),
        "true: NCCL and torch log what they do (sets NCCL_DEBUG=INFO, TORCH_DISTRIBUTED_DEBUG=INFO and "
        "TORCH_SHOW_CPP_STACKTRACES=1 if unset)",
    )
    diagnose: bool = _option(
        True,
        _flag(),
        "after 20 steps, and now and then later, print which rank or which phase slows the steps down, if one does",
    )
    record: bool = _option(
        True,
        _flag(),
        "robomimic, and `ddpshim.record`: each rank writes records for `python -m ddpshim report`, in the folder "
        "ddpshim beside config.json",
    )

    def __post_init__(self) -> None:
        # A frozen dataclass's own constructor writes its fields in the same way.
        for name, value in _parse({name: ("argument", getattr(self, name)) for name in names()}, []).items():
            object.__setattr__(self, name, value)

    @classmethod
    def read(
        cls,
        config_section: Optional[Mapping[str, Any]] = None,
        environ: Optional[Mapping[str, str]] = None,
        **arguments: Any,
    ) -> Options:
        """Return the options of a run: from arguments, else variables, else the config's section, else the defaults.

        Local. The variable of option `name` is `DDPSHIM_NAME`. An empty variable counts as not set, and so does an
        argument that is None. DDPSHIM_CONFIG names a file whose keys override those of `config_section`.

        >>> Options.read({"timeout_s": 60, "guard": True}, {"DDPSHIM_GUARD": "no"}).guard
        False

        Args:
            config_section: the `ddpshim` section of the trainer's own config.
            environ: used instead of os.environ.

        Raises:
            OptionsError: unknown keys, variables or arguments (with the nearest name) and values that are not allowed,
                all in one message. A DDPSHIM_* variable that resembles no option only causes a warning, since it may
                belong to another program. DDPSHIM_MODULE_* is ignored.
        """
        environ = os.environ if environ is None else environ
        problems: list[str] = []
        found: dict[str, tuple[str, Any]] = {}
        sources: list[tuple[str, Mapping[str, Any]]] = []
        if isinstance(config_section, Mapping):
            sources.append((f"section {SECTION}", config_section))
        elif config_section is not None:
            problems.append(f"section {SECTION} holds a {type(config_section).__name__}; allowed: a mapping")
        if environ.get(FILE):
            from ddpshim.config_files import read_section  # rarely needed

            try:
                sources.append((f"{FILE}={environ[FILE]}", read_section(environ[FILE])))
            except OptionsError as error:
                problems.append(str(error))
        for source, section in sources:
            _take(section, source, found, problems)
        for key, text in environ.items():
            if key.startswith(PREFIX) and text.strip() and key not in _OTHER_VARIABLES:
                name = key[len(PREFIX) :].lower()
                if name in names():
                    found[name] = (f"variable {key}", text)
                else:
                    from ddpshim.near_names import unknown

                    problems.extend(unknown(key, names(), FILE))
        _take({k: v for k, v in arguments.items() if v is not None}, "argument", found, problems)
        return cls(**_parse(found, problems))

    def __str__(self) -> str:
        """Return the options whose values differ from their defaults, as one line."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed) or "all at their defaults"


def names() -> list[str]:
    """The names of all options."""
    return [f.name for f in fields(Options)]


def _take(section: Mapping[str, Any], source: str, found: dict[str, tuple[str, Any]], problems: list[str]) -> None:
    """Write the options of `section` to `found`, where they override earlier ones; add unknown keys to `problems`."""
    for key, value in section.items():
        if key in names():
            found[key] = (f"{source}, {key}" if source != "argument" else source, value)
        else:
            from ddpshim.near_names import nearest

            problems.append(f"{source}: no option {key!r}{nearest(str(key), names())}")


def _parse(found: Mapping[str, tuple[str, Any]], problems: list[str]) -> dict[str, Any]:
    """Return the parsed values of `found`, a (source, raw value) by name; raise one OptionsError for all problems."""
    values, problems = {}, list(problems)
    for f in fields(Options):
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
    if values.get("exact") is not None:
        for name, allowed in _EXACT_NEEDS.items():
            if values.get(name, allowed[0]) not in allowed:
                problems.append(
                    f"{found[name][0]}: {name}={values[name]} with exact={values['exact']}: results would depend on "
                    f"the number of ranks. Leave {name} out"
                )
    if problems:
        count = f"{len(problems)} options are" if len(problems) > 1 else "1 option is"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise OptionsError(
            f"{count} wrong:{lines}\nNothing was started, since the run would not be the one you meant. `python -m "
            "ddpshim options` lists all options."
        )
    return values


def _short(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
