"""DROID's trainers, patched: the same experiment on any number of ranks, the same program without a launcher."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpshim import droid as adapter
from ddpshim.model.parallel import wrap_parallel
from ddpshim.process.random_streams import rank_states, restore_rank_states
from ddpshim.shares.loader import make_loader
from evidence.equivalence import Run, largest_difference
from tests.droid import (
    BATCH_SIZE,
    DROID,
    FORK,
    IMAGE_SIZE,
    LOW_DIM,
    TREES,
    Tokenizer,
    copy_tree,
    environ_of,
    make_config,
    make_data,
    source,
    train,
)
from tests.preloaded_commands import python
from tests.ranks import run_ranks

# One that draws from python's generator, and one that draws from torch's.
CROP = {"crop_height": IMAGE_SIZE - 2, "crop_width": IMAGE_SIZE - 2, "num_crops": 1, "pos_enc": False}
ONLY_CROP = {
    "observation__encoder__rgb__obs_randomizer_class": "CropRandomizer",
    "observation__encoder__rgb__obs_randomizer_kwargs": CROP,
}
FLOAT64: dict[str, Any] = {"name": "float64", "environ": {"IN_FLOAT64": "1"}, **ONLY_CROP}
Trainer = Callable[..., Run]


def _require(patch_set: str) -> None:
    if source(patch_set) is None:
        pytest.skip(f"DDPSHIM_UPSTREAM has no {TREES[patch_set]}, a git archive of that commit (see patches/README.md)")


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Trains on four trajectories of unequal weight, and keeps the run for tests that ask for the same one."""
    folder = tmp_path_factory.mktemp("droid")
    done: dict[str, Run] = {}

    def run(
        num_ranks: Optional[int],
        *,
        name: str = "",
        patch_set: str = DROID,
        patched: bool = True,
        in_memory: bool = False,
        environ: Optional[dict[str, str]] = None,
        check: bool = True,
        script: str = "train",
        **settings: Any,
    ) -> Run:
        key = f"{TREES[patch_set]}-{num_ranks}-{patched}-{in_memory}-{name}"
        if key not in done:
            _require(patch_set)
            tree = copy_tree(patch_set, folder, patched, in_memory)
            paths = make_data(folder / "data")
            settings.setdefault("train__data", [{"path": path, "weight": 1 + i} for i, path in enumerate(paths)])
            config = make_config(tree, folder, **settings)
            done[key] = train(tree, config, folder / key, num_ranks, environ, check, script)
        return done[key]

    return run


@pytest.mark.upstream
def test_without_a_launcher_it_is_the_unpatched_program(trainer: Trainer) -> None:
    plain, patched = (trainer(None, patched=patched) for patched in (False, True))
    assert patched.losses() == plain.losses()
    assert len(plain.losses()) == 2
    before, after = plain.observed[0], patched.observed[0]
    assert after["samples"] == before["samples"]
    assert largest_difference(after["networks"], before["networks"]) == 0
    assert torch.equal(after["noise"], before["noise"])
    assert largest_difference(before["initial"], before["networks"]) > 1e-4


@pytest.mark.upstream
def test_patched_in_memory_it_is_the_patched_trainer(trainer: Trainer) -> None:
    patched, unedited = (trainer(2, in_memory=way, **FLOAT64) for way in (False, True))
    assert unedited.losses() == patched.losses()
    for there, here in zip(patched.observed, unedited.observed):
        assert here["samples"] == there["samples"]
        assert largest_difference(here["networks"], there["networks"]) == 0
    assert len(unedited.observed) == 2


def _of(networks: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in networks.items() if key.startswith(part)}


@pytest.mark.upstream
def test_ranks_on_shards_equal_one_process_on_the_batch(trainer: Trainer) -> None:
    one, two = (trainer(n, **FLOAT64) for n in (1, 2))
    (alone,), (first, second) = one.observed, two.observed
    size = BATCH_SIZE // 2
    shards = [[seen["samples"][i : i + size] for i in range(0, 40, size)] for seen in (first, second)]
    whole = [alone["samples"][i : i + BATCH_SIZE] for i in range(0, 80, BATCH_SIZE)]
    assert [sorted(mine + theirs) for mine, theirs in zip(*shards)] == [sorted(batch) for batch in whole]
    assert largest_difference(first["initial"], alone["initial"]) == 0
    for part in ("nets", "ema"):
        assert largest_difference(_of(alone["networks"], part), _of(first["networks"], part)) < 1e-9
        assert largest_difference(_of(first["initial"], part), _of(first["networks"], part)) > 1e-4, "did not move"
    assert largest_difference(first["networks"], second["networks"]) == 0
    assert two.losses() == pytest.approx(one.losses(), rel=1e-9)


