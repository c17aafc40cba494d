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
from typing import Callable

import pytest
import torch

from ddpshim import adapters
from ddpshim.trainers import patching, patching_in_memory
from evidence.equivalence import copy_release, make_run_config, source
from tests import droid
from tests.preloaded import START_DEADLINE_S, environment, start_afresh
from tests.ranks import free_port

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
    patching.build_manifest(root, pristine, "1")


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    make_set(tmp_path / "sets" / "areas" / "1", FILES, CHANGED)
    return tmp_path / "sets"


Load = Callable[..., bool]
PI = pytest.approx(3.14159, abs=1e-5)
TWO_PI = pytest.approx(6.28319, abs=1e-5)


@pytest.fixture
def load(tmp_path: Path, sets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Installs the package with these texts, and has its tool patched; all is as before at the end."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(adapters, "packages", lambda: {"areas": "json"})
    monkeypatch.setattr(patching, "default_patches_root", lambda: sets)

    def install(files: dict[str, str], module: str = "areas.tool") -> bool:
        write(tmp_path / "tree", {**FILES, **files})
        monkeypatch.syspath_prepend(str(tmp_path / "tree"))
        return patching_in_memory.patch_program(module)

    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "areas"]:
        del sys.modules[name]


@pytest.mark.unit
def test_a_program_and_what_it_imports_are_patched_and_shown_as_they_run(load: Load, tmp_path: Path) -> None:
    assert load({})
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
    assert {name: (tmp_path / "tree" / name).read_text() for name in FILES} == FILES
    assert not list(tmp_path.rglob("disc*.pyc")), "another program would run it"


@pytest.mark.unit
def test_another_program_gets_the_files_as_they_are(load: Load) -> None:
    assert not load({}, "areas.other")
    assert importlib.import_module("areas.disc").area(1) == PI


