"""robomimic's trainer, unchanged, with its samples, noise and final networks written down for each rank.

Started by tests/equivalence.py, with or without torchrun, as
`python -m tests.observed FOLDER PRECISION [trainer arguments]`.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any

import torch

from examples.recorded_train import record_samples


def _in_float64() -> None:
    """Have robomimic compute in float64 where it casts to float32, so that rounding can be told from error."""
    import robomimic.utils.tensor_utils as TensorUtils

    torch.set_default_dtype(torch.float64)
    torch.nn.Module.float = torch.nn.Module.double  # type: ignore[method-assign]
    TensorUtils.to_float = lambda x: TensorUtils.map_tensor(x, lambda t: t.double())


def _write_down_networks(out: dict[str, Any]) -> None:
    import ddpshim.robomimic as adapter

    prepare, finish = adapter.prepare, adapter.finish

    def observed_prepare(model: Any) -> Any:
        out["model"] = prepare(model)
        out["initial"] = networks(out["model"])
        return out["model"]

    def observed_finish() -> None:
        out["noise"] = torch.randn(4)
        finish()

    adapter.prepare, adapter.finish = observed_prepare, observed_finish


def _with_small_unet() -> None:
    """The diffusion policy's UNet has 66M parameters whatever the config says: too many for a test."""
    try:
        import robomimic.models.diffusion_policy_nets as DPNets
    except ImportError:
        return
    DPNets.ConditionalUnet1D = functools.partial(  # type: ignore[misc]
        DPNets.ConditionalUnet1D, down_dims=[16, 32], n_groups=4, diffusion_step_embed_dim=16
    )


def networks(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of an Algo by name: networks, target networks, the EMA, those of inner algorithms."""
    import ddpshim.robomimic as adapter

    out = {}
    for number, algo in enumerate(adapter._algos(model)):
        modules = {"": algo.nets}
        if getattr(algo, "ema", None) is not None:
            modules["ema."] = algo.ema.averaged_model
        for prefix, module in modules.items():
            out.update({f"{number}.{prefix}{key}": value.clone() for key, value in module.state_dict().items()})
    return out


def main() -> None:
    folder, precision, *arguments = sys.argv[1:]
    rank = os.environ.get("RANK", "plain")
    out: dict[str, Any] = {}
    if precision == "float64":
        _in_float64()
    _with_small_unet()
    samples = out.setdefault("samples", {})
    record_samples(lambda key, index: samples.setdefault(key, []).append(index))
    _write_down_networks(out)
    sys.argv = ["train.py", *arguments]
    runpy.run_module("robomimic.scripts.train", run_name="__main__")
    out["networks"] = networks(out.pop("model"))
    torch.save(out, os.path.join(folder, f"observed_{rank}.pt"))


if __name__ == "__main__":
    main()
