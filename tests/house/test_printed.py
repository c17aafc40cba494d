"""Each command, page, file and extra that a message, a help text or a page names exists and takes its arguments."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpshim
import ddpshim.__main__ as command_line
from ddpshim import checkpoint, variables
from ddpshim.job.world import World
from ddpshim.options import Options
from ddpshim.tools import first_steps

ROOT = Path(__file__).parents[2]
VALUE = "\0"  # what a message puts in
FOLDERS = "docs|evidence|examples|patches|requirements|tests"
COMMANDS = "run|check|patch|report|selftest|slurm|example|docs"
# Quoted as code, where `python -m ddpshim` may be left out; or up to what ends a command in a sentence.
QUOTED = re.compile(rf"(?<!`)`(?:python3? -m )?(?:ddpshim )?((?:{COMMANDS}) [^`]+)`(?!`)")
BARE = re.compile(r"(?<![`'\w-])python3? -m ddpshim ([^`\n'\"#|)>]*[^`\n'\"#|)>.,;: ])")
# Other words, lists of spellings and variables of a shell.
NO_COMMAND = re.compile(r"[\[($]|[…{}]\s|\s(?:and|or|with|on|is|does|of|in|to|for)\s|/…|--fuzz")
# The site makes the first; the other is a user's.
NOT_HERE = {"docs/api.md", "evidence/gpus"}
VARIABLES = {f"DDPSHIM_{name.upper()}" for name in Options.names()}
VARIABLES |= {value for value in vars(variables).values() if isinstance(value, str)}
VARIABLES |= {"DDPSHIM_GAURD", "DDPSHIM_ROOT", "DDPSHIM_HOME", "DDPSHIM_VERSION", "DDPSHIM_NAME"}  # shown as no options
MODULES = {"ddpshim.auto", "ddpshim.rows", "ddpshim.testing"}
PARSER = command_line._parser()
OBJECTS = {"ddpshim": ddpshim, "world": World(), "checkpoint": checkpoint}


def all_messages() -> Iterator[tuple[str, str]]:
    """File and text of each constant of the library, docstrings included, which `help` shows."""
    for file in sorted((ROOT / "ddpshim").rglob("*.py")):
        name, tree = str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        inside = {id(part) for node in joined for part in node.values}
        for node in joined:
            yield name, "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                yield name, node.value


def markdown() -> list[str]:
    """The names of the repository's pages, without those of environments and builds."""
    names = sorted(str(file.relative_to(ROOT)) for file in ROOT.rglob("*.md"))
    return [name for name in names if not name.startswith((".", "build", "ddpshim-logs"))]


def _pages() -> Iterator[tuple[str, str]]:
    for name in markdown():
        if name != "CHANGELOG.md":  # it names what was removed
            yield name, (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")


def _commands(text: str) -> Iterator[str]:
    """The words after `python -m ddpshim` of each command in a text."""
    for found in (*QUOTED.findall(text), *BARE.findall(text)):
        line = re.split(r" && | > | \| |; | & ", found)[0]
        if not NO_COMMAND.search(f"{line} "):
            yield line


def _refusal(line: str) -> str:
    """What the parser says against a command, whatever a message puts in and whatever a mention leaves out; or ""."""
    said = ""
    for value in ("2", "train.py", "-m m"):
        words = re.sub(rf"(?<=[ =])(?:[A-Z][A-Z_]*|{VALUE})(?=\s|$)", value, line.replace("...", ""))
        for rest in ("", " train.py", " 2 train.py", " 2"):
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                try:
                    PARSER.parse_args(shlex.split(words + rest))
                    return ""
                except SystemExit as ended:
                    if not ended.code:
                        return ""
            said = said or out.getvalue().strip().rpartition("\n")[2]
    return said


def _module_lacks(words: str) -> str:
    """Of `python -m words`, if it is ours: the module, or an option that no file of it names; or ""."""
    name, *arguments = words.split()
    if name.partition(".")[0] not in ("ddpshim", *FOLDERS.split("|")):
        return ""
    if importlib.util.find_spec(name) is None:
        return "it"
    base = ROOT.joinpath(*name.split("."))
    files = [*base.glob("*.py")] if base.is_dir() else [base.with_suffix(".py")]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    return " ".join(option for option in arguments if option not in source)


def _faults(name: str, text: str) -> Iterator[str]:
    for line in _commands(text):
        said = _refusal(line)
        if said:
            yield f"{line}: {said}"
    for words in re.findall(r"python3? -m ((?!ddpshim\b)[\w.]*\w(?: --[\w-]+)*)", text):
        if _module_lacks(words):
            yield f"{words}: there is no {_module_lacks(words)}"
    yield from (name for name in re.findall(r"\bDDPSHIM_[A-Z_]+\b", text) if name not in VARIABLES)
    for start, rest in re.findall(rf"(?<![\w/.])({'|'.join(OBJECTS)})\.(\w+)(?=[(`])", text):
        if not hasattr(OBJECTS[start], rest) and f"{start}.{rest}" not in MODULES:
            yield f"{start}.{rest}"
    known = {page.lower() for page in first_steps.pages()} | {"words"}  # the name of the argument
    yield from (f"docs {page}" for page in re.findall(r"ddpshim docs (\w+)", text) if page.lower() not in known)
    for extras in re.findall(r"(?:ddpshim|\.)\[([a-z,]+)\]", text):
        yield from (f"[{one}]" for one in extras.split(",") if not (ROOT / "requirements" / f"{one}.txt").is_file())
    for path in re.findall(rf"(?<![\w/.-])(?:ddpshim/[\w/]+\.|(?:{FOLDERS})/)[\w./-]*\w(?![*\w])", text):
        places = (ROOT / path, (ROOT / name).parent / path)
        if "CODEBASE" not in path and path not in NOT_HERE and not any(place.exists() for place in places):
            yield path


def _unseen_by_users(text: str) -> list[str]:
    """Files of the repository, which the wheel does not have."""
    return re.findall(r"(?:docs|examples|evidence|patches)/[\w/.-]+\.\w+|(?:See |\()MIGRATION\.md", text)


@pytest.mark.parametrize("texts", [_pages, all_messages])
def test_what_is_printed_exists(texts: object) -> None:
    found = [*texts()]  # type: ignore[operator]
    assert sum(1 for _, text in found for _ in _commands(text)) > 30
    assert [(name, fault) for name, text in found for fault in _faults(name, text)] == []


def test_what_does_not_exist_is_found() -> None:
    for text in (
        "Type `check --raed train.py`, or leave it.",
        f"`python -m ddpshim run --nproc {VALUE} --dry FILE`",
        "`report` builds it: python -m ddpshim reprot lift_bc",
        "run `python -m evidence.no_such_program`",
        "run `python -m evidence.matrix --pyton 3.9`",
        "see `python -m ddpshim docs lunch`",
        "pip install 'ddpshim[reports]'",
        "as examples/train_afterwards.py does",
        "DDPSHIM_PRECISON=bf16",
        "`world.meen(x)`",
        "with `ddpshim.on_gpu(loader)`",
    ):
        assert [*_faults("README.md", text)], text


def test_messages_name_pages_that_the_wheel_has() -> None:
    """Elsewhere than in the first lines of a file, which those read who have its source."""
    for name, text in all_messages():
        tree = (ROOT / name).read_text(encoding="utf-8")
        if not tree.startswith(f'"""{text[:40]}'):
            assert _unseen_by_users(text) == [], (name, text)
