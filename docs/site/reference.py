"""Writes docs/api.md from the docstrings, by griffe: `python -m docs.site.reference`.

It is a page of the site, and in no commit.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
WIDTH = 100  # the longest signature on one line
CHAPTERS = {
    "Job": ("setup", "cleanup", "world", "World", "job.running.Running", "Options", "abort", "spawn"),
    "Model": ("wrap_parallel", "unwrap", "accumulate", "split_random_streams", "shared_random_streams"),
    "Data": (
        *("make_loader", "shares.sharded.ShardedLoader", "on_device", "scale_lr", "check_equal_steps", "watch", "deal"),
        *("shared_arrays", "robomimic.node_memory.SharedArrays"),
    ),
    "Checkpoints": (
        *("Resumable", "checkpoint.save", "checkpoint.save_in_background", "checkpoint.flush", "checkpoint.copy"),
        *("checkpoint.written", "checkpoint.keep_newest", "checkpoint.find_latest", "checkpoint.find_damage"),
    ),
    "Evaluation": (
        *("evaluate", "evaluation.evaluating.Evaluation", "evaluation.evaluating.Episode"),
        "evaluation.evaluating.exact_interval",
    ),
    "Profile and records": ("profile", "record", "observe.recording.Recorder"),
    "Tests of a trainer": ("testing.on_ranks", "testing.assert_same_training"),
    "Errors": (
        *("DdpShimError", "LaunchError", "RankError", "OptionsError", "WorldError", "SyncError", "DataError"),
        *("RolloutError", "CheckpointError", "PatchError", "ReportError"),
    ),
}
HEAD = """# API reference

Written by `python -m docs.site.reference` from the docstrings. *Collective* means that all ranks must make the call,
*local* that it waits for nobody. Times and sizes have their unit in their name: `_s` is seconds, `_mb` megabytes.
"""


def page() -> str:
    logging.getLogger("griffe").setLevel(logging.ERROR)  # it warns of two parameters documented on one line
    package: Any = griffe.load("ddpshim", search_paths=[str(ROOT)], docstring_parser="google", resolve_aliases=True)
    parts = [HEAD]
    for title, names in CHAPTERS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _entry(name, package[name])
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _entry(name: str, thing: Any, level: int = 3) -> Iterator[str]:
    """Yield a name's heading, signature and docstring; for a class also its public methods."""
    thing = thing.final_target if thing.is_alias else thing
    yield f"{'#' * level} {'ddpshim.' * (level == 3)}{name}\n"
    if thing.is_function or (thing.is_class and not name.endswith("Error")):
        yield f"```python\n{_signature(name.rpartition('.')[2], thing)}\n```\n"
    yield from _text(thing)
    if thing.is_class:
        yield from _attributes(thing)
        for member in thing.members.values():
            if member.is_function and member.docstring is not None and not member.name.startswith("_"):
                yield from _entry(member.name, member, level + 1)


def _signature(name: str, thing: Any) -> str:
    parts: list[str] = []
    for parameter in thing.parameters:
        if parameter.name in ("self", "cls") or parameter.name.startswith("_"):
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and not any(part.startswith("*") for part in parts):
            parts.append("*")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind.value, "")
        default = parameter.default.arguments[0] if _is_option(parameter) else parameter.default
        # griffe writes a dataclass's default_factory as a call of a lambda.
        shown = "" if stars or default is None else re.sub(r"\(lambda: (.*)\)\(\)$", r"\1", f" = {default}")
        parts.append(f"{stars}{parameter.name}: {parameter.annotation}{shown}")
    returns = "" if thing.is_class else f" -> {thing.returns}"
    line = f"{name}({', '.join(parts)}){returns}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _is_option(parameter: Any) -> bool:
    return isinstance(parameter.default, griffe.ExprCall) and str(parameter.default.function) == "_option"


def _text(thing: Any) -> Iterator[str]:
    for section in thing.docstring.parsed:
        if section.kind is griffe.DocstringSectionKind.text:
            yield _markdown(section.value) + "\n"
        elif section.kind is griffe.DocstringSectionKind.examples:
            for _, text in section.value:
                yield f"```python\n{text}\n```\n"
        elif section.kind is griffe.DocstringSectionKind.raises:
            yield from _listed("Raises", ((item.annotation, item.description) for item in section.value))
        else:
            title = {"parameters": "Parameters", "attributes": "Attributes"}[section.kind.value]
            yield from _listed(title, ((item.name, item.description) for item in section.value))


def _attributes(thing: Any) -> Iterator[str]:
    """Yield the fields whose text is in their default, and the properties."""
    options = [(p.name, ast.literal_eval(str(p.default.arguments[2]))) for p in thing.parameters if _is_option(p)]
    yield from _listed("Parameters", options)
    properties = [m for m in thing.members.values() if m.is_attribute and m.is_public and m.docstring is not None]
    yield from _listed("Properties", ((m.name, m.docstring.value) for m in properties))


def _listed(title: str, items: Iterable[tuple[Any, str]]) -> Iterator[str]:
    lines = [f"- `{name}`: {' '.join(_markdown(text).split())}" for name, text in items]
    if lines:
        yield f"{title}:\n\n" + "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    """Convert a docstring to Markdown: code blocks after `::`, ">>>" and :func:`roles`."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"^::\n\n((?: {4}.*\n?|\n)+)", lambda m: _fenced(m[1]), text, flags=re.MULTILINE)
    return re.sub(r"((?:^>>> .*\n?(?:^(?!>>> |\n).*\n?)*)+)", lambda m: _fenced(m[1]), text, flags=re.MULTILINE)


def _fenced(code: str) -> str:
    return "```python\n" + re.sub(r"^ {4}", "", code.rstrip(), flags=re.MULTILINE) + "\n```\n\n"


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
