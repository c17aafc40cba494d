"""Makes an installed, unedited robomimic train on all ranks: put `import ddpshim.auto` at the top of a trainer.

Under `python -m ddpshim run` a trainer does not need this line. In one process nothing changes.
"""

from ddpshim.trainers.import_hook import activate, deactivate, is_active, report

__all__ = ["activate", "deactivate", "is_active", "report"]

activate()