@pytest.mark.upstream
def test_one_experiment_is_written_by_the_main_rank(trainer: Trainer) -> None:
    two = trainer(
        2,
        name="own",
        experiment__save__every_n_seconds=0,
        experiment__logging__log_tb=True,
        experiment__mse__enabled=True,
        experiment__mse__num_samples=2,
        experiment__mse__visualize=False,
        train__num_data_workers=1,
    )
    first, second = two.observed
    assert largest_difference(first["networks"], second["networks"]) == 0
    assert largest_difference(_of(first["initial"], "ema"), _of(first["networks"], "ema")) > 1e-4
    written = [path.name for path in (two.folder / "out").rglob("*") if path.is_file()]
    assert sum(name.endswith(".pth") for name in written) == 2
    assert written.count("log.txt") == written.count("config.json") == 1
    assert sum("tfevents" in name for name in written) == 1
    assert len(list((two.folder / "out" / "droid").iterdir())) == 1
    assert two.log.count("MSE Log Epoch 1\n") == two.log.count("Train Epoch 2\n") == 1
    assert two.log.count("finished run successfully") == 1
    assert two.log.count("ddpshim: global batch 8 = 2 ranks x 4") == 1


LOAD = """
import sys, torch
from tests import droid
droid.install_stand_ins()
import robomimic.algo.diffusion_policy as diffusion_policy, functools
diffusion_policy.ConditionalUnet1D = functools.partial(
    diffusion_policy.ConditionalUnet1D, down_dims=[16, 32], n_groups=4, diffusion_step_embed_dim=16)
import robomimic.utils.file_utils as FileUtils
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
def test_unpatched_code_loads_the_checkpoint_of_two_ranks_and_acts(trainer: Trainer, tmp_path: Path) -> None:
    run = trainer(2, **FLOAT64)
    tree = copy_tree(DROID, tmp_path, patched=False)
    written = max(run.folder.glob("out/*/*/models/*.pth"))
    keys = torch.load(written, weights_only=False)["model"]["nets"]
    assert all(key.split(".")[2] == "module" for key in keys), list(keys)[:3]
    python("-c", LOAD, str(written), str(tmp_path / "loaded.pt"), environ=environ_of(tree))
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=False)
    assert largest_difference(loaded, run.observed[0]["networks"]) < 1e-6  # float64 there, float32 here


@pytest.mark.upstream
def test_ranks_start_from_a_checkpoint_of_the_unpatched_trainer(trainer: Trainer) -> None:
    plain = trainer(None, patched=False)
    given = max(plain.folder.glob("out/*/*/models/*.pth"))
    two = trainer(
        2,
        name="from_checkpoint",
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
    run = trainer(2, name="fails", check=False, environ={"FAIL_AT": "1:6"})
    assert run.exit_code != 0
    assert "finished run successfully" not in run.log
    assert run.log.count(") failed:\nTraceback (most recent call last)") == 1, run.log[-3000:]
    assert "ValueError: sample" in run.log.split("ddpshim: rank 1 (")[1]


@pytest.mark.upstream
def test_a_signal_ends_it_and_it_goes_on_with_the_samples_that_were_left(trainer: Trainer) -> None:
    # Ranks look up together before the third step however fast they are, and leave before the one after it.
    how: dict[str, Any] = {"experiment__epoch_every_n_steps": 2, "train__num_epochs": 3}
    whole = trainer(2, name="whole", **how)
    left = trainer(2, name="left", check=False, environ={"SIGNAL_AT": "1:6"}, **how)
    assert left.exit_code != 0, left.log[-2000:]
    assert "is saved in" in left.log
    progress = list(left.folder.glob("out/*/*/resume/*.pth"))
    assert progress, left.log[-2000:]
    config = json.loads((left.folder / "config.json").read_text())
    tree = left.folder.parent / f"{TREES[DROID]}-patched"
    again = train(tree, config, left.folder, 2, {"DDPSHIM_RESUME": "always"})
    assert "resuming at epoch 1, step 1" in again.log
    assert len(list((left.folder / "out" / "droid").iterdir())) == 1
    for before, after in zip(whole.observed, again.observed):
        assert len(before["samples"]) == 24
        assert after["samples"] == before["samples"][12:]
        assert largest_difference(after["networks"], before["networks"]) < 1e-6


@pytest.mark.upstream
def test_the_fork_trains_the_same_experiment(trainer: Trainer) -> None:
    one = trainer(1, **FLOAT64)  # of DROID: the policy is the same
    two = trainer(2, patch_set=FORK, **FLOAT64)
    assert largest_difference(one.observed[0]["networks"], two.observed[0]["networks"]) < 1e-9
    assert largest_difference(two.observed[0]["networks"], two.observed[1]["networks"]) == 0


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
        name="rlds",
        patch_set=patch_set,
        script=script,
        experiment__name="droid" if script == "train" else None,  # then it has the time in it
        experiment__mse__enabled=True,
        experiment__mse__every_n_epochs=2,
        observation__modalities__obs__low_dim=LOW_DIM[:2],
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
    assert not torch.equal(first["noise"], second["noise"])
    assert first["length"] == second["length"] > 0
    assert len(run.losses()) == 2
    assert len(list((run.folder / "out").iterdir())) == len(list((run.folder / "out").glob("*/*"))) == 1
    assert run.log.count("ddpshim: global batch 8 = 2 ranks x 4") == 1
    assert run.log.count("Batch Log Epoch 2\n") == run.log.count("finished run successfully") == 1


def _tokens() -> Any:
    import ddpshim

    texts = [["lift", "put the red cube down"], ["open the drawer", "stop"]][ddpshim.world().rank]
    tokens = adapter.tokenize(Tokenizer(), texts, padding=True, truncation=True, return_tensors="pt")
    return tokens["input_ids"]


@pytest.mark.ranks
def test_texts_are_padded_as_in_the_whole_batch() -> None:
    both = Tokenizer()(["lift", "put the red cube down", "open the drawer", "stop"], padding=True)["input_ids"]
    first, second = run_ranks(_tokens, 2)
    assert torch.equal(torch.cat([first, second]), both)
    assert torch.equal(adapter.tokenize(Tokenizer(), ["stop"], padding=True)["input_ids"], both[3:, :1])


def _held_keys() -> list[str]:
    import ddpshim

    torch.manual_seed(0)
    nets = nn.ModuleDict({"a": adapter.data_parallel(nn.Linear(2, 3), device_ids=[]), "b": nn.Linear(3, 1)})
    wrap_parallel(nets)
    inputs = torch.full((1, 2), float(1 + ddpshim.world().rank))
    nets["b"](nets["a"](inputs)).sum().backward()
    assert torch.equal(nets["a"].module(inputs), nets["a"](inputs))
    grads = {key: p.grad for key, p in nets.named_parameters()}
    return [*nets.state_dict(), type(nets["a"]).__name__, grads["a.module.weight"]]  # type: ignore[list-item]


@pytest.mark.ranks
def test_a_network_is_held_as_dataparallel_held_it() -> None:
    plain = adapter.data_parallel(nn.Linear(2, 3), device_ids=[])
    assert type(plain) is nn.DataParallel
    first, second = run_ranks(_held_keys, 2)
    assert first[:-1] == ["a.module.weight", "a.module.bias", "b.weight", "b.bias", "_Held"]
    assert torch.equal(first[-1], second[-1])
    assert first[-1].abs().sum() > 0


@pytest.mark.unit
def test_each_rank_takes_its_own_gpu_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert adapter.cuda() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    assert adapter.cuda() == "cuda"
    assert bound == []
    launched = {"RANK": 7, "WORLD_SIZE": 8, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}
    for name, value in {**launched, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    assert adapter.cuda() == torch.device("cuda", 3)
    assert bound == [3]


def _epochs() -> tuple[list[list[int]], list[list[int]]]:
    """The samples of three epochs, and of the last two of them in a loader that enters there."""
    runs: list[list[list[int]]] = []
    saved: Any = None
    for start in (0, 1):
        epochs = adapter.Epochs(make_loader(list(range(10)), batch_size=4, shuffle=True), 3)
        if start:
            epochs.set_epoch(start)
            epochs.restore_order(saved[0], is_inside=True)
            restore_rank_states(saved[1], torch.device("cpu"))
        runs.append([])
        for epoch in range(start, 3):
            batches = iter(epochs)
            runs[-1].append([sample for _ in range(3) for sample in next(batches).tolist()])
            saved = (epochs.order_state(), rank_states(torch.device("cpu"))) if epoch == 0 else saved
    return runs[0], runs[1]


@pytest.mark.ranks
def test_epochs_go_on_in_the_pass_where_the_last_one_ended() -> None:
    (first, again), (second, _) = run_ranks(_epochs, 2)
    seen = [sorted(first[e][i : i + 2] + second[e][i : i + 2]) for e in range(3) for i in (0, 2, 4)]
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
