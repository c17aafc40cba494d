"""Takes pictures of reports in a browser, wide and narrow, light and dark, for a human to check.

python -m tests.report_pictures [RUN_DIR ...] --pictures FOLDER [--top FILE]

One folder: its report; several: their comparison; none: both, for invented runs. It fails if text cannot be read (cut
off, over other text, without contrast, wider than the window). --top writes a small picture of the page's top.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

from ddpshim.observe.report.writing import write
from tests import browser

START = 1_790_000_000.0
NUM_EPOCHS = 30
NUM_COLOURS = 32  # enough for a picture of a page
WIDTH, HEIGHT = 1100, 1740


def make_run(folder: Path, num_ranks: int, speed: float = 1.0) -> Path:
    """Write a run with all that a report shows: two starts, a failed guard, a slow rank, long names, environments."""
    draws = random.Random(num_ranks)
    run = folder / f"{num_ranks}_ranks" / "can_image_diffusion_policy_with_a_long_name" / "20260921120000"
    for rank in range(num_ranks):
        records: list[dict[str, Any]] = []

        def note(kind: str, at: float, records: list[dict[str, Any]] = records, **values: Any) -> None:
            records.append({"kind": kind, "time": START + at / speed, **values})

        facts = {
            "backend": "nccl",
            "device": f"cuda:{rank}",
            "gpu": "NVIDIA H100 80GB HBM3",
            "options": {"guard": True},
        }
        note("start", 0, start=1, rank=rank, world_size=num_ranks, **facts)
        pace = {"seconds": {"forward": 0.03, "backward": 0.06}, "sends_s": 0.0, "workers": 0, "worker_s": None}
        note("pace", 40, steps=20, cores=8, gradient_bytes=4e6, bucket_bytes=1e6, **pace)
        for epoch in range(1, NUM_EPOCHS + 1):
            at = 60.0 * epoch
            if epoch == NUM_EPOCHS // 2:
                note("end", at - 30, how="left", reason="SIGTERM on rank 1", epoch=epoch, step=3, exit_code=75)
                note("start", at - 20, start=2, rank=rank, world_size=num_ranks, **facts)
            loss = 0.9 * 0.87**epoch + 0.002
            own = {"Loss": loss * draws.uniform(0.96, 1.04), "L2_Loss": loss, "Policy_Grad_Norms": 0.1 * loss}
            slow = 1.25 if rank == 1 and epoch > 20 else 1.0
            seconds = {"data_wait": 1.8, "compute": 24 * slow, "optimizer": 2.2, "communication": 6.0, "other": 0.3}
            seconds = {part: second / speed for part, second in seconds.items()}
            held = {"rss": 4e9, "peak_rss": 4e9, "gpu_allocated": 3e10, "gpu_reserved": 4e10 + 1e8 * epoch}
            memory = {**held, "gpu_total": 8e10}
            told: dict[str, Any] = {
                "own": own,
                "mean": {**own, "Loss": loss},
                "steps": 100,
                "samples": 6400 / num_ranks,
            }
            note("epoch", at, epoch=epoch, phase="training", seconds=seconds, memory=memory, **told)
            note("epoch", at + 3, epoch=epoch, phase="validation", own={"Loss": 1.1 * loss}, seconds={"compute": 3.0})
            is_good = not (rank == 0 and epoch == 12)
            check = {"check": "weights", "network": "DiffusionPolicyUNet", "reductions": 100 * epoch}
            note("guard", at + 3, passed=is_good, said="" if is_good else "ranks hold different weights", **check)
            if epoch % 5 == 0:
                for environment in ("PickPlaceCan", "PickPlaceCan_D1"):
                    success = round(20 * min(1.0, epoch / 28) * draws.uniform(0.8, 1.0)) / 20
                    returns = [draws.uniform(0.5, 1.5) * success for _ in range(20)]
                    metrics = {"Success_Rate": success, "Return": sum(returns) / 20}
                    played = {"environment": environment, "epoch": epoch, "episodes": 20, "seconds": 6.0 / speed}
                    note("rollout", at + 10, metrics=metrics, returns=returns, **played)
                if rank == 0:
                    path = str(run / "models" / f"model_epoch_{epoch}_PickPlaceCan_success_0.85.pth")
                    note("checkpoint", at + 12, path=path, bytes=1_020_000_000, seconds=0.4, in_background=True)
        note("end", 60.0 * NUM_EPOCHS + 30, how="finished")
        path = run / "ddpshim" / f"rank_{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "config.json").write_text(json.dumps({"train": {"batch_size": 64, "num_epochs": NUM_EPOCHS}}))
    return run


def take_top(page: Path, picture: Path) -> None:
    """A picture of the top of `page`, in few colours."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "raw.png")
        browser.show(page.resolve().as_uri(), WIDTH, HEIGHT, raw)
        image = Image.open(raw).convert("RGB")
    kept: list[tuple[int, ...]] = []
    for _, colour in sorted(image.getcolors(WIDTH * HEIGHT), reverse=True):  # the backgrounds and the lines come first
        if len(kept) < NUM_COLOURS and all(max(abs(a - b) for a, b in zip(colour, other)) > 7 for other in kept):
            kept.append(colour)
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for colour in kept for channel in colour])
    small = io.BytesIO()
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    picture.write_bytes(small.getvalue())


def look_at(page: Path, pictures: Optional[Path]) -> int:
    """How much on `page` cannot be read."""
    found = browser.look(page, pictures=pictures)
    for name, wrong in found.items():
        print(f"{name}: {'; '.join(wrong) or 'can be read'}")
    return sum(map(len, found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN_DIR")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    parser.add_argument("--top", type=Path, metavar="FILE")
    args = parser.parse_args()
    if browser.find() is None:
        sys.exit(browser.NO_BROWSER)
    with tempfile.TemporaryDirectory() as folder:
        runs = args.runs or [make_run(Path(folder), 1), make_run(Path(folder), 4, speed=3.1)]
        groups = [runs] if args.runs else [runs[1:], runs]
        num_wrong = 0
        for group in groups:
            # The report of a run is written beside its videos, which it names by their place.
            page = write(group, None if len(group) == 1 else Path(folder, "comparison.html"))
            num_wrong += look_at(page, args.pictures)
            if args.top is not None and group is groups[0]:
                take_top(page, args.top)
    sys.exit(f"{num_wrong} places cannot be read" if num_wrong else 0)


if __name__ == "__main__":
    main()
