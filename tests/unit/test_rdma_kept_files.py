"""Counters of RDMA ports read from kept files and understood later, against the same read one by one.  Simulated."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.netdev.counters import CounterReading, CounterShape
from railscope.probes.rdma.counters import RdmaCounters
from railscope.probes.rdma.kept_files import KeptFiles
from railscope.probes.rdma.port import PortFiles
from tests.trees import rdma
from tests.trees.rdma import RdmaTree, write
from tests.unit.counter_files import showing
from tests.unit.netdev_messages import SteppedClock
from tests.unit.test_rdma_counters import Scenario, row

SECOND = 1_000_000_000
PORT = "ibp24s0/1"


def at_once(tree: RdmaTree) -> CounterReading:
    """What a source shows that reads for the first time: file by file."""
    with closing(RdmaCounters(tree.sysfs, SteppedClock())) as source:
        return source.read()


def rows(reading: CounterReading) -> dict[str, dict[str, int]]:
    return {name: row(reading, name) for name in reading.names}


@pytest.mark.parametrize("scenario", rdma.SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_every_machine_shows_the_same_either_way(scenario: Scenario, tmp_path: Path) -> None:
    tree = scenario(tmp_path)
    with closing(RdmaCounters(tree.sysfs, SteppedClock())) as source:
        first = source.read()
        answer = source.read_raw()
        assert answer is not None
        (block,) = source.parse_raw([answer])
        later = block.reading(0)
    assert rows(later) == rows(first) == rows(at_once(tree))
    assert (later.generations, later.fields, later.failed) == (first.generations, first.fields, ())
    assert later.shape is first.shape


def test_many_answers_are_understood_together_each_as_it_was(tmp_path: Path) -> None:
    tree = rdma.irdma(tmp_path)  # its bytes are the sum of two counters
    clock = SteppedClock(cost_ns=10)
    with closing(RdmaCounters(tree.sysfs, clock)) as source:
        source.read()
        answers, expected = [], []
        for turn in range(5):
            tree.set("rocep202s0/1", "hw_counters/ip4OutOctets", 1000 * turn)
            tree.set("rocep202s0/1", "hw_counters/ip6OutOctets", turn)
            answer = source.read_raw()
            assert answer is not None
            answers.append(answer)
            expected.append(rows(at_once(tree)))
        (block,) = source.parse_raw(answers)
    assert [rows(block.reading(number)) for number in range(5)] == expected
    assert block.times_ns == tuple((answer.before_ns, answer.after_ns) for answer in answers)
    assert len({one["rocep202s0/1"]["tx_bytes"] for one in expected}) == 5


@pytest.mark.parametrize(
    "text", ["garbage\n", "N/A (no PMA)\n", "", "\n", "12", "1\n2\n", "99999999999999999999\n", "-1\n"]
)
def test_what_is_no_counter_is_looked_at_by_itself_until_it_is_one_again(text: str, tmp_path: Path) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    clock = SteppedClock()
    with closing(RdmaCounters(tree.sysfs, clock)) as source:
        whole = rows(source.read())
        assert source.read_raw() is not None
        tree.counter(PORT, "counters/symbol_error").write_text(text)
        assert source.read_raw() is None
        broken = source.read()
        plain = text.strip().isdigit() and len(text) < 20  # without a line feed, but a number all the same
        assert [failure.device for failure in broken.failed] == ([] if plain else [PORT])
        without = {name: value for name, value in whole[PORT].items() if name != "symbol_error" or plain}
        assert rows(broken)[PORT].keys() == without.keys()
        write(tree.counter(PORT, "counters/symbol_error"), str(whole[PORT]["symbol_error"]))
        clock.now_ns += 3 * SECOND
        assert rows(source.read()) == whole
        assert source.read_raw() is not None


def test_a_device_that_comes_is_looked_for_as_often_as_ever(tmp_path: Path) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    clock = SteppedClock()
    with closing(RdmaCounters(tree.sysfs, clock)) as source:
        before = source.read().names
        assert source.read_raw() is not None
        device = tree.device("mlx5_77", pci="0000:77:00.0")
        tree.port(device, counters={"port_xmit_data": 1, "port_rcv_data": 2}, hw_counters={})
        clock.now_ns += SECOND
        assert source.read_raw() is None, "once a second it looks by itself"
        assert source.read().names == (*before, "mlx5_77/1")
        answer = source.read_raw()
        assert answer is not None
        assert source.parse_raw([answer])[0].names == (*before, "mlx5_77/1")


def test_counters_that_come_after_their_port_are_found(tmp_path: Path) -> None:
    """As while a driver registers a device."""
    tree = RdmaTree(tmp_path)
    device = tree.device("mlx5_0", pci="0000:18:00.0")
    tree.port(device, counters={"symbol_error": 1}, hw_counters={})
    clock = SteppedClock()
    with closing(RdmaCounters(tree.sysfs, clock)) as source:
        assert rows(source.read()) == {"mlx5_0/1": {"symbol_error": 1}}
        for name, value in (("port_xmit_data", 2), ("port_rcv_data", 3)):
            write(device / "ports/1/counters" / name, str(value))
        clock.now_ns += SECOND
        expected = {"mlx5_0/1": {"tx_bytes": 8, "rx_bytes": 12, "symbol_error": 1}}
        assert rows(source.read()) == expected
        clock.now_ns += SECOND
        answer = source.read_raw()
        assert answer is not None
        assert rows(source.parse_raw([answer])[0].reading(0)) == expected


contents = st.one_of(
    st.integers(0, 10**19 - 1).map(lambda value: b"%d\n" % value),
    st.integers(10**19, 10**25).map(lambda value: b"%d\n" % value),
    st.binary(max_size=24),
    st.text("0123456789|\n -+_.N/A", max_size=24).map(str.encode),
)


@settings(deadline=None)
@given(st.lists(contents, min_size=1, max_size=6))
def test_nothing_but_numbers_is_ever_taken_for_numbers(texts: list[bytes]) -> None:
    fields = tuple(f"counter{number}" for number in range(len(texts)))
    nothing = np.zeros((1, len(texts)), dtype=np.bool_)
    shape = CounterShape(nothing, nothing.astype(np.uint64), nothing)
    with showing(texts) as descriptors:
        port = PortFiles(descriptors, tuple((field, 1, (number,)) for number, field in enumerate(fields)))
        kept = KeptFiles.from_files([port], ("mlx5_0/1",), (1,), fields, shape)
        assert kept is not None
        shown = kept.read()
        assert (shown is not None) == all(re.fullmatch(rb"[0-9]{1,19}\n", text) for text in texts)
        if shown is not None:
            assert kept.parse([shown]).tolist() == [[[int(text) for text in texts]]]
