"""Patch sets merged into forks of small codebases made on the spot: all or nothing, and back byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ddpshim.__main__ import main
from ddpshim.errors import PatchError, TargetError
from ddpshim.trainers.patching import files as patching
from ddpshim.trainers.patching.files import revert, status
from ddpshim.trainers.patching.merging import merge
from tests.robomimic.test_patching import PATCHED, TRAIN, TRAIN_PATCHED, Toy, assert_holds, contents, toy

__all__ = ["toy"]  # the fixture
MINE = TRAIN.replace("import torch\n", "# mine\nimport torch\n") + "\n\ndef mine():\n    return 1\n"
MINE_PATCHED = TRAIN_PATCHED.replace("import torch\n", "# mine\nimport torch\n") + "\n\ndef mine():\n    return 1\n"
# A line of the fork stands where a hunk's context ends: its lines stand nowhere together.
CLOSE = TRAIN.replace("import torch\n\n", "import torch\nimport numpy\n\n")


def _fork(toy: Toy, train: str) -> dict[str, bytes]:
    (toy.package / "train.py").write_bytes(train.encode())
    return contents(toy.package)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_hunks_go_where_their_lines_stand_and_come_out_again(toy: Toy, newline: str) -> None:
    before = _fork(toy, MINE.replace("\n", newline))
    trial = merge(toy.target, patches_root=toy.patches, is_trial=True)
    assert trial.changed == ("toybot/common.py", "toybot/sub/loop.py", "toybot/train.py")
    assert contents(toy.package) == before
    done = merge(toy.target, patches_root=toy.patches)
    assert done.changed == trial.changed
    assert_holds(toy.package, {**PATCHED, "train.py": MINE_PATCHED.replace("\n", newline)})
    assert status(toy.target, patches_root=toy.patches).state == "applied"
    assert merge(toy.target, patches_root=toy.patches).changed == ()
    assert revert(toy.target, patches_root=toy.patches).changed == done.changed
    assert contents(toy.package) == before


def test_a_release_is_patched_as_without_merging(toy: Toy) -> None:
    merge(toy.target, patches_root=toy.patches)
    assert_holds(toy.package, PATCHED)
    assert "content" not in (toy.package / patching.JOURNAL).read_text()


def test_a_conflict_changes_nothing_and_shows_the_place(toy: Toy) -> None:
    before = _fork(toy, CLOSE)
    with pytest.raises(
        PatchError, match=r"cannot be merged(.|\n)*train.py, 01-launch.patch, line 1: .* nowhere"
    ) as error:
        merge(toy.target, patches_root=toy.patches)
    assert "--base FOLDER merges three ways" in str(error.value)
    assert contents(toy.package) == before


@pytest.mark.launch
def test_three_ways(toy: Toy, tmp_path: Path) -> None:
    """Lines of the fork beside those of a hunk; and a conflict where both changed one line."""
    shutil.copytree(toy.package, tmp_path / "release" / "toybot")
    base = str(tmp_path / "release")
    twice = "\n\ndef mine(model):\n    model.fit()\n"  # a line of the set, a second time
    for train, place in ((TRAIN + twice, ""), (CLOSE, "line 2:\n<<<<<<< yours\nimport numpy")):
        before = _fork(toy, train)
        if place:
            with pytest.raises(PatchError) as error:
                merge(toy.target, base, patches_root=toy.patches)
            assert f"toybot/train.py, {place}\n=======\nimport ddpshim\n>>>>>>> toybot-1.0" in str(error.value)
        else:
            with pytest.raises(PatchError, match="occur at lines 6, 11"):
                merge(toy.target, patches_root=toy.patches)
            merge(toy.target, base, patches_root=toy.patches)
            assert_holds(toy.package, {**PATCHED, "train.py": TRAIN_PATCHED + twice})
            revert(toy.target, patches_root=toy.patches)
        assert contents(toy.package) == before
    (tmp_path / "release" / "toybot" / "common.py").write_text("other = 1\n")
    with pytest.raises(TargetError, match=r"common.py is not as in toybot/1.0"):
        merge(toy.target, base, patches_root=toy.patches)
    assert contents(toy.package) == before


def test_an_edit_after_the_merge_is_not_lost(toy: Toy) -> None:
    _fork(toy, MINE)
    merge(toy.target, patches_root=toy.patches)
    with open(toy.package / "train.py", "a") as file:
        file.write("# later\n")
    edited = contents(toy.package)
    with pytest.raises(PatchError, match="not a release that ddpshim knows"):
        revert(toy.target, patches_root=toy.patches)
    assert contents(toy.package) == edited


def test_an_interrupted_merge_is_put_back(toy: Toy) -> None:
    before = _fork(toy, MINE)
    merge(toy.target, patches_root=toy.patches)
    (toy.package / "train.py").write_bytes(before["train.py"])
    assert status(toy.target, patches_root=toy.patches).state == "partly applied"
    with pytest.raises(PatchError, match="was interrupted"):
        merge(toy.target, patches_root=toy.patches)
    revert(toy.target, patches_root=toy.patches)
    assert contents(toy.package) == before


def test_a_journal_that_was_tampered_with_puts_nothing_back(toy: Toy) -> None:
    _fork(toy, MINE)
    merge(toy.target, patches_root=toy.patches)
    journal = toy.package / patching.JOURNAL
    record = json.loads(journal.read_text())
    record["files"]["toybot/train.py"]["content"] = "AAAA"
    journal.write_text(json.dumps(record))
    merged = contents(toy.package)
    with pytest.raises(PatchError):
        revert(toy.target, patches_root=toy.patches)
    assert contents(toy.package) == merged


def test_base_belongs_to_merging(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "apply", "--target", toy.target, "--base", "x"]) == 2
    assert "--base without --merge" in capsys.readouterr().err
