"""What is fuzzed: each reader of foreign bytes, and what it may say of damage.

A target fails where its reader raises something else than its own error, ends the process, or takes longer or more
memory than the driver allows (tests/fuzz/driver.py).  Its corpus holds bytes to begin with, and those that once made
its reader fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.cluster.fleet.prometheus import (
    Endpoint,
    PrometheusError,
    PrometheusStore,
    Sample,
    Series,
    parse_samples,
    parse_series,
)
from railscope.agent.cluster.fleet.reader import read_fleet
from railscope.agent.config.file import ConfigError, read_config_file
from railscope.agent.config.options import FILE_KEYS
from railscope.agent.dataset.files import DatasetError
from railscope.agent.imports.facts import ImportFailure
from railscope.agent.imports.runner import import_paths
from railscope.agent.node.inspection.answers import AnswerError, decode
from railscope.agent.node.targets.memory import NameDevices
from railscope.agent.node.targets.sightings import Look, OpenLibrary
from railscope.agent.recording.file import RecordingError, read_recording
from railscope.exporters.web.config import load_web_config
from railscope.exporters.web.config_yaml import WebConfigError
from railscope.exporters.web.http_request import RequestRefused, parse_request, without_empty_lines
from railscope.exporters.web.negotiation import accepts_gzip, metrics_format
from railscope.probes.libraries.elf import Elf, ElfError
from railscope.probes.libraries.elf_variables import find_variables
from railscope.probes.nccl.layouts.dwarf import structures_in
from railscope.probes.nccl.layouts.layout import COMM_FIELDS, layout_from_answer
from railscope.probes.nccl.layouts.unknown_build import loaded_offsets
from railscope.probes.netdev.lldp import MalformedLldp, parse_lldp
from railscope.probes.netdev.netlink import MalformedNetlink
from railscope.probes.rdma.queue_pairs import parse_bound_counters, parse_connections, parse_queue_pairs
from railscope.probes.topology.nccl_xml import TopologyError, parse_topology

CORPUS: Final = Path(__file__).parent / "corpus"
FUNCTIONS: Final = ("ncclAllReduce", "ncclSend", "static_twice")
VARIABLES: Final = ("devices", "count")
_VERSION: Final = re.compile(rb"NCCL version (\d+\.\d+)")
_WINDOW_SECONDS: Final = 300.0
_ANSWERS: Final = (*Look.builds, *OpenLibrary.builds, *NameDevices.builds)


@dataclass(frozen=True, slots=True)
class Target:
    """One reader."""

    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...] = ()
    """What it may raise."""

    def __call__(self, data: bytes) -> None:
        """Raises what the reader must not."""
        with contextlib.suppress(*self.refuses):
            self.read(data)


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("fuzzed")
    try:
        os.write(descriptor, data)
        yield descriptor
    finally:
        os.close(descriptor)


def read_elf(data: bytes) -> None:
    """What the agent asks of a library; one question's refusal hides no other's fault."""
    with _file(data) as descriptor, Elf.open(descriptor) as elf:
        questions: tuple[Callable[[], object], ...] = (
            lambda: elf.build_id,
            lambda: elf.symbols(FUNCTIONS),
            lambda: find_variables(elf, VARIABLES),
            lambda: elf.search(_VERSION),
        )
        for question in questions:
            with contextlib.suppress(ElfError):
                question()


def read_debug_information(data: bytes) -> None:
    """What the process for unknown builds does: it may fail in any way, and its parent believes no answer."""
    with contextlib.suppress(Exception):
        structures_in(io.BytesIO(data), {"ncclComm": COMM_FIELDS}, until_found=True)
    loaded_offsets(data)
    layout_from_answer(data, "2.30.1")


def read_import(data: bytes) -> None:
    """Every format, as the first bytes tell it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "trace_rank_0")
        path.write_bytes(data)
        import_paths([path], Path(folder, "dataset"), None, "host")


def read_config(data: bytes) -> None:
    """The agent's configuration."""
    with _file(data) as descriptor:
        read_config_file(Path(f"/proc/self/fd/{descriptor}"), FILE_KEYS)


def read_web_config(data: bytes) -> None:
    """TLS and passwords."""
    with _file(data) as descriptor:
        load_web_config(Path(f"/proc/self/fd/{descriptor}"))


def read_recorded(data: bytes) -> None:
    """A flight recording."""
    with _file(data) as descriptor:
        read_recording(Path(f"/proc/self/fd/{descriptor}"))


class _SameAnswer:
    """A store that answers every question with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._data = PrometheusStore(Endpoint("http://127.0.0.1:9"))._data(200, answer)

    def query(self, expression: str, at: float | None = None) -> tuple[Sample, ...]:
        del expression, at
        return parse_samples(self._data, "the store")

    def scrapes(self, selector: str, seconds: float, at: float) -> tuple[Series, ...]:
        del selector, seconds, at
        return ()

    def evaluations(self, expression: str, seconds: float, step_seconds: float, at: float) -> tuple[Series, ...]:
        del expression, seconds, step_seconds, at
        return ()

    def warnings(self) -> tuple[str, ...]:
        return ()


def read_store(data: bytes) -> None:
    """A fleet, made of what a store answers."""
    store = _SameAnswer(data)
    with contextlib.suppress(PrometheusError):
        parse_series(store._data, "the store")
    read_fleet(store, window_seconds=_WINDOW_SECONDS)


def read_request(data: bytes) -> None:
    """The head of an HTTP request, and what it asks for."""
    request = parse_request(without_empty_lines(data))
    assert request.path
    assert request.has_body in (True, False)
    metrics_format(request.headers.get("accept", ""))
    accepts_gzip(request.headers.get("accept-encoding", ""))


def read_netlink(data: bytes) -> None:
    """What the kernel says of queue pairs; addresses and names in it are whoever's opened a device."""
    addresses = parse_connections([data])
    parse_queue_pairs([data], "mlx5_0", addresses)
    parse_bound_counters([data], "mlx5_0")


TARGETS: Final[Mapping[str, Target]] = {
    "elf": Target(read_elf, (ElfError,)),
    "dwarf": Target(read_debug_information),
    "topology": Target(parse_topology, (TopologyError,)),
    "imports": Target(read_import, (ImportFailure, DatasetError)),
    "recording": Target(read_recorded, (RecordingError,)),
    "config": Target(read_config, (ConfigError,)),
    "web_config": Target(read_web_config, (WebConfigError,)),
    "store": Target(read_store, (PrometheusError,)),
    "http": Target(read_request, (RequestRefused,)),
    "lldp": Target(parse_lldp, (MalformedLldp,)),
    "netlink": Target(read_netlink, (MalformedNetlink,)),
    "inspection": Target(lambda data: decode(data, _ANSWERS), (AnswerError,)),
}


def corpus_of(name: str) -> list[Path]:
    """The files kept for a target, in the order of their names."""
    return sorted((CORPUS / name).iterdir())
