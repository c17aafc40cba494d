"""`python -m evidence.new_release`: what a tree lacks is named, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddpshim.trainers.patching.unidiff import apply_moved, parse_diff
from evidence.equivalence import copy_release, source
from evidence.new_release import compared

DIFF = b"""--- a/bot/train.py
+++ b/bot/train.py
@@ -1,2 +1,3 @@
 import torch
+import ddpshim
 import bot
@@ -5 +6 @@
-    fit()
+    ddpshim.fit()
"""


def test_hunks_are_found_at_other_lines_if_they_stand_there_once() -> None:
    (diff,) = parse_diff(DIFF, "x.patch")
    moved = b"# new\nimport torch\nimport bot\n\n\n\ndef run():\n    fit()\n"
    patched = b"# new\nimport torch\nimport ddpshim\nimport bot\n\n\n\ndef run():\n    ddpshim.fit()\n"
    assert apply_moved(diff, moved) == (patched, [])
    twice, odd = apply_moved(diff, moved + b"    fit()\n")
    assert odd == ["line 5: 'fit()' and the lines after it occur at lines 9, 10"]
    assert twice.count(b"ddpshim.fit") == 0
    assert twice.count(b"import ddpshim") == 1
    assert apply_moved(diff, b"import torch\n")[1] == [
        "line 1: 'import torch' and the lines after it occur nowhere",
        "line 5: 'fit()' and the lines after it occur nowhere",
    ]


def test_a_hunk_without_lines_of_its_own_is_for_a_person() -> None:
    (diff,) = parse_diff(b"--- a/bot/train.py\n+++ b/bot/train.py\n@@ -1,0 +2 @@\n+import ddpshim\n", "x.patch")
    content, odd = apply_moved(diff, b"import torch\n")
    assert content == b"import torch\n"
    assert odd == ["line 1: has no unchanged line to find it by; place it by hand"]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if source("0.3.0") is None:
        pytest.skip("robomimic 0.3.0 is not installed (pip install --no-deps robomimic==0.3.0)")
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
