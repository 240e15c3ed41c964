"""Where the server listens: addresses as people write them, ports that are taken, and what is left at the end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from railscope.agent.config.values import ListenAddress
from railscope.exporters.web.http import ServerError
from railscope.exporters.web.listen import parse_listen_address
from tests.unit.http_agent import FREE_PORT, Agent, ask, received_until_closed, serving


@pytest.fixture
def agent() -> Iterator[Agent]:
    with serving() as one:
        yield one


def test_close_ends_open_connections_and_frees_the_port(agent: Agent) -> None:
    server = agent.server()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536)
        server.close()
        assert received_until_closed(client) == b""
        again = agent.server(replace(FREE_PORT, listen_address=f"127.0.0.1:{server.port}"))
        assert ask(again, "/healthz").status == 200


def test_a_port_in_use_says_what_to_do(agent: Agent) -> None:
    port = agent.server().port
    with pytest.raises(ServerError) as caught:
        agent.server(replace(FREE_PORT, listen_address=f"127.0.0.1:{port}"))
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: address already in use; "
        "stop the other process or choose another --web.listen-address"
    )


def test_an_address_that_is_not_ours_says_so(agent: Agent) -> None:
    with pytest.raises(ServerError) as caught:
        agent.server(replace(FREE_PORT, listen_address="192.0.2.1:9"))
    assert str(caught.value) == (
        "cannot listen on 192.0.2.1:9: cannot assign requested address; choose another --web.listen-address"
    )


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9779", ListenAddress("127.0.0.1", 9779)),
        (":9779", ListenAddress("", 9779)),
        ("[::1]:0", ListenAddress("::1", 0)),
        ("node-1.example:65535", ListenAddress("node-1.example", 65535)),
    ],
)
def test_listen_addresses_are_read_as_other_exporters_read_them(text: str, address: ListenAddress) -> None:
    assert parse_listen_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "9779", "localhost", "::1:9779", "[::1]", "x:", "x:65536", "x:-1", "x:９", "[x:1"]
)
def test_what_is_no_listen_address_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ServerError, match=r"expected HOST:PORT, :PORT or \[v6\]:PORT"):
        parse_listen_address(text)


def test_every_address_means_ipv4_and_ipv6(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, listen_address=":0"))
    assert ask(server, "/healthz").status == 200
    if socket.has_dualstack_ipv6():
        with socket.create_connection(("::1", server.port), timeout=10) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert received_until_closed(client).endswith(b"ok\n")
