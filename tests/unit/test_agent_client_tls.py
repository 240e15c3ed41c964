"""An agent behind TLS is asked only where its certificate is trusted, or where one says not to care."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from railscope.exporters.top.agent_client import AgentAddress, AgentClient, ClientError
from railscope.exporters.web.config import WebConfigFile
from railscope.exporters.web.http import MetricsServer, ServerSettings
from tests.unit.exporters_snapshots import full_snapshot


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "certificate.pem"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )
    return tmp_path / "certificate.pem"


@pytest.fixture
def url(certificate: Path) -> Iterator[str]:
    web = certificate.with_name("web.yml")
    web.write_text("tls_server_config:\n  cert_file: certificate.pem\n  key_file: key.pem\n")
    with MetricsServer(
        ServerSettings(listen_address="127.0.0.1:0"),
        snapshot=full_snapshot,
        healthy=lambda: (True, "ok"),
        ready=lambda: (True, "ready"),
        web=WebConfigFile(web),
    ) as server:
        yield f"https://localhost:{server.port}"


def test_a_certificate_of_an_unknown_authority_is_refused_with_what_to_do(url: str) -> None:
    with closing(AgentClient(AgentAddress(url))) as client:
        with pytest.raises(ClientError, match=r"is not trusted \(.*\): name its authority with --ca-file"):
            client.scrape()


def test_a_named_authority_is_trusted_and_the_connection_serves_again(url: str, certificate: Path) -> None:
    with closing(AgentClient(AgentAddress(url, ca_file=certificate))) as client:
        assert client.scrape().version == client.scrape().version == "0.1.0"


def test_insecure_takes_any_certificate(url: str) -> None:
    with closing(AgentClient(AgentAddress(url, insecure=True))) as client:
        assert client.scrape().stalls[0].cause == "rail_down"
