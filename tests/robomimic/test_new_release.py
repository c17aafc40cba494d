"""`python -m evidence.new_release`: what a tree lacks is named, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddpshim.trainers.patching.unidiff import apply_moved, parse_diff
from evidence.equivalence import copy_release
from evidence.new_release import compared
from tests.robomimic import require


def test_a_hunk_without_lines_of_its_own_is_for_a_person() -> None:
    (diff,) = parse_diff(b"--- a/bot/train.py\n+++ b/bot/train.py\n@@ -1,0 +2 @@\n+import ddpshim\n", "x.patch")
    content, odd = apply_moved(diff, b"import torch\n")
    assert content == b"import torch\n"
    assert odd == ["line 1: has no unchanged line to find it by; place it by hand"]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("0.3.0")
    return copy_release("0.3.0", tmp_path_factory.mktemp("release"), "plain")


@pytest.mark.robomimic
def test_a_release_that_is_known_lacks_nothing(released: Path) -> None:
    said, num_lacking = compared(str(released))
    assert num_lacking == 0
    assert said[0] == "ok      patch set robomimic/0.3.0 fits (not applied)"
    assert "ok      SequenceDataset makes samples as in 0.3.0" in said
    assert all(line.startswith("ok") for line in said)
    assert len(said) == 3


@pytest.mark.robomimic
def test_the_next_release_lacks_what_changed(released: Path, tmp_path: Path) -> None:
    tree = tmp_path / "robomimic"
    shutil.copytree(released / "robomimic", tree)
    for name, before, after in (
        ("scripts/train.py", '"""', '"""\nThe next one.\n'),
        ("utils/dataset.py", "def get_item(self, index):", "def get_item(self, index):\n        index = int(index)"),
    ):
        text = (tree / name).read_text()
        assert before in text
        (tree / name).write_text(text.replace(before, after, 1))
    said, num_lacking = compared(str(tree))
    lacking = [line[8:] for line in said if line.startswith("LACKING")]
    assert len(lacking) == num_lacking
    assert lacking[0] == "no patch set fits; the nearest is robomimic/0.3.0"
    assert "SequenceDataset makes samples by other code (digest " in lacking[-1]
    assert "ok        robomimic/algo/td3_bc.py: original" in said
    (train,) = (line for line in said if "scripts/train.py: changed upstream" in line)
    num_found, num_hunks = (int(word) for word in train.split("; ")[1].split() if word.isdigit())
    assert 0 < num_found <= num_hunks
