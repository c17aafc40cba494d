"""The cell magic `%%ddpshim`: what a cell gets, what comes back, errors and Ctrl-C; also in a real kernel."""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddpshim.launch import notebook
from tests.preloaded import working_in
from tests.preloaded_commands import python

CELLS = (
    """\
%load_ext ddpshim
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset""",
    """\
torch.manual_seed(0)
X = torch.randn(64, 8)
Y, lr = X.sum(1, keepdim=True), 0.1

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)

def train(num_epochs):
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    losses = []
    for _ in range(num_epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(policy(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return policy, optimizer, loader, losses
""",
    """\
state = torch.get_rng_state()
policy, optimizer, loader, losses = train(2)
alone = [one.detach() for one in policy.parameters()], losses, torch.rand(3)
torch.set_rng_state(state)""",
)
TRAINS = """\
%%ddpshim 2
policy, optimizer, loader, losses = train(2)
opposite, size = lambda x: -x, 3

class Config:
    size = size

    def twice(self):
        return 2 * self.size

config = Config()
print("trained by", len(losses), "steps")"""
SHOWS = """\
weights = [one.detach() for one in policy.parameters()]
said = {
    "weights": max(float((x - y).abs().max()) for x, y in zip(weights, alone[0])),
    "losses": max(abs(x - y) for x, y in zip(losses, alone[1])),
    "draws": bool((torch.rand(3) == alone[2]).all()),
    "same": [type(policy) is Policy, optimizer.param_groups[0]["params"][0] is next(policy.parameters())],
    "config": config.twice(),
    "kept": [type(loader) is DataLoader, "opposite" in globals()],
}
print("FOUND", __import__("json").dumps(said))"""

# Runs cells in a shell without a kernel, and prints the output and the error of each.
SHELL = """
import json, os, signal, threading, time
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

def interrupt():
    while not os.path.exists("ready"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
shell, found = InteractiveShell.instance(), []
for cell in json.load(open("cells.json")):
    if "ready" in cell:
        threading.Thread(target=interrupt, daemon=True).start()
    with capture_output() as out:
        result = shell.run_cell(cell, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    found.append([out.stdout + out.stderr, type(error).__name__, str(error)])
json.dump(found, open("found.json", "w"))
"""

# The same in a kernel.
KERNEL = """
import json, nbclient, nbformat
new = nbformat.v4
book = new.new_notebook(cells=[new.new_code_cell(cell) for cell in json.load(open("cells.json"))])
nbclient.NotebookClient(book, kernel_name="python3", timeout=300).execute()
json.dump(["".join(out["text"] for out in cell.outputs) for cell in book.cells], open("found.json", "w"))
"""


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def _run(folder: Path, *cells: str) -> list[list[str]]:
    pytest.importorskip("IPython", reason="pip install ipykernel nbclient")
    (folder / "cells.json").write_text(json.dumps(cells))
    (folder / "shell.py").write_text(SHELL)
    python("shell.py", environ=_environ(), cwd=folder, deadline_s=400)
    found: list[list[str]] = json.loads((folder / "found.json").read_text())
    return found


def _check(trained: str, shown: str) -> None:
    assert "\ntrained by 8 steps\n" in trained
    assert "ddpshim: back from the main rank: policy, optimizer, losses, size, config, Config\n" in trained
    assert "loader did not come back: a DataLoader of the ranks: create it again\n" in trained
    assert "opposite did not come back: Can't pickle <function <lambda> at " in trained
    found = json.loads(shown.partition("FOUND ")[2])
    assert found.pop("weights") < 1e-6
    assert found.pop("losses") < 1e-5
    assert found == {"draws": True, "same": [True, True], "config": 6, "kept": [True, False]}


@pytest.mark.launch
def test_a_cell_trains_as_in_one_process(tmp_path: Path) -> None:
    changes = "%%ddpshim 2 --no-logs\nsize += len(X)\nlosses.clear()\nlines = (line for line in [])\n"
    changes += "class Lost:\n    lines = lines\nlost = Lost()"
    found = _run(tmp_path, *CELLS, TRAINS, SHOWS, changes, "print(size, losses, 'lost' in dir(), 'Lost' in dir())")
    assert [error for _, *error in found] == [["NoneType", "None"]] * len(found)
    _check(found[3][0], found[4][0])
    assert "main rank: losses, size\n" in found[5][0]  # not X, which is as it was
    assert "ddpshim: Lost did not come back: NameError(\"name 'lines' is not defined\")\n" in found[5][0]
    assert "ddpshim: lost did not come back: it needs Lost\n" in found[5][0]
    assert found[6][0] == "67 [] False False\n"


