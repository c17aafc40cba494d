"""DROID's trainers, patched: the same experiment on any number of ranks, the same program without a launcher."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch.utils.data import DataLoader

from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.robomimic import droid as adapter
from evidence.equivalence import Run, largest_difference
from tests import droid
from tests.droid import BATCH_SIZE, DROID, FORK, TREES
from tests.preloaded_commands import python
from tests.ranks import run_ranks
from tests.robomimic import Trainer, kept

FLOAT64: dict[str, Any] = {"environ": {"IN_FLOAT64": "1"}}


def _require(patch_set: str) -> None:
    if droid.source(patch_set) is None:
        pytest.skip(f"DDPSHIM_UPSTREAM has no {TREES[patch_set]}, a git archive of that commit (see patches/README.md)")


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Trains on four trajectories of unequal weight, once for the same arguments."""
    folder, numbers = tmp_path_factory.mktemp("droid"), itertools.count()

    @kept
    def run(
        num_ranks: Optional[int],
        *,
        patch_set: str = DROID,
        way: str = "patched",
        environ: Optional[dict[str, str]] = None,
        check: bool = True,
        script: str = "train",
        **settings: Any,
    ) -> Run:
        _require(patch_set)
        tree = droid.copy_tree(patch_set, folder, way)
        paths = droid.make_data(folder / "data")
        settings.setdefault("train__data", [{"path": path, "weight": 1 + i} for i, path in enumerate(paths)])
        config = droid.make_config(tree, folder, **settings)
        return droid.train(tree, config, folder / f"{num_ranks}-{next(numbers)}", num_ranks, environ, check, script)

    return run


def _of(networks: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in networks.items() if key.startswith(part)}


def _check_same(plain: Run, ranks: Run, tolerance: float = 1e-9) -> None:
    """Assert that ranks have trained what one process of the released trainer has: samples, noise, networks, losses."""
    (alone,), num = plain.observed, len(ranks.observed)
    cuts = [BATCH_SIZE * rank // num for rank in range(num + 1)]
    for rank, own in enumerate(ranks.observed):
        first, end = cuts[rank], cuts[rank + 1]
        batches = range(0, len(alone["samples"]), BATCH_SIZE)
        assert own["samples"] == [i for at in batches for i in alone["samples"][at + first : at + end]]
        assert largest_difference(own["initial"], alone["initial"]) == 0
        assert torch.equal(own["noise"], alone["noise"])
        assert largest_difference(own["networks"], ranks.observed[0]["networks"]) == 0
        for part in ("nets", "ema"):
            assert largest_difference(_of(alone["networks"], part), _of(own["networks"], part)) < tolerance
            assert largest_difference(_of(own["initial"], part), _of(own["networks"], part)) > 1e-4, "did not move"
    # By the first patch alone, torchrun shows what each rank prints.
    assert [*dict.fromkeys(ranks.losses())] == pytest.approx(plain.losses(), rel=tolerance)
    assert len(plain.losses()) == 2


@pytest.mark.upstream
def test_without_a_launcher_it_is_the_unpatched_program(trainer: Trainer) -> None:
    plain, patched = (trainer(None, way=way) for way in ("plain", "patched"))
    assert patched.losses() == plain.losses()
    _check_same(plain, patched, 1e-30)


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("patch_set", "num_ranks", "way"), [(DROID, 2, "two lines"), (DROID, 3, "unedited"), (FORK, 2, "patched")]
)
def test_ranks_train_what_the_released_trainer_trains(
    trainer: Trainer, patch_set: str, num_ranks: int, way: str
) -> None:
    _check_same(trainer(None, way="plain", **FLOAT64), trainer(num_ranks, patch_set=patch_set, way=way, **FLOAT64))


@pytest.mark.upstream
def test_one_experiment_is_written_by_the_main_rank(trainer: Trainer) -> None:
    three = trainer(
        3,
        **FLOAT64,
        train__num_data_workers=1,
        experiment__save__every_n_seconds=0,
        experiment__logging__log_tb=True,
        experiment__mse__enabled=True,
        experiment__mse__num_samples=2,
        experiment__mse__visualize=False,
    )
    plain = trainer(None, way="plain", **FLOAT64)
    # The noise of the errors that are logged comes after the first epoch's steps.
    assert three.losses()[0] == pytest.approx(plain.losses()[0], rel=1e-9)
    for own in three.observed:
        assert largest_difference(own["networks"], three.observed[0]["networks"]) == 0
        assert largest_difference(_of(own["initial"], "ema"), _of(own["networks"], "ema")) > 1e-4
    written = [path.name for path in (three.folder / "out").rglob("*") if path.is_file()]
    assert sum(name.endswith(".pth") for name in written) == 2
    assert written.count("log.txt") == written.count("config.json") == 1
    assert sum("tfevents" in name for name in written) == 1
    assert len(list((three.folder / "out" / "droid").iterdir())) == 1
    assert three.log.count("MSE Log Epoch 1\n") == three.log.count("Train Epoch 2\n") == 1
    assert three.log.count("finished run successfully") == 1


