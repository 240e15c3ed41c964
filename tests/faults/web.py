"""HTTP from the test's own process to servers inside network namespaces.

The sockets are made in the fabric's switch namespace, from where every host's management address can be reached, so
nothing of the test has to run there and no address of this machine is touched.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from prometheus_client.parser import text_string_to_metric_families

from railscope.testbed.namespaces import tcp_socket

TIMEOUT_SECONDS: Final = 10.0


class WebError(RuntimeError):
    """A server did not answer, or not with 200."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of an exposition."""

    name: str
    labels: Mapping[str, str]
    value: float


def get(namespace: str, host: str, port: int, path: str) -> bytes:
    """The body of a page.

    Raises:
        WebError: nobody answers there, or the status is not 200.
    """
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.sock = tcp_socket(namespace)
        connection.sock.settimeout(TIMEOUT_SECONDS)
        connection.sock.connect((host, port))
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise WebError(f"http://{host}:{port}{path}: {error}") from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise WebError(f"http://{host}:{port}{path}: status {answer.status}")
    return body


def samples_of(text: str, names: Iterable[str]) -> list[Sample]:
    """The samples with these names; the rest of the exposition is not even parsed, as this happens several times a
    second beside what is measured."""
    starts = tuple(start for name in names for start in (f"{name}{{", f"{name} "))
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(starts))
    return [
        Sample(sample.name, dict(sample.labels), float(sample.value))
        for family in text_string_to_metric_families(wanted + "\n")
        for sample in family.samples
    ]


def instant_query(namespace: str, host: str, port: int, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to an instant query: its `result`.

    Raises:
        WebError: it does not answer.
    """
    body = get(namespace, host, port, f"/api/v1/query?query={quote(expression)}")
    result: list[dict[str, Any]] = json.loads(body)["data"]["result"]
    return result
