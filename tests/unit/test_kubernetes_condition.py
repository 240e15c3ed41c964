"""deploy/actions/set-kubernetes-condition in a pod: what it asks of the API server.

Simulated: the API server, behind TLS, and the answer of the node's agent.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

ACTION: Final = Path(__file__).parents[2] / "deploy/actions/set-kubernetes-condition"
EVENT: Final = {"event": "begun", "verdict": {"cause": "rail_down", "evidence": ["rail 1 has no carrier", "so it is"]}}


@dataclass
class ApiServer:
    """What was asked of it; it answers with `status`."""

    port: int
    folder: Path
    status: int = 200
    conditions: list[dict[str, str]] = field(default_factory=list)
    """Of the node before it is asked."""
    asked: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)

    def run(
        self, *arguments: str, told: dict[str, Any] | None = None, standing: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """The action in a pod of node gpu-1; `standing`: the exit status of `railscope verdicts --once`."""
        tools = self.folder / "tools"
        tools.mkdir(exist_ok=True)
        (tools / "railscope").write_text(f'#!/bin/sh\necho "$@" >{self.folder}/asked\nexit {standing}\n')
        (tools / "railscope").chmod(0o755)
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}", "NODE_NAME": "gpu-1", "KUBERNETES_SERVICE_HOST": "localhost",
            "KUBERNETES_SERVICE_PORT": str(self.port), "RAILSCOPE_SERVICE_ACCOUNT": str(self.folder),
            "RAILSCOPE_LEAST_CONFIDENCE": "medium", "https_proxy": "http://127.0.0.1:1",
        }  # fmt: skip
        return subprocess.run(
            [sys.executable, ACTION, *arguments], input=json.dumps(told or EVENT), env=environment, text=True,
            capture_output=True, timeout=60,
        )  # fmt: skip

    @property
    def condition(self) -> dict[str, str]:
        """The one that was set last."""
        (one,) = self.asked[-1][3]["status"]["conditions"]
        return dict(one)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "ca.crt"),
        ],
        cwd=tmp_path, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (tmp_path / "token").write_text("s3cret\n")

    class Handler(BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.asked.append(("PATCH", self.path, dict(self.headers), content))
            self.send_response(made.status)
            self.end_headers()
            if made.status != 200:
                self.wfile.write(b"nodes is forbidden")
                return
            for one in content.get("status", {}).get("conditions", ()):
                made.conditions = [other for other in made.conditions if other["type"] != one["type"]] + [one]
            self.wfile.write(json.dumps({"kind": "Node", "status": {"conditions": made.conditions}}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("localhost", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        made = ApiServer(server.server_port, tmp_path)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield made
        server.shutdown()
        thread.join()


def test_a_verdict_sets_the_condition_of_this_node_with_the_pods_token(api: ApiServer) -> None:
    done = api.run()
    assert (done.returncode, done.stderr) == (0, "")
    (_, _, _, empty), (method, path, headers, _) = api.asked
    assert empty == {}
    assert (method, path) == ("PATCH", "/api/v1/nodes/gpu-1/status")
    assert headers["Authorization"] == "Bearer s3cret"
    assert headers["Content-Type"] == "application/strategic-merge-patch+json"
    shown = {name: api.condition[name] for name in ("type", "status", "reason", "message")}
    assert shown == {
        "type": "RailscopeStall", "status": "True", "reason": "RailDown", "message": "rail 1 has no carrier; so it is",
    }  # fmt: skip


@pytest.mark.parametrize(("standing", "status"), [(0, "False"), (1, "True"), (2, "True")])
def test_one_that_ended_takes_it_back_unless_another_stands_or_the_agent_is_gone(
    api: ApiServer, standing: int, status: str
) -> None:
    assert api.run(told=EVENT | {"event": "ended"}, standing=standing).returncode == 0
    assert api.condition["status"] == status
    assert (api.folder / "asked").read_text() == "verdicts --once --confidence medium\n"


@pytest.mark.parametrize(("standing", "asked"), [(0, ["False"]), (1, []), (2, [])])
def test_a_pod_that_starts_takes_back_what_ended_while_nobody_listened(
    api: ApiServer, standing: int, asked: list[str]
) -> None:
    assert api.run("--refresh", standing=standing).returncode == 0
    assert [one[3]["status"]["conditions"][0]["status"] for one in api.asked[1:]] == asked


def test_a_condition_that_stays_keeps_the_time_of_its_last_change(api: ApiServer) -> None:
    long_ago = "2026-01-02T03:04:05Z"
    api.conditions = [
        {"type": "Ready", "status": "True", "lastTransitionTime": "2025-01-01T00:00:00Z"},
        {"type": "RailscopeStall", "status": "True", "lastTransitionTime": long_ago},
    ]
    assert api.run().returncode == 0
    assert api.condition["lastTransitionTime"] == long_ago < api.condition["lastHeartbeatTime"]
    assert api.run(told=EVENT | {"event": "ended"}).returncode == 0
    assert (api.condition["status"], api.condition["lastTransitionTime"]) == (
        "False",
        api.condition["lastHeartbeatTime"],
    )


def test_a_refusal_is_one_line_with_what_the_api_server_said(api: ApiServer) -> None:
    api.status = 403
    done = api.run()
    assert done.returncode == 1
    assert done.stderr == "set-kubernetes-condition: the API server refuses (403): nodes is forbidden\n"
