"""Train the installed robomimic on two ranks, unedited, write the report of the run, and take a picture of it.

    python examples/report_picture.py [--epochs 12] [--out out/report_picture] [--picture docs/report.png]

The picture needs chromium (Debian: apt-get install chromium); without it the report is written all the same.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.same_experiment import ROOT, make_config

WIDTH, HEIGHT = 1100, 1600
NUM_COLOURS = 32  # a picture for a page, not a photograph
MODULE = "robomimic.scripts.train"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "report_picture")
    parser.add_argument("--picture", type=Path, default=None)
    args = parser.parse_args()
    out = args.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    config = make_config("bc", args.steps, args.epochs, out, environ)
    config["experiment"].update(validate=True, validation_epoch_every_n_steps=10)
    config["experiment"]["save"]["every_n_epochs"] = 4
    config["train"].update(hdf5_filter_key="train", hdf5_validation_filter_key="valid")
    (out / "config.json").write_text(json.dumps(config))
    trainer = ["run", "--nproc", "2", "-m", MODULE, "--config", str(out / "config.json")]
    subprocess.run([sys.executable, "-m", "ddpshim", *trainer], check=True, env=environ, cwd=out)
    report = [sys.executable, "-m", "ddpshim", "report", str(out / "trained")]
    page = subprocess.run(report, check=True, env=environ, capture_output=True, text=True).stdout.strip()
    print(page)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if args.picture is not None and browser is None:
        sys.exit("no chromium was found, so no picture was taken; the report is there")
    if args.picture is not None and browser is not None:
        take(browser, page, args.picture)
        print(f"{args.picture}: {args.picture.stat().st_size / 1e3:.0f} kB")


def take(browser: str, page: str, picture: Path) -> None:
    """A picture of the top of `page`, in few colours."""
    from PIL import Image

    raw = picture.resolve().with_suffix(".raw.png")
    how = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    subprocess.run(
        [browser, *how, f"--screenshot={raw}", f"file://{page}"], check=True, timeout=120, capture_output=True
    )
    image = Image.open(raw).convert("RGB")
    kept: list[tuple[int, ...]] = []
    for _, colour in sorted(image.getcolors(WIDTH * HEIGHT), reverse=True):  # the backgrounds and the lines come first
        if len(kept) < NUM_COLOURS and all(max(abs(a - b) for a, b in zip(colour, other)) > 7 for other in kept):
            kept.append(colour)
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for colour in kept for channel in colour])
    small = io.BytesIO()
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    raw.unlink()
    picture.write_bytes(small.getvalue())


if __name__ == "__main__":
    main()
