"""The shape of the package: what imports what, what an import costs, and that the docs do what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpshim
import ddpshim.__main__ as command_line
from ddpshim.tools import first_steps
from tests import loaded
from tests.preloaded_commands import python

ROOT = Path(__file__).parents[2]
# Each folder imports only those above it, and itself.
WINGS = [
    *("process", "failures", "job", "shares", "model", "checkpoint", "evaluation", "observe", "rows", "trainers"),
    *("robomimic", "launch", "tools"),
]
# The files beside the folders: all may import them, and they import only each other.
OPEN = ["adapters", "errors", "lazy", "options", "reading", "variables", "version"]
# These may import anything, inside functions.
FACES = ["__init__", "__main__", "auto", "testing"]
CHOOSE_BY_NAME = {"launch.rank": {"tools"}}  # inside functions
TRAINERS = (
    "evaluation.environments",
    "observe.report",
    "robomimic.batches",
    "robomimic.calls",
    "robomimic.droid",
    "robomimic.rollout",
    "robomimic.session",
)  # these import the trainer's packages, or plotly, inside functions
ALLOWED = {"torch", "packaging", "ddpshim", *sys.stdlib_module_names} if sys.version_info >= (3, 10) else None


def _nodes(tree: ast.Module) -> list[ast.AST]:
    conditions = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {inner for node in conditions for inner in ast.walk(node)}
    return [node for node in ast.walk(tree) if node not in for_types]


def _imports(source: str) -> list[tuple[str, bool]]:
    """Each imported module or name, except for types, and whether it is imported with the file: at its top level."""
    tree = ast.parse(source)
    out = []
    for node in _nodes(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "ddpshim" else [node.module]
        out += [(name, node in tree.body) for name in names]
    return out


def _named(source: str) -> set[str]:
    """The modules of the package that a file imports, at any place but for types, or names in a string.

    A name after "-m" starts another process, which imports nothing into this one.
    """
    nodes = _nodes(ast.parse(source))
    of_commands = {
        after
        for node in nodes
        if isinstance(node, (ast.List, ast.Tuple))
        for before, after in zip(node.elts, node.elts[1:])
        if isinstance(before, ast.Constant) and before.value == "-m"
    }
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            parts = {f"{node.module}.{a.name}" for a in node.names}
            names |= {part if part.partition(".")[2] in MODULES else node.module for part in parts}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in of_commands:
            names.add(node.value)
    return {name.partition(".")[2] for name in names if name.startswith("ddpshim.")} & MODULES.keys()


def _circles(named: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that name each other, directly or through others, largest first."""
    below: dict[str, set[str]] = {}
    for module in named:
        found, left = set(), [*named[module]]
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                left += named.get(name, ())
        below[module] = found
    circles = {
        tuple(sorted(other for other in found if module in below.get(other, ())))
        for module, found in below.items()
        if module in found
    }
    return sorted(map(list, circles), key=len, reverse=True)


def _modules() -> dict[str, Path]:
    files = {path.relative_to(ROOT / "ddpshim").with_suffix(""): path for path in (ROOT / "ddpshim").rglob("*.py")}
    return {".".join(at.parts).replace(".__init__", ""): path for at, path in files.items()}


MODULES = _modules()


def _wrong_imports(module: str, source: str) -> list[str]:
    out = []
    wing = module.partition(".")[0]
    for name, top_level in _imports(source):
        package, _, inner = name.partition(".")
        other = inner.partition(".")[0]
        if package == "ddpshim" and wing not in FACES:
            named = () if top_level else CHOOSE_BY_NAME.get(module, ())
            below = WINGS[: WINGS.index(wing) + 1] if wing in WINGS else []
            wrong = other not in [*OPEN, *below, *named] or (other in OPEN and wing in OPEN and module == other)
        else:
            wrong = package != "ddpshim" and ALLOWED is not None and package not in ALLOWED
            wrong = wrong and (top_level or module not in TRAINERS)
            wrong = wrong and (module, package) != ("tools.pytest_plugin", "pytest")
        if wrong:
            out.append(name)
    return out


def test_all_files_are_in_a_wing() -> None:
    assert {module.partition(".")[0] for module in MODULES} == {*WINGS, *OPEN, *FACES}
    assert {p.name for p in (ROOT / "ddpshim").glob("*.py")} == {f"{name}.py" for name in (*OPEN, *FACES)}


def test_a_wing_imports_only_those_above_it() -> None:
    found = {module: _wrong_imports(module, path.read_text()) for module, path in MODULES.items()}
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


# Files that name each other; the list only falls. A name is passed down, or what both need lies below both.
CIRCLES = [["rows.calls", "rows.capture"]]


