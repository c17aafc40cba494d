"""The doctor: every page's examples, and what the command says, ignores, fixes and returns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ddpshim.__main__ import main
from ddpshim.tools.doctor.checking import check
from ddpshim.tools.doctor.findings import CODES, SEVERITIES
from ddpshim.tools.doctor.tree import Tree
from tests.idioms import HAZARDS, IDIOMS, program
from tests.preloaded_commands import patience

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "doctor"


def _examples(code: str) -> tuple[str, str]:
    """The failing and the fixed program of a page."""
    page = (PAGES / f"{code}.md").read_text()
    failing, fixed = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return failing, fixed


def _found(path: Path) -> list[tuple[str, int]]:
    return [(f.code, f.line) for f in check(path).findings]


@pytest.mark.parametrize("code", CODES)
def test_each_pages_failing_example_has_exactly_its_finding_and_the_fixed_one_none(code: str, tmp_path: Path) -> None:
    failing, fixed = _examples(code)
    path = tmp_path / "train.py"
    path.write_text(failing)
    marked = [(code, number) for number, line in enumerate(failing.split("\n"), 1) if line.endswith(f"# {code}")]
    assert len(marked) == 1
    assert _found(path) == marked
    path.write_text(fixed)
    assert _found(path) == []


@pytest.mark.parametrize("name", IDIOMS)
def test_correct_programs_have_no_finding(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program(name))
    assert _found(tmp_path / "train.py") == []


@pytest.mark.parametrize("name", HAZARDS)
def test_each_hazard_is_found_at_its_line_and_nothing_else(name: str, tmp_path: Path) -> None:
    text = program(name)
    (tmp_path / "train.py").write_text(text)
    marks = [re.search(r"# (DDP\d+)$", line) for line in text.split("\n")]
    assert _found(tmp_path / "train.py") == [(mark[1], number) for number, mark in enumerate(marks, 1) if mark]


# The programs of the pages that `--fix` mends on its own; DDP401 twice, by an argument and by a test.
FIXED = ["DDP105", "DDP202", "DDP203", "DDP401", "DDP503", "DDP504", "DDP603", "DDP604", "DDP701", "DDP702"]
TRAINER = (
    "import torch.distributed as dist\n"
    "from torch.nn.parallel import DistributedDataParallel\n"
    "def main(network, batches, folder):\n"
    "    dist.init_process_group()\n"
    "    model = DistributedDataParallel(network)\n"
    "    for batch in batches:\n"
    "        model(batch).mean().backward()\n"
)


_ONE_SEED = "torch.manual_seed(0) is the same on every rank and stays so:"


def _doctor(*arguments: object, code: int = 1) -> subprocess.CompletedProcess[bytes]:
    """What the command answers; `code` is its exit code."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "ddpshim", "doctor", *map(str, arguments)],
        env=environ,
        capture_output=True,
        timeout=patience(120),
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran


def _patch(path: Path) -> None:
    """Apply what `--fix` prints by GNU patch, without fuzz."""
    patch = ["patch", "-p1", "--fuzz=0", "--batch", "--forward", "--binary", "-s"]
    folder = path if path.is_dir() else path.parent
    subprocess.run(patch, input=check(path).diff(), cwd=folder, check=True, timeout=patience(120))


