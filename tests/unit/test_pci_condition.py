"""The PCIe links of cards and GPUs: what they run at and could, and their errors, on trees of sysfs."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.condition.watch import ConditionWatch, Hardware
from railscope.exporters.series.condition_families import condition_families
from railscope.probes.topology.pci_condition import parse_aer, read_condition
from tests.unit.netdev_messages import SteppedClock

PORT, CARD = "0000:17:00.0", "0000:18:00.0"
AER = """RxErr 0
BadTLP {}
BadDLLP 2
TOTAL_ERR_COR 7
"""


def machine(root: Path, *, card: tuple[str, str, str, str], port: tuple[str, str]) -> Path:
    """A card below a port; (width, most, speed, most) of the card, (most width, most speed) of the port."""
    below = root / "devices/pci0000:15" / PORT / CARD
    below.mkdir(parents=True)
    for name, text in zip(
        ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed"), card, strict=True
    ):
        (below / name).write_text(text + "\n")
    for name, text in zip(("max_link_width", "max_link_speed"), port, strict=True):
        (below.parent / name).write_text(text + "\n")
    (below / "aer_dev_correctable").write_text(AER.format(5))
    (below / "aer_dev_fatal").write_text("Undefined 0\nDLP 1\nTOTAL_ERR_FATAL 1\n")
    (below.parent / "aer_dev_correctable").write_text(AER.format(0))
    devices = root / "bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / CARD).symlink_to(below)
    return root


def test_a_link_is_held_against_what_both_ends_can(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, card=("8", "16", "32.0 GT/s PCIe", "64.0 GT/s PCIe"), port=("16", "32.0 GT/s PCIe"))
    found = read_condition(sysfs, CARD)
    assert found is not None
    assert (found.lanes, found.lanes_possible) == (8, 16)
    assert (found.speed_gigatransfers, found.speed_possible_gigatransfers) == (32.0, 32.0)
    assert (found.upstream, found.upstream_errors) == (
        PORT,
        (("correctable", "RxErr", 0), ("correctable", "BadTLP", 0), ("correctable", "BadDLLP", 2)),
    )
    assert ("correctable", "BadTLP", 5) in found.errors
    assert ("fatal", "DLP", 1) in found.errors


def test_what_is_not_known_is_none(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, card=("0", "255", "Unknown", ""), port=("16", "x"))
    found = read_condition(sysfs, CARD)
    assert found is not None
    assert (found.lanes, found.lanes_possible, found.speed_gigatransfers) == (None, 16, None)
    assert read_condition(sysfs, "0000:99:00.0") is None
    assert read_condition(sysfs, "../../etc") is None


def test_a_degraded_link_and_its_errors_are_series_and_a_sound_one_has_none(tmp_path: Path) -> None:
    watch = ConditionWatch(
        SteppedClock(),
        sysfs=machine(tmp_path, card=("8", "16", "32.0 GT/s PCIe", "32.0 GT/s PCIe"), port=("16", "32.0 GT/s PCIe")),
        log_device=None,
    )
    watch.set_hardware(Hardware(functions=(("mlx5_0", CARD), ("mlx5_9", "0000:99:00.0"))))
    assert watch.unread_sources() == ("pcie",)
    watch.update()
    assert watch.unread_sources() == ()
    shown = {
        draft.metric.name: list(draft.samples)
        for draft in condition_families(watch.facts())
        if draft.metric.name.startswith("railscope_pcie")
    }
    assert shown == {
        "railscope_pcie_link_ratio": [(("mlx5_0", CARD, "width"), 0.5)],
        "railscope_pcie_errors_total": [
            (("mlx5_0", CARD, "correctable", "BadTLP"), 5),
            (("mlx5_0", CARD, "correctable", "BadDLLP"), 2),
            (("mlx5_0", CARD, "fatal", "DLP"), 1),
            (("mlx5_0", PORT, "correctable", "BadDLLP"), 2),
        ],
    }
    assert [(one.collector, one.success) for one in watch.collectors()] == [("pcie", True)]


@given(st.text(max_size=400))
def test_any_text_is_errors_or_none(text: str) -> None:
    for name, count in parse_aer(text):
        assert name.isidentifier() or name[0].isdigit()
        assert count >= 0


def test_after_the_first_reading_links_are_read_in_turn_each_in_half_a_minute(tmp_path: Path) -> None:
    clock = SteppedClock()
    sysfs = machine(tmp_path, card=("8", "16", "8.0 GT/s PCIe", "8.0 GT/s PCIe"), port=("16", "8.0 GT/s PCIe"))
    (sysfs / "bus/pci/devices" / PORT).symlink_to(sysfs / "devices/pci0000:15" / PORT)
    watch = ConditionWatch(clock, sysfs=sysfs, log_device=None)
    watch.set_hardware(Hardware(functions=(("mlx5_0", CARD), ("mlx5_1", PORT))))
    watch.update()
    assert [one.lanes for one in watch.facts().pcie] == [8, None]
    for address in (CARD, PORT):
        (sysfs / "bus/pci/devices" / address / "current_link_width").write_text("4\n")
    seen = []
    for _ in range(4):
        clock.now_ns += 15_000_000_000
        watch.update()
        seen.append([one.lanes for one in watch.facts().pcie])
    assert seen == [[4, None], [4, 4], [4, 4], [4, 4]]
