"""`check` in other projects' tests: the pytest plugin in a foreign repository, and the steps of the GitHub action."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.preloaded import environment, start_afresh
from tests.preloaded_commands import python

pytestmark = pytest.mark.launch
ROOT = Path(__file__).parents[2]
FILES = {
    "pytest.ini": "[pytest]\ntestpaths = tests\npythonpath = src\n",
    "src/policies.py": """
import torch

def make_policy():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)
""",
    "train.py": """
import os, sys
import torch
import torch.distributed as dist
from policies import make_policy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

net = policy = make_policy()
data, batch_size, sampler = TensorDataset(torch.randn(24, 4), torch.randn(24, 2)), 8, None
if sys.argv[1] != "plain" and "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    policy, sampler = DistributedDataParallel(net), DistributedSampler(data)
    batch_size //= dist.get_world_size()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for x, y in DataLoader(data, batch_size, shuffle=sampler is None, sampler=sampler):
    optimizer.zero_grad()
    loss = ((net if sys.argv[1] == "unwrapped" else policy)(x) - y).square().mean()
    loss.backward()
    optimizer.step()
""",
    "tests/test_ddp.py": """
import pytest

def test_unmodified(same_experiment):
    same_experiment("train.py", "plain", nproc=2, steps=2)

def test_port(same_experiment):
    same_experiment("-m", "train", "port", steps=2, own_ddp=True)

def test_unwrapped(same_experiment):
    same_experiment("train.py", "unwrapped", steps=2, own_ddp=True)

def test_absent(same_experiment):
    same_experiment("trian.py", one=None)

def test_misspelled(same_experiment):
    same_experiment("train.py", "plain", nprocs=2)
""",
    "tests/test_other.py": """
import sys

def test_without_the_fixture():
    assert "torch" not in sys.modules
    ours = {name for name in sys.modules if name.startswith("ddpshim.")}
    assert ours == {f"ddpshim.{name}" for name in ("errors", "lazy", "version", "tools", "tools.pytest_plugin")}
""",
}
# As in a terminal, but `python` is forked from a process that has imported torch.
PYTEST = """
import shutil, sys
sys.executable = shutil.which("python")
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def _make_project(folder: Path) -> dict[str, str]:
    """Write a repository of somebody else into `folder`; return an environment in which ddpshim is installed."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    declared = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points.pytest11]\n")[2].splitlines()[0]
    info = folder / "site" / "ddpshim-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddpshim\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[pytest11]\n" + declared.replace('"', ""))
    inherited = {name: value for name, value in environment().items() if not name.startswith("PYTEST_")}
    return {**inherited, "PYTHONPATH": os.pathsep.join([str(info.parent), inherited["PYTHONPATH"]])}


def test_a_foreign_repository(tmp_path: Path) -> None:
    """Programs are found from its tests/ too; an answer other than yes fails with its words, and so does no answer."""
    environ, folder = _make_project(tmp_path), tmp_path / "tests"
    _, said = start_afresh(["-c", PYTEST, "test_ddp.py", "-v", "--basetemp=made"], environ, folder, 120)
    failed = [("absent", "FAILED"), ("misspelled", "FAILED")]
    outcomes = re.findall(r"::test_(\w+) (\w+)", said.partition("= FAILURES =")[0])
    assert outcomes == [("unmodified", "PASSED"), ("port", "PASSED"), ("unwrapped", "FAILED"), *failed], said
    assert "\nthe same experiment: no\n  differs first in step 1: gradients of weight, bias, train.py:" in said
    assert "\n  usually: they are not reduced: the network is not wrapped" in said
    (page,) = {*re.findall(r"^page:  (.*)$", said, re.M)}  # also in pytest's summary, if CI is set
    command = f"python -m ddpshim check --log-dir={Path(page).parent} --nproc=2 --steps=2 --own-ddp "
    assert Path(page).read_text().startswith(f"# The same experiment: no\n\n```\n$ {command}")
    assert f"trian.py does not exist (in {tmp_path}): no rank could start it" in said
    assert "error: unrecognized arguments: --nprocs=2; did you mean --nproc?" in said
    assert "pytest_plugin.py:" not in said, "no line of ddpshim stands in the traceback"


def test_nothing_is_imported_before_a_test_asks(tmp_path: Path) -> None:
    environ = _make_project(tmp_path)
    assert "1 passed" in python("-m", "pytest", "tests/test_other.py", environ=environ, cwd=tmp_path)
    assert "same_experiment" in python("-m", "pytest", "--fixtures", environ=environ, cwd=tmp_path)


@pytest.mark.parametrize(
    ("program", "exit_code", "title", "files"),
    [
        ("--steps 2 train.py 'plain'", 0, "yes", ["check.log", "check.md", "one.log", "rank_0.log", "rank_1.log"]),
        ("trian.py; touch injected", 2, "cannot tell", ["check.log", "check.md"]),
    ],
)
def test_steps_of_the_action(tmp_path: Path, program: str, exit_code: int, title: str, files: list[str]) -> None:
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    _make_project(tmp_path)
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path / "src")])
    given = {"program": program, "python": str(tmp_path / "python")}
    inputs = {name: given.get(name, about.get("default")) for name, about in action["inputs"].items()}
    known = {"runner.temp": str(tmp_path / "temp"), **{f"inputs.{name}": value for name, value in inputs.items()}}
    # Instead of installing, it notes what would be.
    (tmp_path / "python").write_text(
        '#!/bin/sh\nif [ "$2" = pip ]; then echo "$@" > pip.txt; else exec python "$@"; fi\n'
    )
    (tmp_path / "python").chmod(0o755)
    (workflow,) = re.findall("```yaml\n(.*?)```", (ROOT / "docs" / "check.md").read_text(), re.DOTALL)
    assert {*yaml.safe_load(workflow)["jobs"]["same-experiment"]["steps"][-1]["with"]} <= {*inputs}
    github = {"PYTHONPATH": path, "GITHUB_ACTION_PATH": str(ROOT), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    install, check, upload = action["runs"]["steps"]
    for step, expected in ((install, 0), (check, exit_code)):
        own = {
            name: re.sub(r"\${{ (\S+) }}", lambda found: known[found[1]], text) for name, text in step["env"].items()
        }
        bash = "import os, sys; os.execvp('bash', ['bash', '--noprofile', '-eo', 'pipefail', '-c', sys.argv[1]])"
        code, said = start_afresh(["-c", bash, step["run"]], {**environment(), **github, **own}, tmp_path, 120)
        assert code == expected, said
    assert (tmp_path / "pip.txt").read_text() == f"-m pip install {ROOT}\n"
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith(f"# The same experiment: {title}\n\n```\n")
    assert f"{said.splitlines()[-1]}\n```\n" in summary
    assert ("note: the program can distribute itself; ddpshim did so here" in summary) == (not exit_code)
    assert (upload["if"], upload["with"]["path"]) == ("always()", check["env"]["LOGS"])
    assert sorted(file.name for file in (tmp_path / "temp" / "same-experiment").iterdir()) == files
    assert not (tmp_path / "injected").exists()