@pytest.mark.unit
def test_moved_lines_are_patched_where_they_stand_once(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    assert load({"areas/disc.py": "# a fork of our own\n" + FILES["areas/disc.py"]})
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
def test_a_package_that_no_set_fits_is_left_as_it_is_with_the_lines(
    load: Load, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not load({"areas/disc.py": text})
    assert importlib.import_module("areas.disc").area(1) == PI
    said = capsys.readouterr().err
    assert "it is distributed as any other program (" in said
    assert f"areas/disc.py, 01-all.patch, {why}" in said


@pytest.mark.unit
def test_files_that_are_patched_on_disk_are_left(load: Load) -> None:
    assert load({"areas/disc.py": CHANGED["areas/disc.py"]})
    disc = importlib.import_module("areas.disc")
    assert disc.area(1) == TWO_PI
    assert not hasattr(disc.__loader__, "_source")
    del sys.modules["areas.disc"], sys.modules["areas"]
    assert not load(CHANGED)


@pytest.mark.unit
def test_a_file_is_known_by_its_path(load: Load, tmp_path: Path) -> None:
    load({})
    assert patching_in_memory.module_of(str(tmp_path / "tree" / "areas" / "tool.py")) == "areas.tool"
    assert patching_in_memory.module_of(str(tmp_path / "areas" / "tool.py")) is None
    assert patching_in_memory.module_of(str(tmp_path / "tree" / "tool.py")) is None


# The real trainer.

RELEASE, TRAINER = "0.3.0", ("-m", "robomimic.scripts.train")


@pytest.mark.robomimic
@pytest.mark.parametrize("patch_set", patching.load_sets(), ids=lambda patch_set: patch_set.name)
def test_every_hunk_of_a_set_stands_once_in_its_release(patch_set: patching.PatchSet) -> None:
    """Or no fork of it could be patched. In memory it has the very text of the patched file."""
    tree = droid.source(patch_set.name) if "droid" in patch_set.name else source(patch_set.version)
    if tree is None:
        pytest.skip(f"DDPSHIM_UPSTREAM has no {patch_set.name} (see patches/README.md)")
    for name, hashes in patch_set.files.items():
        content = (tree / name).read_bytes()
        assert patching.sha256(content) == hashes["original"]
        moved, odd = patching.transform(patch_set.patches, name, content, "patched", is_moved=True)
        assert odd == []
        assert patching.sha256(moved) == hashes["patched"]
        assert patching.transform(patch_set.patches, name, moved, "original") == (content, []), "it is reverted"
        assert moved != content
    found = patching_in_memory.fit(tree / "robomimic", [patch_set])
    texts = {name: found.sources[name[: -len(".py")].replace("/", ".")] for name in patch_set.files}
    assert {name: patching.sha256(text) for name, text in texts.items()} == {
        name: hashes["patched"] for name, hashes in patch_set.files.items()
    }
    assert found.lacking == []


def _train(
    tree: Path, config: Path, name: str, num_ranks: int, *program: str, num_endings: int = 1
) -> tuple[str, list[float]]:
    """What a training of this experiment's name prints, and its losses; under `run` if on several ranks."""
    settings = json.loads(config.read_text())
    settings["experiment"]["name"] = name  # so that it asks nobody what to do with the directory of the run before
    config.write_text(json.dumps(settings))
    run = ["-m", "ddpshim", "run", f"--nproc={num_ranks}"] if num_ranks > 1 else []
    command = [*run, *program, "--config", str(config)]
    code, said = start_afresh(command, environment(tree), config.parent, START_DEADLINE_S)
    assert code == 0, said[-3000:]
    assert said.count("finished run successfully") == num_endings, said[-3000:]
    return said, [float(number) for number in re.findall(r'"Loss": (\S+?),', said)]


@pytest.mark.launch
@pytest.mark.robomimic
def test_a_fork_is_patched_or_distributed_as_any_program_is(tmp_path: Path) -> None:
    tree = copy_release(RELEASE, tmp_path, "plain")
    config = make_run_config(tree, RELEASE, "td3_bc", tmp_path, 2, 1)
    trainer = tree / "robomimic" / "scripts" / "train.py"
    trainer.write_text("# ours\n" + trainer.read_text())
    said, patched = _train(tree, config, "patched", 2, str(trainer))  # the path, not -m
    assert said.count("the lines of robomimic/0.3.0 occur once each in robomimic/scripts/train.py") == len(patched) == 1
    assert _has_records(tmp_path, "patched")

    trainer.write_text(trainer.read_text().replace(".get_exp_dir(config)", ".get_exp_dir( config)"))
    said, losses = _train(tree, config, "own_folder", 2, *TRAINER)
    assert re.search(r"train\.py, 02-\S+\.patch, line 61: '.*' and the lines after it occur nowhere", said)
    assert "is trained by all ranks together" in said
    assert not _has_records(tmp_path, "own_folder")
    assert losses == pytest.approx(patched, rel=1e-6)


def _has_records(folder: Path, name: str) -> bool:
    return bool([*folder.glob(f"out/{name}/*/ddpshim")])


@pytest.mark.launch
@pytest.mark.robomimic
def test_the_set_and_a_trainer_of_ones_own_equal_one_process(tmp_path: Path) -> None:
    tree = copy_release(RELEASE, tmp_path, "plain")
    config = make_run_config(tree, RELEASE, "bc_rnn_gmm", tmp_path, 2, 2, train__batch_size=25)
    copy = tmp_path / "my_train.py"
    copy.write_text("import ddpshim.auto\n" + (tree / "robomimic" / "scripts" / "train.py").read_text())
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=3", f"--master_port={free_port()}"]
    _, losses = _train(tree, config, "one", 1, *TRAINER)
    said, losses_of_two = _train(tree, config, "two", 2, *TRAINER)
    assert said.count("is trained by all ranks together") == 1
    assert _has_records(tmp_path, "two")
    # torchrun shows what each rank prints.
    said, losses_of_three = _train(tree, config, "three", 1, *torchrun, str(copy), num_endings=3)
    assert "is trained by all ranks together" in said
    paths = [next(tmp_path.glob(f"out/{name}/*/models/model_epoch_2.pth")) for name in ("one", "two", "three")]
    one, *others = (torch.load(path, weights_only=False)["model"] for path in paths)
    assert len(losses) == 2
    assert losses_of_two == pytest.approx(losses, rel=1e-6)
    assert sorted(losses_of_three) == pytest.approx(sorted(losses * 3), rel=1e-6)
    assert max(float((one[key] - other[key]).abs().max()) for other in others for key in one) < 1e-5
