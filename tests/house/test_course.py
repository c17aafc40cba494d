"""The quick start and the chapters of examples/course run to their end, print what they claim, show their pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.course import notebooks
from tests.preloaded import environment, start_afresh

FOLDER = Path(__file__).parents[2] / "examples" / "course"
DEADLINE_S = 240.0
SAID = {
    "../quick_start.py": [
        "$ python -m ddpshim run --nproc 2 -m robomimic.scripts.train --config ",
        "finished run successfully!",
        "epoch 3: loss 0.",
        "largest difference of a weight: ",
        "**Finished: every rank completed the training.**",
    ],
    "1_setup.py": [
        "'LOCAL_RANK': '0', 'GROUP_RANK': '1', 'WORLD_SIZE': '4'}; device cpu, backend gloo",
        "rank 0 of 1, no launcher, no process group",
        "mean 0.625",
        "by hand 4 folders, with run_on_main 1",
        "weights and permutations equal on all ranks; after split_random_streams() each draws its own noise",
        "rank 1 | ValueError: demonstration 17 has no actions",
    ],
    "2_training.py": [
        "on shares: error ",
        "trained past DDP ",
        "SyncError: Adam.step(): parameter 0 of group 0 ('net.0.weight' of Policy) has a gradient that is this rank's",
        "each step the same samples on 1, 2 and 4 ranks; by hand all epochs are alike",
        "  sqrt: 1 ranks 0.0010, 2 ranks 0.0014, 4 ranks 0.0020",
        "DataError: Global batch 3 does not split over 4 ranks",
        "10 samples, drop_last=False: rank 0 sees ",
    ],
    "3_communication.py": [
        "100M parameters: NVLink 1.6, PCIe 21.9, 10 Gbit Ethernet 560.0, here ",
        "ddpshim.accumulate: 1 x the bytes of one pass",
        "no_sync() forgotten: 4 x the bytes of one pass",
        "float32: 4.1 MB a step; float16: 2.1 MB",
    ],
    "4_checkpoints.py": [
        "ddpshim: net.0.weight; by hand: module.net.0.weight",
        "by_hand: 1000000 bytes, damaged: ",
        "{'epoch': 1}",
        "stopping with exit code 75",
        "80 steps on 2, 4 and 1 ranks, ended by SIGTERM and SIGKILL: from the unbroken run ",
        "40 noisy bf16 steps, ended after ",
    ],
}


def test_the_notebooks_are_made_from_the_scripts() -> None:
    for script in notebooks.scripts():
        text = script.read_text()
        code = [cell for cell in json.loads(notebooks.notebook(text))["cells"] if cell["cell_type"] == "code"]
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        found = [line for cell in code for line in "".join(cell["source"]).splitlines()]
        assert [line for line in found if line and not line.startswith("#")] == lines, "a line is in no cell"


def test_every_chapter_is_here() -> None:
    assert {(FOLDER / name).resolve() for name in SAID} == set(notebooks.scripts())


@pytest.mark.launch
@pytest.mark.parametrize("chapter", SAID)
def test_a_chapter_runs_and_says_what_it_claims(chapter: str, tmp_path: Path) -> None:
    # What is asserted in a chapter fails it; what is looked for here shows that it came to that line.
    # As a notebook: by its cells.
    if "quick_start" in chapter:
        pytest.importorskip("robomimic", reason="pip install --no-deps robomimic==0.3.0")
    command = [str(FOLDER / "notebooks.py"), str(FOLDER / chapter), "--quick"]
    code, output = start_afresh(command, {**environment(), "OMP_NUM_THREADS": "1"}, tmp_path, DEADLINE_S)
    assert code == 0, output[-5000:]
    at = 0
    for line in SAID[chapter]:
        at = output.find(line, at)
        assert at >= 0, f"{line!r} is not said, or not in its place:\n{output[-5000:]}"
    assert "picture" not in output
