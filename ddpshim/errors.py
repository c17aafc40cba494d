"""Defines the errors that ddpshim raises, one class for each part of a migration that can go wrong.

::

    DdpShimError (RuntimeError)
    ├── LaunchError   the launch environment is partial, garbled or impossible
    ├── RankError     a rank of `ddpshim.spawn` failed
    ├── OptionsError  (also ValueError) options that do not exist, are not allowed or differ between ranks
    ├── WorldError    the process group: contradicting setup, a collective that cannot be served
    ├── SyncError     gradients, parameters or noise would not be what one process has
    ├── DataError     (also ValueError) batches, samplers or datasets that do not split
    ├── RolloutError  an episode of an evaluation failed
    ├── CheckpointError  (also OSError) a file could not be written, or none would be left
    ├── ReportError   a run left nothing to report, or its charts cannot be drawn
    ├── PatchError    a patch set does not fit the files it was asked to change
    │   └── TargetError  there are no such files
    └── HookError     an installed trainer is not one that can be made distributed without an edit

Every message has three parts: what was found, what it would have caused, what to do.
"""


class DdpShimError(RuntimeError):
    """Base of all errors that ddpshim raises on purpose.

    Attributes:
        exit_code: of a command that ends with it. 1: it looked, and refused; 2: it was asked for what cannot be done.
    """

    exit_code = 1


class LaunchError(DdpShimError):
    """The launch environment cannot be a process of a distributed job."""

    exit_code = 2


class RankError(DdpShimError):
    """A rank that was started from this process failed; the text names the first that did, and holds its traceback."""


class OptionsError(DdpShimError, ValueError):
    """Options of a run that do not exist, are not allowed, or are not the same on every rank."""


class WorldError(DdpShimError):
    """The process group cannot do what was asked of it."""


class SyncError(DdpShimError):
    """Ranks would train different models, or the same noise."""


class DataError(DdpShimError, ValueError):
    """A dataset, sampler or batch size does not split over the ranks."""


class RolloutError(DdpShimError):
    """An evaluation cannot be finished: an episode failed on some rank."""


class CheckpointError(DdpShimError, OSError):
    """A checkpoint could not be written; the one before it is as it was."""


class ReportError(DdpShimError):
    """A run cannot be reported."""

    exit_code = 2


class PatchError(DdpShimError):
    """A patch set does not fit its target."""


class TargetError(PatchError):
    """There is no such target."""

    exit_code = 2


class HookError(DdpShimError):
    """What `ddpshim.auto` would hook is not what it knows, or is used in a way that would train apart."""
