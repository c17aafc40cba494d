"""`check --read`: each rule's example before and after the change, correct programs, the command, and its precision."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from ddpshim.__main__ import main
from ddpshim.job.world import World
from ddpshim.tools.check.reading.command import read
from ddpshim.tools.check.reading.explanations import EXPLANATIONS
from ddpshim.tools.check.reading.rules import _OUR_COLLECTIVES, RULES
from evidence import reading_trees
from tests.idioms import HAZARDS, IDIOMS, program
from tests.preloaded_commands import patience

ROOT = Path(__file__).parents[2]
HEAD = """\
import itertools, os, time
import torch, ddpshim
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler
def main(network, dataset, batches, world, args, local_rank, epochs):
    dist.init_process_group()
"""


def _trainer(lines: str) -> str:
    """A distributed trainer around an example's lines; it wraps a network and trains unless these do."""
    wrap = "" if "model =" in lines else "model = DistributedDataParallel(network)\n"
    train = "" if "backward" in lines else "\nfor batch in batches:\n    model(batch).mean().backward()"
    return HEAD + textwrap.indent(wrap + lines + train, "    ") + "\n"


def _example(code: str, sign: str) -> str:
    """The trainer of an example before ("-") or after ("+") the change."""
    lines = EXPLANATIONS[code].example.splitlines()
    return _trainer("\n".join(line[2:] for line in lines if line[0] in f" {sign}"))


def _found(folder: Path, text: str) -> list[tuple[str, int]]:
    (folder / "train.py").write_text(text)
    return [(finding.code, finding.line) for finding in read(folder / "train.py").findings]


@pytest.mark.parametrize("code", EXPLANATIONS)
def test_a_rule_finds_its_example_and_not_the_corrected_one(code: str, tmp_path: Path) -> None:
    assert [found for found, _ in _found(tmp_path, _example(code, "-"))] == [code]
    assert _found(tmp_path, _example(code, "+")) == []


def test_each_rule_is_explained() -> None:
    assert RULES.keys() == EXPLANATIONS.keys()
    assert len(RULES) <= 20
    assert {about.severity for about in EXPLANATIONS.values()} == {"error", "warning"}


@pytest.mark.parametrize("name", IDIOMS)
def test_correct_programs_have_no_finding(name: str, tmp_path: Path) -> None:
    assert _found(tmp_path, program(name)) == []


@pytest.mark.parametrize("name", HAZARDS)
def test_each_hazard_is_found_at_its_line_and_nothing_else(name: str, tmp_path: Path) -> None:
    text = program(name)
    marks = [re.search(r"# (DDP\d+)$", line) for line in text.split("\n")]
    assert _found(tmp_path, text) == [(mark[1], number) for number, mark in enumerate(marks, 1) if mark]


OURS = """\
import ddpshim
def main(network, dataset):
    world = ddpshim.setup(seed=1)
    model = {model}
    loader = {loader}
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        if {test}:
            {call}
"""
GOOD = {
    "model": "ddpshim.wrap_parallel(network)",
    "loader": "ddpshim.make_loader(dataset, batch_size=8)",
    "test": "world.is_main",
    "call": "print(loss)",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        *(({"call": f"world.{name}(loss)"}, [("DDP502", 10)]) for name in sorted(_OUR_COLLECTIVES)),
        ({"call": "world.only_main(loss)"}, []),
        ({"call": "values.mean()"}, []),  # of a tensor
        ({"test": "world.world_size > 1", "call": "world.mean(loss)"}, []),
        ({"test": "not world.is_main", "call": "world.barrier()"}, [("DDP502", 10)]),
        ({"model": "network"}, [("DDP107", 8)]),
        ({"loader": "torch.utils.data.DataLoader(dataset, batch_size=8)"}, [("DDP204", 5)]),
        ({"loader": "ddpshim.make_loader(torch.utils.data.DataLoader(dataset, batch_size=8))"}, []),
    ],
)
def test_a_program_of_ddpshim(changes: dict[str, str], expected: list[tuple[str, int]], tmp_path: Path) -> None:
    assert _found(tmp_path, OURS.format(**{**GOOD, **changes})) == expected


def test_the_collectives_are_worlds() -> None:
    """One that is renamed would no longer be looked for."""
    assert [name for name in _OUR_COLLECTIVES if not callable(getattr(World, name, None))] == []


