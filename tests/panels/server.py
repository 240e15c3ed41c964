"""What the page asks for, on a loopback port: itself, the dashboards as committed, icons, and Prometheus' answers."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from railscope.dashboards import build

_PAGE: Final = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>railscope</title>
<link rel="stylesheet" href="/bundle.css"></head>
<body><div id="page"></div><script src="/bundle.js"></script></body></html>
"""
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".json": "application/json", ".svg": "image/svg+xml"}
_ICONS: Final = "/public/build/img/icons/"
_ANSWER_SECONDS: Final = 60


class _Handler(BaseHTTPRequestHandler):
    server: _Listener

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/":
            self._send(HTTPStatus.OK, "text/html", _PAGE)
            return
        file = self._file(path)
        if file is None or not file.is_file():
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"")
        else:
            self._send(HTTPStatus.OK, _TYPES.get(file.suffix, "application/octet-stream"), file.read_bytes())

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
                self._send(HTTPStatus(answer.status), "application/json", answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                self._send(HTTPStatus(refused.code), "application/json", refused.read())
        except OSError as error:
            gone = json.dumps({"status": "error", "error": f"Prometheus does not answer: {error}"})
            self._send(HTTPStatus.BAD_GATEWAY, "application/json", gone.encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    page = Path()
    icons = Path()
    prometheus = ""


class PageServer:
    """The page at `url`, for as long as the `with` block lasts."""

    def __init__(self, page: Path, icons: Path, prometheus: str) -> None:
        """`page`: the folder of the bundle; `prometheus`: the URL of what answers `/api/v1/`."""
        self._listener = _Listener(("127.0.0.1", 0), _Handler)
        self._listener.page, self._listener.icons = page, icons
        self._listener.prometheus = prometheus.rstrip("/")
        self.url: Final = f"http://127.0.0.1:{self._listener.server_port}"
        self._thread = threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.1})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()
