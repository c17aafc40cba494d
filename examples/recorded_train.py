"""robomimic's own trainer, with each rank's samples counted: `recorded_train.py FOLDER [trainer arguments]`."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Callable

from torch.utils.data._utils.fetch import _MapDatasetFetcher


def record_samples(seen: Callable[[str, int], None]) -> None:
    """Call `seen(filter_key, index)` for each sample that a loader fetches from a robomimic dataset in this process."""
    original = _MapDatasetFetcher.fetch

    def recorded(self: _MapDatasetFetcher, indices: list[int]) -> object:
        for index in indices:
            seen(str(getattr(self.dataset, "filter_by_attribute", None)), int(index))
        return original(self, indices)

    _MapDatasetFetcher.fetch = recorded


def main() -> None:
    folder, *arguments = sys.argv[1:]
    samples: list[int] = []
    record_samples(lambda _, index: samples.append(index))
    sys.argv = ["train.py", *arguments]
    runpy.run_module("robomimic.scripts.train", run_name="__main__")
    (Path(folder) / f"samples_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
