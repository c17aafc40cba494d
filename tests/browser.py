"""Opens pages in Chromium: takes pictures of them for a human, and finds text that cannot be read."""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

NO_BROWSER = "needs a browser (Debian: apt-get install chromium)"
DEADLINE_S = 120
FRAMES = "frames.html"

# A frame for each width and colour scheme, since Chromium's window cannot be so narrow; problems are written to #found.
_FRAMES = """<!DOCTYPE html>
<meta charset="utf-8">
<style>body { margin: 0; display: flex; align-items: start } iframe { border: 0; flex: none }</style>
%s
<pre id="found" hidden></pre>
<script>
const parts = colour => colour.match(/[\\d.]+/g).map(Number);
const light = colour => parts(colour).slice(0, 3).map(x => x / 255)
  .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
  .reduce((sum, x, i) => sum + [0.2126, 0.7152, 0.0722][i] * x, 0);
function contrast(a, b) {
  const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}
function under(element) {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (parts(colour)[3] !== 0) return colour;
  }
  return "rgb(255, 255, 255)";
}
function wrong(frame) {
  const page = frame.contentDocument, found = [];
  const wide = page.documentElement.scrollWidth;
  if (wide > frame.clientWidth) found.push(`scrolls sideways: ${wide} pixels`);
  for (const text of page.querySelectorAll("h1, h2, h3, p, dt, dd, td, th, li, summary, figcaption, span, a, text")) {
    const box = text.getBoundingClientRect(), said = text.textContent.trim().slice(0, 60);
    if (!said || !box.width || text.classList.contains("bartext") || text.closest(".scroll, .modebar")) continue;
    const chart = text.closest(".chart"), style = getComputedStyle(text);
    const around = (chart || page.documentElement).getBoundingClientRect();
    if (box.left < around.left - 1 || box.right > around.right + 1) found.push(`cut off: ${said}`);
    const ratio = contrast(chart ? style.fill : style.color, under(text));
    if (ratio < 4.5) found.push(`contrast of ${ratio.toFixed(1)}: ${said}`);
  }
  for (const chart of page.querySelectorAll(".chart")) {
    if (!chart.querySelector("svg.main-svg")) found.push(`not drawn: ${chart.id}`);
    for (const axis of [".xtick text", ".ytick text", ".legendtext"]) {
      const boxes = [...chart.querySelectorAll(axis)].map(text => text.getBoundingClientRect());
      for (const [i, a] of boxes.entries()) for (const b of boxes.slice(i + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
          found.push(`on top of each other: ${axis} of ${chart.id}`);
    }
  }
  return [...new Set(found)];
}
onload = () => setTimeout(() => {
  const frames = [...document.querySelectorAll("iframe")];
  for (const frame of frames) frame.style.height = `${frame.contentDocument.documentElement.scrollHeight}px`;
  const all = frames.map(frame => [frame.title, frame.clientHeight, wrong(frame)]);
  document.getElementById("found").textContent = JSON.stringify(all);
}, 500);
</script>
"""


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


def look(page: Path, widths: Sequence[int] = (1280, 400), pictures: Optional[Path] = None) -> dict[str, list[str]]:
    """Return the problems of `page` by width and colour scheme; write a picture of each to the folder `pictures`.

    Problems are: the page scrolls sideways, text is cut off, overlaps or has little contrast, or a chart is missing.
    """
    schemes = {f"{page.stem}_{width}{'_dark' * is_dark}": (width, is_dark) for width in widths for is_dark in (0, 1)}
    with _served(page) as address:
        text = show(f"{address}/{_framed(schemes)}", 1280, 1000)
        match = re.search(r'<pre id="found" hidden="">(.+?)</pre>', text)
        assert match is not None, f"{page} was not measured"
        found: list[tuple[str, int, list[str]]] = json.loads(html.unescape(match[1]))
        for name, height, _ in found if pictures is not None else []:
            pictures.mkdir(parents=True, exist_ok=True)
            width, _ = schemes[name]
            show(f"{address}/{_framed({name: schemes[name]}, height)}", width, height, pictures / f"{name}.png")
    return {name: wrong for name, _, wrong in found}


def _framed(schemes: dict[str, tuple[int, int]], height: int = 1000) -> str:
    each = ";".join(f"{name},{width},{is_dark}" for name, (width, is_dark) in schemes.items())
    return f"{FRAMES}?{each}?{height}"


class _Handler(http.server.SimpleHTTPRequestHandler):
    page: str

    def __init__(self, *args: Any, page: str, **options: Any) -> None:
        self.page = page
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        if not self.path.startswith(f"/{FRAMES}?"):
            super().do_GET()
            return
        _, each, height = self.path.split("?")
        frames = "".join(
            f'<iframe title="{name}" src="{self.page}" '
            f'style="width: {width}px; height: {height}px; color-scheme: {("light", "dark")[int(is_dark)]}"></iframe>'
            for name, width, is_dark in (frame.split(",") for frame in each.split(";"))
        )
        content = (_FRAMES % frames).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def _served(page: Path) -> Iterator[str]:
    """Serve the folder of `page` to this machine, and yield its address."""
    handler = functools.partial(_Handler, directory=str(page.parent), page=page.name)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