LOAD = """
import sys, torch
from tests import droid, observed
droid.install_stand_ins()
observed._with_small_unet()
import functools, robomimic.utils.file_utils as FileUtils
torch.load = functools.partial(torch.load, weights_only=False)
assert "ddpshim.robomimic" not in sys.modules
policy, _ = FileUtils.policy_from_checkpoint(ckpt_path=sys.argv[1], device=torch.device("cpu"))
algo = policy.policy
shapes = {"robot_state/cartesian_position": [6], "robot_state/gripper_position": [1],
          "lang_fixed/language_distilbert": [4]}
shapes.update({key: [3, droid.IMAGE_SIZE, droid.IMAGE_SIZE] for key in droid.CAMERAS})
algo.set_eval(); algo.reset()
acted = algo.get_action({key: torch.zeros(1, 2, *shape) for key, shape in shapes.items()})
assert acted.shape == (1, 10), acted.shape
torch.save(droid.networks(algo), sys.argv[2])
"""


@pytest.mark.upstream
def test_unpatched_code_loads_the_checkpoint_of_three_ranks_and_acts(trainer: Trainer, tmp_path: Path) -> None:
    run = trainer(3, way="unedited", **FLOAT64)
    tree = droid.copy_tree(DROID, tmp_path, "plain")
    written = max(run.folder.glob("out/*/*/models/*.pth"))
    keys = torch.load(written, weights_only=False)["model"]["nets"]
    assert all(key.split(".")[2] == "module" for key in keys), list(keys)[:3]
    python("-c", LOAD, str(written), str(tmp_path / "loaded.pt"), environ=droid.environ_of(tree))
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=False)
    assert largest_difference(loaded, run.observed[0]["networks"]) < 1e-6  # float64 there, float32 here


