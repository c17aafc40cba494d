"""Options: where a value may come from, what is refused and how, and that each one has its effect."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpshim
from ddpshim.errors import DataError, OptionsError
from ddpshim.observe.report import load
from ddpshim.options import Options
from ddpshim.process.job import current
from ddpshim.process.observed import PARTS
from evidence.equivalence import copy_release, make_config, make_data, train_all
from tests import options
from tests.ranks import run_ranks
from tests.robomimic import require

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Options.names():
        monkeypatch.delenv(f"DDPSHIM_{name.upper()}", raising=False)


# Reading


def test_an_argument_wins_over_its_variable_that_over_the_default() -> None:
    environ = {"DDPSHIM_TIMEOUT_S": "11", "DDPSHIM_SIDE_TIMEOUT_S": "21"}
    read = Options.read(environ, timeout_s=12)
    assert (read.timeout_s, read.side_timeout_s, read.keep_checkpoints) == (12, 21, 2)
    assert Options.read({}, timeout_s=None) == Options()
    assert Options.read({"DDPSHIM_GUARD": "maybe"}, guard="no").guard is False, "it is not looked at"
    assert Options.read({"DDPSHIM_TIMEOUT_S": "", "DDPSHIM_NONSENSE": " "}) == Options(), "empty is not set"


ALLOWED: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("background_save", True, ("true", "yes", "on", "1", " True ", "YES")),
    ("guard", False, ("false", "no", "off", "0", "False", False)),
    ("timeout_s", 600.0, ("600", "6e2", 600)),
    ("keep_checkpoints", 4, ("4", 4)),
    ("checkpoint_every_s", None, ("none", "null", None)),
    ("checkpoint_every_s", 12.5, ("12.5", 12.5)),
    ("backend", "nccl", ("NCCL", "nccl")),
    ("precision", "bf16", ("bf16",)),
    ("node_memory", False, (" OFF",)),
]


@pytest.mark.parametrize(("name", "value", "words"), ALLOWED)
def test_what_is_allowed(name: str, value: Any, words: tuple[Any, ...]) -> None:
    for raw in words:
        for found in (Options.read({f"DDPSHIM_{name.upper()}": str(raw)}), Options(**{name: raw})):
            assert getattr(found, name) == value
            assert type(getattr(found, name)) is type(value)


REFUSED: dict[str, tuple[Any, ...]] = {
    "timeout_s": ("soon", 0, "-1", "inf", math.nan, True, None),
    "keep_checkpoints": ("2.0", 2.0, 0, True, "1_0"),
    "checkpoint_every_n_steps": (0,),
    "guard": ("maybe", 1, None),
    "backend": ("nccll",),
    "lr_rule": ("cubic", None),
    "precision": ("fp8", "fp16"),
    "node_memory": (3, "disk"),
    "resume": (True,),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    for raw in REFUSED[name]:
        with pytest.raises(OptionsError) as caught:
            Options(**{name: raw})
        assert f"argument {name}: {raw!r}; allowed: " in str(caught.value)
        assert isinstance(caught.value, ValueError)
        if isinstance(raw, str):
            with pytest.raises(OptionsError, match=f"variable DDPSHIM_{name.upper()}: '{raw}'; allowed: "):
                Options.read({f"DDPSHIM_{name.upper()}": raw})


def test_all_that_is_wrong_is_told_in_one_message() -> None:
    environ = {"DDPSHIM_TIMEOUT_S": "soon", "DDPSHIM_GAURD": "0", "DDPSHIM_LAUNCHER": "none", "PATH": "/bin"}
    environ |= {"DDPSHIM_TRACEBACK": "1", "DDPSHIM_ROWS": " All", "DDPSHIM_UNEDITED": ""}
    with pytest.raises(OptionsError) as caught:
        Options.read(environ, lr_rule="cubic", resumes="all")
    *lines, last = str(caught.value).splitlines()
    assert lines == [
        "5 options are wrong:",
        "  - variable DDPSHIM_GAURD: no such option; did you mean DDPSHIM_GUARD?",
        "  - variable DDPSHIM_TRACEBACK: '1'; allowed: full",
        "  - argument: no option 'resumes'; did you mean resume?",
        "  - variable DDPSHIM_TIMEOUT_S: 'soon'; allowed: a number above 0",
        "  - argument lr_rule: 'cubic'; allowed: linear, sqrt or none",
    ]
    assert last.startswith("Nothing was started")
    with pytest.raises(OptionsError, match="lr_rule=sqrt without per_rank_batch"):
        Options.read({}, lr_rule="sqrt")


def test_a_variable_that_is_no_option() -> None:
    for variable in ("LAUNCHER", "UPSTREAM", "FAULT"):
        assert Options.read({f"DDPSHIM_{variable}": "x"}) == Options()
    for variable in ("QUEUE", "CLUSTER_NAME", "FOO", "INSTALL_DIR", "STATIC_GRAPH"):
        with pytest.warns(UserWarning, match=f"^DDPSHIM_{variable} is not an option and is ignored"):
            assert Options.read({f"DDPSHIM_{variable}": "x"}) == Options()
    for variable, meant in {
        **{"TIMEOUT": "TIMEOUT_S", "TIMEOUT_SECONDS": "TIMEOUT_S", "RECORD_DIR": "RECORD", "LAUCHER": "LAUNCHER"},
        **{"NODE_MEMORYS": "NODE_MEMORY", "NUM_CHECKPOINTS": "KEEP_CHECK"},
    }.items():
        text = f"variable DDPSHIM_{variable}: no such option; did you mean DDPSHIM_{meant}"
        with pytest.raises(OptionsError, match=text):
            Options.read({f"DDPSHIM_{variable}": "1"})


# What the world does with them


def test_the_world_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ddpshim.scale_lr(0.1, world_size=4) == pytest.approx(0.4)
    ddpshim.cleanup()
    monkeypatch.setenv("DDPSHIM_PER_RANK_BATCH", "1")
    monkeypatch.setenv("DDPSHIM_LR_RULE", "sqrt")
    here = ddpshim.setup()
    assert here.options == Options(per_rank_batch=True, lr_rule="sqrt")
    assert ddpshim.scale_lr(0.1, world_size=4) == pytest.approx(0.2)
    assert ddpshim.scale_lr(0.1, "linear", world_size=4) == pytest.approx(0.4)
    assert ddpshim.setup(options=here.options) is here
    text = r"setup\(options='all at their defaults'\), .* with options=\"per_rank_batch=True, lr_rule='sqrt'\""
    with pytest.raises(ddpshim.WorldError, match=text):
        ddpshim.setup(options=Options())
    ddpshim.cleanup()
    monkeypatch.setenv("DDPSHIM_TIMEOUT_S", "soon")
    with pytest.raises(OptionsError, match="variable DDPSHIM_TIMEOUT_S: 'soon'"):
        ddpshim.setup()
    assert current().world is None


def test_bf16_computes_in_bf16_and_sees_weights_that_were_stepped_inside() -> None:
    here = ddpshim.setup(options=Options(precision="bf16"), device="cpu")
    net = nn.Linear(2, 2, bias=False)
    with here.autocast():
        before = net(torch.ones(1, 2))
        with torch.no_grad():
            net.weight.fill_(1.0)
        after = net(torch.ones(1, 2))
        after.sum().backward()
    assert before.dtype == after.dtype == torch.bfloat16
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == torch.float32
    assert after.tolist() == [[2.0, 2.0]], "a cast of the old weights was kept"


# What ranks do with them


def _differ() -> str:
    rank = ddpshim.world().rank
    ddpshim.cleanup()
    with pytest.raises(OptionsError) as caught:
        ddpshim.setup(device="cpu", options=Options(keep_checkpoints=3 + rank))
    return str(caught.value)


@pytest.mark.ranks
def test_options_that_differ_between_ranks_are_refused_on_all() -> None:
    texts = run_ranks(_differ, 2)
    assert texts[0] == texts[1]
    assert texts[0].startswith("option keep_checkpoints is 3 on rank 0 and 4 on rank 1; ranks would train differently")


def _gradients() -> list[list[float]]:
    found = []
    for steps in (1, 2, 3):
        with ddpshim.shared_random_streams(0):
            net = ddpshim.wrap_parallel(nn.Linear(3, 1))
        x = torch.arange(36.0).reshape(12, 3)[ddpshim.world().rank :: 2]
        for part in ddpshim.accumulate({"x": [x], "name": "x"}, net, steps=steps):
            assert part["name"] == "x"
            (net(part["x"][0]).square().mean() / steps).backward()
        assert net.num_reductions == 1
        found.append(net.weight.grad.flatten().tolist())
    return found


@pytest.mark.ranks
def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    first, second = run_ranks(_gradients, 2)
    assert first == second
    for gradient in first[1:]:
        assert gradient == pytest.approx(first[0], rel=1e-6)
    with pytest.raises(DataError, match="a batch of 5 does not split into 2 equal parts"):
        next(ddpshim.accumulate(torch.zeros(5), steps=2))


# The docs


def test_the_page_has_the_table_and_every_option_is_read_somewhere() -> None:
    assert options.PAGE.read_text() == options.page(), "run python -m tests.options"
    page = (ROOT / "docs" / "options.md").read_text()
    assert all(f"\n| `{name}` | `DDPSHIM_{name.upper()}` |" in page for name in Options.names())
    assert len(Options.names()) <= 25
    code = "".join(p.read_text() for p in (ROOT / "ddpshim").rglob("*.py") if p.name != "options.py")
    unread = {n for n in Options.names() if not re.search(rf"(options|given|chosen|\(here\))\.{n}\b", code)}
    assert unread == set()


# The patched trainer


@pytest.mark.launch
@pytest.mark.robomimic
def test_the_recorded_times_of_a_training_add_up_to_upstreams_own(
    tmp_path: Path, releases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("0.3.0")
    tree = copy_release("0.3.0", releases)
    file = make_config(tree, "bc", make_data(tmp_path, num_demos=50), tmp_path, 10, 2)
    monkeypatch.setenv("OBSERVED_CLOCK", "1")  # two clocks that are not read at once agree, whatever else runs here
    [run] = train_all(tree, [(file, tmp_path / "two", 2)])
    assert run.exit_code == 0, run.log[-2000:]
    *_, rows = [[*rows.values()] for rows in load(run.folder / "out").passes("training").values()]
    assert [row["steps"] for row in rows] == [10, 10]
    upstreams = run.metrics()[1]  # a mean over the ranks, in minutes
    seconds = {part: statistics.mean(row["seconds"][part] for row in rows) for part in PARTS}
    assert sum(seconds.values()) == pytest.approx(60 * upstreams["Time_Epoch"], rel=1e-3)
    assert seconds["data_wait"] == pytest.approx(60 * upstreams["Time_Data_Loading"], rel=1e-3)
    assert seconds["data_wait"] == pytest.approx(10 * 50 / 1024, rel=1e-3), "a millisecond for each sample"
    assert seconds["compute"] + seconds["optimizer"] > 30 * upstreams["Time_Train_Batch"]
    assert min(seconds["optimizer"], seconds["compute"]) > 0
