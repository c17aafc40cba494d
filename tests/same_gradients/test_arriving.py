"""Losses that arrive while the backward pass runs (rows/arriving.py): a step waits for no message before its gradients.

That numbers are those of one process is shown by the programs of tests/one_process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpshim import variables
from tests.preloaded import environment, start_afresh

DEADLINE_S = 240
# What a step waits for, by the function that waits. (`run` leaves a program that imports ddpshim alone.)
WAITS = """
import json, sys, torch
from evidence import main_thread_train as programs

torch.set_num_threads(1)
torch.manual_seed(0)
found = {}
for name in sys.argv[1].split(","):
    trainer = programs.Trainer("plain", name, *programs._make(name))
    for _ in range(20):  # ranks read each line's first ten numbers from the main rank
        trainer.step()
    found[name] = [programs.waits(trainer.step) for _ in range(3)]
    compute = trainer._forward
    trainer._forward = lambda batch: lambda: (loss := compute(batch)(), loss.item())[0]
    for _ in range(20):
        trainer.step()
    found[name].append(programs.waits(trainer.step))
if torch.distributed.get_rank() == 0:
    open("waits.json", "w").write(json.dumps(found))
"""
# Waits for the means of gradients, and for buffers: torch's DDP has both.
GRADIENTS = {"mean_gradients._finish", "collectives.finish"}


@pytest.mark.launch
@pytest.mark.robomimic
@pytest.mark.parametrize(
    ("capture", "names"),
    [("off", "bc,bc_transformer,unet"), ("force", "bc,bc_rnn_gmm,bc_transformer,unet")],  # by the rules, a GMM decides
)
def test_a_step_waits_for_no_message_before_its_gradients(capture: str, names: str, tmp_path: Path) -> None:
    pytest.importorskip("robomimic")
    (tmp_path / "train.py").write_text(WAITS)
    command = ["-m", "ddpshim", "run", "--nproc", "3", "train.py", names]
    environ = {**environment(), variables.ROWS: "all", "DDPSHIM_CAPTURE": capture}
    code, output = start_afresh(command, environ, tmp_path, DEADLINE_S)
    assert code == 0, output[-6000:]
    for name, steps in json.loads((tmp_path / "waits.json").read_text()).items():
        *usual, early = [{place: num for place, num in step.items() if place not in GRADIENTS} for step in steps]
        # What ranks compare is sent with the last gradients, and the loss has come by the end of the pass, or when it
        # is read before.
        assert [*usual, early] == [{"collectives.wait": 1, "blocks.wait": 1}] * 4, name
