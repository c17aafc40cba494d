# %% [markdown]
# # Quick start
#
# This notebook trains robomimic's bc in one process, then on two with ddpshim, and shows that both trainings are the
# same experiment. It takes about a minute on a CPU and needs an environment with robomimic
# ([docs/start.md](../docs/start.md)). In a clone of this repository:
#
# `pip install . jupyterlab && python examples/course/notebooks.py && jupyter lab examples/quick_start.ipynb`

# %%
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

WORK = tempfile.TemporaryDirectory()  # removed at the end
FOLDER = Path(WORK.name)


def shell(command):
    """Run a command, and show the end of its output."""
    print("$", command)
    ran = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(*ran.stdout.splitlines()[-4:], sep="\n")
    assert ran.returncode == 0, ran.stdout


# %% [markdown]
# ## A config
#
# `ddpshim example` writes a config for robomimic and 200 demonstrations. Here it writes to a temporary folder, and the
# training has three epochs of 100 steps.

# %%
shell(f"python -m ddpshim example --out {FOLDER}")
config = json.loads((FOLDER / "lift_bc.json").read_text())
config["train"]["num_epochs"] = 3
config["experiment"]["save"] = {"every_n_epochs": 3}
if "--quick" in sys.argv:
    config["experiment"]["epoch_every_n_steps"] = 10
(FOLDER / "lift_bc.json").write_text(json.dumps(config))

# %% [markdown]
# ## One process
#
# This is robomimic as released; ddpshim is not involved.

# %%
shell(f"python -m robomimic.scripts.train --config {FOLDER}/lift_bc.json --name one")

# %% [markdown]
# ## Two processes
#
# The same program and the same config, on two GPUs or, as here, on two CPU processes. You edit nothing.

# %%
shell(f"python -m ddpshim run --nproc 2 -m robomimic.scripts.train --config {FOLDER}/lift_bc.json --name two")


# %% [markdown]
# ## The same experiment
#
# The logs have the same losses, and the last checkpoints the same weights, up to rounding. (Training amplifies
# rounding: the more steps, the larger the difference. [The option
# exact](../docs/same_experiment.md#the-same-bits) removes it.)


# %%
def results(name):
    (run,) = (FOLDER / "lift_bc" / name).iterdir()
    losses = re.findall(r'"Loss": ([\d.e-]+)', (run / "logs" / "log.txt").read_text())
    newest = max((run / "models").glob("*.pth"), key=lambda path: path.stat().st_mtime)
    return [float(loss) for loss in losses], torch.load(newest, map_location="cpu", weights_only=False)["model"]


def largest_difference(one, two):
    if isinstance(one, torch.Tensor):
        return float((one - two).abs().max())
    return max((largest_difference(one[key], two[key]) for key in one), default=0.0) if isinstance(one, dict) else 0.0


(one, weights), (two, others) = results("one"), results("two")
for epoch, losses in enumerate(zip(one, two), 1):
    print(f"epoch {epoch}: loss {losses[0]:.6f} in one process, {losses[1]:.6f} on two")
apart = largest_difference(weights, others)
print(f"largest difference of a weight: {apart:.0e}")
assert len(one) == len(two) == config["train"]["num_epochs"]
assert max(abs(a - b) for a, b in zip(one, two)) < 1e-5
assert 0 < apart < 1e-4

# %% [markdown]
# ## What every rank did
#
# Each rank has recorded its losses, its times and its memory.

# %%
(run,) = (FOLDER / "lift_bc" / "two").iterdir()
shell(f"python -m ddpshim report --markdown --out {run}/report.md {run}")
print((run / "report.md").read_text()[:1500])

# %% [markdown]
# Next: [a trainer that you prefer not to edit](../docs/run.md), [your own trainer](../MIGRATION.md), or
# [the course](course/README.md), which shows what goes wrong by hand.