@pytest.mark.upstream
def test_ranks_start_from_a_checkpoint_of_the_unpatched_trainer(trainer: Trainer) -> None:
    plain = trainer(None, way="plain")
    given = max(plain.folder.glob("out/*/*/models/*.pth"))
    two = trainer(
        2,
        environ={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        experiment__ckpt_path=str(given),
        experiment__epoch_every_n_steps=1,
        train__num_epochs=1,
    )
    start, end = plain.observed[0]["networks"], two.observed[0]["networks"]
    # One step of Adam moves a weight by its learning rate at most; from other weights it would be far.
    assert 0 < largest_difference(_of(start, "nets"), _of(end, "nets")) < 2e-4
    assert largest_difference(end, two.observed[1]["networks"]) == 0


@pytest.mark.upstream
def test_a_failing_rank_ends_the_job(trainer: Trainer) -> None:
    run = trainer(2, check=False, environ={"FAIL_AT": "1:6"})
    assert run.exit_code != 0
    assert "finished run successfully" not in run.log
    assert run.log.count(") failed:\nTraceback (most recent call last)") == 1, run.log[-3000:]
    assert "ValueError: sample" in run.log.split("ddpshim: rank 1 (")[1]


@pytest.mark.upstream
def test_a_signal_ends_it_and_it_goes_on_with_the_samples_that_were_left(trainer: Trainer) -> None:
    # Ranks look up together before the third step however fast they are, and leave there.
    how: dict[str, Any] = {**FLOAT64, "experiment__epoch_every_n_steps": 3, "train__num_epochs": 2}
    whole = trainer(None, way="plain", **how)
    how["environ"] = {**how["environ"], "SIGNAL_AT": "1:6"}
    left = trainer(2, check=False, **how)
    assert left.exit_code != 0, left.log[-2000:]
    assert "is saved in" in left.log
    progress = list(left.folder.glob("out/*/*/resume/*.pth"))
    assert progress, left.log[-2000:]
    config = json.loads((left.folder / "config.json").read_text())
    tree = left.folder.parent / f"{TREES[DROID]}-patched"
    again = droid.train(tree, config, left.folder, 3, {**FLOAT64["environ"], "DDPSHIM_RESUME": "always"})
    assert "resuming at epoch 0, step 2, of a run on 2 ranks" in again.log
    assert len(list((left.folder / "out" / "droid").iterdir())) == 1
    left_over = whole.observed[0]["samples"][2 * BATCH_SIZE :]
    assert len(left_over) == 4 * BATCH_SIZE
    of_ranks = [[*own["samples"]] for own in again.observed]
    assert [
        of_ranks[rank].pop(0) for _ in range(4) for rank, num in enumerate((2, 3, 3)) for _ in range(num)
    ] == left_over
    for own in again.observed:
        assert largest_difference(own["networks"], whole.observed[0]["networks"]) < 1e-9


@pytest.mark.upstream
@pytest.mark.parametrize(("patch_set", "script"), [(DROID, "train"), (FORK, "train_rlds")])
def test_ranks_train_one_model_on_rlds_data(trainer: Trainer, patch_set: str, script: str, tmp_path: Path) -> None:
    _require(patch_set)
    for needed in ("tensorflow", "tensorflow_datasets", *(["hydra"] if patch_set == FORK else [])):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed (requirements/rlds.txt)")
    code = "import sys; from examples.rlds.build_dataset import build; build(sys.argv[1], num_episodes=21)"
    python("-c", code, str(tmp_path))
    run = trainer(
        2,
        patch_set=patch_set,
        script=script,
        experiment__name="droid" if script == "train" else None,  # then it has the time in it
        experiment__mse__enabled=True,
        experiment__mse__every_n_epochs=2,
        observation__modalities__obs__low_dim=droid.LOW_DIM[:2],
        train__data=None,
        train__data_format="droid_rlds",
        train__data_path=str(tmp_path),
        train__dataset_names=["droid"],
        train__sample_weights=[1],
        train__shuffle_buffer_size=50,
        train__traj_transform_threads=2,
        train__traj_read_threads=2,
        train__num_parallel_calls=2,
    )
    first, second = run.observed
    assert largest_difference(first["networks"], second["networks"]) == 0
    for part in ("nets", "ema"):
        assert largest_difference(_of(first["initial"], part), _of(first["networks"], part)) > 1e-4
    assert torch.equal(first["noise"], second["noise"])
    assert len(run.losses()) == 2
    assert len(list((run.folder / "out").iterdir())) == len(list((run.folder / "out").glob("*/*"))) == 1
    assert run.log.count("Batch Log Epoch 2\n") == run.log.count("finished run successfully") == 1


def _epochs() -> tuple[list[list[int]], list[list[int]]]:
    """The samples of three epochs, and of the last two of them in a loader that enters there."""
    runs: list[list[list[int]]] = []
    saved: Any = None
    for start in (0, 1):
        epochs = adapter.Epochs(DataLoader(list(range(10)), batch_size=4, shuffle=True, drop_last=True), 3)  # type: ignore[arg-type]
        if start:
            epochs.enter(start, 0, saved[0], is_inside=True)
            restore_rank_states(saved[1], torch.device("cpu"))
        runs.append([])
        for epoch in range(start, 3):
            batches = iter(epochs)
            runs[-1].append([sample for _ in range(3) for sample in next(batches).tolist()])
            saved = (epochs.order_state(), rank_states(torch.device("cpu"))) if epoch == 0 else saved
    return runs[0], runs[1]


@pytest.mark.ranks
def test_epochs_go_on_in_the_pass_where_the_last_one_ended() -> None:
    (first, again), (second, _) = run_ranks(_epochs, 2, batch="global", seed=1)
    assert first == second
    seen = [first[epoch][at : at + 4] for epoch in range(3) for at in (0, 4, 8)]
    passes = [seen[0] + seen[1], seen[2] + seen[3], seen[4] + seen[5]]  # of two steps each
    assert all(len(set(one)) == 8 for one in passes)
    assert again == first[1:]


@pytest.mark.unit
def test_without_a_launcher_epochs_are_torchs_own_batches() -> None:
    def loader() -> Any:
        torch.manual_seed(0)
        return DataLoader(list(range(10)), batch_size=4, shuffle=True)  # type: ignore[arg-type]

    whole = loader()
    expected = [batch.tolist() for _ in range(2) for batch in whole]
    epochs, seen = adapter.Epochs(loader(), 2), []
    for _ in range(3):
        batches = iter(epochs)
        seen += [next(batches).tolist() for _ in range(2)]
    assert seen == expected
