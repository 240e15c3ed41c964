"""Queries Prometheus, or a store with its HTTP interface (VictoriaMetrics, Thanos, Mimir).

One call, `/api/v1/query`, with types for what comes back: samples of one moment, or every scrape within a time (in a
range query VictoriaMetrics repeats old values for the last 30 seconds, and both know only a grid).  Redirects are not
followed, so that credentials go nowhere else; whatever goes wrong is a `PrometheusError` of one line that says what to
do.  A store that answers in part only, as a cluster of which a node is down, says so beside its answer: that is kept
for the verdict's notes.

Source: https://prometheus.io/docs/prometheus/latest/querying/api/.  `nocache=1` is VictoriaMetrics': without it its
answers leave out the last 30 seconds; Prometheus does not look at it.  `isPartial` is a VictoriaMetrics cluster's.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from railscope.agent.cluster.fleet.timed_http import read_body, timed_response
from railscope.probes.printable import printable

_MOST_BYTES: Final = 256 * 1024 * 1024
"""A longer answer is not read: it is not one to the questions asked here."""
_LARGEST: Final = 1e30
"""No metric is as large; so sums of values are numbers too."""
_LATEST: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""What comes later is no moment that can be shown."""
_BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})
"""What a proxy says while the store behind it is overloaded, or for a moment gone."""
_LEAST_SECONDS: Final = 0.001
_LONGEST_SECONDS: Final = 100 * 365 * 86400.0
_MOST_WARNINGS: Final = 4
_MOST_LETTERS: Final = 300
"""Of what a store says in words."""
_REMARK: Final = "PromQL info"
"""How a warning begins that is none: Prometheus 2.48 to 2.53 puts what is worth knowing of a query among them."""


class PrometheusError(Exception):
    """The store cannot be asked, or does not answer; the message is one line."""


class NoAnswerError(PrometheusError):
    """This question had no answer, or none in time; another one may have."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series at one moment."""

    labels: Mapping[str, str]
    """Without `__name__`."""
    value: float


@dataclass(frozen=True, slots=True)
class Series:
    """One series over a time."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]
    """(seconds since the Unix epoch, value), ascending; what is no number is left out."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the store is, and how to get in."""

    url: str
    """Prometheus' own address, with the path it is served under: `https://host:9090`, `http://host/prometheus`."""
    authorization: str = field(default="", repr=False)
    """Value of the Authorization header; empty: none."""
    ca_file: Path | None = None
    """Certificates to trust instead of the system's."""
    insecure: bool = False
    """Take any certificate."""
    timeout_seconds: float = 10.0
    """For one answer, however it comes."""
    all_seconds: float | None = None
    """For all answers together, from when the store is made on; None: as long as they take."""


class Store(Protocol):
    """What answers; calls may come from several threads at once."""

    def query(self, expression: str, at: float | None = None) -> tuple[Sample, ...]:
        """An instant query, at a moment in seconds since the Unix epoch; None: at the store's own now."""

    def scrapes(self, selector: str, seconds: float, at: float) -> tuple[Series, ...]:
        """Everything that was scraped of some series in the seconds before a moment."""

    def evaluations(self, expression: str, seconds: float, step_seconds: float, at: float) -> tuple[Series, ...]:
        """An expression as it was at equal steps in the seconds before a moment."""

    def warnings(self) -> tuple[str, ...]:
        """Warnings of the store that limit its answers, a sentence each."""


def bearer_header(file: Path) -> str:
    """The Authorization header for a token.

    Raises:
        PrometheusError: the file cannot be read, or does not hold a token.
    """
    token = _secret(file, "--bearer-token-file")
    if not token.isascii():
        raise PrometheusError(f"--bearer-token-file: {file} contains characters that no token has: copy it again")
    return f"Bearer {token}"