def test_a_helper_in_another_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "files.py").write_text("import torch\ndef save(net):\n    torch.save(net, 'last.pt')\n")
    text = HEAD + "    from files import save\n    model = DistributedDataParallel(network)\n    model(1).backward()\n"
    (tmp_path / "train.py").write_text(text + "    save(model)\n")
    (found,) = read(tmp_path).findings
    assert (Path(found.path).name, found.line, found.code) == ("files.py", 3, "DDP401")
    (tmp_path / "train.py").write_text(text + "    if dist.get_rank() == 0:\n        save(model)\n")
    assert read(tmp_path / "train.py").findings == []


def test_noise_that_is_drawn_once_for_the_data_may_be_equal(tmp_path: Path) -> None:
    noisy = "def noisy(rows):\n    return [row + torch.randn_like(row) for row in rows]\n"
    assert _found(tmp_path, _trainer("torch.manual_seed(1)\nbatches = noisy(batches)") + noisy) == []


def test_a_comment_ignores(tmp_path: Path) -> None:
    text = _example("DDP401", "-")
    for comment, is_found in (("ignore", False), ("ignore[DDP401]", False), ("ignore[DDP203]", True)):
        lines = [f"{line}  # ddpshim: {comment}" if "torch.save" in line else line for line in text.split("\n")]
        assert bool(_found(tmp_path, "\n".join(lines))) is is_found, comment


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    bad, good = (_example("DDP203", sign) for sign in "-+")
    for name, text in (("bad.py", bad), ("good.py", good), ("empty.py", "print(1)\n"), ("broken.py", "def (\n")):
        (tmp_path / name).write_text(text)
    assert main(["check", "--read", "good.py"]) == 0
    assert capsys.readouterr().out == "nothing found; 1 trainer (1 distributed) in 1 file, 15 lines\n"
    assert main(["check", "--read", "good.py", "bad.py"]) == 1
    first, do, *_, why = capsys.readouterr().out.splitlines()[1:]
    found = "set_epoch is never called for sampler"
    assert first == f"bad.py:10:15 DDP203 error {found}. {EXPLANATIONS['DDP203'].caused}"
    assert do == f"    do: {EXPLANATIONS['DDP203'].do}"
    assert why == "why, with an example: python -m ddpshim check --explain DDP203"
    assert main(["check", "--read", "empty.py"]) == 2
    assert "no trainer in 1 file: nothing was checked" in capsys.readouterr().out
    assert main(["check", "--read", "broken.py"]) == 2
    assert "not read: broken.py:1: " in capsys.readouterr().out
    assert main(["check", "--read", "absent.py"]) == 2
    assert main(["check", "--read", "-m", "package"]) == 2
    capsys.readouterr()
    assert main(["check", "--read", "--json", "bad.py"]) == 1
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert [(f["path"], f["line"], f["code"]) for f in report["findings"]] == [("bad.py", 10, "DDP203")]
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "bad.py"])
    assert "did you mean check --read?" in capsys.readouterr().err


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, code in ([], 0), (["DDP203"], 0), (["DDP9"], 2):
        with pytest.raises(SystemExit) as ended:
            main(["check", "--explain", *argv])
        assert ended.value.code == code
    out, err = capsys.readouterr()
    assert all(f"{code} {about.found}\n" in out for code, about in EXPLANATIONS.items())
    assert "    +     sampler.set_epoch(epoch)\n" in out
    assert "no code begins with 'DDP9'" in err


def test_a_trainer_of_one_process_is_told_what_the_second_rank_changes(tmp_path: Path) -> None:
    report = read(ROOT / "examples" / "train_before.py")
    assert {f.code for f in report.findings} == {"DDP101", "DDP102", "DDP204", "DDP301", "DDP401"}
    assert {f.severity for f in report.findings} == {"migration"}
    assert "python -m ddpshim run" in report.as_text()
    assert read(ROOT / "examples" / "train_after.py").findings == []
    by_hand = {f.code for f in read(ROOT / "examples" / "migration" / "by_hand.py").findings}
    assert {"DDP102", "DDP203"} <= by_hand


@pytest.mark.launch
def test_reading_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nloss.backward()\n")
    code = (
        "import sys; from ddpshim.__main__ import main; code = main(['check', '--read', 'train.py']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout=patience(60)
    )
    assert ran.returncode == 0


def test_at_least_nine_of_ten_findings_are_true_on_code_that_changed_no_rule() -> None:
    assert sum(reading_trees.trees().values()) >= 6
    counts = Counter((one.code, one.verdict) for one in reading_trees.judged() if one.is_held_out)
    assert {code for code, _ in counts} <= RULES.keys()
    for code in RULES:
        true, false = counts[code, "true"], counts[code, "false"]
        assert true >= 9 * false, code
    page = (ROOT / "docs" / "check.md").read_text()
    assert "\n".join(reading_trees.table()) in page
