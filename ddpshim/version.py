"""The version of the package, and the oldest torch that it runs on."""

from __future__ import annotations

import sys

__version__ = "0.2.0"

_NEEDS = {
    (3, 9): "2.1",
    (3, 12): "2.4",  # with an older torch, TCPStore.compare_set crashes Python 3.12 (segmentation fault)
    (3, 13): "2.6",  # with torch 2.5's wheels for Python 3.13, torch.save fails
}


def oldest_torch(python: tuple[int, int]) -> str:
    """The oldest release of torch on which the package runs under this Python. Local."""
    return next(torch for since, torch in reversed(_NEEDS.items()) if python >= since)


def check_torch() -> None:
    """Raise ImportError if the torch of this Python is too old. Local; imports no torch.

    pip does not check it: a version bound in the requirements would let pip replace the user's torch.
    """
    from packaging.version import Version

    needed = oldest_torch(sys.version_info[:2])
    found = getattr(sys.modules.get("torch"), "__version__", None)
    if found is None:
        import importlib.metadata

        try:
            found = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return  # `import torch` reports it
    if Version(str(found)).release < Version(needed).release:
        raise ImportError(
            f"torch {found} is too old for ddpshim, which needs {needed} or newer on Python "
            f"{sys.version_info[0]}.{sys.version_info[1]}: training would fail midway. Make an environment with a "
            "newer torch (python -m ddpshim docs start)."
        )
