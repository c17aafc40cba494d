"""`python states.py FOLDER OUT` writes every checkpoint under FOLDER, as tensors by name, to OUT.

Run it with the trainer's PYTHONPATH: a checkpoint may contain objects of its classes.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ENDINGS = {".ckpt", ".pth", ".pt"}


def __getattr__(name: str) -> Any:
    """Return a module class: a checkpoint may contain one that the trainer's script defines."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (torch.nn.Module,), {})


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors and numbers in nested containers, modules and optimizers, by path."""
    if isinstance(value, torch.Tensor):
        return {name: value.detach().double()} if value.is_floating_point() else {name: value.detach()}
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)  # type: ignore[assignment]
    elif isinstance(value, (bool, int, float)):
        return {name: torch.tensor(float(value), dtype=torch.float64)}
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, item in items:
        found.update(flat(item, f"{name}/{key}"))
    return found


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in ENDINGS and path.is_file():
            try:
                saved = torch.load(path, map_location="cpu", weights_only=False)
                saved = saved.get("state_dicts", saved) if isinstance(saved, dict) else saved
                found[str(path.relative_to(folder))] = flat(saved)
            except Exception as error:
                found[str(path.relative_to(folder))] = f"{type(error).__name__}: {error}"
    torch.save(found, out)


if __name__ == "__main__":
    main()
