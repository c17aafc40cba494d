"""`import ddpshim.auto`, one line at the top of a trainer: the installed robomimic trains on all ranks, unedited.

Started by `python -m ddpshim run` a trainer needs not even the line. In one process nothing changes.
"""

from ddpshim.hooking import activate, deactivate, is_active, report

__all__ = ["activate", "deactivate", "is_active", "report"]

activate()
