"""Heads of HTTP requests, as clients write them and as nobody should."""

from __future__ import annotations

from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.exporters.web.http_request import RequestRefused, parse_request, without_empty_lines


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
    assert parse_request(b"GET / HTTP/" + version + b"\r\nHost: x\r\n" + connection + b"\r\n").stays is stays


def test_one_who_names_no_version_is_answered_and_let_go() -> None:
    request = parse_request(b"GET /healthz\n\n")
    assert (request.path, request.stays) == ("/healthz", False)


def test_a_header_that_comes_twice_is_a_list() -> None:
    headers = parse_request(b"GET / HTTP/1.1\nHost: x\nAccept: text/plain\nX: y\naccept: */*;q=0.1\n\n").headers
    assert headers == {"host": "x", "accept": "text/plain, */*;q=0.1", "x": "y"}


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
    assert parse_request(b"GET / HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n").has_body is has_body


@pytest.mark.parametrize(
    ("arrived", "rest"),
    [(b"", b""), (b"\r\n\n\r\nGET /\r\n", b"GET /\r\n"), (b"\r\n\r", b"\r"), (b"\r\rGET /", b"\r\rGET /")],
)
def test_empty_lines_before_a_request_are_passed_over(arrived: bytes, rest: bytes) -> None:
    assert without_empty_lines(arrived) == rest


@pytest.mark.parametrize(
    "host", [b"", b"node-1:9779", b"node_1.example.", b"[::1]:9779", b"[fe80::1%eth0]", b"10.0.0.1"]
)
def test_a_host_may_be_any_that_a_url_can_name(host: bytes) -> None:
    assert parse_request(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n").headers["host"] == host.decode()


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"Host: x\r\nHost: y\r\n",
        b"Host: x\r\nHost: x\r\n",
        b"Host:\r\nHost:\r\n",
        b"Host: x y\r\n",
        b"Host: x/y\r\n",
        b"Host: u@x\r\n",
        b"Host: x:y\r\n",
    ],
)
def test_who_does_not_say_whom_he_asks_or_says_it_twice_is_refused(fields: bytes) -> None:
    assert refusal(b"GET / HTTP/1.1\r\n" + fields + b"\r\n") == 400


def test_an_old_client_need_not_say_whom_it_asks_but_not_twice_either() -> None:
    assert "host" not in parse_request(b"GET / HTTP/1.0\r\n\r\n").headers
    assert refusal(b"GET / HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n") == 400


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://node-1:9779/healthz", "/healthz"),
        (b"HTTPS://[::1]/metrics?collect=rails", "/metrics"),
        (b"http://node-1", "/"),
        (b"http://node-1?collect=rails", "/"),
        (b"/http://node-1/healthz", "/http://node-1/healthz"),
        (b"*", "*"),
    ],
)
def test_a_target_may_be_a_whole_url(target: bytes, path: str) -> None:
    assert parse_request(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n").path == path


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
        (b"GET\t/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\x0bHTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET\x0b/healthz\x0cHTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /a\tb HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /a\rb HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: b\0c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: b\rContent-Length: 5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: b\r\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n: no name\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length : 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: y\r\n folded: z\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused_with_the_reason(head: bytes, status: int) -> None:
    assert refusal(head) == status


def test_a_hundred_fields_are_not_too_many() -> None:
    request = parse_request(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 99 + b"\r\n")
    assert len(request.headers["x"].split(", ")) == 99


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: b"GET / HTTP/1.1\r\nHost: b\r\n" + tail))
def test_whatever_arrives_is_a_request_or_refused(head: bytes) -> None:
    try:
        request = parse_request(head)
    except RequestRefused:
        return
    assert not set("\n\r\0") & set(request.line + request.method + request.target + "".join(request.headers.values()))