@pytest.mark.launch
@pytest.mark.parametrize("code", FIXED)
def test_the_printed_fix_applies_and_leaves_nothing_to_find(code: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    before = _examples(code)[0].replace("main(network", "main(  network")  # formatting that is nobody's business
    path.write_text(f"{before}\n\nif __name__ == '__main__':\n    main()\n")
    assert code in [f.code for f in check(tmp_path).findings]
    _patch(tmp_path)
    assert [f.code for f in check(tmp_path).findings if f.code == code] == []
    if "main(  network" in before:
        assert "main(  network" in path.read_text()


@pytest.mark.launch
def test_a_fix_touches_its_own_line_only_whatever_the_file_looks_like(tmp_path: Path) -> None:
    body = (
        TRAINER.replace("    ", "\t") + "\tos.makedirs( folder , 0o755 )  # è\n\ttorch.save(\n\t\tbatches, folder\n\t)"
    )
    text = "# whatever its encoding\nimport os, torch\n" + body + "\n"
    before = text.replace("\n", "\r\n").encode()[:-2]  # tabs, CRLF, no last newline
    (tmp_path / "train.py").write_bytes(before)
    _patch(tmp_path / "train.py")
    after = (tmp_path / "train.py").read_bytes()
    assert after == before.replace(b"0o755 )", b"0o755, exist_ok=True )").replace(
        b"\ttorch.save(\r\n\t\tbatches, folder\r\n\t)",
        b"\tif dist.get_rank() == 0:\r\n\t\ttorch.save(\r\n\t\t\tbatches, folder\r\n\t\t)",
    )
    assert _found(tmp_path / "train.py") == []


@pytest.mark.launch
def test_the_command_prints_the_diff_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_examples("DDP604")[0])
    ran = _doctor("--fix", path)
    assert ran.stdout == check(path).diff()
    assert b'\n-    os.environ["MASTER_PORT"] = "29500"' in ran.stdout
    assert b"DDP604" in ran.stderr
    assert path.read_text() == _examples("DDP604")[0]


def test_one_seed_is_reported_where_something_is_drawn_during_the_training(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    head, train = TRAINER.split("def main(network, batches, folder):\n")
    before = f"import torch\nfrom torch import nn\n{head}torch.manual_seed(0)\nx = torch.randn(8)\n"
    lines = textwrap.dedent(train)
    for text, drawn in (
        (before + lines, ""),  # data, once
        (before + "net = nn.Sequential(nn.Dropout(0.1))\n" + lines, "nn.Dropout"),
        (before + lines + "    x = torch.rand(8)\n", "torch.rand"),
    ):
        path.write_text(text)
        said = [f.message for f in check(path).findings if f.code == "DDP301"]
        assert said == ([] if not drawn else [f"{_ONE_SEED} all ranks draw equal numbers, for example by {drawn}."])


def test_what_takes_a_person_is_not_fixed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_examples("DDP204")[0])
    assert check(path).diff() == b""
    assert [f.fixable for f in check(path).findings] == [False]


def test_ignore_comments_select_and_ignore(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"import os\n{TRAINER}"
        "    os.remove(folder)\n"
        "    os.remove(folder)  # ddpshim: ignore[DDP404]\n"
        "    os.remove(folder)  # ddpshim: ignore[DDP401]\n"
        "    os.remove(\n"
        "        folder  # ddpshim: ignore[DDP401, DDP404] one rank only, by hand\n"
        "    )\n"
        "    os.makedirs(folder)  # ddpshim: ignore\n"
        "    os.makedirs('# ddpshim: ignore')\n"
    )
    assert _found(path) == [("DDP404", 9), ("DDP404", 11), ("DDP401", 16)]
    assert check(path).num_ignored == 3
    assert [f.code for f in check(path, select=["DDP401"]).findings] == ["DDP401"]
    assert [f.code for f in check(path, select=["DDP4"], ignore=["DDP404"]).findings] == ["DDP401"]
    assert check(path, ignore=["DDP4"]).findings == ()


@pytest.mark.launch
def test_json_has_a_stable_schema(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_examples("DDP203")[0])
    report = json.loads(_doctor("--json", path).stdout)
    assert list(report) == [
        "schema",
        "files",
        "lines",
        "programs",
        "distributed_programs",
        "ignored",
        "findings",
    ]
    assert (report["schema"], report["files"], report["programs"], report["distributed_programs"]) == (1, 1, 1, 1)
    assert report["findings"] == [
        {
            "path": str(path),
            "line": 10,
            "column": 15,
            "end_line": 10,
            "code": "DDP203",
            "name": "no-set-epoch",
            "severity": "error",
            "message": "set_epoch is never called for sampler: every epoch replays the order of the first.",
            "fix": CODES["DDP203"].fix,
            "fixable": True,
        }
    ]


