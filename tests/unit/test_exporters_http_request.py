"""Heads of HTTP requests, as clients write them and as nobody should."""

from __future__ import annotations

from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.http_request import RequestRefused, parse_request


def refusal(head: bytes) -> HTTPStatus:
    with pytest.raises(RequestRefused) as caught:
        parse_request(head)
    return caught.value.status


def test_a_scrape_of_prometheus() -> None:
    request = parse_request(
        b"GET /metrics?collect=rails HTTP/1.1\r\nHost: node-1:9779\r\nUser-Agent: Prometheus/3.5.0\r\n"
        b"Accept: text/plain;version=0.0.4;q=0.5\r\nACCEPT-ENCODING:gzip \r\n\r\n"
    )
    assert (request.method, request.target, request.path) == ("GET", "/metrics?collect=rails", "/metrics")
    assert request.line == "GET /metrics?collect=rails HTTP/1.1"
    assert request.headers["accept"] == "text/plain;version=0.0.4;q=0.5"
    assert request.headers["accept-encoding"] == "gzip"
    assert request.stays
    assert not request.has_body


@pytest.mark.parametrize(
    ("version", "connection", "stays"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.1", b"Connection: TE, Close\r\n", False),
        (b"1.1", b"Connection: keep-alive\r\n", True),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: Keep-Alive\r\n", True),
        (b"1.0", b"Connection: keep-alive, close\r\n", False),
    ],
)
def test_whether_a_client_means_to_ask_again(version: bytes, connection: bytes, stays: bool) -> None:
    assert parse_request(b"GET / HTTP/" + version + b"\r\n" + connection + b"\r\n").stays is stays


def test_one_who_names_no_version_is_answered_and_let_go() -> None:
    request = parse_request(b"GET /healthz\n\n")
    assert (request.path, request.stays) == ("/healthz", False)


def test_a_header_that_comes_twice_is_a_list() -> None:
    headers = parse_request(b"GET / HTTP/1.1\nAccept: text/plain\nX: y\naccept: */*;q=0.1\n\n").headers
    assert headers == {"accept": "text/plain, */*;q=0.1", "x": "y"}


@pytest.mark.parametrize(
    ("header", "has_body"),
    [
        (b"Content-Length: 0", False),
        (b"Content-Length: 12", True),
        (b"Content-Length: 0\r\nContent-Length: 12", True),
        (b"Content-Length: twelve", True),
        (b"Transfer-Encoding: chunked", True),
    ],
)
def test_whether_a_body_follows(header: bytes, has_body: bool) -> None:
    assert parse_request(b"GET / HTTP/1.1\r\n" + header + b"\r\n\r\n").has_body is has_body


def test_an_empty_line_too_many_is_passed_over() -> None:
    assert parse_request(b"\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n").headers == {"host": "x"}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / of metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1\r\n\r\n", 400),
        (b"GET / HTTP/1.+1\r\n\r\n", 400),
        (b"GET / HTTP/1.12345678901\r\n\r\n", 400),
        (b"GET / http/1.1\r\n\r\n", 400),
        (b"G(T / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET / HTTP/0.9\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n: no name\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length : 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: y\r\n folded: z\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused_with_the_reason(head: bytes, status: int) -> None:
    assert refusal(head) == status


def test_a_hundred_fields_are_not_too_many() -> None:
    assert len(parse_request(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100 + b"\r\n").headers["x"].split(", ")) == 100


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: b"GET / HTTP/1.1\r\nA: b\r\n" + tail))
def test_whatever_arrives_is_a_request_or_refused(head: bytes) -> None:
    try:
        request = parse_request(head)
    except RequestRefused:
        return
    assert "\n" not in request.line + request.method + request.target + "".join(request.headers.values())