@pytest.mark.launch
def test_a_cell_that_fails_or_is_interrupted_changes_nothing(tmp_path: Path) -> None:
    fails = "%%ddpshim 2\nsize, other = 4, 5\n\ndef last(x):\n    return half(x) + missing\n\nlast(size)"
    loops = "%%ddpshim 2 --grace 5\nimport time\nsize = 4\nopen('ready', 'w').close()\nwhile True: time.sleep(0.05)"
    cells = ("%load_ext ddpshim\nsize = 3\n", "def half(x):\n    return x / 2", fails, loops)
    ends = "%%ddpshim 2\nsize = 4\nraise SystemExit"
    found = _run(
        tmp_path,
        *cells,
        ends,
        "print(size, 'other' in dir(), 'last' in dir())",
        "%%ddpshim\nsize = 4",
        "%%ddpshim 2\nx = =",
    )
    assert [kind for _, kind, _ in found] == [
        *("NoneType", "NoneType", "CellError", "KeyboardInterrupt", "NoneType", "NoneType", "CellError", "SyntaxError")
    ]
    said = found[2][0]
    assert 'cell.py", line 7, in <module>\n    last(size)' in said
    assert 'cell.py", line 5, in last\n    return half(x) + missing' in said
    assert found[2][2].startswith("`run` ended with exit code 1, and its last lines say why; no variable ")
    assert "SIGINT, passed on to the ranks" in found[3][0]
    assert "the cell ended by sys.exit, so no variable came back" in found[4][0]
    assert found[5][0] == "3 False False\n"
    assert "--nproc=gpu, but torch sees no GPU" in found[6][0]
    assert working_in(tmp_path) == []


@pytest.mark.launch
def test_a_kernel_streams_the_output(tmp_path: Path) -> None:
    for name in ("ipykernel", "nbclient"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"pip install {name}")
    (tmp_path / "cells.json").write_text(json.dumps([*CELLS, TRAINS, SHOWS]))
    python("-c", KERNEL, environ=_environ(), cwd=tmp_path, deadline_s=400)
    trained, shown = json.loads((tmp_path / "found.json").read_text())[3:]
    _check(trained, shown)


def _given(monkeypatch: pytest.MonkeyPatch, folder: Path, cell: str, *cells: str) -> str:
    """Return the first line of the program of a cell, in a notebook in which other cells have run."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for number, source in enumerate(cells):
        exec(compile(source, f"cell {number}", "exec", dont_inherit=True), vars(main))
    vars(main)["In"] = [*cells, ""]
    compiler = SimpleNamespace(flags=0, cache=lambda source, number: "<cell>")
    shell = SimpleNamespace(user_ns=vars(main), user_ns_hidden={}, compile=compiler, execution_count=len(cells))
    notebook._give(shell, "\n" + cell, str(folder))
    assert (folder / "cell.py").read_text().splitlines()[1:-1] == cell.splitlines()
    return (folder / "cell.py").read_text().splitlines()[0]


def test_what_a_cell_gets_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "import os.path\nimport os\nfrom torch import nn\nimport json as js, ast\nscale = 2"
    second = "def f(x):\n    return g(x)\ndef g(x):\n    return nn.ReLU()(x) * scale\n"
    second += "class A:\n    relu = staticmethod(nn.functional.relu)\na = A()\nunused = open"
    got = _given(monkeypatch, tmp_path, "os.getcwd()\nf(a)\nast = 1\njs = lambda js: js", first, second)
    assert got.startswith("import os.path; import os; from torch import nn; __import__('ddpshim.launch.notebook'")
    plan = notebook._load(str(tmp_path), "given", "cpu")
    assert [marshal.loads(code).co_names for code in plan["defined"]] == [("f",), ("g",), ("A",)]
    assert sorted(notebook._load(str(tmp_path), "given.variables", "cpu")) == ["a", "scale"]
    program: dict[str, Any] = vars(sys.modules["__main__"])
    for name in ("f", "g", "A", "a", "scale"):
        del program[name]
    program["__file__"] = str(tmp_path / "cell.py")
    notebook.enter(program)
    assert (program["scale"], type(program["a"])) == (2, program["A"])
    assert program["f"].__code__.co_filename == str(tmp_path / "cell_1.py")


def test_what_cannot_be_given_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = "import torch\nnet = torch.nn.Linear(1, 1)\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
    made += "file = (line for line in [])\ndef f():\n    return 1\nf2 = f\ndel f\n"
    again = "def g():\n    return 1"
    with pytest.raises(notebook.CellError, match=r"cannot get: file \(.*generator.*\); opt \(a SGD, which the ranks m"):
        _given(monkeypatch, tmp_path, "opt.step(file)\n", made)
    with pytest.raises(notebook.CellError, match=r"cannot get: f2 \(no cell defines it as it is now\)"):
        _given(monkeypatch, tmp_path, "f2()", made)
    with pytest.raises(notebook.CellError, match=r"cannot get: g \(no cell defines it as it is now\)"):
        _given(monkeypatch, tmp_path, "g()", again, "real = g\ndel g\nexec('def g():\\n    return 2')")
    _given(monkeypatch, tmp_path, "opt = 1\nopt + 1", made)  # it makes its own