def basic_header(user_and_file: str, option: str = "--basic-auth") -> str:
    """The Authorization header for `USER:FILE`, the file holding the password.

    Raises:
        PrometheusError: there is no colon, or the file cannot be read.
    """
    user, colon, file = user_and_file.partition(":")
    if not (user and colon and file):
        raise PrometheusError(f"{option}: write USER:FILE, the file holding the password")
    pair = f"{user}:{_secret(Path(file), option)}"
    # A user that is no text in this locale goes out byte for byte as it was typed.
    return f"Basic {base64.b64encode(pair.encode(errors='surrogateescape')).decode()}"


def _secret(file: Path, option: str) -> str:
    try:
        secret = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PrometheusError(f"{option}: {file}: {why}") from None
    if not secret or not secret.isprintable():
        raise PrometheusError(f"{option}: {file} does not hold one line with the secret")
    return secret


class PrometheusStore:
    """A store behind HTTP; every question has a connection of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises:
        PrometheusError: the URL or the certificates cannot be used.
        """
        self._endpoint = endpoint
        text = endpoint.url if "://" in endpoint.url else f"http://{endpoint.url}"
        try:
            url = urllib.parse.urlsplit(text)
            port = url.port
            # What a connection makes of the name: of the wrong length in a part, it is none.
            (url.hostname or "").encode("idna")
            self._path = urllib.parse.quote(url.path.rstrip("/").removesuffix("/api/v1"), safe="/%:@!$&'()*+,;=~")
        except ValueError as error:
            raise PrometheusError(f"{endpoint.url} is not a URL: {error}") from None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise PrometheusError(f"{endpoint.url} is not a URL of a Prometheus: write http://HOST:9090")
        if url.username or url.password:
            raise PrometheusError("a password in the URL is visible to others: use --basic-auth USER:FILE")
        self.shown = f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}"
        """The URL as messages show it."""
        self._connect = self._connector(url.scheme == "https", url.hostname, port)
        self._partial = False
        self._warnings: dict[str, None] = {}
        self._until = time.monotonic() + (math.inf if endpoint.all_seconds is None else endpoint.all_seconds)

    def _connector(self, secure: bool, host: str, port: int | None) -> Callable[[float], http.client.HTTPConnection]:
        if not secure:
            return lambda timeout: http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            context = ssl.create_default_context(cafile=self._endpoint.ca_file)
        except (OSError, ssl.SSLError):
            raise PrometheusError(f"--ca-file: {self._endpoint.ca_file} contains no readable certificate") from None
        if self._endpoint.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return lambda timeout: http.client.HTTPSConnection(host, port, timeout=timeout, context=context)

    def query(self, expression: str, at: float | None = None) -> tuple[Sample, ...]:
        """What an expression gives at a moment, in seconds since the Unix epoch; None: at the store's own now.

        Raises:
            PrometheusError: the store cannot be reached, refuses, or is none.
        """
        moment = {} if at is None else {"time": f"{at:.3f}"}
        return parse_samples(self._ask("query", {"query": expression, **moment}), self.shown)

    def scrapes(self, selector: str, seconds: float, at: float) -> tuple[Series, ...]:
        """What a store scraped of some series in the seconds before a moment.

        Raises:
            PrometheusError: the store cannot be reached, refuses, or is none.
        """
        data = self._ask("query", {"query": f"{selector}[{seconds:.0f}s]", "time": f"{at:.3f}"})
        return parse_series(data, self.shown)

    def evaluations(self, expression: str, seconds: float, step_seconds: float, at: float) -> tuple[Series, ...]:
        """What an expression gave at equal steps in the seconds before a moment.

        Raises:
            PrometheusError: the store cannot be reached, refuses, or is none.
        """
        subquery = f"({expression})[{seconds:.0f}s:{1000 * step_seconds:.0f}ms]"
        return parse_series(self._ask("query", {"query": subquery, "time": f"{at:.3f}"}), self.shown)

    def warnings(self) -> tuple[str, ...]:
        """That answers were partial, and what the store warned of; empty: neither."""
        partial = f"{self.shown} marks its answers as partial: hosts and ranks may be missing from the verdict"
        warned = [f"{self.shown} warns: {warning}" for warning in tuple(self._warnings)[:_MOST_WARNINGS]]
        return (*((partial,) if self._partial else ()), *warned)

    def _ask(self, call: str, parameters: Mapping[str, str]) -> Any:
        seconds = min(self._endpoint.timeout_seconds, self._until - time.monotonic())
        if seconds <= 0:
            raise NoAnswerError(self._late())
        # The store gives up too, and what nobody waits for any more does not keep it from what is asked next.
        given = {**parameters, "nocache": "1", "timeout": f"{1000 * seconds:.0f}ms"}
        try:
            body = urllib.parse.urlencode(given)
        except UnicodeEncodeError:
            raise PrometheusError("--comm: not a valid label value") from None
        until = time.monotonic() + seconds
        status, text = self._exchange("POST", call, body, until)
        if status == 405:
            # A proxy in front that refuses POST.
            status, text = self._exchange("GET", call, body, until)
        return self._data(status, text)

    def _exchange(self, method: str, call: str, parameters: str, until: float) -> tuple[int, bytes]:
        path = f"{self._path}/api/v1/{call}"
        headers = {"Accept": "application/json", "User-Agent": "railscope"}
        if self._endpoint.authorization:
            headers["Authorization"] = self._endpoint.authorization
        if method == "POST":
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        connection = self._connect(max(_LEAST_SECONDS, until - time.monotonic()))
        try:
            connection.request(
                method,
                path if method == "POST" else f"{path}?{parameters}",
                parameters if method == "POST" else None,
                headers,
            )
            with closing(timed_response(connection, method, until)) as response:
                text = read_body(response, _MOST_BYTES)
            location = printable(response.headers.get("Location", ""))[:_MOST_LETTERS]
        except ssl.SSLCertVerificationError as error:
            raise PrometheusError(
                f"the certificate of {self.shown} is not trusted ({error.verify_message}): name its authority with "
                "--ca-file"
            ) from None
        except TimeoutError:
            raise NoAnswerError(self._late()) from None
        except (OSError, http.client.HTTPException) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
            raise NoAnswerError(
                f"cannot reach {self.shown}: {_one_line(why)}; check the URL given with --prometheus"
            ) from None
        finally:
            connection.close()
        if 300 <= response.status < 400:
            raise PrometheusError(
                f"{self.shown} redirects to {location or 'another place'}: give that URL, if you trust it"
            )
        if len(text) > _MOST_BYTES:
            raise NoAnswerError(f"{self.shown} answers with more than {_MOST_BYTES >> 20} MiB: name one --comm")
        return response.status, text

    def _late(self) -> str:
        if time.monotonic() >= self._until:
            return (
                f"{self.shown} did not answer everything within {self._endpoint.all_seconds:.3g} s: give it more with "
                "--timeout"
            )
        return (
            f"{self.shown} did not answer within {self._endpoint.timeout_seconds:.3g} s: is it up, and reachable from "
            "here? If it is busy, give it more with --timeout"
        )

    def _data(self, status: int, text: bytes) -> Any:
        """The `data` of an answer."""
        if status in (401, 403):
            given = "the credentials given" if self._endpoint.authorization else "a request without credentials"
            raise PrometheusError(
                f"{self.shown} refuses {given} (HTTP {status}): use --bearer-token-file FILE or --basic-auth USER:FILE"
            )
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("status") not in ("success", "error"):
            if status in _BUSY:
                raise NoAnswerError(f"{self.shown} cannot answer now (HTTP {status})")
            raise PrometheusError(
                f"{self.shown} does not answer as Prometheus does (HTTP {status}): give the address below which "
                "/api/v1/query is found"
            )
        if answer["status"] == "error":
            why = _one_line(str(answer.get("error", f"HTTP {status}")))
            refused = PrometheusError if answer.get("errorType") == "bad_data" else NoAnswerError
            raise refused(f"{self.shown} cannot answer: {why}")
        self._note(answer)
        return answer.get("data")

    def _note(self, answer: Mapping[str, Any]) -> None:
        """Remember what limits this answer; from any thread."""
        if answer.get("isPartial") is True:
            self._partial = True
        warnings = answer.get("warnings")
        for warning in warnings if isinstance(warnings, list) else ():
            if isinstance(warning, str) and not warning.startswith(_REMARK) and len(self._warnings) < _MOST_WARNINGS:
                self._warnings[_one_line(warning)] = None


