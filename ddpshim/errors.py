"""Defines the errors that ddpshim raises, one class for each part of a migration.

Every message has three parts: what was found, what it would have caused, what to do.
"""


class DdpShimError(RuntimeError):
    """Base class of all errors that ddpshim raises; a RuntimeError.

    Attributes:
        exit_code: the exit code of a command that fails with this error. 1: the answer is no; 2: nothing was done.
    """

    exit_code = 1


class LaunchError(DdpShimError):
    """The launch environment cannot be a process of a distributed job."""

    exit_code = 2


class RankError(DdpShimError):
    """A rank that this process started has failed; the message names the first one, with its traceback."""


class OptionsError(DdpShimError, ValueError):
    """Options of a run that do not exist, are not allowed, or are not the same on every rank."""


class WorldError(DdpShimError):
    """The process group cannot do what was requested."""


class SyncError(DdpShimError):
    """Ranks would train different models, or draw the same noise."""


class DataError(DdpShimError, ValueError):
    """A dataset, sampler or batch size does not split over the ranks."""


class RolloutError(DdpShimError):
    """An evaluation cannot finish: an episode failed on some rank."""


class CheckpointError(DdpShimError, OSError):
    """A checkpoint could not be written, and the previous one is unchanged; or progress could not be read."""


class ReportError(DdpShimError):
    """A report of a run cannot be built."""

    exit_code = 2


class CertificateError(DdpShimError):
    """A file is not a certificate or was edited, or a run cannot be certified or repeated."""

    exit_code = 2


class PatchError(DdpShimError):
    """A patch set does not fit its target."""


class TargetError(PatchError):
    """The target of a patch set does not exist."""

    exit_code = 2
