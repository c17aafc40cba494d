"""The real robomimic, patched: the same experiment on any number of ranks, and the same program without a launcher."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpshim.job.world import World
from ddpshim.observe.report import load, verdict
from ddpshim.options import Options
from ddpshim.robomimic import calls, session
from evidence.equivalence import VALIDATION, Run, copy_release, largest_difference, train
from tests.ranks import run_ranks
from tests.robomimic import Trainer, check_weights, require, trainings

pytestmark = pytest.mark.robomimic
RELEASE = "0.3.0"
TRAINER = "robomimic.scripts.train"


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory, releases: Path) -> Trainer:
    return trainings(tmp_path_factory.mktemp("robomimic"), releases, RELEASE, 10)


def _transformer() -> Any:
    """A bc_transformer_gmm of robomimic's, and a batch for it, as its loader makes them."""
    import robomimic.utils.obs_utils as ObsUtils
    from robomimic.algo import algo_factory
    from robomimic.config import config_factory

    config = config_factory("bc")
    with config.values_unlocked():
        config.algo.transformer.update(enabled=True, context_length=3, embed_dim=8, num_layers=6, num_heads=2)
        config.algo.gmm.enabled = True
        config.algo.actor_layer_dims = ()
        config.observation.modalities.obs.low_dim = ["object"]
        config.train.frame_stack = 3
    ObsUtils.initialize_obs_utils_with_config(config)
    torch.manual_seed(1)
    model = algo_factory("bc", config, {"object": [5]}, 4, torch.device("cpu"))
    model.set_train()
    draw = torch.Generator().manual_seed(1)
    obs, actions = torch.randn(6, 3, 5, generator=draw), torch.rand(6, 3, 4, generator=draw)
    return model, {"obs": {"object": obs}, "actions": actions}


def _rank_counts_reads() -> None:
    warnings.simplefilter("ignore")  # of torchvision, and of what robomimic calls
    reads_of: dict[str, int] = {"item": 0, "tolist": 0}

    def count(name: str) -> None:
        read = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor) -> Any:
            reads_of[name] += 1
            return read(tensor)

        setattr(torch.Tensor, name, counted)

    def three_steps(is_ours: bool) -> tuple[list[Any], dict[str, torch.Tensor], list[dict[str, int]]]:
        (model, batch), logs, read = _transformer(), [], []
        batch = model.process_batch_for_training(batch)
        for number in range(3):
            torch.manual_seed(number)  # dropout
            with calls.norms_read_at_once() if is_ours else contextlib.nullcontext():
                reads_of.update(item=0, tolist=0)
                logs.append(model.log_info(model.train_on_batch(batch, epoch=1)))
                read.append(dict(reads_of))
        return logs, model.nets.state_dict(), read

    for name in reads_of:
        count(name)
    theirs, their_weights, their_reads = three_steps(False)
    ours, our_weights, our_reads = three_steps(True)
    num_gradients = sum(p.requires_grad for p in _transformer()[0].nets.parameters())
    assert num_gradients == 79
    assert [read["tolist"] for read in (*their_reads, *our_reads)] == [0, 0, 0, 1, 1, 1]
    # The others are of the log, and of Adam's counters, which never are on a GPU.
    assert [their["item"] - our["item"] for their, our in zip(their_reads, our_reads)] == [num_gradients] * 3
    assert ours == theirs
    assert all(torch.equal(our_weights[key], their_weights[key]) for key in their_weights)


def test_a_step_reads_all_norms_at_once_where_upstream_reads_one_for_each_gradient() -> None:
    require(RELEASE)
    run_ranks(_rank_counts_reads, 1)


def _rank_logs_in_two_starts(folder: str) -> list[tuple[Any, ...]]:
    session.AlgoState = lambda model: SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)  # type: ignore[assignment,misc]
    found = []
    for _ in range(2):
        training, logger = session.Session(), SimpleNamespace(_data={}, close=lambda: None)
        training.goes_on = bool(found)
        training.open(folder)
        start = training.resume(None, logger, 1, 0.5)
        found.append((*start, {**logger._data}))
        assert training.progress is not None
        logger._data["Rollout/Return"] = [1.0, 2.0]
        training.progress.values["best so far"], training.progress.step = (0.7,), 3
        training.progress.save()
    return found


def test_a_resumed_logger_has_what_was_logged(tmp_path: Path) -> None:
    expected = [(1, 0.5, {}), (1, 0.7, {"Rollout/Return": [1.0, 2.0]})]
    assert run_ranks(_rank_logs_in_two_starts, 2, str(tmp_path)) == [expected] * 2


