"""`import ddpshim.auto`, one line at the top of a trainer: the installed robomimic trains on all ranks, unedited.

Started by `python -m ddpshim run` a trainer needs not even the line. In one process nothing changes.
"""

from ddpshim.trainers.import_hook import activate, deactivate, is_active, report

__all__ = ["activate", "deactivate", "is_active", "report"]

activate()
