"""Fetches a running agent's pages over one keep-alive connection.

Redirects are not followed, so that a password goes nowhere else.  Whatever goes wrong is a `ClientError` of one line
that says what to do; the next question starts anew.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import time
import urllib.parse
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.exporters.top.options import DEFAULT_URL
from railscope.exporters.top.scraped import NodeScrape, ScrapeError, parse_scrape

_MOST_BYTES: Final = 256 * 1024 * 1024
"""A longer page is not read: it is none of an agent's."""
_PIECE_BYTES: Final = 1 << 18
_GZIP_WINDOW: Final = 31
_METRICS_PATH: Final = "/metrics"
_STALLS_PATH: Final = "/stalls"
_COMMUNICATORS_PATH: Final = "/communicators"
_TRANSFERS_PATH: Final = "/transfers"


class ClientError(Exception):
    """The agent cannot be asked, or does not answer as one; the message is one line."""


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """Where an agent is, and how to get in."""

    url: str = DEFAULT_URL
    """With the path of its metrics where that is not /metrics."""
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    """Certificates to trust instead of the system's."""
    insecure: bool = False
    """Take any certificate."""
    timeout_seconds: float = 5.0


class AgentClient:
    """One agent's pages.  Not for several threads at once."""

    def __init__(self, address: AgentAddress) -> None:
        """Raises:
        ClientError: the URL, the password's file or the certificates cannot be used.
        """
        self._address = address
        text = address.url if "://" in address.url else f"http://{address.url}"
        try:
            url = urllib.parse.urlsplit(text)
            port = url.port
        except ValueError as error:
            raise ClientError(f"--url: {address.url} is not a URL: {error}") from None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ClientError(f"--url: {address.url} is not a URL of an agent: write {DEFAULT_URL}")
        if url.username or url.password:
            raise ClientError("--url: a password in the URL is visible to others: use --user and --password-file")
        self.display_name = f"{url.scheme}://{url.netloc}"
        """The agent as messages show it."""
        self._metrics_path = url.path if url.path.strip("/") else _METRICS_PATH
        self._headers = {"User-Agent": "railscope", "Accept": "text/plain", "Accept-Encoding": "gzip"}
        if bool(address.user) != (address.password_file is not None):
            raise ClientError("--user and --password-file belong together: give both or none")
        if address.password_file is not None:
            pair = f"{address.user}:{_password(address.password_file)}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._connection = self._connection_to(url.scheme == "https", url.hostname, port)

    def _connection_to(self, secure: bool, host: str, port: int | None) -> http.client.HTTPConnection:
        timeout = self._address.timeout_seconds
        if not secure:
            if self._address.ca_file is not None or self._address.insecure:
                raise ClientError("--ca-file and --insecure are for an agent behind TLS: write https:// in --url")
            return http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            context = ssl.create_default_context(cafile=self._address.ca_file)
        except (OSError, ssl.SSLError):
            raise ClientError(f"--ca-file: {self._address.ca_file} contains no readable certificate") from None
        if self._address.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)

    def close(self) -> None:
        self._connection.close()

    def scrape(self) -> NodeScrape:
        """What the agent shows now.

        Raises:
            ClientError: it cannot be reached, refuses, or is no agent.
        """
        metrics = self._page(f"{self._metrics_path}?profile=full")
        if metrics is None:
            raise ClientError(
                f"{self.display_name} has nothing at {self._metrics_path} (HTTP 404): add the agent's "
                "--web.telemetry-path to "
                "--url"
            )
        try:
            return parse_scrape(
                metrics.decode(errors="replace"),
                self._page(_STALLS_PATH),
                self._page(_COMMUNICATORS_PATH),
                self._page(_TRANSFERS_PATH),
            )
        except ScrapeError as error:
            raise ClientError(f"{self.display_name} is not a railscope agent, or of another version: {error}") from None

    def _page(self, path: str) -> bytes | None:
        """The page's bytes; None where there is none."""
        try:
            try:
                return self._exchange(path)
            except (http.client.RemoteDisconnected, http.client.CannotSendRequest, ConnectionError):
                # Closed for having been idle: a new connection tells whether the agent is there.
                self._connection.close()
                return self._exchange(path)
        except ClientError:
            self._connection.close()
            raise
        except ssl.SSLCertVerificationError as error:
            self._connection.close()
            raise ClientError(
                f"the certificate of {self.display_name} is not trusted ({error.verify_message}): name its authority "
                "with "
                "--ca-file"
            ) from None
        except TimeoutError:
            self._connection.close()
            raise ClientError(
                f"{self.display_name} did not answer within {self._address.timeout_seconds:g} s"
            ) from None
        except (OSError, http.client.HTTPException, UnicodeError, zlib.error) as error:
            self._connection.close()
            why = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
            raise ClientError(
                f"no agent answers at {self.display_name} ({why}): is 'railscope agent' running there?  else give --url"
            ) from None

    def _exchange(self, path: str) -> bytes | None:
        deadline = time.monotonic() + self._address.timeout_seconds
        self._connection.request("GET", path, headers=self._headers)
        response = self._connection.getresponse()
        pieces, size = [], 0
        while piece := response.read(_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > _MOST_BYTES:
                raise ClientError(
                    f"{self.display_name}{path} is longer than {_MOST_BYTES >> 20} MiB: this is not a page of an agent"
                )
            if time.monotonic() > deadline:
                raise TimeoutError
        if response.status == 404:
            return None
        if response.status in (401, 403):
            given = "this user and password" if "Authorization" in self._headers else "a request without a password"
            raise ClientError(
                f"{self.display_name} refuses {given} (HTTP {response.status}): give --user and --password-file"
            )
        if 300 <= response.status < 400:
            where = response.headers.get("Location", "another place")
            raise ClientError(f"{self.display_name} redirects to {where}: give that as --url, if you trust it")
        if response.status != 200:
            raise ClientError(f"{self.display_name}{path} answers HTTP {response.status}: look at the agent's log")
        body = b"".join(pieces)
        if response.headers.get("Content-Encoding") == "gzip":
            unpacker = zlib.decompressobj(_GZIP_WINDOW)
            body = unpacker.decompress(body, _MOST_BYTES)
        return body


def _password(file: Path) -> str:
    try:
        password = file.read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ClientError(f"--password-file: {file}: {why}") from None
    if not password or "\n" in password:
        raise ClientError(f"--password-file: {file} does not hold one line with the password")
    return password