def _check_equal(one: Run, many: Run, tolerance: float, is_noisy: bool = False) -> None:
    start, alone = one.observed[0]["initial"], one.observed[0]["networks"]
    for observed in many.observed:
        assert observed["batches"] == one.observed[0]["batches"]
        assert largest_difference(observed["initial"], start) == 0
        assert largest_difference(observed["networks"], alone) < tolerance
    assert largest_difference(start, alone) > (1 if is_noisy else 100) * tolerance, "nothing was trained"
    assert many.losses() == pytest.approx(one.losses(), rel=1e-4 if is_noisy else 1e-5)
    assert len(many.losses()) == 2


def test_ranks_that_do_not_divide_the_batch_equal_one_process(trainer: Trainer) -> None:
    one, three = trainer("bc_rnn_gmm", None, patched=False), trainer("bc_rnn_gmm", 3)
    _check_equal(one, three, 1e-6)
    fetched = [len(observed["samples"]["None"]) for observed in three.observed]
    assert fetched == [20 * rows for rows in (33, 33, 34)]  # steps, and rows of a batch of 100


def test_a_whole_epoch_in_float64(trainer: Trainer) -> None:
    one, two = (trainer("bc_gmm", n, precision="float64", steps=None, epochs=1) for n in (1, 2))
    assert len(one.observed[0]["batches"]["Train"]) == 20  # 50 demonstrations hold 2,079 samples
    assert largest_difference(one.observed[0]["networks"], two.observed[0]["networks"]) < 1e-9
    assert largest_difference(two.observed[0]["networks"], two.observed[1]["networks"]) == 0