@pytest.mark.launch
def test_exit_codes_and_what_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_examples("DDP604")[0])
    lines = _doctor(path).stdout.decode().splitlines()
    assert lines[0].startswith(f"{path}:8:5 DDP604 error os.environ['MASTER_PORT'] = '29500' replaces ")
    assert lines[1] == f"    fix: {CODES['DDP604'].fix}"
    assert lines[2] == "1 error; 1 trainer (1 distributed) in 1 files, 12 lines"
    path.write_text(_examples("DDP604")[1])
    assert _doctor(path, code=0).stdout.startswith(b"nothing found; ")
    assert b"nothing was checked" in _doctor(tmp_path / "none.py", code=2).stderr
    path.write_text("print('hello')\n")
    assert _doctor(path, code=2).stdout.startswith(
        b"no trainer in 1 file, 1 line: nothing was checked. A trainer calls "
    )
    assert b"no code begins with 'DDP9'" in _doctor("--select", "DDP9", path, code=2).stderr


def test_a_file_that_cannot_be_parsed_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{TRAINER}    input('go?')\nif __name__ == '__main__':\n    main()\n")
    (tmp_path / "broken.py").write_text("x = (\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00\x00")
    found = [(Path(f.path).name, f.code, f.line) for f in check(tmp_path).findings]
    assert found == [("binary.py", "DDP001", 1), ("broken.py", "DDP001", 1), ("train.py", "DDP402", 8)]
    assert check(tmp_path, exclude=["broken.py", "binary.py"]).num_files == 1


