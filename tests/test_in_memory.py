"""Files that a patch set changes are patched when Python loads them; what cannot be patched is refused by name."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from ddpshim.errors import HookError
from ddpshim.trainers.patching import in_memory, patchset
from tests import droid
from tests.equivalence import copy_release, make_run_config, source
from tests.preloaded import START_DEADLINE_S, environment, start_afresh

FILES = {
    "areas/__init__.py": "",
    "areas/disc.py": "import math\n\n\ndef area(radius):\n    return math.pi * radius**2\n",
    "areas/tool.py": 'from areas.disc import area\n\nprint("area", area(1), __name__)\nresult = area(1)\n',
}
CHANGED = {
    "areas/disc.py": FILES["areas/disc.py"].replace(
        "    return math.pi * r", "    # twice\n    return 2 * math.pi * r"
    ),
    "areas/tool.py": FILES["areas/tool.py"].replace("result = area(1)", "result = area(1)\nfail = area(None)"),
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())


def make_set(root: Path, before: dict[str, str], after: dict[str, str]) -> None:
    """A patch set in the folder `root` from files and what they are to be."""
    root.mkdir(parents=True)
    diffs = [
        difflib.unified_diff(before[name].splitlines(True), text.splitlines(True), f"a/{name}", f"b/{name}", n=1)
        for name, text in after.items()
    ]
    (root / "01-all.patch").write_text("Description: twice\n---\n" + "".join(line for diff in diffs for line in diff))
    pristine = root.parent / "pristine"
    write(pristine, before)
    patchset.build_manifest(root, pristine, "1")


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    make_set(tmp_path / "sets" / "areas" / "1", FILES, CHANGED)
    return tmp_path / "sets"


@pytest.fixture
def load(
    tmp_path: Path, sets: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., in_memory.PatchedFiles]]:
    """Installs the package with these texts, and has it patched; all is as before at the end."""
    found: list[in_memory.PatchedFiles] = []

    def install(files: dict[str, str], **how: Any) -> in_memory.PatchedFiles:
        write(tmp_path / "tree", {**FILES, **files})
        monkeypatch.syspath_prepend(str(tmp_path / "tree"))
        found.append(in_memory.PatchedFiles(tmp_path / "tree" / "areas", sets, **how))
        sys.meta_path.insert(0, found[-1])
        return found[-1]

    yield install
    for finder in found:
        sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.split(".")[0] == "areas"]:
        del sys.modules[name]


PI = pytest.approx(3.14159, abs=1e-5)
TWO_PI = pytest.approx(6.28319, abs=1e-5)
Load = Callable[..., in_memory.PatchedFiles]


@pytest.mark.unit
def test_a_program_and_what_it_imports_are_patched_and_shown_as_they_run(load: Load, tmp_path: Path) -> None:
    files = load({})
    with pytest.raises(TypeError) as failed:
        runpy.run_module("areas.tool", run_name="__main__")
    frames = traceback.extract_tb(failed.tb)[-2:]
    assert [(frame.line, frame.lineno) for frame in frames] == [
        ("fail = area(None)", 5),
        ("return 2 * math.pi * radius**2", 6),
    ]
    assert frames[1].filename == f"{tmp_path}/tree/areas/disc.py, patched by ddpshim"
    disc = importlib.import_module("areas.disc")
    assert (disc.area(1), disc.__file__) == (TWO_PI, f"{tmp_path}/tree/areas/disc.py")
    assert "areas.disc: patched in memory" in files.report()
    assert files.set_name == "areas/1"
    assert files.refuse(disc) is None
    assert {name: (tmp_path / "tree" / name).read_text() for name in FILES} == FILES
    assert not list(tmp_path.rglob("disc*.pyc")), "another program would run it"


@pytest.mark.unit
def test_another_program_gets_the_files_as_they_are_but_for_those_that_are_named(load: Load) -> None:
    files = load({})
    assert importlib.import_module("areas.tool").result == PI
    assert (files.report(), files.set_name) == ([], None)


@pytest.mark.unit
def test_a_library_is_patched_for_every_program(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load({"areas/tool.py": FILES["areas/tool.py"] + "# edited\n"}, is_library="areas.disc".__eq__)
    assert importlib.import_module("areas.tool").result == TWO_PI, "patched by itself, whatever another file is"
    assert "no release" not in capsys.readouterr().err


@pytest.mark.unit
def test_moved_lines_are_patched_where_they_stand_once(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    moved = "# a fork of our own\n" + FILES["areas/disc.py"].replace("\n", "\r\n")
    load({"areas/disc.py": moved}, is_library="areas.disc".__eq__)
    assert importlib.import_module("areas.disc").area(1) == TWO_PI
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"ddpshim: \S+/areas is not a release that ddpshim knows; the lines of areas/1 occur once each in "
        r"areas/disc\.py, and are patched in memory\n",
        said,
    )


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            FILES["areas/disc.py"].replace("radius", "r"),
            "line 4: 'def area(radius):' and the lines after it occur nowhere",
        ),
        (FILES["areas/disc.py"] * 2, "line 4: 'def area(radius):' and the lines after it occur at lines 4, 9"),
    ],
)
def test_a_file_that_no_set_fits_is_refused_by_the_line(load: Load, text: str, why: str) -> None:
    files = load({"areas/disc.py": text}, is_library="areas.disc".__eq__)
    disc = importlib.import_module("areas.disc")  # a program may have no use for it
    assert disc.area(1) == PI
    assert f"areas/disc.py, 01-all.patch, {why}" in str(files.refuse(disc))


@pytest.mark.unit
def test_a_program_that_no_set_fits_is_refused(load: Load) -> None:
    load({"areas/tool.py": FILES["areas/tool.py"].replace("result", "outcome")}, is_library="areas.disc".__eq__)
    with pytest.raises(HookError, match=r"docs MIGRATION, section 2\)\. Or run a copy of the trainer from outside"):
        runpy.run_module("areas.tool", run_name="__main__")


@pytest.mark.unit
def test_a_library_that_no_set_fits_stops_only_those_who_use_it(load: Load) -> None:
    files = load({"areas/disc.py": FILES["areas/disc.py"] * 2}, is_library="areas.disc".__eq__)
    with pytest.raises(TypeError):  # of the line that the set adds to the program
        runpy.run_module("areas.tool", run_name="__main__")
    assert list(files.refused) == ["areas.disc"]
    assert "01-all.patch, line 4" in str(files.refuse(sys.modules["areas.disc"]))


@pytest.mark.unit
def test_a_file_that_is_patched_on_disk_is_left(load: Load) -> None:
    files = load({"areas/disc.py": CHANGED["areas/disc.py"]}, is_library="areas.disc".__eq__)
    disc = importlib.import_module("areas.disc")
    assert (disc.area(1), in_memory.patched_source(disc), files.refuse(disc)) == (TWO_PI, None, None)
    assert files.set_name is None


@pytest.mark.unit
def test_what_was_imported_before_cannot_be_patched_and_is_named(load: Load, tmp_path: Path) -> None:
    write(tmp_path / "tree", FILES)
    sys.path.insert(0, str(tmp_path / "tree"))
    disc = importlib.import_module("areas.disc")
    sys.path.pop(0)
    files = load({}, is_library="areas.disc".__eq__)
    assert re.match(r"areas\.disc: imported before ddpshim\.auto", str(files.refuse(disc)))
    with pytest.raises(HookError, match=r"areas\.disc: imported before ddpshim\.auto.* Move `import ddpshim\.auto`"):
        runpy.run_module("areas.tool", run_name="__main__")


@pytest.mark.unit
def test_a_file_is_known_by_its_path(load: Load, tmp_path: Path) -> None:
    files = load({})
    assert files.module_at((tmp_path / "tree" / "areas" / "tool.py").resolve()) == "areas.tool"
    assert files.module_at((tmp_path / "tree" / "areas" / "__init__.py").resolve()) is None


# The real trainer.

RELEASE = "0.3.0"


@pytest.mark.robomimic
@pytest.mark.parametrize("patch_set", patchset.load_sets(), ids=lambda patch_set: patch_set.name)
def test_every_hunk_of_a_set_stands_once_in_its_release(patch_set: patchset.PatchSet) -> None:
    """Or no fork of it could be patched. In memory it has the very text of the patched file."""
    tree = droid.source(patch_set.name) if "droid" in patch_set.codebase else source(patch_set.version)
    if tree is None:
        pytest.skip(f"DDPSHIM_UPSTREAM has no {patch_set.name} (see patches/README.md)")
    for name, hashes in patch_set.files.items():
        content = (tree / name).read_bytes()
        assert patchset.sha256(content) == hashes.original
        moved, num_hunks, odd = patchset.transform_moved(patch_set.patches, name, content)
        assert (patchset.sha256(moved), odd) == (hashes.patched, [])
        assert num_hunks > 0
    files = in_memory.PatchedFiles(tree / "robomimic")
    files.begin_program()
    texts = {name: files.source(name[: -len(".py")].replace("/", ".")) or b"" for name in patch_set.files}
    assert {name: patchset.sha256(text) for name, text in texts.items()} == {
        name: hashes.patched for name, hashes in patch_set.files.items()
    }


def _run(tree: Path, folder: Path, *command: str) -> tuple[int, str]:
    return start_afresh(["-m", "ddpshim", "run", "--nproc=2", *command], environment(tree), folder, START_DEADLINE_S)


def _rename(config: Path, name: str) -> None:
    """So that it asks nobody what to do with the directory of the run before."""
    settings = json.loads(config.read_text())
    settings["experiment"]["name"] = name
    config.write_text(json.dumps(settings))


@pytest.mark.launch
@pytest.mark.robomimic
def test_a_fork_is_patched_or_refused_and_its_trainers_copy_is_hooked(tmp_path: Path) -> None:
    tree = copy_release(RELEASE, tmp_path, "plain")
    config = make_run_config(tree, RELEASE, "td3_bc", tmp_path, 3, 1)
    trainer, algorithm = (tree / "robomimic" / name for name in ("scripts/train.py", "algo/td3_bc.py"))
    for file in (trainer, algorithm):
        file.write_text("# ours\n" + file.read_text())
    code, said = _run(tree, tmp_path, str(trainer), "--config", str(config))  # the path, not -m
    assert code == 0, said[-3000:]
    assert "global batch 100 = 2 ranks x 50" in said
    one_line = "the lines of robomimic/0.3.0 occur once each in robomimic/algo/td3_bc.py, robomimic/scripts/train.py"
    assert said.count(one_line) == said.count("finished run successfully") == 1

    # An algorithm that is somebody's own stops those who train it, and nobody else.
    text = algorithm.read_text()
    algorithm.write_text(text.replace("lam = self.algo_config.alpha /", "lam = self.algo_config.our_alpha /"))
    _rename(config, "own_loss")
    code, said = _run(tree, tmp_path, "-m", "robomimic.scripts.train", "--config", str(config))
    assert code == 1
    assert re.search(
        r"HookError: .*\n.*algo/td3_bc\.py, 03-model\.patch, line 289: '.*' and the lines after it occur nowhere", said
    )
    other = make_run_config(tree, RELEASE, "bc", tmp_path, 3, 1)
    code, said = _run(tree, tmp_path, "-m", "robomimic.scripts.train", "--config", str(other))
    assert code == 0, said[-3000:]
    algorithm.write_text(text)

    trainer.write_text(trainer.read_text().replace("device = TorchUtils.get_torch_device(", "device = get_device("))
    code, said = _run(tree, tmp_path, "-m", "robomimic.scripts.train", "--config", str(config))
    assert code == 1
    assert re.search(
        r"scripts/train\.py, 01-launch\.patch, line 350: 'device = .*' and the lines after it occur nowhere", said
    )

    copy = tmp_path / "my_train.py"
    copy.write_text(trainer.read_text().replace("device = get_device(", "device = TorchUtils.get_torch_device("))
    _rename(config, "copied")
    code, said = _run(tree, tmp_path, str(copy), "--config", str(config))
    assert code == 0, said[-3000:]
    assert "global batch 100 = 2 ranks x 50" in said