def _one_line(text: str) -> str:
    """Foreign text, made safe for a terminal."""
    return printable(" ".join(text.split()))[:_MOST_LETTERS]


def parse_samples(data: Any, source: str) -> tuple[Sample, ...]:
    """The samples in the `data` of Prometheus's answer to an instant query; what is no number is left out.

    Raises:
        PrometheusError: this is no vector or scalar.
    """
    try:
        if data["resultType"] == "scalar":
            found: list[tuple[dict[str, Any], Any]] = [({}, data["result"])]
        elif data["resultType"] == "vector":
            found = [(one["metric"], one["value"]) for one in data["result"]]
        else:
            raise KeyError(data["resultType"])
        samples = [Sample(_labels(labels), float(value)) for labels, (_, value) in found]
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise PrometheusError(f"{source} answers with something that is not a Prometheus vector") from None
    return tuple(sample for sample in samples if _is_number(sample.value))


def parse_series(data: Any, source: str) -> tuple[Series, ...]:
    """The series in the `data` of Prometheus's answer to a query for a range.

    Raises:
        PrometheusError: this is no matrix.
    """
    try:
        if data["resultType"] != "matrix":
            raise KeyError(data["resultType"])
        return tuple(
            Series(
                _labels(one["metric"]),
                tuple((_moment(t), float(value)) for t, value in one["values"] if _is_number(float(value))),
            )
            for one in data["result"]
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise PrometheusError(f"{source} answers with something that is not a Prometheus matrix") from None


def _is_number(value: float) -> bool:
    """Whether it is one that can be counted and added up; NaN and the infinite are not."""
    return abs(value) < _LARGEST


def _moment(given: Any) -> float:
    """Raises:
    ValueError: it is no moment.
    OverflowError: the same.
    """
    moment = float(given)
    if not 0 <= moment <= _LATEST:
        raise ValueError(f"{moment} is not a valid time")
    return moment


def _labels(given: Mapping[str, Any]) -> dict[str, str]:
    labels = {str(name): str(value) for name, value in given.items() if name != "__name__"}
    for value in labels.values():
        # Half of a surrogate pair cannot be written, nor asked for: UnicodeEncodeError is a ValueError.
        value.encode()
    return labels


def parse_time(text: str) -> float:
    """Seconds since the Unix epoch of `2026-11-21T03:05:00Z` or `1795230300`.

    Raises:
        ValueError: it is neither.
    """
    try:
        seconds = float(text)
    except ValueError:
        given = datetime.fromisoformat(text)
        seconds = (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()
    return _moment(seconds)


def parse_duration(text: str) -> float:
    """Seconds of a length of time as Prometheus writes it: `90s`, `5m`, `1h30m`.

    Raises:
        ValueError: it is none.
    """
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
    wrong = ValueError(f"{text!r} is not a duration: write 90s, 5m or 1h30m")
    total, rest = 0.0, text
    while rest:
        number = rest[: len(rest) - len(rest.lstrip("0123456789."))]
        rest = rest[len(number) :]
        unit = rest[: len(rest) - len(rest.lstrip("mshdw"))]
        if unit not in units:
            raise wrong
        try:
            total += float(number) * units[unit]
        except ValueError:
            raise wrong from None
        rest = rest[len(unit) :]
    if not 0 < total <= _LONGEST_SECONDS:
        raise wrong
    return total
