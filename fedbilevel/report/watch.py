"""The report page of runs in progress, served only to this machine."""

from __future__ import annotations

import contextlib
import http
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from fedbilevel.errors import InputError, in_one_line
from fedbilevel.report.inside import Inside, look_inside
from fedbilevel.report.page import encoded, page
from fedbilevel.runs.folder import RunFolder

ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost")


class PageServer(ThreadingHTTPServer):
    """Serves `/`, the page, and `/data.json`, its newest contents, on 127.0.0.1.

    A request that names another host is refused, so that a web site open in a browser cannot read the page by
    pointing its own name at this machine.
    """

    daemon_threads = True

    def __init__(self, contents: Callable[[], dict[str, Any]], port: int = 0):
        super().__init__((ADDRESS, port), _Handler)
        self._contents, self._one_at_a_time = contents, Lock()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def contents(self) -> dict[str, Any]:
        """The page's contents as of now."""
        with self._one_at_a_time:
            return self._contents()


class BackgroundLook:
    """Looks inside runs beside the server, since that takes seconds and the page must not wait: gives what it found last."""

    def __init__(self) -> None:
        self._found: dict[Path, Inside | InputError] = {}
        self._seen: dict[Path, list[int]] = {}
        self._one_at_a_time = Lock()

    def __call__(self, folder: RunFolder) -> Inside | None:
        """What is known of a run so far; None if nothing is. Raises the `InputError` that looking inside ended with."""
        files = (folder.path / name for name in ("metrics.jsonl", "x.npy"))
        written = [file.stat().st_mtime_ns for file in files if file.exists()]
        if self._seen.get(folder.path) != written and not self._one_at_a_time.locked():
            Thread(target=self._look, args=(folder, written), daemon=True).start()
        found = self._found.get(folder.path)
        if isinstance(found, InputError):
            raise found
        return found

    def _look(self, folder: RunFolder, written: list[int]) -> None:
        with self._one_at_a_time:
            try:
                self._found[folder.path] = look_inside(folder)
            except InputError as error:
                self._found[folder.path] = error
            except OSError:  # it was moved or removed meanwhile
                return
            self._seen[folder.path] = written


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        if not _is_this_machine(self.headers.get("Host", "")):
            self._answer(http.HTTPStatus.FORBIDDEN, "text/plain", "this page is for this machine only")
        elif self.path not in ("/", "/data.json"):
            self._answer(http.HTTPStatus.NOT_FOUND, "text/plain", "only / and /data.json are served")
        else:
            try:
                contents = self.server.contents()
            except (InputError, OSError) as error:  # the runs may be moved, or removed, while they are watched
                self._answer(http.HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", in_one_line(error))
            else:
                shown = (
                    ("text/html", page(contents, live=True)) if self.path == "/" else ("application/json", encoded(contents))
                )
                self._answer(http.HTTPStatus.OK, *shown)

    def _answer(self, status: http.HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        with contextlib.suppress(ConnectionError):  # a reader who does not wait is no matter
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep requests out of the terminal."""


def _is_this_machine(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in HOSTS
    except ValueError:
        return False
