"""robomimic's own trainer, which also records each rank's samples: `recorded_train.py WAY FOLDER [trainer arguments]`.

WAY: "released" is the trainer as released; "ddpshim" patches it in memory, as `ddpshim run -m robomimic.scripts.train`
does; "by_hand" is a typical quick port: DistributedDataParallel around the networks, and a DistributedSampler in the
loader.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, Callable

from torch.utils.data._utils.fetch import _MapDatasetFetcher


def record_samples(seen: Callable[[str, int], None]) -> None:
    """Call `seen(filter_key, index)` for each sample that a loader fetches from a robomimic dataset in this process."""
    original = _MapDatasetFetcher.fetch

    def recorded(self: _MapDatasetFetcher, indices: list[int]) -> object:
        if not hasattr(self.dataset, "dataset"):  # ddpshim's loader calls this once more, for the dataset itself
            for index in indices:
                seen(str(getattr(self.dataset, "filter_by_attribute", None)), int(index))
        return original(self, indices)

    _MapDatasetFetcher.fetch = recorded


def port_by_hand(arguments: list[str]) -> list[str]:
    """Wrap robomimic's networks and loaders as guides recommend; return the arguments, with a folder for each rank."""
    import robomimic.algo
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils import data
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    make, loader = robomimic.algo.algo_factory, data.DataLoader

    def make_and_wrap(*args: Any, **options: Any) -> Any:
        model = make(*args, **options)
        for name, net in model.nets.items():
            model.nets[name] = DistributedDataParallel(net)
        return model

    class Loader(loader):  # type: ignore[misc, valid-type]
        def __init__(self, dataset: Any, sampler: Any = None, shuffle: bool = False, **options: Any) -> None:
            super().__init__(dataset, sampler=DistributedSampler(dataset, shuffle=shuffle), **options)

    robomimic.algo.algo_factory, data.DataLoader = make_and_wrap, Loader  # type: ignore[misc]
    place = arguments.index("--config") + 1
    config = json.loads(Path(arguments[place]).read_text())
    if dist.get_rank():  # otherwise all ranks would write the same files, and mix their output
        config["train"]["output_dir"] += f"_of_rank_{dist.get_rank()}"
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    own = Path(arguments[place]).with_name(f"config_{dist.get_rank()}.json")
    own.write_text(json.dumps(config))
    return [*arguments[:place], str(own), *arguments[place + 1 :]]


def main() -> None:
    way, folder, *arguments = sys.argv[1:]
    if way == "ddpshim":
        from ddpshim.trainers.patching_in_memory import patch_program

        patch_program("robomimic.scripts.train")
    elif way == "by_hand":
        arguments = port_by_hand(arguments)
    samples: list[int] = []
    record_samples(lambda _, index: samples.append(index))
    sys.argv = ["train.py", *arguments]
    # Opened before ranks become one program, in which the main rank alone writes.
    with open(Path(folder) / f"samples_{os.environ.get('RANK', '0')}.json", "w") as file:
        runpy.run_module("robomimic.scripts.train", run_name="__main__")
        json.dump(samples, file)


if __name__ == "__main__":
    main()
