"""What an agent does not load, which it would keep for as long as it runs: its memory is a promise to its host."""

from __future__ import annotations

import subprocess
import sys

import pytest

_RUN = """
import os, signal, socket, sys, threading, time
from railscope.agent.cli import main as cli

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = free.getsockname()

def ask(path):
    try:
        with socket.socket() as client:
            client.connect(address)
            client.sendall(b"GET %s HTTP/1.0\\r\\n\\r\\n" % path)
            return client.recv(12)
    except OSError:
        return b""

def look():
    deadline = time.monotonic() + 60
    while not ask(b"/readyz").endswith(b"200") and time.monotonic() < deadline:
        time.sleep(0.05)
    answer = ask(b"/metrics")
    # Two ticks at the least.
    time.sleep(2.5)
    print(answer.decode(), *sorted(sys.modules), sep="\\n")
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=look, daemon=True).start()
words = ["--web.listen-address", f"{address[0]}:{address[1]}", "--recordings.directory", sys.argv[1]]
sys.exit(cli.main(["agent", *words, *sys.argv[2:]]))
"""

_UNWANTED = frozenset(
    {
        # OpenSSL, passwords: without a web configuration file there are none.
        *("ssl", "_ssl", "_hashlib", "bcrypt", "hmac", "railscope.exporters.web.config", "railscope.exporters.web.tls"),
        # What Python's own HTTP server and its list of packages would bring.
        *("http.server", "http.client", "email", "html.entities", "mimetypes", "importlib.metadata", "csv", "tempfile"),
        # A configuration file, an error in the words of one.
        *("yaml", "tomllib", "difflib", "railscope.agent.config.file"),
        # What writes a recording, before there is one.
        *("zipfile", "railscope.agent.recording.file"),
        # numpy's masked arrays, which its median loads; all characters' properties, which a name as text does.
        *("numpy.ma", "unicodedata", "stringprep"),
        # Other commands.
        *(
            "railscope.agent.analysis",
            "railscope.agent.dataset",
            "railscope.agent.cluster.options",
            "railscope.agent.doctor.command",
            "railscope.agent.estimate.options",
        ),
        *(
            "railscope.agent.trace.options",
            "railscope.agent.imports",
            "railscope.dashboards",
            "railscope.testbed",
            "railscope.exporters.top.options",
            "railscope.exporters.top.command",
        ),
        # The other loader, which runs a program of its own.
        *(
            "railscope.probes.loading.bcc_loader",
            "railscope.probes.loading.bcc_source",
            "railscope.probes.loading.bcc_helper",
        ),
        # For tests and for other loaders only.
        *("pyroute2", "elftools", "capstone", "prometheus_client", "pynvml", "pyarrow", "asyncio"),
        *("scipy", "google.protobuf", "rich"),
    }
)


@pytest.mark.parametrize(
    "options",
    # Jobs that other tests run at the same time are none of its business.
    [("--no-collector.collective",), pytest.param(("--pid", "1"), marks=pytest.mark.root)],
    ids=["rails", "all"],
)
def test_an_agent_that_was_scraped_has_not_loaded_what_only_others_need(
    options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("recordings"))
    done = subprocess.run(
        [sys.executable, "-c", _RUN, folder, *options], capture_output=True, text=True, check=False, timeout=120
    )
    answer, *modules = done.stdout.splitlines()
    assert (done.returncode, answer) == (0, "HTTP/1.1 200"), done.stderr
    assert {"railscope.agent.node.daemon.daemon", "numpy", "railscope.exporters.web.http"} <= set(modules)
    assert _UNWANTED & set(modules) == set()