def test_ranks_in_bfloat16_equal_one_process_in_bfloat16(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = trainer("bc_gmm", None, patched=False)
    monkeypatch.setenv("DDPSHIM_PRECISION", "bf16")
    one, three = (trainer("bc_gmm", num_ranks) for num_ranks in (None, 3))
    start, alone = one.observed[0]["initial"], one.observed[0]["networks"]
    rounding = largest_difference(wide.observed[0]["networks"], alone)
    assert 1e-5 < rounding < largest_difference(start, alone), "it is not bfloat16"
    for observed in three.observed:
        assert largest_difference(observed["networks"], alone) < 2 * rounding
        assert largest_difference(observed["networks"], three.observed[0]["networks"]) == 0
    assert three.losses() == pytest.approx(one.losses(), rel=1e-2)


def test_without_a_launcher_it_is_the_unpatched_program(trainer: Trainer) -> None:
    how: dict[str, Any] = {"module": TRAINER, "forked": False, **VALIDATION}
    plain, patched = (trainer("td3_bc", None, patched=p, **how) for p in (False, True))
    assert patched.losses() == plain.losses()
    assert patched.losses("Validation") == plain.losses("Validation")
    assert len(plain.losses("Validation")) == 2
    check_weights(plain, patched)
    assert [p.name for p in _written(patched)] == [p.name for p in _written(plain)]


def _written(run: Run) -> list[Path]:
    return sorted(p for p in (run.folder / "out").rglob("*") if p.is_file() and "tfevents" not in p.name)


# What two ranks write, for two tests.
WRITES: dict[str, Any] = {
    "module": TRAINER,
    "forked": False,
    "experiment__save__every_n_seconds": 0,
    "experiment__save__on_best_validation": True,
    "experiment__logging__log_tb": True,
    **VALIDATION,
}


def test_one_experiment_is_written_by_the_main_rank(trainer: Trainer) -> None:
    two, one = trainer("bc", 2, **WRITES), trainer("bc", 1, **{**WRITES, "forked": True})
    names = [p.name for p in _written(two)]
    best = two.losses("Validation")[0]
    assert f"model_epoch_1_best_validation_{best}.pth" in names
    assert sum(n.endswith(".pth") for n in names) == 2
    assert names.count("log.txt") == names.count("config.json") == 1
    assert len(list((two.folder / "out").rglob("*tfevents*"))) == 1
    assert len(list((two.folder / "out" / "bc").iterdir())) == 1
    for text in (
        "Train Epoch 1\n",
        "Validation Epoch 2\n",
        "finished run successfully",
        "is trained by all ranks together",
    ):
        assert two.log.count(text) == 1, text
    assert two.log.count("ddpshim: 2 ranks on this machine, CPU (torchrun, gloo)") == 1
    assert two.losses("Validation") == pytest.approx(one.losses("Validation"), rel=1e-5)


GUARDED = [
    ("model", "bc", "after 10 backward passes of ModuleDict ranks hold different weights or settings: parameter '"),
    ("td3", "td3_bc", "actor_target.nets.mlp._model.0.weight' of network 0 (ModuleDict) sums to"),
]


@pytest.mark.parametrize(("place", "variant", "text"), GUARDED)
def test_guards_speak_up_in_the_trainer(trainer: Trainer, place: str, variant: str, text: str) -> None:
    run = trainer(variant, 2, module="tests.faults", fault=f"weights@{place}:1:5", check=False)
    assert run.exit_code != 0
    assert text in run.log, run.log[-3000:]
    assert "SyncError" in run.log


@pytest.mark.unit
def test_what_is_said_before_an_experiment_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = [tmp_path / "1", tmp_path / "2"]
    chosen = {"resume": "auto"}
    monkeypatch.setattr(calls, "world", lambda: World(options=Options(**chosen)))
    assert calls._about(starts) == "", "nothing would be lost"
    chosen.update(resume="always", checkpoint_every_n_steps=20)
    assert calls._about([]) == ""
    assert calls._about(starts) == (
        f"resume=always, but {starts[1]} holds no saved step: a run saves at SIGTERM, and by checkpoint_every_s=600 "
        "and checkpoint_every_n_steps=20."
    )
    (starts[0] / "resume").mkdir(parents=True)
    for name in ("epoch_000002_step_000000099.pth", "epoch_000003_step_000000015.pth", "epoch_000004_x.pth.damaged"):
        (starts[0] / "resume" / name).touch()
    held = f"{starts[0]} holds unfinished progress (epoch 3, step 15); overwriting deletes it. To resume it, "
    assert calls._about(starts[:1]) == f"{held}start again with DDPSHIM_RESUME=always."
    later = f"remove the later {starts[1]}, and "
    assert calls._about(starts) == f"{held}{later}start again with DDPSHIM_RESUME=always."


def test_a_killed_rank_ends_the_job(trainer: Trainer) -> None:
    run = trainer("bc", 2, module="tests.faults", fault="kill@model:0:15", check=False, has_agent=True)
    assert run.exit_code != 0
    root = run.log.split("Root Cause (first observed failure):")[1]
    assert "rank      : 0 " in root
    assert "SIGKILL" in root
    told = load(run.folder / "out")
    assert verdict(told) == "Failed: rank 0 ended without an error message, perhaps killed (out of memory?)"
    assert [*told.losses("training").values()] == run.losses()[:1]


def test_an_existing_experiment_with_closed_stdin_ends_the_job(trainer: Trainer, releases: Path) -> None:
    first = trainer("bc", 2, **WRITES)
    tree, config = copy_release(RELEASE, releases), first.folder / "config.json"
    how: dict[str, Any] = {"module": TRAINER, "forked": True, "has_agent": True}
    (start,) = (first.folder / "out").glob("*/*/logs/..")
    saved = start.resolve() / "resume" / "epoch_000003_step_000000015.pth"
    saved.parent.mkdir()
    saved.touch()  # as if the first run had not finished
    again = train(tree, config, first.folder, 2, check=False, **how)
    assert again.exit_code != 0
    saved.unlink()  # an error if it is gone
    saved.parent.rmdir()
    before, _, after = again.log.partition("already exists! \noverwrite? (y/n)")
    held = f"{saved.parent.parent} holds unfinished progress (epoch 3, step 15); overwriting deletes it. To resume it,"
    assert (before.count(held), after.count("already exists! \noverwrite"), held in after) == (1, 0, True)
    assert "LaunchError: an experiment of this name exists" in again.log
    assert len([p for p in _written(first) if p.suffix == ".pth"]) == 2, "the experiment that was there is gone"


UPSTREAM = {"0.4.0": "bc", **dict.fromkeys(("0.5.0", "master", "robocasa"), "diffusion_policy")}


@pytest.mark.upstream
@pytest.mark.parametrize("release", UPSTREAM)
def test_other_releases_train_the_same_experiment(trainer: Trainer, release: str) -> None:
    require(release)
    one, two = (trainer(UPSTREAM[release], n, release=release) for n in (1, 2))
    if release == "0.4.0":
        _check_equal(one, two, 1e-6)
        return
    _check_equal(one, two, 1e-5, is_noisy=True)
    moved = [k for k, v in two.observed[0]["networks"].items() if "ema." in k and v.dtype.is_floating_point]
    assert moved
    assert any(not torch.equal(two.observed[0]["networks"][k], two.observed[0]["initial"][k]) for k in moved)