def test_circles_of_imports_only_fall() -> None:
    inner = {module: path for module, path in MODULES.items() if module not in FACES}
    circles = _circles({module: _named(path.read_text()) - {module, *FACES} for module, path in inner.items()})
    assert circles == CIRCLES


CONSTRUCTORS = {"tensor", "empty", "zeros", "ones", "arange", "full", "randperm", "rand", "randn", "randint", "eye"}


def test_tensors_are_made_where_they_belong() -> None:
    """A program may call torch.set_default_device."""
    lost = {module: _made_anywhere(path.read_text()) for module, path in MODULES.items() if "tools." not in module}
    assert {module: calls for module, calls in lost.items() if calls} == {}


def _made_anywhere(source: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in CONSTRUCTORS}]
    return [ast.unparse(call) for call in made if not {"device", None} & {keyword.arg for keyword in call.keywords}]


def test_public_names() -> None:
    for name in ddpshim.__all__:
        assert getattr(ddpshim, name).__doc__, name
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        ddpshim.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'wrap_paralel'; did you mean wrap_parallel\?$"):
        ddpshim.wrap_paralel  # noqa: B018
    assert set(ddpshim.__all__) <= set(dir(ddpshim))


# What a process keeps, and a job does not: `cleanup()` leaves it. All else is in `process.job.Job`.
OF_THE_PROCESS = {
    "adapters.packages": "what is installed",
    "tools.watching._signs": "a function of a number",
    "job.process_group._kept": "groups that torch before 2.8 cannot end",
    "job.process_group._worlds": "how many there were: a store keeps the keys of the one before",
    "failures.unsynced_check.watch": "torch's hook of all optimizers is the process's",
    "process.say.say_once": "lines that were said",
    "process.say._has_open_line": "what `run` has copied to the screen",
    "process.users_line._is_of_program": "a function of a file's name",
    "process.users_line.is_torchs_or_ours": "the same",
    "process.users_line._relative": "the same, and of the folder",
    "process.random_streams._numpys": "what is known of numpy's generator, which is the process's",
    "trainers.unedited.set_order.make_alike": "sets and dicts of the program keep the hashes of their items",
    "trainers.unedited.set_order._known": "the same",
    "trainers.unedited.set_order._num_given": "the same",
    "trainers.unedited.file_calls._listen": "Python has no way to take back an audit hook",
    "trainers.unedited.file_calls._seeing": "what that hook calls",
    "process.job._current": "the job itself",
    "process.observed._records": "an open file",
    "failures.preemption._state": "of signal handlers: a job that a signal asks to leave keeps them",
    "failures.preemption._previous": "the same",
    "process.random_streams._blocks": "blocks of code that draw alike on all ranks",
    "observe.records._state": "an open file, in which the end of a run is noted after cleanup()",
    "process.job_store._stores": "the store of a launcher's address: its server must outlive its clients",
    "rows.blocks._part_of": "numbers, by numbers",
    "rows.blocks._plan": "numbers, by numbers",
    "rows.rules._dense": "numbers, by numbers",
    "trainers.unedited.reads._asserts": "of code, by the code",
    "model.batchnorm._of_known": "the same",
    "rows.gradients._made": "classes of the program, by class",
    "robomimic.batches.digest": "of code, by the code",
    "robomimic.batches._rows_of": "files in memory, of a data worker as well",
}


def _state(source: str) -> set[str]:
    """The variables of a module that hold something which changes, or may be changed by a function."""
    tree = ast.parse(source)
    changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    changed |= {f.name for f in functions if "cache" in "".join(map(ast.unparse, f.decorator_list))}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_made = isinstance(getattr(node, "value", None), (ast.Call, ast.List, ast.Dict, ast.Set))
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        # A constant is in capitals, a type begins with one.
        changed |= {name for name in names if is_made and name.islower() and not name.startswith("__")}
    return changed


def test_a_job_is_one_object() -> None:
    found = {f"{module}.{name}" for module, path in MODULES.items() for name in _state(path.read_text())}
    assert found == set(OF_THE_PROCESS), "what a job keeps belongs to it: job.current().part(YourClass)"


EXAMPLES = [module for module, path in MODULES.items() if ">>> " in path.read_text()]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"ddpshim.{module}"))
    assert failed == 0
    assert attempted > 0


def _diff_lines(page: str) -> list[str]:
    blocks = (ROOT / page).read_text().split("```diff\n")[1:]
    return [line for block in blocks for line in block.split("```")[0].splitlines()]


def test_the_readmes_diff_is_the_first_of_the_guide() -> None:
    for page in ("README.md", "MIGRATION.md"):
        assert doctest.testfile(str(ROOT / page), module_relative=False).failed == 0
    of_readme, of_guide = map(_diff_lines, ("README.md", "MIGRATION.md"))
    assert of_readme == of_guide[: len(of_readme)]
    assert len([line for line in of_readme if line.startswith("+")]) == 3