def test_a_trainer_of_one_process_has_them_to_come(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "def main(network, batches):\n"
        "    for batch in batches:\n"
        "        network(batch).mean().backward()\n"
        "    torch.save(network.state_dict(), input('where? '))\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    found = check(tmp_path).findings
    assert [(f.code, f.line, f.severity) for f in found] == [("DDP401", 5, "migration"), ("DDP402", 5, "migration")]
    *_, last = check(tmp_path / "train.py").as_text().splitlines()
    assert re.search(r"`python -m ddpshim run --nproc N \S*train.py` needs none of it", last)


def test_scripts_that_do_not_train_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import files\n{TRAINER}if __name__ == '__main__':\n    main()\n")
    (tmp_path / "files.py").write_text("import shutil\ndef clear(folder):\n    shutil.rmtree(folder)\n")
    (tmp_path / "clean.py").write_text("import files\nif __name__ == '__main__':\n    files.clear(input('what? '))\n")
    assert check(tmp_path).findings == ()
    (tmp_path / "train.py").write_text(
        f"import files\n{TRAINER}    files.clear(folder)\nif __name__ == '__main__':\n    main()\n"
    )
    assert [(Path(f.path).name, f.code) for f in check(tmp_path).findings] == [("files.py", "DDP404")]


def test_a_method_counts_where_its_class_is_used(tmp_path: Path) -> None:
    used = "class Store:\n    def tidy(self, folder):\n        shutil.rmtree(folder)\n"
    unused = "class Robot:\n    def tidy(self, folder):\n        input('is the table free?')\n"
    (tmp_path / "stores.py").write_text(f"import shutil\n{used}{unused}")
    (tmp_path / "train.py").write_text(
        f"from stores import Robot, Store\n{TRAINER}    Store().tidy(folder)\n"
        "def later(robot: Robot):\n    pass\nif __name__ == '__main__':\n    main()\n"
    )
    assert [f.code for f in check(tmp_path).findings] == ["DDP404"]


GUARDS = [
    "if dist.get_rank() == 0:\n        os.remove(folder)",
    "if not dist.get_rank():\n        os.remove(folder)",
    "if is_main_process() and folder:\n        os.remove(folder)",
    "if not distributed or dist.get_rank() == 0:\n        os.remove(folder)",
    "if dist.get_rank() != 0:\n        return\n    os.remove(folder)",
    "if dist.get_rank() == 0:\n        pass\n    else:\n        return\n    os.remove(folder)",
    "is_lead = dist.get_rank() == 0\n    if is_lead:\n        os.remove(folder)",
    "if use_ddp and dist.get_rank() != 0:\n        pass\n    else:\n        os.remove(folder)",
    "log = open(folder) if dist.get_rank() == 0 else None\n    if log is not None:\n        os.remove(folder)",
    "log = None\n    if dist.get_rank() == 0:\n        log = open(folder)\n    if log:\n        os.remove(folder)",
    "dist.get_rank() == 0 and os.remove(folder)",
    "if accelerator.is_main_process:\n        clear(folder)\ndef clear(folder):\n    os.remove(folder)",
    "if lead():\n        os.remove(folder)\ndef lead():\n    return dist.get_rank() == 0",
    "def clear():\n        os.remove(folder)\n    if dist.get_rank() == 0:\n        clear()",
    "def hook(a, b):\n        os.remove(folder)\n    accelerator.register_save_state_pre_hook(hook)\n"
    "    if accelerator.is_main_process:\n        accelerator.save_state(folder)",
    "once(folder)\n@rank_zero_only\ndef once(folder):\n    os.remove(folder)",
]


@pytest.mark.parametrize("guard", GUARDS)
def test_what_only_the_main_rank_does_is_no_finding(guard: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import os\n{TRAINER}    {guard}\n")
    assert _found(path) == []


@pytest.mark.parametrize(
    ("test", "line"),
    [
        ("if dist.get_rank() == 0 or folder:\n        os.remove(folder)", 10),
        ("if dist.get_rank() != 0 and folder:\n        pass\n    else:\n        os.remove(folder)", 12),
        ("if dist.get_rank() == 0:\n        pass\n    os.remove(folder)", 11),
        ("is_first = folder == 0\n    if is_first:\n        os.remove(folder)", 11),
    ],
)
def test_a_test_that_lets_every_rank_through_guards_nothing(test: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import os\n{TRAINER}    {test}\n")
    assert _found(path) == [("DDP404", line)]


def test_other_files_of_the_program_are_seen(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"from loop import advance\n{_examples('DDP203')[0]}        advance(loader, epoch)\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    (tmp_path / "loop.py").write_text("def advance(loader, epoch):\n    loader.sampler.set_epoch(epoch)\n")
    assert check(tmp_path).findings == ()


@pytest.mark.parametrize("framework", ["Fabric", "Accelerator"])
def test_what_a_framework_does_is_not_asked_for(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    package = {"Fabric": "lightning", "Accelerator": "accelerate"}[framework]
    path.write_text(
        f"from {package} import {framework}\nfrom torch.utils.data import DataLoader\n"
        f"def main(network, train_set):\n    runner = {framework}()\n"
        "    loader = runner.prepare(DataLoader(train_set, batch_size=8, shuffle=True))\n"
        "    for epoch in range(10):\n        for batch in loader:\n"
        "            runner.backward(network(batch).mean())\n"
    )
    assert _found(path) == []


@pytest.mark.launch
def test_no_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_examples("DDP203")[0])
    code = (
        "import sys; from ddpshim.__main__ import main; "
        f"code = main(['doctor', {str(tmp_path / 'train.py')!r}]); print(code, 'torch' in sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=patience(120), check=True
    )
    assert ran.stdout.splitlines()[-1] == "1 False"


def test_the_migration_of_the_examples_leaves_nothing_to_find() -> None:
    before, after = (ROOT / "examples" / f"train_{which}.py" for which in ("before", "after"))
    assert {f.code for f in check(before).findings} == {"DDP101", "DDP102", "DDP204", "DDP301", "DDP401"}
    assert {f.severity for f in check(before).findings} == {"migration"}
    assert check(after).findings == ()


def test_what_run_on_main_calls_runs_on_one_rank() -> None:
    assert check(ROOT / "examples" / "rloo").findings == ()


def test_the_pages_are_those_of_the_codes() -> None:
    assert {p.stem for p in PAGES.glob("DDP*.md")} == set(CODES)
    index = (PAGES / "index.md").read_text()
    for code in CODES.values():
        assert f"| [{code.code}]({code.code}.md) | {code.name} | {code.severity} |" in index
        assert code.severity in SEVERITIES
        page = " ".join((PAGES / f"{code.code}.md").read_text().split())
        assert page.startswith(f"# {code.code} {code.name} Severity: {code.severity}.")
        assert code.fix in page


FRAMEWORK_TRAINERS = {
    "Lightning": (
        "import pytorch_lightning as pl\n"
        "class Net(pl.LightningModule):\n"
        "    def training_step(self, batch, index):\n        return self(batch).mean()\n"
        "if __name__ == '__main__':\n    pl.Trainer(devices=2).fit(Net(), loader)\n"
    ),
    "Transformers": (
        "from transformers import Trainer\n"
        "class Ours(Trainer):\n    pass\n"
        "if __name__ == '__main__':\n    ours = Ours(model, train_dataset=data)\n    ours.train()\n"
    ),
    "timm": (
        "import timm.utils\n"
        "def main(model, loader, optimizer):\n    loss_scaler = timm.utils.NativeScaler()\n"
        "    for batch in timm.data.create_loader(loader):\n        loss = model(batch)\n"
        "        loss_scaler(loss, optimizer, parameters=model.parameters())\n"
        "if __name__ == '__main__':\n    main(torch.nn.parallel.DistributedDataParallel(model), loader, optimizer)\n"
    ),
    "Accelerate": (
        "from accelerate import Accelerator\n"
        "def main(network, optimizer, loader):\n    accelerator = Accelerator()\n"
        "    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)\n"
        "    for batch in loader:\n        accelerator.backward(network(batch).mean())\n        optimizer.step()\n"
        "if __name__ == '__main__':\n    main(*made())\n"
    ),
}


@pytest.mark.parametrize("framework", FRAMEWORK_TRAINERS)
def test_a_frameworks_trainer_is_a_trainer(framework: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FRAMEWORK_TRAINERS[framework])
    for path in (tmp_path, tmp_path / "train.py"):
        report = check(path)
        assert (report.num_programs, report.num_distributed, report.findings) == (1, 1, ())


def test_a_file_alone_brings_what_it_imports_of_its_project(tmp_path: Path) -> None:
    package = tmp_path / "ours" / "engines"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "steps.py").write_text(f"import shutil\n{TRAINER}    shutil.rmtree(folder)\n")
    (package / "other.py").write_text("never = imported(\n")
    (tmp_path / "ours" / "train.py").write_text("from .engines.steps import main\nmain(1, 2, 3)\n")
    (tmp_path / "script.py").write_text("from ours.engines import steps\nsteps.main(1, 2, 3)\n")
    for path in (tmp_path / "ours" / "train.py", tmp_path / "script.py"):
        found = check(path).findings
        assert [(Path(f.path), f.code, f.line) for f in found] == [(package / "steps.py", "DDP404", 9)]


def test_a_package_is_read_as_its_parent_folder_is(tmp_path: Path) -> None:
    """Also an installed one, in a project, and one file of it, without the other packages beside it."""
    package = tmp_path / "site-packages" / "ours"
    (package / "scripts").mkdir(parents=True)  # no __init__.py, as in robomimic
    (tmp_path / "pyproject.toml").touch()
    (package / "__init__.py").touch()
    (package / "steps.py").write_text(f"import shutil\n{TRAINER}    shutil.rmtree(folder)\n")
    script = "import theirs\nfrom ours.steps import main\nif __name__ == '__main__':\n    main(1, 2, 3)\n"
    (package / "scripts" / "train.py").write_text(script)
    (package.parent / "theirs.py").write_text("never = imported(\n")
    for path in (package, package / "scripts" / "train.py"):
        report = check(path)
        assert [(Path(f.path), f.code, f.line) for f in report.findings] == [(package / "steps.py", "DDP404", 9)]
        assert report.num_programs == 1
    (package / "scripts" / "train.py").write_text("import steps\n")  # the root is on the path
    tree = Tree(package, (), lambda shown: None)
    assert [s.path.name for source in tree.sources for s in tree.imports(source)] == ["steps.py"]


def test_what_only_the_name_of_a_method_leads_to_is_not_told_of(tmp_path: Path) -> None:
    """`store.finish()` is of an object that comes from elsewhere, not of the recorder that is made for its size."""
    (tmp_path / "recorder.py").write_text(
        "import shutil\nclass Recorder:\n    def finish(self):\n        shutil.rmtree(self.folder)\n"
    )
    (tmp_path / "train.py").write_text(
        f"from recorder import Recorder\n{TRAINER}    size = len(Recorder())\n    made().finish()\n"
        "if __name__ == '__main__':\n    main(1, 2, 3)\n"
    )
    assert check(tmp_path).findings == ()
    text = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(text.replace("made().finish()", "Recorder().finish()"))
    assert [f.code for f in check(tmp_path).findings] == ["DDP404"]


def test_functions_in_a_function_may_call_each_other(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    inner = "    def one():\n        two()\n        os.remove(folder)\n    def two():\n        one()\n    one()\n"
    path.write_text(f"import os\n{TRAINER}{inner}")
    assert _found(path) == [("DDP404", 11)]


def test_a_guard_is_seen_where_a_call_or_an_early_return_asks(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"import os\n{TRAINER}    network.save_pretrained(folder, is_main_process=dist.get_rank() == 0)\n"
        "    tidy(folder)\ndef tidy(folder):\n"
        "    if not folder or dist.get_rank() != 0:\n        return\n    os.remove(folder)\n"
    )
    assert _found(path) == []


def test_a_device_in_the_config_of_a_trainer_is_found_there(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("lr: 1.0e-4\ntraining:\n  device: 'cuda:0'  # the first\n")
    (tmp_path / "other.yaml").write_text("device: cuda:1\n")
    text = (
        "import torch, yaml\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "def main(network, batches):\n    cfg = yaml.safe_load(open('config.yaml'))\n"
        "    device = torch.device(cfg['training']['device'])\n"
        "    model = DistributedDataParallel(network.to(device))\n"
        "    for batch in batches:\n        model(batch).mean().backward()\n"
        "if __name__ == '__main__':\n    main(1, 2)\n"
    )
    (tmp_path / "train.py").write_text(text)
    for path in (tmp_path, tmp_path / "train.py"):
        found = check(path).findings
        assert [(Path(f.path).name, f.line, f.column, f.code) for f in found] == [("config.yaml", 3, 12, "DDP601")]
    (tmp_path / "train.py").write_text(text.replace("cfg['training']['device']", "'cuda', local_rank"))
    assert check(tmp_path).findings == ()


def test_a_note_alone_is_no_reason_to_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(_examples("DDP304")[0])
    assert main(["doctor", str(tmp_path / "train.py")]) == 0
    assert "DDP304 note" in capsys.readouterr().out
    (tmp_path / "train.py").write_text(_examples("DDP303")[0])
    assert main(["doctor", str(tmp_path / "train.py")]) == 1


def test_explain_prints_the_page_of_each_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--explain", "DDP203,DDP50"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith((PAGES / "DDP203.md").read_text())
    assert re.findall(r"^# (DDP\d+)", printed, re.MULTILINE) == [
        "DDP203",
        *(code for code in CODES if code.startswith("DDP50")),
    ]
