"""What is taken from the kernel's log, and what is not: records as Linux and NVIDIA's driver write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.condition.kernel_events import KernelEvents, severity_of
from railscope.probes.kernel_log import KernelEvent, KernelLog, parse_record
from tests.unit.netdev_messages import SteppedClock

HOUR_US = 3_600_000_000


def record(text: str, *, priority: int = 4, at_us: int = HOUR_US) -> bytes:
    return f"{priority},1234,{at_us},-,caller=T17;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:18:00.0\n".encode()


@pytest.mark.parametrize(
    ("text", "found", "severity"),
    [
        (
            "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
            ("xid", "79", "0000:1b:00.0"),
            "page",
        ),
        ("NVRM: Xid (PCI:00000009:01:00): 119, Timeout after 6s of waiting", ("xid", "119", "0009:01:00.0"), "page"),
        ("NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python, MMU Fault", ("xid", "31", "0000:1b:00.0"), "context"),
        ("NVRM: Xid (PCI:0000:1b:00): 63, Row Remapper: New row marked", ("xid", "63", "0000:1b:00.0"), "warn"),
        ("NVRM: Xid (PCI:0000:1b:00): 999, something new", ("xid", "999", "0000:1b:00.0"), "warn"),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            ("sxid", "20034", "0000:05:00.0"),
            "page",
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 24007, Non-fatal, Link 30 sourcetrack",
            ("sxid", "24007", "0000:05:00.0"),
            "warn",
        ),
        (
            "mlx5_core 0000:18:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
            ("pcie", "fatal", "0000:18:00.0"),
            "page",
        ),
        (
            "pcieport 0000:17:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer",
            ("pcie", "non_fatal", "0000:17:00.0"),
            "warn",
        ),
        (
            "pcieport 0000:17:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
            ("pcie", "correctable", "0000:17:00.0"),
            "context",
        ),
        (
            "mlx5_core 0000:18:00.0: poll_health:846:(pid 0): device's health compromised - reached miss count",
            ("nic", "firmware", "0000:18:00.0"),
            "page",
        ),
        (
            "mlx5_core 0000:18:00.0: Port module event[error]: module 0, Cable error, High Temperature",
            ("nic", "module", "0000:18:00.0"),
            "warn",
        ),
        (
            "bnxt_en 0000:3b:00.0 ens3f0: NETDEV WATCHDOG: CPU: 3: transmit queue 5 timed out 5000 ms",
            ("nic", "transmit_timeout", "0000:3b:00.0"),
            "warn",
        ),
        ("mce: [Hardware Error]: Machine check events logged", ("machine_check", "hardware_error", ""), "warn"),
    ],
)
def test_a_line_about_ill_hardware_is_an_event(text: str, found: tuple[str, str, str], severity: str) -> None:
    event = parse_record(record(text))
    assert event is not None
    assert (event.kind, event.code, event.pci, event.monotonic_ns) == (*found, HOUR_US * 1000)
    assert severity_of(event) == severity


@pytest.mark.parametrize(
    "text",
    [
        "I saw NVRM: Xid (PCI:0000:1b:00): 79, today",
        "NVRM: Xid (PCI:0000:1b:00): 79xyz",
        "NVRM: Xid (PCI:../../etc): 79, x",
        "usb 1-1: new high-speed USB device number 2",
        "mlx5_core 0000:18:00.0: Port module event: module 0, Cable plugged",
        "",
    ],
)
def test_other_lines_are_none(text: str) -> None:
    assert parse_record(record(text)) is None


def test_what_a_program_wrote_is_none() -> None:
    """The kernel gives it the facility `user` (1), whatever it asks for."""
    assert parse_record(record("NVRM: Xid (PCI:0000:1b:00): 79, x", priority=1 << 3 | 4)) is None


@given(st.binary(max_size=600))
def test_any_bytes_are_an_event_or_none(data: bytes) -> None:
    for found in (
        parse_record(data),
        parse_record(b"4,1,2,-;" + data),
        parse_record(b"4,1,2,-;NVRM: Xid (PCI:" + data),
    ):
        assert found is None or len(found.code) <= 20


class Log:
    """A log that is a pipe: real reads, one record each."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg"
        os.mkfifo(self.path)

    def write(self, *records: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY)
        for one in records:
            os.write(descriptor, one)
        os.close(descriptor)


def test_a_log_is_read_to_its_end_and_on(tmp_path: Path) -> None:
    log = Log(tmp_path)
    reader = KernelLog(log.path)
    log.write(record("NVRM: Xid (PCI:0000:1b:00): 79, x"))
    assert [one.code for one in reader.read().events] == ["79"]
    assert reader.read().events == ()
    log.write(record("NVRM: Xid (PCI:0000:1b:00): 48, x"))
    assert [one.code for one in reader.read().events] == ["48"]
    reader.close()


def test_the_running_kernel_s_log_is_read_without_waiting() -> None:
    try:
        reader = KernelLog()
    except OSError as refused:
        pytest.skip(f"/dev/kmsg: {refused.strerror}")
    assert reader.read().lost >= 0
    reader.close()


def event(code: str, *, kind: str = "xid", seconds: float = 3600, pci: str = "0000:1b:00.0") -> KernelEvent:
    return KernelEvent(kind, code, pci, False, round(seconds * 1e9))  # type: ignore[arg-type]


def test_events_are_counted_and_the_last_one_has_a_time() -> None:
    clock = SteppedClock()
    events = KernelEvents(clock, Path("/nowhere"))
    events.add([event("79"), event("79", seconds=3700), event("13")])
    booted = (clock.realtime_ns() - clock.monotonic_ns()) / 1e9
    assert [(one.kind, one.code, one.severity, one.count) for one in events.facts] == [
        ("xid", "79", "page", 2),
        ("xid", "13", "context", 1),
    ]
    assert events.facts[0].last_seconds == pytest.approx(booted + 3700)


def test_a_machine_that_boots_raises_nothing_of_links_and_cards() -> None:
    events = KernelEvents(SteppedClock(), Path("/nowhere"))
    events.add(
        [event("fatal", kind="pcie", seconds=40), event("reset", kind="nic", seconds=290), event("79", seconds=60)]
    )
    assert [one.code for one in events.facts] == ["79"]


def test_a_flood_of_codes_is_bounded() -> None:
    events = KernelEvents(SteppedClock(), Path("/nowhere"))
    events.add(event(str(number)) for number in range(1000))
    assert len(events.facts) == 257
    assert sum(one.count for one in events.facts) == 1000


def test_a_link_that_fails_all_the_time_does_not_fill_the_agents_log(caplog: pytest.LogCaptureFixture) -> None:
    events = KernelEvents(SteppedClock(), Path("/nowhere"))
    for _ in range(1000):
        events.add([event("non_fatal", kind="pcie"), event("correctable", kind="pcie")])
    assert [one.count for one in events.facts] == [1000, 1000]
    said = [one.message for one in caplog.records]
    assert len(said) == 10
    assert said[-1] == "the kernel's log: pcie non_fatal of 0000:1b:00.0, 512 so far"


def test_a_log_that_cannot_be_opened_has_no_result_and_no_events() -> None:
    events = KernelEvents(SteppedClock(), Path("/nowhere/kmsg"))
    events.update()
    assert (events.facts, events.result) == ((), None)