def _in_tree(tree: str) -> Iterator[tuple[str, str]]:
    """Each path of a file tree, and what is said of it. Two spaces are a level; a folder ends in a slash."""
    parents: list[str] = []
    for line in tree.splitlines():
        entry, _, purpose = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [entry]
        yield "".join(parents), purpose.strip()


def test_the_readme_ends_with_the_file_tree() -> None:
    tree = (ROOT / "README.md").read_text().partition("\n## Files")[2]
    assert tree.endswith("```\n"), "nothing stands below it"
    lines = dict(_in_tree(tree.split("```")[1].strip("\n")))
    assert [path for path, purpose in lines.items() if not (ROOT / path).exists() or not purpose] == []
    assert len(lines) <= 25
    wings = [path.split("/")[1] for path in lines if path.startswith("ddpshim/") and path.count("/") == 2]
    assert list(dict.fromkeys(wings)) == WINGS, "in the order in which they may import each other"


def test_the_readme_is_short_and_robomimics_page_runs_what_the_example_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    page = (ROOT / "docs" / "robomimic.md").read_text()
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["example"]) == 0
    said = capsys.readouterr().out
    train = "-m robomimic.scripts.train --config lift_bc.json"
    assert page.count(train) == said.count(train) == 2
    commands = [line.strip() for line in said.splitlines() if line.startswith("  python")]
    alone = f"python {train} --name plain"
    compare = "python -m ddpshim report lift_bc/plain lift_bc/lift_bc --markdown"
    assert commands == [f"python -m ddpshim run --nproc 2 {train}", alone, compare]
    assert (alone in page, compare in page) == (True, True)
    settings = json.loads((tmp_path / "lift_bc.json").read_text())
    data = "lift_scripted200_train.hdf5"
    assert settings["train"]["data"] == str(tmp_path / data)
    assert (tmp_path / data).read_bytes() == (ROOT / "examples" / "data" / data).read_bytes()
    assert settings["train"]["output_dir"] == str(tmp_path / "lift_bc")  # or it is a folder inside robomimic
    assert command_line.main(["example"]) == 0  # the same again
    (tmp_path / "lift_bc.json").write_text("{}")
    assert command_line.main(["example"]) == 2
    assert (tmp_path / "lift_bc.json").read_text() == "{}"
    capsys.readouterr()
    monkeypatch.setattr(first_steps, "find_spec", lambda name: None)
    (tmp_path / "lift_bc.json").unlink()
    assert command_line.main(["example"]) == 0
    assert "Install robomimic first: python -m ddpshim docs start" in capsys.readouterr().out


# Lines of ddpshim in a process at its end, and in all files. They only fall: the goals are 1,400, 4,500, 11,000 and
# 21,000.
CEILINGS = {"plain": 1483, "launched": 5846, "run": 12299}
PACKAGE_CEILING = 26280
OF_A_LAUNCHED_TRAINER = {
    *("errors", "lazy", "options", "variables", "version", "process", "failures", "job", "shares", "model"),
}


@pytest.mark.launch
def test_what_is_loaded_only_falls() -> None:
    for kind, ceiling in CEILINGS.items():
        found = loaded.loaded(kind)
        _check_ceiling(sum(found.values()), ceiling, f"{kind} trainer loads", f'CEILINGS["{kind}"]')
        if kind == "launched":
            wings = {module.split(".")[1] for module in found if "." in module}
            assert wings == OF_A_LAUNCHED_TRAINER
    _check_ceiling(loaded.in_package(), PACKAGE_CEILING, "package has", "PACKAGE_CEILING")


def _check_ceiling(num_lines: int, ceiling: int, what: str, name: str) -> None:
    assert num_lines <= ceiling, (
        f"the {what} {num_lines} lines, more than {ceiling}: import what serves an option that is off, a failure or an "
        "absent case in its branch, or remove something (`python -m tests.loaded` lists the files)"
    )


NAMES = """
import sys, torch
before = set(sys.modules)
import ddpshim
print(*sorted(set(sys.modules) - before))
for name in ddpshim.__all__:
    getattr(ddpshim, name)
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.launch
def test_no_public_name_loads_dynamo_fsdp_or_anything_foreign() -> None:
    alone, all_names = (line.split() for line in python("-c", NAMES).splitlines())
    assert alone == ["ddpshim", "ddpshim.errors", "ddpshim.lazy", "ddpshim.version"]
    assert "ddpshim.model.parallel" in all_names
    assert [name for name in all_names if name.startswith(("torch._dynamo", "torch.distributed.fsdp"))] == []
    if ALLOWED:
        assert {name.partition(".")[0] for name in all_names} <= ALLOWED


@pytest.mark.launch
def test_nothing_is_tracked_that_a_run_writes() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""
