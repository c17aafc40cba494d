"""The shape of the package: what imports what, what an import costs, and that the docs do what they say."""

from __future__ import annotations

import ast
import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddpshim
from tests.preloaded import environment, start_afresh

ROOT = Path(__file__).parent.parent
# Each module imports only modules above it.
ROOMS = [
    "errors",
    "swapping",
    "options",
    "launch",
    "slurm",
    "rank_log",
    "streams",
    "output",
    "meter",
    "records",
    "failure",
    "preemption",
    "snapshot",
    "background",
    "machine",
    "advice",
    "reduction",
    "devices",
    "rendezvous",
    "group",
    "node_memory",
    "transparent",
    "guard",
    "parallel",
    "permutation",
    "weighted",
    "sampler",
    "sharding",
    "tfdata",
    "mailbox",
    "sequences",
    "loader",
    "accumulation",
    "checkpoint",
    "onewriter",
    "convert",
    "resume",
    "profiling",
    "unidiff",
    "patchset",
    "replacing",
    "patching",
    "environment",
    "recording",
    "rollout",
    "algo",
    "demos",
    "datasets",
    "rlds",
    "sameness",
    "robomimic",
    "droid",
    "patched_code",
    "replay",
    "hooks",
    "hooking",
    "auto",
    "audit",
    "audit.fingerprints",
    "audit.recording",
    "rank",
    "runner",
    "checks",
    "selftest",
    "report",
    "report.words",
    "report.run",
    "report.findings",
    "report.tables",
    "report.charts",
    "report.page",
    "report.writing",
    "doctor",
    "doctor.findings",
    "doctor.source",
    "doctor.tree",
    "doctor.meaning",
    "doctor.rules",
    "doctor.training",
    "doctor.data",
    "doctor.files",
    "doctor.control",
    "doctor.devices",
    "doctor.checkpoints",
    "doctor.fixes",
    "doctor.checking",
    "doctor.printing",
    "audit.verdict",
    "audit.witness",
    "audit.divergence",
    "audit.overlap",
    "audit.judging",
    "audit.running",
    "__main__",
]
TRAINERS = (
    "tfdata",
    "sequences",
    "rollout",
    "algo",
    "datasets",
    "rlds",
    "sameness",
    "robomimic",
    "hooks",
    "droid",
    "report.charts",
)  # these import the trainer's packages, or matplotlib, inside functions
ALLOWED = {"torch", "packaging", "ddpshim", *sys.stdlib_module_names} if sys.version_info >= (3, 10) else None


def _imports(source: str) -> list[tuple[str, bool]]:
    """Each imported module, and whether the import stands at the top level of the file."""
    tree = ast.parse(source)
    out = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            is_package = node.module in ("ddpshim", "ddpshim.audit", "ddpshim.doctor", "ddpshim.report")
            names = [f"{node.module}.{a.name}" for a in node.names] if is_package else [node.module]
        out += [(name, node in tree.body) for name in names]
    return out


def _wrong_imports(room: str, source: str) -> list[str]:
    out = []
    for name, top_level in _imports(source):
        package, _, inner = name.partition(".")
        below = package == "ddpshim" and inner in ROOMS and ROOMS.index(inner) >= ROOMS.index(room)
        foreign = ALLOWED is not None and package not in ALLOWED and (top_level or room not in TRAINERS)
        if below or foreign:
            out.append(name)
    return out


def _file(room: str) -> Path:
    path = ROOT / "ddpshim" / room.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_rooms_are_all_there_are() -> None:
    there = {*(ROOT / "ddpshim").glob("*.py"), *(ROOT / "ddpshim").glob("*/*.py")}
    assert there == {ROOT / "ddpshim" / "__init__.py", *map(_file, ROOMS)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_module_imports_only_modules_above_it(room: str) -> None:
    assert _wrong_imports(room, _file(room).read_text()) == []


def test_the_check_of_imports_can_fail() -> None:
    assert _wrong_imports("group", "from ddpshim.parallel import wrap_parallel") == ["ddpshim.parallel"]
    assert _wrong_imports("group", "from ddpshim import loader") == ["ddpshim.loader"]
    if ALLOWED:
        assert _wrong_imports("group", "def f():\n    import numpy") == ["numpy"]
        assert _wrong_imports("robomimic", "import robomimic") == ["robomimic"]
        assert _wrong_imports("rollout", "import robomimic") == ["robomimic"]
        assert _wrong_imports("robomimic", "def f():\n    import robomimic.algo") == []


def _run(*command: str, cwd: Path = ROOT) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.launch
def test_importing_loads_no_torch_and_using_it_no_dynamo() -> None:
    code = (
        "import sys, ddpshim; print('torch' in sys.modules); ddpshim.setup; ddpshim.wrap_parallel; ddpshim.make_loader"
    )
    seen = _run("-c", f"{code}; print('torch._dynamo' in sys.modules, 'torch.distributed.fsdp' in sys.modules)")
    assert seen.split() == ["False", "False", "False"]


def test_public_names() -> None:
    for name in ddpshim.__all__:
        assert getattr(ddpshim, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ddpshim.nonsense  # noqa: B018
    assert set(ddpshim.__all__) <= set(dir(ddpshim))


EXAMPLES = [room for room in ROOMS if ">>> " in _file(room).read_text()]


@pytest.mark.parametrize("room", EXAMPLES)
def test_examples_in_docstrings(room: str) -> None:
    module = __import__(f"ddpshim.{room}", fromlist=["_"])
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted > 0


@pytest.mark.parametrize("page", ["README.md", "MIGRATION.md"])
def test_examples_in_the_docs(page: str) -> None:
    assert doctest.testfile(str(ROOT / page), module_relative=False).failed == 0


def _diff_lines(page: str) -> list[str]:
    blocks = (ROOT / page).read_text().split("```diff\n")[1:]
    return [line for block in blocks for line in block.split("```")[0].splitlines()]


def test_the_readmes_diff_is_that_of_the_examples() -> None:
    before, after = ((ROOT / "examples" / f"train_{which}.py").read_text() for which in ("before", "after"))
    for line in _diff_lines("README.md"):
        if line.startswith("-"):
            assert line[1:].strip() in before
        elif line.startswith("+"):
            assert line[1:].strip() in after


def _losses(printed: str) -> list[float]:
    return [float(line.split("loss ")[1]) for line in printed.splitlines() if line.startswith("epoch")]


@pytest.mark.launch
def test_the_examples_run_and_two_ranks_equal_one(tmp_path: Path) -> None:
    def run(*command: str) -> list[float]:
        code, said = start_afresh(command, environment(), tmp_path, 120)
        assert code == 0, said
        return _losses(said)

    before = run(str(ROOT / "examples" / "train_before.py"))
    plain = run(str(ROOT / "examples" / "train_after.py"))
    assert len(before) == 5
    assert plain == before
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    after = str(ROOT / "examples" / "train_after.py")
    one, two = (run(*torchrun, f"--nproc_per_node={n}", after) for n in (1, 2))
    assert two == pytest.approx(one, abs=2e-4)
    assert len(two) == 5


def test_version_stands_in_one_place() -> None:
    assert f"## {ddpshim.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.launch
def test_nothing_is_tracked_that_a_run_writes() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""
