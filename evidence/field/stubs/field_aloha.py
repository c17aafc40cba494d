"""Replaces constants.py of act-plus-plus: the same, with the data beside it, and no question who is logged in."""

import os
import runpy

os.getlogin = lambda: "nobody"
globals().update(runpy.run_path("constants.py"))
for task in SIM_TASK_CONFIGS.values():  # noqa: F821
    task["dataset_dir"] = "data/" + os.path.basename(task["dataset_dir"])
