"""A trainer that nobody edited: it is the patched one, patched in memory or hooked; in one process the plain one."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from ddpshim.errors import HookError
from ddpshim.job.world import World
from ddpshim.robomimic import stand_ins
from ddpshim.robomimic.replay import Replay
from ddpshim.trainers import swapping
from tests import equivalence
from tests.equivalence import Run, batches, copy_release, fork, largest_difference, make_run_config, train_all
from tests.preloaded import START_DEADLINE_S, environment, start_afresh

ROOT = Path(__file__).parent.parent
RELEASE = "0.3.0"
ALGORITHMS = ("bc", "bc_rnn_gmm", "bcq", "hbc", "td3_bc")


# Functions that run others in their place.


def _greet(name: str, mark: str = "!", *, times: int = 1) -> str:
    return f"hello {name}{mark}" * times


@pytest.fixture
def given_back() -> Iterator[None]:
    yield
    swapping.swap_back()


@pytest.mark.unit
@pytest.mark.usefixtures("given_back")
def test_who_held_a_function_before_gets_the_stand_in() -> None:
    held, signature, code = _greet, inspect.signature(_greet), _greet.__code__

    def shout(original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        return original(*args, **kwargs).upper()

    swapping.swap("tests.greet", _greet, shout, lambda names: names["__name__"] == __name__)
    assert held is _greet
    assert held("you", times=2) == "HELLO YOU!HELLO YOU!"
    assert inspect.signature(held) == signature
    elsewhere: dict[str, Any] = {"greet": held, "__name__": "elsewhere"}
    exec("said = greet('you', '?')", elsewhere)
    assert elsewhere["said"] == "hello you?", "the original is for everybody else"
    swapping.swap_back()
    assert held("you") == "hello you!"
    assert (inspect.signature(held), held.__code__) == (signature, code)


@pytest.mark.unit
@pytest.mark.usefixtures("given_back")
def test_a_stand_in_reaches_the_original_through_what_others_put_around_it() -> None:
    swapping.swap("tests.greet", _greet, lambda original, name: f"<{(lambda n: _greet(n))(name)}>", lambda names: True)
    assert _greet("you") == "<hello you!>"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_greet, r"x\.greet\(name, mark, times\) in .*test_auto\.py is not .* \('times' is new to them\)"),
        (lambda name: name, r"'mark' is missing"),
        (print, "is <built-in function print>, not a plain function"),
        (None, "is None, not a plain function"),
    ],
)
def test_a_function_that_is_not_known_is_refused_by_name(function: Any, text: str) -> None:
    with pytest.raises(HookError, match=text):
        swapping.refuse_unknown("x.greet", function, ["name", "mark"], ["never"])


# Epochs that are told again.


@pytest.mark.unit
def test_a_trainer_is_told_again_what_it_was_told() -> None:
    here, asked = World(device=torch.device("cpu")), []

    def ask(replay: Replay, epoch: int) -> tuple[Any, ...]:
        kept = replay.begin_epoch(epoch)
        out = [replay.answer("training", lambda: asked.append(epoch) or len(asked))]
        replay.end_epoch()
        out += [replay.answer("validation", lambda: asked.append(epoch) or len(asked)) for _ in range(2)]
        return (*out, replay.is_past, kept)

    first = Replay(here)
    told = [ask(first, epoch) for epoch in (1, 2, 3)]
    assert [said[:3] for said in told] == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    second = Replay(here)
    second.go_on(told[-1][-1], 3)
    start = second.now
    again = [ask(second, epoch) for epoch in (1, 2)]
    assert [said[:4] for said in again] == [(1, 2, 3, True), (4, 5, 6, True)]
    assert asked == [1] * 3 + [2] * 3 + [3] * 3, "past epochs asked nobody"
    past = second.now - start
    assert past == pytest.approx(told[-1][-1]["clock", 2][0])
    live = ask(second, 3)
    assert live[:4] == (10, 11, 12, False)
    assert second.now - start >= past, "the clock goes on from where it was"


# The real trainer.

pytest_robomimic = pytest.mark.robomimic


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> dict[tuple[str, int, str], Run]:
    """Each algorithm on one rank, patched, and on two ranks: patched on disk, in memory, and hooked."""
    if equivalence.source(RELEASE) is None:
        pytest.skip(f"robomimic {RELEASE} is not installed (pip install --no-deps robomimic==0.3.0)")
    folder = tmp_path_factory.mktemp("auto")
    out = {}
    for way, sizes in (("patched", (1, 2)), ("unedited", (2,)), ("hooked", (2,))):
        tree = copy_release(RELEASE, releases, way)
        made = {name: make_run_config(tree, RELEASE, name, folder, 5, 2) for name in ALGORITHMS}
        keys = [(name, size, way) for name in ALGORITHMS for size in sizes]
        jobs = [(made[name], folder / f"{name}-{size}-{way}", size) for name, size, _ in keys]
        out.update(zip(keys, train_all(tree, jobs)))
    return out


@pytest_robomimic
@pytest.mark.parametrize("way", ["unedited", "hooked"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_unedited_it_is_the_patched_trainer(runs: dict[tuple[str, int, str], Run], name: str, way: str) -> None:
    one, patched, unedited = runs[name, 1, "patched"], runs[name, 2, "patched"], runs[name, 2, way]
    assert (one.exit_code, patched.exit_code, unedited.exit_code) == (0, 0, 0), unedited.log[-3000:]
    assert len(unedited.observed) == len(patched.observed) == 2
    for there, here in zip(patched.observed, unedited.observed):
        assert largest_difference(there["networks"], here["networks"]) == 0
    assert unedited.losses() == patched.losses()
    assert len(unedited.losses()) == 2
    assert batches(unedited, unedited.batch_size) == batches(one, one.batch_size)
    weights = [observed["networks"] for observed in unedited.observed]
    assert largest_difference(*weights) == 0
    assert largest_difference(one.observed[0]["networks"], weights[0]) < 1e-5
    assert largest_difference(one.observed[0]["initial"], weights[0]) > 1e-4, "nothing was trained"
    written = [
        sorted(p.name for p in run.folder.glob("out/*/*/*/*") if "tf" not in p.name) for run in (patched, unedited)
    ]
    assert written[0] == written[1]


@pytest_robomimic
@pytest.mark.upstream
@pytest.mark.parametrize(
    ("release", "names"),
    [("0.4.0", ["bc"]), ("0.5.0", ["bc_transformer_gmm", "diffusion_policy"]), ("master", ["diffusion_policy"])],
)
@pytest.mark.parametrize("way", ["unedited", "hooked"])
def test_other_releases_unedited_are_the_patched_ones(
    release: str, names: list[str], way: str, tmp_path: Path, releases: Path
) -> None:
    if equivalence.source(release) is None:
        pytest.skip(f"DDPSHIM_UPSTREAM has no robomimic-{release} (see patches/README.md)")
    runs = {}
    for how in ("patched", way):
        tree = copy_release(release, releases, how)
        made = [make_run_config(tree, release, name, tmp_path, 5, 2) for name in names]
        jobs = [(config, tmp_path / f"{name}-{how}", 2) for name, config in zip(names, made)]
        runs[how] = train_all(tree, jobs)
    for patched, unedited in zip(runs["patched"], runs[way]):
        assert (patched.exit_code, unedited.exit_code) == (0, 0), unedited.log[-3000:]
        assert len(unedited.observed) == len(patched.observed) == 2
        for there, here in zip(patched.observed, unedited.observed):
            assert largest_difference(there["networks"], here["networks"]) == 0
        assert largest_difference(*(observed["networks"] for observed in unedited.observed)) == 0
        assert unedited.losses() == patched.losses()


EDITED = """
import torch, sys
{above}
import ddpshim.auto
{below}
"""


def _trainer(tree: Path, folder: Path, above: str = "", below: str = "") -> Path:
    """The release's train.py with `import ddpshim.auto` at its top, and what else is put around it."""
    path = folder / "train.py"
    source = (tree / "robomimic" / "scripts" / "train.py").read_text()
    head, main = source.split('if __name__ == "__main__":\n')
    path.write_text(EDITED.format(above=above, below=below) + head + 'if __name__ == "__main__":\n' + main)
    return path


