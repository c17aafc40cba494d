"""Programs of hydra, zarr, TensorBoard, Lightning and accelerate, which `run` distributes."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
from pathlib import Path

import pytest
import torch

from ddpshim.launch import rank
from evidence.compare import largest_difference
from tests.launch.test_unedited import Ran, run, succeeded

TRAINER = """
import logging
import hydra, zarr
from hydra.core.config_store import ConfigStore
from tensorboardX import SummaryWriter

folder = {"run": {"dir": "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S.%f}"}, "job": {"chdir": True, "name": "train"}}
ConfigStore.instance().store("config", {"lr": 0.01, "hydra": folder})

@hydra.main(version_base=None, config_name="config")
def main(config):
    torch.manual_seed(0)
    model, loader = network(), DataLoader(Items(), 8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), config.lr)
    writer = SummaryWriter("events")
    own = 1 + int(os.environ.get("DDPSHIM_RANK", 0))
    zarr.save("buffer.zarr", np.zeros(6))
    for epoch in range(2):
        model.train()
        for index, x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y.double()).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            writer.add_scalar("loss", sum(model(x).sum().item() for _, x, _ in loader), epoch)
        logging.getLogger("train").info("epoch %d at %s", epoch, config.lr)
        zarr.open("buffer.zarr", mode="r+")[epoch * 3 : epoch * 3 + 2] = own
    writer.close()
    say("kept", zarr.load("buffer.zarr")[:].tolist())
    if "OF_RANKS" in os.environ:
        say("of ranks", zarr.load(os.environ["OF_RANKS"])[:].tolist())

main()
"""


def needs(*packages: str, how: str = "-r requirements/test.txt") -> pytest.MarkDecorator:
    lacking = ", ".join(name for name in packages if importlib.util.find_spec(name) is None)
    return pytest.mark.skipif(bool(lacking), reason=f"lacking {lacking}: pip install {how}")


def _losses(folder: Path) -> list[tuple[int, float]]:
    """The steps and values in the only file of events below `folder`, each record of which is whole."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.rglob("events.out.tfevents.*")
    data, at, found = file.read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + size])
        found += [(event.step, value.simple_value) for value in event.summary.value]
        at += size + 16
    assert at == len(data), "the last record is cut off"
    return found


def _run_folder(ran: Ran) -> Path:
    """The only one of hydra's."""
    (folder,) = ran.folder.glob("outputs/*/*")
    return folder


