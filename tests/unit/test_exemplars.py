"""Exemplars: from a duration bucket to the operation that it counted last.  The events are simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from railscope.agent.facts import catalogue
from railscope.agent.facts.histogram import Exemplar, Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import OpHistogram
from railscope.agent.node.completion.completion import DURATION_BOUNDS
from railscope.agent.node.completion.exemplars import Exemplars
from railscope.exporters.series.family import Family
from railscope.exporters.series.protobuf import ProtobufRenderer
from railscope.exporters.series.text import Format, Renderer
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.records.internals import BUCKETS, COMPLETION_EVENT
from tests.unit.exporters_snapshots import communicator
from tests.unit.metric_families import labels_of, read_families

SECOND_NS = 1_000_000_000
COMMUNICATORS = (
    replace(communicator(rank="3"), instance=7),
    replace(communicator(comm=UNKNOWN, rank=UNKNOWN), instance=8),
)
REALTIME_OFFSET_NS = (1_800_000_000 - 500) * SECOND_NS


def completed(*durations_ns: int, op: Op = Op.AllReduce, instance: int = 7) -> Records:
    """Operations that completed a second apart, the first one 100 s after the host's start."""
    events = np.zeros(len(durations_ns), COMPLETION_EVENT)
    events["duration_ns"] = durations_ns
    events["time_ns"] = (100 + np.arange(len(durations_ns))) * SECOND_NS
    events["sequence"] = 1 + np.arange(len(durations_ns))
    events["op"], events["instance"] = op, instance
    return events


def counted(*events: Records) -> Histogram:
    """All-reduces as the kernel counts them."""
    counts = np.zeros(BUCKETS, int)
    for batch in events:
        np.add.at(counts, [bucket_of(int(one)) for one in batch["duration_ns"]], 1)
    return Histogram(DURATION_BOUNDS, tuple(counts.tolist()), 1.0)


def bucket_of(duration_ns: int) -> int:
    """As in probes/bpf/proxy_tables.h."""
    return 0 if duration_ns <= 1 << 10 else min(BUCKETS - 1, (duration_ns - 1).bit_length() - 10)


def attached(histogram: Histogram, *events: Records) -> tuple[Exemplar | None, ...]:
    exemplars = Exemplars()
    for batch in events:
        exemplars.record(batch)
    (found,) = exemplars.attach((OpHistogram("AllReduce", histogram),), COMMUNICATORS, REALTIME_OFFSET_NS)
    return found.histogram.exemplars


def test_a_bucket_leads_to_the_last_operation_that_it_counted() -> None:
    events = completed(5000, 6000, 1 << 20)
    found = attached(counted(events), events)
    assert [at for at, one in enumerate(found) if one is not None] == [3, 10]
    assert found[3] == Exemplar(
        labels=(("comm", "00c0ffee00c0ffee"), ("rank", "3"), ("sequence", "2")),
        value=6e-6,
        # 101 s after the host's start.
        realtime_ns=(1_800_000_000 - 500 + 101) * SECOND_NS,
    )


@given(st.lists(st.lists(st.integers(0, 1 << 44), min_size=1, max_size=20), min_size=1, max_size=4))
def test_every_exemplar_lies_in_its_bucket_and_is_the_last_of_it(batches: list[list[int]]) -> None:
    events = [completed(*batch) for batch in batches]
    found = attached(counted(*events), *events)
    last = {bucket_of(duration_ns): duration_ns for batch in batches for duration_ns in batch}
    assert {at: round(one.value * 1e9) for at, one in enumerate(found) if one is not None} == last


@pytest.mark.parametrize(
    "events",
    [completed(5000, instance=8), completed(5000, instance=9), completed(5000, instance=0), completed()],
    ids=["without a name", "forgotten", "no communicator", "nothing completed"],
)
def test_operations_that_nobody_can_name_are_no_exemplars(events: Records) -> None:
    assert attached(counted(completed(5000)), events) == ()


def test_operations_of_another_kind_are_no_exemplars() -> None:
    assert attached(counted(completed(5000)), completed(5000, op=Op.AllGather)) == ()
    strange = completed(5000)
    strange["op"] = 200
    assert attached(counted(completed(5000)), strange) == ()


def test_what_the_kernel_did_not_count_in_a_bucket_is_no_exemplar_of_it() -> None:
    assert attached(counted(completed(1 << 20)), completed(5000)) == ()


def family() -> Family:
    events = completed(5000, 1 << 20, 1 << 43)
    histogram = replace(counted(events), exemplars=attached(counted(events), events))
    return Family(
        catalogue.COLLECTIVE_DURATION_SECONDS, ("op", "source"), histograms=((("AllReduce", "proxy"), histogram),)
    )


def test_openmetrics_has_exemplars_that_prometheus_client_reads() -> None:
    text = Renderer().render([family()], Format.OPENMETRICS).decode()
    (read,) = parse_openmetrics(text)
    found = {float(sample.labels["le"]): sample.exemplar for sample in read.samples if sample.exemplar}
    assert len(found) == 3
    one = found[DURATION_BOUNDS[3]]
    assert one.labels == {"comm": "00c0ffee00c0ffee", "rank": "3", "sequence": "1"}
    assert one.value == 5e-6
    assert float(one.timestamp) == 1_800_000_000 - 400
    assert found[float("inf")].value == (1 << 43) / 1e9
    # The limit of OpenMetrics is for names and values together.
    assert all(sum(len(name) + len(value) for name, value in one.labels.items()) < 128 for one in found.values())


def test_plain_text_has_no_exemplars() -> None:
    assert b" # " not in Renderer().render([family()], Format.PROMETHEUS)


def test_protobuf_has_the_same_exemplars() -> None:
    (read,) = read_families(ProtobufRenderer().render([family()]))
    found = {bucket.upper_bound: bucket.exemplar for bucket in read.metric[0].histogram.bucket if bucket.exemplar.value}
    assert len(found) == 3
    one = found[DURATION_BOUNDS[3]]
    assert labels_of(one) == {"comm": "00c0ffee00c0ffee", "rank": "3", "sequence": "1"}
    assert one.value == 5e-6
    assert (one.timestamp.seconds, one.timestamp.nanos) == (1_800_000_000 - 400, 0)


def test_the_time_of_an_exemplar_is_exact_to_the_nanosecond_in_protobuf() -> None:
    exemplar = Exemplar((("comm", "00"),), 0.5, 1_800_000_000 * SECOND_NS + 12_345_678)
    histogram = Histogram((1.0,), (1, 0), 0.5, exemplars=(exemplar, None))
    shown = Family(catalogue.COLLECTIVE_DURATION_SECONDS, ("op", "source"), histograms=((("a", "b"), histogram),))
    (read,) = read_families(ProtobufRenderer().render([shown]))
    (first, second) = read.metric[0].histogram.bucket
    assert (first.exemplar.timestamp.seconds, first.exemplar.timestamp.nanos) == (1_800_000_000, 12_345_678)
    assert not second.HasField("exemplar")
    assert b'# {comm="00"} 0.5 1800000000.012\n' in Renderer().render([shown], Format.OPENMETRICS)
