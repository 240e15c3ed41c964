"""Only a communicator that has an identity counts as named."""

from __future__ import annotations

from tests.bench.late_attach import identities


def test_communicators_are_told_apart_by_rank_and_unknown_ones_do_not_count() -> None:
    text = (
        "# TYPE railscope_comm_info gauge\n"
        'railscope_comm_info{comm="00000000000000aa",rank="0",nranks="2"} 1\n'
        'railscope_comm_info{comm="00000000000000bb",rank="0",nranks="2"} 1\n'
        'railscope_comm_info{comm="00000000000000aa",rank="1",nranks="2"} 1\n'
        'railscope_comm_info{comm="unknown",rank="1",nranks="2"} 1\n'
        'railscope_comm_enqueued_total{comm="00000000000000cc",rank="1"} 7\n'
    )
    assert identities(text) == {0: {"00000000000000aa", "00000000000000bb"}, 1: {"00000000000000aa"}}