def _job(folder: Path, releases: Path, **settings: Any) -> tuple[Path, Path]:
    tree = copy_release(RELEASE, releases, "plain")
    config = make_run_config(tree, RELEASE, "bc", folder, 3, 2)
    content = json.loads(config.read_text())
    for key, value in settings.items():
        content["experiment" if key == "validate" else "train"][key] = value
    config.write_text(json.dumps(content))
    return tree, config


def _run(tree: Path, folder: Path, *command: str, has_robomimic: bool = True, **how: Any) -> tuple[int, str]:
    """The exit code and the output of `run`, in a process that `has_robomimic` imported already, or not."""
    if has_robomimic:
        return fork(tree, ["ddpshim", "run", *command], folder, None, {}, START_DEADLINE_S)
    return start_afresh(["-m", "ddpshim", "run", *command], environment(tree), folder, START_DEADLINE_S, **how)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max(folder.glob("out/*/*/models/*.pth"), key=lambda path: path.stat().st_mtime)
    return torch.load(newest, weights_only=False)["model"]  # type: ignore[no-any-return]


@pytest_robomimic
def test_run_distributes_a_trainer_without_a_line_in_it(tmp_path: Path, releases: Path) -> None:
    tree, config = _job(tmp_path, releases)
    command = ("--nproc=2", "-m", "robomimic.scripts.train", "--config", str(config))
    code, said = _run(tree, tmp_path, *command, has_robomimic=False, is_cold=True)
    assert code == 0, said[-3000:]
    assert "world of 2" in said
    assert "global batch 100 = 2 ranks x 50" in said
    names = sorted(p.name for p in (tmp_path / "out").rglob("*") if p.is_file() and "tf" not in p.name)
    of_ranks = ["rank_0.jsonl", "rank_0.log", "rank_1.jsonl", "rank_1.log"]
    assert names == ["config.json", "log.txt", "model_epoch_2.pth", *of_ranks, "resume.finished"]
    assert said.count("finished run successfully") == 1


