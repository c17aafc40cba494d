"""Shows what one GPU can show in ten minutes: `python -m evidence.gpu_first [--device cpu] [--only PARTS]`.

1. graphs NETWORK: the plain program twice, and under `run --nproc 1` with DDPSHIM_GRAPHS=on, in alternation: all bits
   of the weights, a step's time and memory. At the end two of them with cuBLAS's workspace as torch has it.
2. traps: the programs of tests/one_process/graphed.py, plain and with graphs.
3. at_once NETWORK: peak memory with DDPSHIM_ROWS_AT_ONCE, and a step's time.
4. ranks NETWORK: two ranks that share the GPU over gloo, traced and replayed, and with graphs.

Each program is a process of its own with a time limit, since what fails in a capture leaves it unusable. On a CPU a
stand-in records the graphs (ddpshim/rows/graphs.py), so this file is tested there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NETWORKS = ("unet", "bc", "act", "resnet", "bc_rnn_gmm", "bc_transformer")
DEADLINE_S, ROOT = 90, Path(__file__).resolve().parent.parent
FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
PARTS = (
    *(f"graphs {name}" for name in NETWORKS),
    "traps",
    *(f"at_once {name}" for name in ("unet", "bc_transformer")),
    *(f"ranks {name}" for name in ("unet", "bc", "resnet")),
    *(f"graphs {name} workspace" for name in ("unet", "bc")),
)


def train(name: str, out: str) -> None:
    """Train a network of main_thread_train.py, and write the hash of its weights, a step's ms, and memory in MB."""
    import torch

    from evidence import main_thread_train as trains

    is_gpu = trains.DEVICE.type == "cuda"
    num_steps = 200 if is_gpu else 12
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    trainer = trains.Trainer("plain", name, *trains._make(name))
    torch.manual_seed(1)
    for _ in range(num_steps):
        trainer.step()
    of_net = b"".join(value.cpu().numpy().tobytes() for value in trainer.net.state_dict().values())
    norm = sum(float(p.detach().double().square().sum()) for p in trainer.net.parameters()) ** 0.5
    found: dict[str, Any] = {"weights": hashlib.sha256(of_net).hexdigest()[:12], "norm": norm}
    began, of_thread = time.perf_counter(), time.thread_time()
    for _ in range(num_steps):
        trainer.step()  # which reads the loss
    found["ms"] = 1000 * (time.perf_counter() - began) / num_steps
    found["main thread"] = 1000 * (time.thread_time() - of_thread) / num_steps
    found["MB"] = torch.cuda.max_memory_reserved() / 2**20 if is_gpu else 0.0
    Path(out).write_text(json.dumps(found))


def ran(arguments: list[str], ranks: int, device: str, folder: Path, **variables: str) -> tuple[Any, str]:
    """Return what a program wrote, or None, and a line: why, or how many calls were replayed."""
    out = folder / "out"
    launched = ["-m", "ddpshim", "run", "--no-logs", "--nproc", str(ranks)] if ranks else []
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DDPSHIM_ROWS": "all", "OMP_NUM_THREADS": "1", **variables}
    environ |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"DDPSHIM_BACKEND": "gloo"}
    command = [sys.executable, *launched, "-m", *arguments, str(out)]
    try:
        done = subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"not finished within {DEADLINE_S} s"
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    if done.returncode:
        return None, next((line for line in reversed(lines) if "Error" in line), lines[-1])[:300]
    path = out if out.is_file() else out / "results.json"
    said = [line.partition("DDPSHIM_GRAPHS=on: ")[2] for line in lines if "DDPSHIM_GRAPHS=on: " in line]
    return json.loads(path.read_text()), "; ".join(said)


def show(part: str, device: str, folder: Path) -> str:
    """Return what a part has shown. Runs its programs."""
    kind, name, how = [*part.split(), "", ""][:3]
    program = ["evidence.gpu_first", "--train", name]
    fixed = {} if how else FIXED
    numbers = iter(range(100))

    def run(arguments: list[str], ranks: int = 0, **variables: str) -> tuple[Any, str]:
        own = folder / f"{part.replace(' ', '_')}_{next(numbers)}"
        own.mkdir()
        return ran(arguments, ranks, device, own, **fixed, **variables)

    if kind == "traps":
        programs = ["tests.one_process.graphed", *(["--device", "cuda"] if device == "cuda" else [])]
        (plain, problem), (graphs, said) = run(programs), run(programs, 1, DDPSHIM_GRAPHS="on")
        if plain is None or graphs is None:
            return problem or said
        differ = [of for of, one in plain.items() if json.dumps(one) != json.dumps(graphs.get(of))]
        return f"{len(plain) - len(differ)} of {len(plain)} programs have all bits, not {', '.join(differ)}; {said}"
    ranks = 2 if kind == "ranks" else 1
    first: dict[str, str] = {"DDPSHIM_CAPTURE": "force"} if kind == "ranks" else {}
    second = {"DDPSHIM_ROWS_AT_ONCE": "4"} if kind == "at_once" else {"DDPSHIM_GRAPHS": "on"}
    arms = [run(program, ranks if variables or ranks == 2 else 0, **variables) for variables in (first, second) * 2]
    if any(found is None for found, _ in arms):
        return "; ".join(said for found, said in arms if found is None)
    (one, _), (other, said), (again, _), (last, _) = arms
    equal = [
        f"{what} {'equal' if x['weights'] == one['weights'] else 'DIFFER'}"
        for what, x in [("again", again), ("", other)]
    ]
    text = [f"weights {equal[1].strip()} ({equal[0]})"]
    if kind == "at_once":  # which rounds otherwise
        text = [f"norms of weights {abs(other['norm'] / one['norm'] - 1):.1e} apart"]
    for what in ("ms", "main thread", "MB"):
        pairs = min(one[what], again[what]), min(other[what], last[what])
        text.append(f"{what} {pairs[0]:.2f} -> {pairs[1]:.2f}")
    return "; ".join([*text, *([said] if said else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=lambda parts: parts.split(","), default=PARTS)
    parser.add_argument("--train", nargs=2, metavar=("NETWORK", "OUT"))
    options = parser.parse_args()
    if options.train:
        train(*options.train)
        return
    with tempfile.TemporaryDirectory() as folder:
        for part in options.only:
            began = time.perf_counter()
            print(
                f"{part}: {show(part, options.device, Path(folder))} [{time.perf_counter() - began:.0f} s]", flush=True
            )


if __name__ == "__main__":
    main()
