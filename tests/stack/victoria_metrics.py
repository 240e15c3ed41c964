"""A real VictoriaMetrics for tests, Debian's, and its own evaluator of rules beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.stack.prometheus import answering, free_port, running, tool

_PACKAGE: Final = "victoria-metrics"


@contextmanager
def victoria_metrics(folder: Path, scrape_configs: str = "", arguments: Sequence[str] = ()) -> Iterator[str]:
    """Run one, which scrapes every second if it is told what; yields its URL."""
    port = free_port()
    command = [tool("victoria-metrics", _PACKAGE), f"-storageDataPath={folder / 'data'}"]
    command += [f"-httpListenAddr=127.0.0.1:{port}", "-memory.allowedBytes=256MB", *arguments]
    if scrape_configs:
        config = folder / "scrape.yml"
        config.write_text(f"global:\n  scrape_interval: 1s\n{scrape_configs}")
        command += [f"-promscrape.config={config}"]
    with running(command, folder / "victoria-metrics.log"):
        yield answering(f"http://127.0.0.1:{port}", "VictoriaMetrics")


@contextmanager
def vmalert(folder: Path, url: str, rules: Sequence[Path]) -> Iterator[None]:
    """Evaluate rules every second on a VictoriaMetrics, and write there what they record; nobody is notified."""
    command = [tool("vmalert", _PACKAGE), f"-datasource.url={url}", f"-remoteWrite.url={url}"]
    command += ["-notifier.url=http://127.0.0.1:9", "-evaluationInterval=1s"]
    command += ["-remoteWrite.flushInterval=500ms", f"-httpListenAddr=127.0.0.1:{free_port()}"]
    command += [f"-rule={file}" for file in rules]
    with running(command, folder / "vmalert.log"):
        yield