@pytest_robomimic
def test_in_one_process_it_is_the_plain_trainer(tmp_path: Path, releases: Path) -> None:
    weights, losses = [], []
    for name in ("plain", "hooked"):
        folder = tmp_path / name
        folder.mkdir()
        tree, config = _job(folder, releases)
        trainer = _trainer(tree, folder, below="assert ddpshim.auto.is_active()")
        if name == "plain":
            trainer.write_text(trainer.read_text().replace("import ddpshim.auto", "").replace("assert ddpshim", "# "))
        code, log = fork(tree, [str(trainer), "--config", str(config)], folder, None, {}, START_DEADLINE_S)
        assert code == 0, log
        losses.append(re.findall(r'"Loss": (\S+)', log))
        weights.append(_weights(folder))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert list(weights[0]) == list(weights[1])
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


HELD = """
from robomimic.algo import algo_factory as held
import robomimic.utils.train_utils as T
import robomimic.utils.log_utils
kept = T.run_epoch, held.__code__
"""
ASKED = """
from robomimic.algo import algo_factory
assert algo_factory is held and T.run_epoch is kept[0] and held.__code__ is not kept[1]
print("REPORT", *ddpshim.auto.report(), sep=chr(10))
ddpshim.auto.deactivate()
assert held.__code__ is kept[1] and not ddpshim.auto.is_active()
assert "update" not in vars(robomimic.config.base_config.BaseConfig)
print("REPORT", *ddpshim.auto.report(), sep=chr(10))
sys.exit(0)
"""


@pytest_robomimic
def test_what_a_trainer_holds_already_is_hooked_reported_and_given_back(tmp_path: Path, releases: Path) -> None:
    tree, _ = _job(tmp_path, releases)
    code, said = fork(tree, [str(_trainer(tree, tmp_path, HELD, ASKED))], tmp_path, None, {}, START_DEADLINE_S)
    assert code == 0, said
    active, inactive = (part.strip().splitlines() for part in said.split("REPORT\n")[1:])
    hooked = dict(line.split(": ", 1) for line in active if line.startswith("robomimic."))
    assert hooked["robomimic.algo.algo.algo_factory"] == "every network reduced over the ranks"
    assert "robomimic.utils.train_utils.run_epoch" in hooked
    assert len(hooked) == 14
    assert inactive == ["not active: it was deactivated"]


