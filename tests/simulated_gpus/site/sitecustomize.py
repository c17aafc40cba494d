"""Found by each Python process whose path begins with this folder: its torch, once imported, has simulated GPUs."""

import os
import sys

if os.environ.get("SIMULATED_GPUS_LIBRARY"):
    _here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.dirname(_here))
    import torch_c  # imports no torch

    torch_c.prepare(os.environ["SIMULATED_GPUS_LIBRARY"])
    sys.path.remove(os.path.dirname(_here))
