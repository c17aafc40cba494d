"""Serves a live report of runs to this machine only. Writes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import urllib.parse
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Optional, Union

from ddpshim.errors import ReportError
from ddpshim.observe.report import page
from ddpshim.observe.report.run import load_all

ADDRESS = "127.0.0.1"
_NAMES = (ADDRESS, "localhost")  # with other host names, a foreign web page could read this server
_TYPES = {".mp4": "video/mp4", ".webm": "video/webm"}
_PIECE = 1 << 20  # bytes


def serve(folders: Sequence[Union[str, os.PathLike[str]]], port: int) -> None:
    """Serve the report of the runs in `folders` to this machine until Ctrl-C. Local."""
    with Server(folders, port) as server:
        here = f"{ADDRESS}:{server.server_port}"
        print(
            f"http://{here}/ until Ctrl-C; from elsewhere, through ssh -L {server.server_port}:{here} HOST", flush=True
        )
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


class Server(ThreadingHTTPServer):
    """Serves the report of the runs in `folders`, built again for each request."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Union[str, os.PathLike[str]]], port: int) -> None:
        """Open the port. Raises ReportError if that fails, or there is nothing to report."""
        self.folders = [run.folder for run in load_all(folders)]
        self.library = page.plotly_js()
        self.videos: dict[str, Path] = {}
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ReportError(
                f"port {port} of {ADDRESS} cannot be opened ({error}); nobody could see the page. Name another --port, "
                "or 0 for one that is free."
            ) from error

    def html(self, library: str) -> str:
        return page.html(load_all(self.folders), self.link, library, is_live=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def link(self, path: Path) -> str:
        """Return the address of a video, which is served from now on."""
        address = f"video/{urllib.parse.quote(str(path.resolve()).lstrip('/'))}"
        self.videos[f"/{address}"] = path
        return address


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in _NAMES:
            self.send_error(403, "Ask for this page as localhost")
        elif self.path in ("/", "/part"):
            self._send_page(self.server.library if self.path == "/" else "")
        elif self.path in self.server.videos:
            self._send_video(self.server.videos[self.path])
        else:
            self.send_error(404)

    def _send_page(self, library: str) -> None:
        try:
            content = self.server.html(library).encode(errors="replace")
        except ReportError as error:  # its folder was removed; it may be restored
            self.send_error(503, explain=str(error))
            return
        self._begin("text/html; charset=utf-8", len(content))
        self.wfile.write(content)

    def _send_video(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except OSError:  # robomimic removes the videos of policies that it does not keep
            self.send_error(404)
            return
        with file:
            num_bytes = os.fstat(file.fileno()).st_size
            part = _part(self.headers.get("Range") or "", num_bytes)
            if part is None:
                self._begin(_TYPES[path.suffix.lower()], num_bytes)
                part = range(num_bytes)
            elif not part:
                self.send_error(416)
                return
            else:
                place = f"bytes {part.start}-{part.stop - 1}/{num_bytes}"
                self._begin(_TYPES[path.suffix.lower()], len(part), {"Content-Range": place}, status=206)
            file.seek(part.start)
            left = len(part)
            while left and (piece := file.read(min(left, _PIECE))):
                self.wfile.write(piece)
                left -= len(piece)

    def _begin(self, kind: str, num_bytes: int, more: Optional[dict[str, str]] = None, status: int = 200) -> None:
        headers = {"Content-Type": kind, "Content-Length": str(num_bytes), "Accept-Ranges": "bytes"}
        self.send_response(status)
        for name, value in {**headers, "Cache-Control": "no-store", **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Log nothing, for the privacy of readers."""


def _part(header: str, num_bytes: int) -> Optional[range]:
    """Return the bytes that a Range header asks for, empty if the file has none of them; None: send the whole file.

    Browsers seek in a video by such requests, and Safari plays none without. Several ranges at once get the whole file,
    as RFC 9110 (section 14.2) allows.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match[1], match[2]
    if not first:
        return range(max(0, num_bytes - int(last)), num_bytes)
    if last and int(last) < int(first):
        return None
    return range(int(first), min(int(last or num_bytes), num_bytes - 1) + 1)