@pytest_robomimic
def test_spawned_workers_are_left_alone_and_ranks_train(tmp_path: Path, releases: Path) -> None:
    tree, config = _job(tmp_path, releases, num_data_workers=1, num_epochs=1)
    line = "print('IN', __name__, ddpshim.auto.is_active(), *ddpshim.auto.report()[:1], flush=True)"
    trainer = _trainer(tree, tmp_path, "", f"torch.multiprocessing.set_start_method('spawn', force=True); {line}")
    code, said = _run(tree, tmp_path, "--nproc=1", str(trainer), "--config", str(config))
    assert code == 0, said[-3000:]
    assert "IN __main__ True" in said
    assert "IN __mp_main__ False not active: this is a child of multiprocessing, which does not train" in said
    assert "global batch 100 = 1 rank x 100" in said


# Upstream's main() catches what train() raises and prints it; another trainer might not even do that.
PRINTS = 'res_str = "run failed with error:\\n{}\\n\\n{}".format(e, traceback.format_exc())'


@pytest_robomimic
@pytest.mark.parametrize(
    ("ranks", "printed", "says"),
    [
        (2, PRINTS, "ZeroDivisionError: division by zero"),
        (1, "pass", "HookError: the program ended before its training"),
    ],
)
def test_a_swallowed_exception_ends_the_job(
    tmp_path: Path, releases: Path, ranks: int, printed: str, says: str
) -> None:
    tree, config = _job(tmp_path, releases)
    trainer = _trainer(tree, tmp_path)
    text = trainer.read_text()
    assert text.count(PRINTS) == text.count("print(model)") == 1
    trainer.write_text(text.replace("print(model)", "1 / 0").replace(PRINTS, printed))
    code, said = _run(tree, tmp_path, f"--nproc={ranks}", str(trainer), "--config", str(config))
    assert code == 1, said[-3000:]
    assert says in said
    assert "finished run successfully" not in said.split("failed:")[0] or printed == "pass"


MIGRATED = """
import ddpshim.auto, os, sys, torch.distributed as dist
import robomimic.utils.torch_utils as T
held = T.get_torch_device, T.get_torch_device.__code__
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(T.get_torch_device(False), *ddpshim.auto.report(), held[0].__code__ is not held[1])
"""
PATCHED = """
import ddpshim.auto, runpy
import robomimic.utils.train_utils as T
hooked = T.run_epoch.__code__
runpy.run_module("robomimic.scripts.train", run_name="imported")
print("cpu", *ddpshim.auto.report(), T.run_epoch.__code__ is not hooked)
"""


@pytest_robomimic
@pytest.mark.parametrize("program", [MIGRATED, PATCHED], ids=["migrated", "patched"])
def test_a_trainer_that_minds_ranks_itself_is_left_alone(tmp_path: Path, releases: Path, program: str) -> None:
    tree = copy_release(RELEASE, releases, "patched" if program is PATCHED else "plain")
    (tmp_path / "program.py").write_text(program)
    code, printed = fork(tree, [str(tmp_path / "program.py")], tmp_path, None, {}, START_DEADLINE_S)
    assert code == 0, printed
    said = "cpu not active: the trainer itself does what the hooks do True"
    assert printed.strip().splitlines()[-1] == said


@pytest.mark.unit
def test_another_signature_is_refused_with_nothing_hooked(given_back: None) -> None:
    module = types.ModuleType("robomimic.utils.torch_utils")
    exec("def get_torch_device(try_to_use_cuda, index): return 'cpu'", vars(module))
    logs = types.ModuleType("robomimic.utils.log_utils")
    exec("class PrintLogger:\n    def __init__(self, log_file): pass", vars(logs))
    with pytest.raises(HookError, match=r"torch_utils\.get_torch_device\(try_to_use_cuda, index\).*'index' is new"):
        stand_ins.hook([module])
    with pytest.raises(HookError, match=r"log_utils\.DataLogger\.__init__ is None, not a plain function"):
        stand_ins.hook([logs])
    assert module.get_torch_device(1, 2) == "cpu"
