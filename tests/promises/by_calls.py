"""trainer.py by ddpshim's calls: `python by_calls.py global|shares OUT [options]`."""

import os
import sys

import trainer

import ddpshim


class Door:
    make_loader, wrap_parallel = staticmethod(ddpshim.make_loader), staticmethod(ddpshim.wrap_parallel)
    rank = os.environ.get("RANK", "") if sys.argv[1] == "shares" else ""  # in shares, each rank writes its own

    def training(self, folder, objects):
        ddpshim.split_random_streams()
        if "--stop-at" in sys.argv:
            training = ddpshim.Resumable(folder, objects)
            training.restore()
            return training


ddpshim.setup(seed=0, **({"batch": "global"} if sys.argv[1] == "global" else {}))
sys.argv[1:2] = []
trainer.main(Door())
ddpshim.cleanup()
