"""What is built and installed: the wheel and the source distribution, the command, the extras."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import pytest

import ddpshim
import ddpshim.__main__ as command_line
from ddpshim import version
from tests.preloaded_commands import patience, python

ROOT = Path(__file__).parents[2]
INFO = f"ddpshim-{ddpshim.__version__}.dist-info"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    build = pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("built")
    sources = folder / "sources"
    tracked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(tracked, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, sources / name)
    # Without isolation nothing is installed: the setuptools that is here builds.
    command = [sys.executable, "-m", build.__name__, "--no-isolation", "--outdir", str(folder), str(sources)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=patience(300), check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Warning" not in ran.stdout + ran.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """A folder as `pip install` fills it: the wheel's library, and the command."""
    folder = built / "installed"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([*command, str(_wheel(built))], timeout=patience(300), check=True)
    return folder


def _wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def _metadata(built: Path) -> Message:
    with zipfile.ZipFile(_wheel(built)) as wheel:
        return Parser().parsestr(wheel.read(f"{INFO}/METADATA").decode())


def test_what_the_wheel_and_the_source_distribution_have(built: Path) -> None:
    """The library, the patch sets and the example, and nothing else; and what building and testing take."""
    sources = built / "sources"
    files = [file.relative_to(sources).as_posix() for file in sources.rglob("*") if file.is_file()]
    assert {"ddpshim/py.typed", "patches/robomimic/0.3.0/manifest.json", "examples/data/lift_bc.json"} <= {*files}
    expected = {f"{INFO}/licenses/LICENSE", *(file for file in files if file.startswith("ddpshim/"))}
    for folder, place in (
        (r"(patches)/.*", "ddpshim/patches"),
        (r"(docs)/\w+\.md", "ddpshim/docs"),
        (r"((?:MIGRATION|(?:examples/)?README)\.md)", r"ddpshim/\1"),
        (r"(examples/data)/.*(?<!README\.md)", "ddpshim/tools/lift"),
    ):
        found = (re.fullmatch(folder, file) for file in files)
        expected |= {match[0].replace(match[1], match.expand(place), 1) for match in found if match is not None}
    generated = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")}
    with zipfile.ZipFile(_wheel(built)) as wheel:
        assert {*wheel.namelist()} - generated == expected
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "bootstrap.py", "LICENSE", "CHANGELOG.md", "requirements/robomimic.txt"} <= names
    assert {"docs/launch.md", "tests/conftest.py", "examples/train_after.py", "patches/README.md"} <= names
    assert [name for name in names if name.endswith(".pyc") or ".venv" in name] == []


def test_metadata(built: Path) -> None:
    metadata = _metadata(built)
    assert metadata["Version"] == ddpshim.__version__ == version.__version__
    assert (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].split()[0] == version.__version__
    assert f"\nversion: {version.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert metadata["License-Expression"] == "MIT"
    required = metadata.get_all("Requires-Dist") or []
    assert {line.partition(";")[0].partition(">")[0] for line in required if "extra ==" not in line} == {
        "torch",
        "packaging",
    }
    assert "torch" in required, "a bound would have pip replace the user's torch"
    assert metadata.get_all("Provides-Extra") == ["completion", "report", "robomimic"]
    assert [line for line in required if "==" in line.partition(";")[0]] == [], "a pin would fight that of a trainer"
    assert not [line for line in required if line.startswith(("robomimic", "torchvision"))], "it would replace torch"
    shown = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {link.partition(":")[0] for link in re.findall(r"\]\(([^)]*)\)", shown)} <= {"https"}, "no file is there"
    assert "\n$ pip install ddpshim " in shown
    assert "pip install . " not in shown
    assert "git clone" not in shown


@pytest.mark.parametrize(
    ("python", "torch", "is_refused"),
    [
        ((3, 9), "2.0.1+cu117", True),
        ((3, 9), "2.1.0", False),
        ((3, 11), "2.1.0a0+git1", False),
        ((3, 12), "2.3.1", True),
        ((3, 12), "2.4.0", False),
        ((3, 13), "2.5.1", True),
        ((3, 14), "2.15.0", False),
    ],
)
def test_a_torch_that_is_too_old_is_refused_when_ddpshim_is_used(
    python: tuple[int, int], torch: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=torch, __spec__=sys.__spec__))
    monkeypatch.delitem(vars(ddpshim), "wrap_parallel", raising=False)
    if not is_refused:
        version.check_torch()
        return
    with pytest.raises(ImportError, match=f"^torch {re.escape(torch)} is too old for ddpshim, which needs 2"):
        ddpshim.wrap_parallel  # noqa: B018
    assert command_line.main(["run", "train.py"]) == 2


def test_the_command_does_what_the_module_does_in_any_folder(installed: Path, tmp_path: Path) -> None:
    # In one write: the ranks share a pipe.
    says = "sys.stdout.write(f'rank {os.environ[\"RANK\"]} {ddpshim.__file__}\\n')\n"
    (tmp_path / "trainer.py").write_text(f"import ddpshim, os, sys\n{says}")
    path = os.pathsep.join([str(installed / "bin"), os.environ["PATH"]])
    environ = {**os.environ, "PYTHONPATH": str(installed), "PATH": path}

    def run(*argv: str) -> str:
        ran = subprocess.run(
            argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=patience(240), check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    assert run("ddpshim", "docs", "MIGRATION") == (ROOT / "MIGRATION.md").read_text()
    (tmp_path / "tree" / "robomimic").mkdir(parents=True)
    status = ["patch", "status", "--target", "tree", "--set", "robomimic/0.3.0"]
    found = run("ddpshim", *status)
    assert found == run(sys.executable, "-m", "ddpshim", *status)
    assert found.startswith("robomimic/0.3.0 in ")
    assert "\nusage: ddpshim " in run("ddpshim", "--help")
    # A module of the folder that one is in, which a command does not find by itself.
    said = run("ddpshim", "run", "--nproc", "2", "--no-logs", "-m", "trainer").splitlines()
    home = installed / "ddpshim" / "__init__.py"
    assert {f"rank {rank} {home}" for rank in range(2)} <= set(said)


@pytest.mark.daily
@pytest.mark.launch
def test_the_package_has_the_types_that_it_says() -> None:
    """mypy finds nothing in the package, and in typed.py what it should."""
    python("-m", "mypy", cwd=ROOT)  # 20 s on a machine where torch is imported in 2; beside other tests, half as long
