"""Reads the options of a run from a JSON or YAML file; loaded only if a variable names one."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

from ddpshim.errors import OptionsError
from ddpshim.options import FILE, SECTION
from ddpshim.reading import read_bytes


def read_section(path: Union[str, os.PathLike[str]]) -> Mapping[str, Any]:
    """Return the `ddpshim` section of a JSON or YAML file, or the whole file if it has no such section. Local.

    Raises:
        OptionsError: the file cannot be read or is not a mapping, or it is YAML and PyYAML is not installed.
    """
    path = Path(path)
    try:
        text = read_bytes(path).decode()
        content = _load_yaml(path, text) if path.suffix.lower() in (".yaml", ".yml") else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        raise OptionsError(
            f"{path} cannot be read ({type(error).__name__}: {error}), so its options would be ignored. Set {FILE} "
            "to a JSON or YAML file."
        ) from error
    section = content.get(SECTION, content) if isinstance(content, Mapping) else content
    if not isinstance(section, Mapping):
        raise OptionsError(
            f"{path} contains a {type(section).__name__} where its options should be, so they would be ignored. Write "
            f'a mapping: {{"{SECTION}": {{"timeout_s": 600}}}}.'
        )
    return section


def _load_yaml(path: Path, text: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise OptionsError(
            f"{path} is YAML and PyYAML is not installed, so its options would be ignored. Run pip install pyyaml, "
            "or write JSON."
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
