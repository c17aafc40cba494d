"""Opens pages in Chromium: runs their scripts, and takes pictures of them for a human."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Optional

NO_BROWSER = "needs a browser (Debian: apt-get install chromium)"
DEADLINE_S = 120


def find() -> Optional[str]:
    """Return the path of Chromium or Chrome; None if neither is installed."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def show(url: str, width: int, height: int, picture: Optional[Path] = None, is_dark: bool = False) -> str:
    """Return the HTML of the page at `url` after its scripts have run, or take a picture. Raises CalledProcessError."""
    browser = find()
    assert browser is not None, NO_BROWSER
    how = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    how += ["--virtual-time-budget=3000", "--blink-settings=preferredColorScheme=0"][: 1 + is_dark]
    how.append("--dump-dom" if picture is None else f"--screenshot={picture.resolve()}")
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [browser, *how, f"--user-data-dir={profile}", url],
            check=True,
            timeout=DEADLINE_S,
            capture_output=True,
            text=True,
        ).stdout
