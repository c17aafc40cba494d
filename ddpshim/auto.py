"""Makes an installed, unedited robomimic train on all ranks: `import ddpshim.auto` at the top of a trainer.

Started by `python -m ddpshim run` a trainer needs not even the line. In one process nothing changes.
"""

from ddpshim.trainers.import_hook import activate, deactivate, is_active, report

__all__ = ["activate", "deactivate", "is_active", "report"]

activate()