def _files(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {re.sub(r"tfevents\..*", "tfevents", name) for name in names}


@pytest.mark.launch
@needs("hydra", "zarr", "tensorboardX", how="-r requirements/test.txt -r requirements/robomimic.txt")
def test_hydra_zarr_and_tensorboard_on_two_ranks_write_what_one_process_writes(tmp_path: Path) -> None:
    ranks = succeeded(run(tmp_path, TRAINER, 2))
    written = _run_folder(ranks)
    plain = succeeded(run(tmp_path, TRAINER, 1, is_plain=True, OF_RANKS=str(written / "buffer.zarr")))
    alone = _run_folder(plain)
    assert _files(written) == _files(alone)
    assert {".hydra/config.yaml", "train.log", "events/events.out.tfevents"} < _files(written)
    assert [re.sub(r"\[.*?\d\]", "", line) for line in (written / "train.log").read_text().splitlines()] == [
        "[train][INFO] - epoch 0 at 0.01",
        "[train][INFO] - epoch 1 at 0.01",
    ]
    assert [step for step, _ in _losses(written)] == [0, 1]
    for (_, loss), (_, expected) in zip(_losses(written), _losses(alone)):
        assert loss == pytest.approx(expected, rel=1e-5)
    # Each rank reads what it wrote itself; on the disk is what the main rank wrote.
    mains, others = ([number, number, 0.0] * 2 for number in (1.0, 2.0))
    assert [ranks.said(number, "kept") for number in (0, 1)] == [[mains], [others]]
    assert plain.said(0, "of ranks") == plain.said(0, "kept") == [mains]


EDITED = """
import hydra, time
from hydra.core.config_store import ConfigStore
import ddpshim

ConfigStore.instance().store("config", {"hydra": {"run": {"dir": "outputs/${now:%H-%M-%S.%f}"}}})

@hydra.main(version_base=None, config_name="config")
def main(config):
    world = ddpshim.setup(seed=1)
    say("folder", hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
    ddpshim.cleanup()

main()
"""


@pytest.mark.launch
@needs("hydra")
def test_ranks_of_an_edited_hydra_program_have_one_folder(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / rank.program.BEGAN).touch()
    os.utime(job / rank.program.BEGAN, (0, 0.25))
    ranks = succeeded(run(tmp_path, EDITED, 2, DDPSHIM_RUN_DIR=str(job)))
    folders = [Path(ranks.said(number, "folder")[0]) for number in (0, 1)]
    assert folders[0] == folders[1]
    assert folders[0].name.endswith("-00.250000")


LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint

class Trained(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network(dropout=0.5)
    def training_step(self, batch, number):
        return nn.functional.mse_loss(self.network(batch[1]), batch[2].double())
    def validation_step(self, batch, number):
        self.log("valid", nn.functional.mse_loss(self.network(batch[1]), batch[2].double()))
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, accumulate_grad_batches=2,
    gradient_clip_val=0.1, callbacks=[ModelCheckpoint("kept", monitor="valid", save_top_k=2)],
)
trained = Trained()
trainer.fit(trained, DataLoader(Items(), 8, shuffle=True), DataLoader(Items(20), 8))
torch.save(trained.state_dict(), "weights.pth")
"""


@pytest.mark.launch
@needs("lightning")
def test_an_unedited_lightning_trainer_for_one_device_trains_on_ranks_as_in_one_process(tmp_path: Path) -> None:
    plain = succeeded(run(tmp_path, LIGHTNING, 1, is_plain=True))
    ranks = succeeded(run(tmp_path, LIGHTNING, 2, DDPSHIM_UNEDITED="on"))
    assert largest_difference(*(torch.load(ran.folder / "weights.pth") for ran in (plain, ranks))) < 1e-12
    assert _files(ranks.folder / "kept") == _files(plain.folder / "kept")
    assert "Trained (97 parameters), stepped by Adam, is trained by all ranks together" in ranks.logs[0]


ACCELERATED = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, loader = network(dropout=0.2), DataLoader(Items(39), 8, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
log = open("log.txt", "w")
for epoch in range(2):
    model.train()
    for index, x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y.double())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        print(f"{accelerator.gather(loss).mean():.8f}", accelerator.sync_gradients, file=log)
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{epoch}.pth")
say("processes", [accelerator.num_processes, index.tolist()])
"""


@pytest.mark.launch
@needs("accelerate")
def test_a_program_that_uses_accelerate_is_that_of_one_process(tmp_path: Path) -> None:
    plain, two = succeeded(run(tmp_path, ACCELERATED, 1, is_plain=True)), succeeded(run(tmp_path, ACCELERATED, 2))
    assert (two.folder / "log.txt").read_text() == (plain.folder / "log.txt").read_text()
    for name in ("0.pth", "1.pth"):
        assert largest_difference(*(torch.load(ran.folder / name) for ran in (plain, two))) < 1e-12
    assert two.said(0, "processes") == two.said(1, "processes") == plain.said(0, "processes")


@pytest.mark.launch
@needs("accelerate")
def test_a_program_that_has_accelerate_divide_its_model_is_left_to_it(tmp_path: Path) -> None:
    script = """
from accelerate import Accelerator

say("started", type(DataLoader).__module__)
Accelerator(cpu=True)
say("processes", torch.distributed.get_world_size())
"""
    two = succeeded(run(tmp_path, script, 2, ACCELERATE_USE_FSDP="true"))
    assert "accelerate divides its model (ACCELERATE_USE_FSDP)" in two.logs[0]
    assert [len(two.said(rank, "started")) for rank in (0, 1)] == [2, 2]
    assert two.said(1, "processes") == [2]
