"""What the page asks for, on a loopback port: itself, the dashboards as committed, icons, and Prometheus' answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from railscope.dashboards import build
from tests.serving import QuietHandler, running

_PAGE: Final = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>railscope</title>
<link rel="stylesheet" href="/bundle.css"></head>
<body><div id="page"></div><script src="/bundle.js"></script></body></html>
"""
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".json": "application/json", ".svg": "image/svg+xml"}
_ICONS: Final = "/public/build/img/icons/"
_ANSWER_SECONDS: Final = 60


class _Handler(QuietHandler):
    server: _Listener

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/":
            self.answer(HTTPStatus.OK, "text/html", _PAGE)
            return
        file = self._file(path)
        if file is None or not file.is_file():
            self.answer(HTTPStatus.NOT_FOUND, "text/plain", b"")
        else:
            self.answer(HTTPStatus.OK, _TYPES.get(file.suffix, "application/octet-stream"), file.read_bytes())

    def _file(self, path: str) -> Path | None:
        if ".." in path:
            return None
        if path.startswith("/dashboards/"):
            return build.COMMITTED / path.removeprefix("/dashboards/")
        if path.startswith(_ICONS):
            return self.server.icons / path.removeprefix(_ICONS)
        return self.server.page / path.removeprefix("/")

    def do_POST(self) -> None:
        """A question to Prometheus."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        question = urllib.request.Request(f"{self.server.prometheus}{self.path}", body)
        try:
            with urllib.request.urlopen(question, timeout=_ANSWER_SECONDS) as answer:
                self.answer(answer.status, "application/json", answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                self.answer(refused.code, "application/json", refused.read())
        except OSError as error:
            gone = json.dumps({"status": "error", "error": f"Prometheus does not answer: {error}"})
            self.answer(HTTPStatus.BAD_GATEWAY, "application/json", gone.encode())


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    page = Path()
    icons = Path()
    prometheus = ""


@contextmanager
def page_served(page: Path, icons: Path, prometheus: str) -> Iterator[str]:
    """Serve the page; yields its URL.

    Args:
        page: the folder of the bundle.
        prometheus: the URL of what answers `/api/v1/`.
    """
    server = _Listener(("127.0.0.1", 0), _Handler)
    server.page, server.icons = page, icons
    server.prometheus = prometheus.rstrip("/")
    with running(server):
        yield f"http://127.0.0.1:{server.server_port}"
