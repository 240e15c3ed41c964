"""The live view's screens, keys, orders and words.  The nodes are simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.rank_process import RankProcess
from railscope.agent.facts.snapshot import CommunicatorFacts, CommunicatorStall, NodeCollectives, Snapshot
from railscope.exporters.top.columns import INITIAL_ORDERS, RAIL_COLUMNS
from railscope.exporters.top.node_view import NodeView, make_node_view
from railscope.exporters.top.plain import render_lines
from railscope.exporters.top.screen import COLUMN_COUNTS, Frame, Status, render_frame
from railscope.exporters.top.state import Order, Pane, ViewState, apply_key
from railscope.exporters.top.terminal import Keys
from railscope.exporters.top.words import format_amount, format_length, format_percent, render_bar
from railscope.probes.processes.owner import ProcessOwner, ProcessUsage
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.exporters_snapshots import (
    communicator,
    full_snapshot,
    inside_call,
    large_snapshot,
    rail,
    stall,
    with_communicators,
)
from tests.unit.identities import named
from tests.unit.nodes import healthy, later, scraped, view_of

STATUS = Status("http://127.0.0.1:9779", 2.0)
COMM = "00c0ffee00c0ffee"


def screen(
    view: NodeView | None, width: int = 80, height: int = 24, state: ViewState | None = None, status: Status = STATUS
) -> list[str]:
    return [line.plain for line in render_frame(view, state or ViewState(), status, width, height).lines]


def moving(snapshot: Snapshot) -> NodeView:
    return view_of(snapshot, later(snapshot))


def line_with(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def styles_of(made: Frame, start: str) -> str:
    """Every style of the line that starts so."""
    line = next(line for line in made.lines if line.plain.startswith(start))
    return " ".join(str(style) for style in (line.style, *(span.style for span in line.spans)))


def test_at_80_columns_a_rank_shows_operation_rates_age_and_what_is_open() -> None:
    lines = screen(moving(full_snapshot()))
    header = line_with(lines, "COMM")
    assert header.split() == ["COMM", "RANK", "GPU", "OP", "CALLS/s", "PAYLOAD/s", "AGE", "OPEN", "BEHIND"]
    assert line_with(lines, f"{COMM} 0/4").split()[2:] == ["0", "AllReduce", "120", "126", "MB", "250ms", "1", "0"]


def test_at_120_columns_a_rank_shows_its_mean_time_lateness_process_and_job_too() -> None:
    lines = screen(moving(full_snapshot()), 120)
    assert line_with(lines, "COMM").split()[9:] == ["TIME", "LATE", "PID", "JOB"]
    assert line_with(lines, f"{COMM} 1/4").split()[10:] == ["5ms", "0%", "4712", "pretrain"]


def with_jobs(snapshot: Snapshot, *comms: str, ended: str = "") -> Snapshot:
    """The snapshot with a job of each of these communicators, of which one may have ended."""
    (steps, *_) = snapshot.collectives.jobs
    jobs = tuple(replace(steps, comm=comm, rank="0") for comm in comms)
    ranks = [replace(communicator(comm), alive=comm != ended) for comm in comms]
    changed = with_communicators(snapshot, *ranks)
    return replace(changed, collectives=replace(changed.collectives, jobs=jobs))


def test_the_steps_of_jobs_stand_above_the_panes_and_what_has_ended_takes_no_place() -> None:
    snapshot = full_snapshot()
    view = moving(with_jobs(snapshot, "a1", "b2", "c3", ended="a1"))
    told = [line for line in screen(view, 120) if "steps of " in line]
    assert len(told) == 2
    assert all(line.startswith("pretrain: steps of ") for line in told)
    of_jobs = [line.split() for line in render_lines(view) if " kind=job " in line]
    assert [next(word for word in line if word.startswith("comm=")) for line in of_jobs] == [
        "comm=b2", "comm=c3", "comm=a1",
    ]  # fmt: skip
    assert ["ended=1" in line for line in of_jobs] == [False, False, True]


def test_jobs_that_there_is_no_room_for_are_counted() -> None:
    lines = screen(moving(with_jobs(full_snapshot(), "a1", "b2", "c3", "d4")), 120)
    assert sum("steps of " in line for line in lines) == 2
    assert line_with(lines, "2 more jobs") == "2 more jobs with steps: --plain shows them"


@pytest.mark.parametrize("width", [80, 120])
def test_a_rail_shows_its_rates_as_bars_against_its_speed_and_how_much_is_explained(width: int) -> None:
    lines = screen(moving(full_snapshot()), width)
    fast, soft = line_with(lines, "0     mlx5_0"), line_with(lines, "1     rxe0")
    assert "████▊    30.0 GB" in fast
    assert "██▍      15.0 GB" in fast
    assert "50%" in fast
    assert ("91%" in fast) == (width == 120)
    assert "█" not in soft, "its speed is unknown"
    assert "30.0 GB" in soft


def test_a_rail_s_owners_are_those_who_moved_something_that_the_numbers_show() -> None:
    def moved_later(**more: float) -> NodeView:
        (key,) = (key for key, one in before.rails.items() if one.bytes_by_owner)
        owners = {owner: count + more.get(owner, 0.0) for owner, count in before.rails[key].bytes_by_owner.items()}
        rails = {**before.rails, key: replace(before.rails[key], bytes_by_owner=owners)}
        return make_node_view(before, replace(scraped(later(full_snapshot())), rails=rails))

    before = scraped(full_snapshot())
    for more, shown, row in (
        ({"ucx": 2e9, "storage": 1e5}, "ucx:1.000", "ucx 100%"),
        ({"ucx": 1.996e9, "storage": 4e6}, "ucx:0.998,storage:0.002", "ucx 100%"),
        ({"ucx": 1e9, "storage": 1e9}, "ucx:0.500,storage:0.500", "ucx 50% storage 50%"),
    ):
        view = moved_later(**more)
        assert [line for line in render_lines(view) if line.endswith(f" owners={shown}")]
        (moved_by,) = (one for one in view.rails if one.owners)
        assert next(one for one in RAIL_COLUMNS if one.title == "OWNERS").text(moved_by) == row


def test_errors_that_grow_are_on_their_rail_and_a_rail_that_is_down_says_so() -> None:
    first = replace(healthy(), rails=(rail("0"), rail("1", "mlx5_1")))
    now = later(first)
    lossy = replace(now.rails[0], counters=(("link_downed", "page", 3),))
    made = render_frame(
        view_of(first, replace(now, rails=(lossy, replace(now.rails[1], up=False)))), ViewState(), STATUS, 80, 24
    )
    lines = [line.plain for line in made.lines]
    assert line_with(lines, "0     mlx5_0").endswith("+2 link_downed")
    assert line_with(lines, "1     mlx5_1").rstrip().endswith("DOWN")
    assert "red" in styles_of(made, "0     mlx5_0")
    assert "bold red" in styles_of(made, "1     mlx5_1")


@pytest.mark.parametrize("width", [80, 120])
def test_a_stall_is_red_with_its_cause_whom_it_blames_and_the_evidence(width: int) -> None:
    made = render_frame(moving(full_snapshot()), ViewState(), STATUS, width, 24)
    text = " ".join(" ".join(line.plain for line in made.lines).split())
    assert f"STALL rail_down: AllReduce of rank 1/2 of {COMM} for 4.5s; blamed: rail 1 (rail1)" in text
    assert "rail 1 (rail1) has no carrier or is switched off" in text
    assert "2 stalls" in made.lines[1].plain
    assert "bold red" in styles_of(made, "STALL rail_down")
    assert "bold red" in styles_of(made, f"{COMM} 1/4")
    assert "red" not in styles_of(made, f"{COMM} 0/4")


def test_weak_evidence_of_a_stall_is_said_but_not_of_a_process_that_is_seen_to_be_stopped() -> None:
    snapshot = full_snapshot()
    one = next(stalled for stalled in snapshot.stalls.lengths if stalled.current is not None)

    def said(cause: Cause) -> str:
        current = replace(
            stall(), flight_strength="weak", diagnosis=replace(stall().diagnosis, cause=cause, netns="pod7")
        )
        stalls = replace(snapshot.stalls, lengths=(replace(one, current=current),))
        view = make_node_view(None, scraped(replace(snapshot, stalls=stalls)))
        return " ".join(" ".join(screen(view)).split())

    assert "STALL rail_down, weak evidence: AllReduce" in said(Cause.RAIL_DOWN)
    assert "blamed: rail 1 (rail1 in pod7)" in said(Cause.RAIL_DOWN)
    assert "STALL process_stopped: AllReduce" in said(Cause.PROCESS_STOPPED)


def test_of_a_waiting_and_a_blamed_process_it_says_which_is_which() -> None:
    view = make_node_view(None, scraped(full_snapshot()))
    one = view.stalls[0]
    blamed = next(rank for rank in view.ranks if rank.identity.comm == one.comm and rank.identity.rank != one.rank)
    owned = replace(one.process, user="ada", program="")

    def said(blamed_rank: str) -> str:
        told = replace(one, blamed_rank=blamed_rank, rail="", process=owned)
        return " ".join(" ".join(screen(replace(view, stalls=(told,)), 200)).split())

    waits = said(blamed.identity.rank)
    assert f"; waiting: process {one.pid} of ada; blamed: rank {blamed.identity.rank} (process " in waits
    assert f"(process {blamed.identity.pid}" in waits
    assert f"; process {one.pid} of ada; blamed: rank {one.rank} (process " in said(one.rank)
    assert "; blamed: rank 77 " in said("77")


def test_without_a_stall_it_says_so_and_tells_of_the_last_that_ended() -> None:
    calm = replace(full_snapshot(), stalls=replace(full_snapshot().stalls, lengths=()))
    lines = screen(moving(calm))
    assert "no stall" in lines[1]
    assert line_with(lines, "ended").startswith("ended 3.5s ago: rail_down: AllReduce of rank 1/2")
    assert not any("ended" in line for line in screen(moving(healthy())))


def test_an_operation_of_no_known_communicator_is_its_process_s_also_after_its_end() -> None:
    wait = replace(
        inside_call(), comm="unknown", rank="unknown", nranks="unknown", op="cudaStreamSynchronize", pid=77,
        ended_ns=8_000_000_000,
    )  # fmt: skip
    nameless = CommunicatorStall("unknown", "unknown", wait.diagnosis.cause, 1.0, None)
    stalls = replace(full_snapshot().stalls, lengths=(nameless,), ended=(wait,))
    text = " ".join(screen(moving(replace(full_snapshot(), stalls=stalls)), 200))
    assert "ago: inside_call: cudaStreamSynchronize of process 77 for " in text
    assert "unknown" not in text.partition("ago: ")[2].partition("for ")[0]


def test_operations_show_size_and_both_bandwidths() -> None:
    lines = screen(moving(full_snapshot()))
    assert line_with(lines, "OPERATION").split()[1:] == ["CALLS/s", "PAYLOAD/s", "MEAN", "SIZE", "ALGBW/s", "BUSBW/s"]
    row = line_with(lines, "AllReduce").split()
    assert row == ["AllReduce", "120", "126", "MB", "1.05", "MB", "252", "MB", "377", "MB"]
    assert line_with(lines, "Send").split() == ["Send", "0", "0", "B", "–", "–", "–"]


def test_simulated_input_and_sources_that_fail_are_told() -> None:
    lines = screen(moving(full_snapshot()))
    assert "SIMULATED INPUT" in lines[0]
    assert "not read: ethernet" in lines[1]


def test_an_agent_that_does_not_answer_is_one_line_over_what_was_known() -> None:
    broken = replace(STATUS, error="no agent answers at http://127.0.0.1:9779 (Connection refused)")
    assert "no agent answers" in screen(None, status=broken)[1]
    lines = screen(moving(full_snapshot()), status=broken)
    assert "no agent answers" in lines[1]
    assert line_with(lines, f"{COMM} 0/4")


def test_what_to_do_about_an_agent_that_does_not_answer_is_wrapped() -> None:
    told = (
        "no agent answers at http://127.0.0.1:9779 (Connection refused): is 'railscope agent' running there?  else "
        "give --url"
    )
    broken = replace(STATUS, error=told)
    for view in (None, moving(full_snapshot())):
        made = render_frame(view, ViewState(), broken, 80, 24)
        assert len(made.lines) == 24
        assert all(line.cell_len <= 80 for line in made.lines)
        both = " ".join(line.plain.strip() for line in made.lines[1:3])
        assert " ".join(both.split()) == " ".join(f"{told}; trying again".split())
    for height in range(1, 9):
        assert len(render_frame(_MANY, ViewState(), broken, 10, height).lines) <= height


@given(st.integers(1, 200), st.integers(1, 60), st.booleans(), st.sampled_from(list(Pane)))
def test_a_frame_fits_a_screen_of_any_size(width: int, height: int, alone: bool, focus: Pane) -> None:
    for state in (ViewState(focus=focus, alone=alone), ViewState(help=True), ViewState(typing=True, filter="x" * 90)):
        made = render_frame(_MANY, state, STATUS, width, height)
        assert len(made.lines) == height if height >= 3 else len(made.lines) <= height
        assert all(line.cell_len <= width for line in made.lines)


_MANY = moving(replace(large_snapshot(120, 12), stalls=full_snapshot().stalls))


def test_at_24_lines_every_pane_is_there_and_says_how_much_is_not_shown() -> None:
    lines = screen(_MANY)
    for start in ("STALL", "COMM", "RAIL", "OPERATION"):
        assert line_with(lines, start)
    below = [line.split() for line in lines[lines.index(line_with(lines, "COMM")) :] if line.endswith("below")]
    ranks = sum(line.startswith("0000") for line in lines)
    assert below[0] == [str(120 - ranks), "more", "below"]


def test_a_pane_alone_has_the_whole_screen_and_scrolls_to_its_last_row() -> None:
    state = ViewState(alone=True)
    made = render_frame(_MANY, state, STATUS, 80, 24)
    assert (made.page, made.rows) == (19, 120)
    assert not any(line.plain.startswith("RAIL") for line in made.lines)
    last = apply_key(state, "end", COLUMN_COUNTS, made.page, made.rows)
    lines = screen(_MANY, state=last)
    assert line_with(lines, "000000000000000e 7/4")
    assert " 101 more above, 0 below" in lines
    assert apply_key(last, "home", COLUMN_COUNTS, made.page, made.rows).first_row == 0


def test_names_that_could_steer_the_terminal_are_made_harmless() -> None:
    one = named(communicator(), job=(("job", "\x1b[2Jgone\r"),))
    lines = screen(moving(with_communicators(healthy(), one)), 120)
    assert line_with(lines, COMM).rstrip().endswith("\ufffd[2Jgone\ufffd")


# Sorting and filtering


def ranks_shown(state: ViewState, view: NodeView) -> list[str]:
    return [line.split()[1] for line in screen(view, 80, 40, state) if line.startswith("00")]


def by(column: int, *, reverse: bool = False) -> ViewState:
    return ViewState(orders={Pane.RANKS: Order(column, reverse)})


def calling(one: CommunicatorFacts, more: int) -> CommunicatorFacts:
    """The same rank, with so many more calls than it has made."""
    return replace(one, enqueued=one.enqueued + more, ops=tuple(replace(op, calls=op.calls + more) for op in one.ops))


def three_ranks() -> NodeView:
    """Ranks 0, 2 and 10: the second calls most, the third has the oldest operation; nothing is known of the first's."""
    before = with_communicators(
        healthy(),
        communicator(rank="10"),
        communicator(rank="2"),
        replace(communicator(rank="0"), completed=None, inflight_seconds=None),
    )
    ten, two, zero = later(before).collectives.communicators
    return view_of(
        before,
        with_communicators(
            later(before),
            replace(ten, inflight_seconds=7.0),
            replace(calling(two, 1000), inflight_seconds=0.5),
            calling(zero, -100),
        ),
    )


def test_ranks_are_sorted_as_numbers_by_rates_largest_first_and_unknown_last_either_way() -> None:
    view = three_ranks()
    assert ranks_shown(by(0), view) == ["0/4", "2/4", "10/4"]
    assert ranks_shown(by(1, reverse=True), view) == ["10/4", "2/4", "0/4"]
    assert ranks_shown(by(4), view) == ["2/4", "10/4", "0/4"]
    assert ranks_shown(by(6), view) == ["10/4", "2/4", "0/4"]
    assert ranks_shown(by(6, reverse=True), view) == ["2/4", "10/4", "0/4"]


def split_often(ended: int = 30) -> NodeView:
    """A stalled communicator, two that call, one that does not, one just made, and many that have ended, whose hashes
    come before the others'."""
    base = full_snapshot()
    before = with_communicators(
        base,
        *(communicator(f"{number:016x}", "0") for number in range(ended)),
        *(communicator(f"{letter * 16}", "0") for letter in "fedc"),
        communicator(rank="1"),
    )
    now = later(before)
    # Whoever ends while others of its communicator live has not ended it.
    gone = [replace(one, enqueued=1200, alive=False) for one in now.collectives.communicators[:ended]]
    slow, fast, idle, new, stalled = now.collectives.communicators[ended:]
    return view_of(
        with_communicators(before, *(one for one in before.collectives.communicators if one.identity.comm != "c" * 16)),
        with_communicators(
            now,
            *gone,
            calling(idle, 1200 - idle.enqueued),
            new,
            slow,
            calling(fast, 1000),
            named(replace(slow, alive=False), rank="3"),
            stalled,
        ),
    )


def test_at_first_stalled_ranks_stand_above_those_that_call_most_and_ended_ones_come_last() -> None:
    view = split_often()
    made = render_frame(view, ViewState(orders=INITIAL_ORDERS), STATUS, 130, 80)
    lines = [line.plain for line in made.lines]
    ranks = [line.split() for line in lines[lines.index(line_with(lines, "COMM")) + 1 :] if line.count("pretrain")]
    assert [(words[0][:2], words[-1]) for words in ranks[:7]] == [
        ("00", "stalled"), ("ee", "active"), ("ff", "active"), ("cc", "–"), ("dd", "idle"), ("00", "ended"),
        ("00", "ended"),
    ]  # fmt: skip
    assert ranks[-1][:2] == ["f" * 16, "3/4"]
    assert lines[1].startswith("3 processes, 5 communicators, 30 ended, 5 ranks, 2 rails, 2 stalls")
    assert line_with(lines, "0000000000000000 0/4").split()[3] == "ended"
    assert "dim" in styles_of(made, "0000000000000000 0/4")
    assert "dim" not in styles_of(made, "dddddddddddddddd 0/4")
    assert "30 ended" not in screen(moving(full_snapshot()))[1]


@pytest.mark.parametrize("order", [{}, INITIAL_ORDERS])
def test_ranks_that_have_ended_leave_room_for_what_goes_on(order: dict[Pane, Order]) -> None:
    view = split_often(200)
    view = replace(view, rails=tuple(replace(view.rails[0], rail=str(number)) for number in range(10)))
    made = render_frame(view, ViewState(orders=order), STATUS, 130, 40)
    lines = [line.plain for line in made.lines]
    assert [line.split()[0] for line in lines if " mlx5_0 " in line] == [str(number) for number in range(10)]
    assert sum(line.startswith(("AllReduce", "Send")) for line in lines) == 2
    # What is left of the screen is theirs: no line is empty but the last before the footer at most.
    assert all(lines[:-2])
    (below,) = (int(line.split()[0]) for line in lines if line.endswith(" more below"))
    assert below + sum(line.count("pretrain") for line in lines) == 206


def test_plain_lines_tell_ended_ranks_from_living_ones() -> None:
    lines = list(render_lines(split_often(2)))
    assert " ranks=5 ended_ranks=3 " in lines[0]
    ended = [line for line in lines if " kind=rank " in line and line.endswith(" ended=1")]
    assert len(ended) == 3
    assert all(" kind=rank " in line for line in ended)


def test_calls_and_bytes_of_a_rank_are_of_the_same_moments() -> None:
    before = scraped(full_snapshot())
    (key, counts), *_ = sorted(before.rank_ops.items())
    # The agent counted a call after it had answered /metrics, and before it answered /communicators.
    ops = {
        **before.rank_ops,
        key: replace(counts, calls=counts.calls + 3, payload_bytes=(counts.payload_bytes or 0) + 6),
    }
    now = replace(before, at_seconds=before.at_seconds + 2.0, rank_ops=ops)
    rank = next(one for one in make_node_view(before, now).ranks if one.identity.key == key[:2])
    assert (rank.calls_per_second, rank.payload_bytes_per_second) == (1.5, 3.0)


def test_a_filter_keeps_rows_with_all_its_words_and_never_hides_a_stall() -> None:
    lines = screen(moving(full_snapshot()), state=ViewState(filter="C0FFEE 1/4"))
    assert line_with(lines, f"{COMM} 1/4")
    assert not any(line.startswith(f"{COMM} 0/4") for line in lines)
    assert not any(line.startswith("0     mlx5_0") for line in lines)
    assert line_with(lines, " no rail has these words")
    assert line_with(lines, "STALL rail_down")
    assert "only: C0FFEE 1/4" in lines[0]


def test_a_job_s_name_finds_its_ranks_on_narrow_screens_too() -> None:
    lines = screen(moving(full_snapshot()), state=ViewState(filter="pretrain"))
    assert sum(line.startswith(COMM) for line in lines) == 2


# Keys


def after(*keys: str, state: ViewState | None = None) -> ViewState:
    state = state or ViewState()
    for key in keys:
        state = apply_key(state, key, COLUMN_COUNTS, 5, 20)
    return state


def test_keys_choose_pane_order_filter_pause_and_help() -> None:
    assert after("tab").focus is Pane.RAILS
    assert after("backtab").focus is Pane.STALLS
    assert after("s", "s").order(Pane.RANKS) == Order(2)
    assert after("S").order(Pane.RANKS) == Order(COLUMN_COUNTS[Pane.RANKS] - 1)
    assert after("s", "r").order(Pane.RANKS) == Order(1, reverse=True)
    assert after("tab", "s").order(Pane.RANKS) == Order(0)
    assert after(" ").paused
    assert not after("p", "p").paused
    assert after("?").help
    assert after("?", "q") == after()
    assert after("z").alone
    assert after("backtab", "s").orders == {}


def test_the_keys_fit_into_80_columns_with_the_longest_of_orders() -> None:
    state = ViewState(orders={Pane.RANKS: Order(5, reverse=True)})
    footer = screen(moving(healthy()), state=state)[-1]
    assert footer == "q quit ? help Tab ranks s r sort: PAYLOAD/s reversed / filter z zoom p pause"


def test_while_a_filter_is_typed_keys_are_its_letters() -> None:
    typed = after("/", "s", "q", " ", "x", "backspace")
    assert (typed.filter, typed.typing, typed.paused) == ("sq ", True, False)
    assert after("enter", state=typed).filter == "sq "
    assert after("escape", state=typed) == after()
    assert after("enter", "escape", state=typed) == after()


def test_scrolling_stops_at_both_ends() -> None:
    assert after("up").first_row == 0
    assert after("down", "j", "k").first_row == 1
    assert after("pagedown").first_row == 5
    assert after(*["pagedown"] * 9).first_row == 15
    assert after("end", "pageup").first_row == 10
    assert after("end", "g").first_row == 0


def test_keys_are_read_from_the_bytes_that_terminals_send() -> None:
    assert Keys().feed(b"s\x1b[A\x1bOB\x1b[5~\x1b[Z\t\r\x7f?\xc3\xa9") == [
        *("s", "up", "down", "pageup", "backtab", "tab", "enter", "backspace", "?", "é"),
    ]


def test_an_escape_sequence_in_pieces_is_one_key_and_escape_alone_is_itself() -> None:
    keys = Keys()
    assert keys.feed(b"\x1b") == []
    assert keys.unfinished
    assert keys.feed(b"[") == []
    assert keys.feed(b"B") == ["down"]
    assert keys.feed(b"\x1b") == []
    assert keys.flush() == ["escape"]
    assert not keys.unfinished
    assert keys.feed(b"\x1bq") == ["escape", "q"]
    assert keys.feed(b"\x1b[200~\xe2\x82") == []
    assert keys.feed(b"\xac") == ["€"]


@given(st.lists(st.binary(max_size=8)))
def test_no_bytes_upset_the_keys(pieces: list[bytes]) -> None:
    keys = Keys()
    for piece in pieces:
        for key in keys.feed(piece):
            after("/", key)
            after(key)
    keys.flush()


# Words


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "B", "–"),
        (0, "", "0"),
        (3, "", "3"),
        (0.5, "", "0.50"),
        (999.6, "", "1.00k"),
        (12_345, "", "12.3k"),
        (1_258_291_200, "B", "1.26 GB"),
        (99.96e9, "B", "100 GB"),
        (5e21, "B", "5000 EB"),
    ],
)
def test_amounts_have_three_digits(value: float | None, unit: str, text: str) -> None:
    assert format_amount(value, unit) == text


@given(st.floats(0, 1e18))
def test_an_amount_below_1000_exabytes_fits_its_column(value: float) -> None:
    assert len(format_amount(value, "B")) <= 7


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(None, "–"), (0.0, "0"), (25e-6, "25us"), (0.25, "250ms"), (0.9999, "1.0s"), (12.34, "12.3s")],
        *[(99.96, "1m40s"), (245.0, "4m05s"), (11_400.0, "3h10m")],
    ],
)
def test_lengths_of_time_choose_their_unit(seconds: float | None, text: str) -> None:
    assert format_length(seconds) == text


def test_bars_are_as_wide_as_asked_and_never_more() -> None:
    assert render_bar(0.5, 8) == "████    "
    assert render_bar(7.0, 8) == "████████"
    assert render_bar(None, 8) == " " * 8
    assert render_bar(0.5, 8, ascii_only=True) == "####...."
    assert (format_percent(0.911), format_percent(70.0), format_percent(None)) == ("91%", ">999%", "–")


def test_a_node_that_shows_nothing_yet_says_so() -> None:
    empty = replace(healthy(), collectives=NodeCollectives(), rails=())
    lines = screen(make_node_view(None, scraped(empty)))
    assert [line for line in lines if line.startswith(" no ")] == [
        " no ranks yet",
        " no rails yet",
        " no operations yet",
    ]


def process(pid: int, *, cpu_seconds: float, read_seconds: float, started: int = 1) -> RankProcess:
    """Of ada, who trains."""
    identity = ProcessIdentity(pid, started)
    usage = ProcessUsage(int(read_seconds * 1e9), cpu_seconds, 3 << 30, 97, started)
    return RankProcess(identity, ProcessOwner(identity, "ada", "python3 train.py"), usage)


def test_a_wide_screen_shows_whose_a_rank_is_and_how_busy_its_process_was() -> None:
    snapshot = full_snapshot()
    pid = snapshot.collectives.communicators[0].identity.pid
    before = scraped(snapshot, processes=[process(pid, cpu_seconds=10.0, read_seconds=100.0)])
    # The agent read the process a second and a half later, whenever it was asked.
    now = scraped(later(snapshot), processes=[process(pid, cpu_seconds=11.8, read_seconds=101.5)])
    line = line_with(screen(make_node_view(before, now), width=166), f"{COMM} 0/4")
    assert "120%" in line
    assert "ada      python3 train.py" in line
    (plain,) = (one for one in render_lines(make_node_view(before, now)) if f" pid={pid} " in one and " rank=0 " in one)
    assert 'user=ada program="python3 train.py" cpu_ratio=1.2 resident_bytes=3221225472 threads=97' in plain


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([], [process(4711, cpu_seconds=11.8, read_seconds=101.5)]),
        ([process(4711, cpu_seconds=10, read_seconds=100)], []),
        (
            [process(4711, cpu_seconds=10, read_seconds=100)],
            [process(4711, cpu_seconds=11, read_seconds=101, started=2)],
        ),
        ([process(4711, cpu_seconds=10, read_seconds=100)], [process(4711, cpu_seconds=10, read_seconds=100)]),
        ([process(4711, cpu_seconds=10, read_seconds=100)], [process(4711, cpu_seconds=11, read_seconds=99)]),
    ],
)
def test_how_busy_a_process_was_is_unknown_without_two_readings_of_it(
    before: list[RankProcess], now: list[RankProcess]
) -> None:
    snapshot = with_communicators(full_snapshot(), communicator(pid=4711))
    view = make_node_view(scraped(snapshot, processes=before), scraped(later(snapshot), processes=now))
    assert [one.cpu_ratio for one in view.ranks if one.identity.process == "4711"] == [None]


def test_a_stall_says_whose_its_process_is_on_a_screen_of_any_width() -> None:
    snapshot = full_snapshot()
    owner = ProcessOwner(ProcessIdentity(4712, 1), "ada", "python3 train.py")
    stalls = replace(
        snapshot.stalls, lengths=(replace(snapshot.stalls.lengths[0], current=replace(stall(), owner=owner)),)
    )
    view = make_node_view(None, scraped(replace(snapshot, stalls=stalls)))
    assert "process 4712 of ada, python3 train.py" in " ".join(" ".join(screen(view)).split())
    (plain,) = (one for one in render_lines(view) if " kind=stall " in one)
    assert 'pid=4712 user=ada program="python3 train.py"' in plain


def test_network_namespaces_that_begin_alike_are_told_apart_on_narrow_columns() -> None:
    before = healthy()
    now = later(before)
    hosts = [f"railscope-9129a0-host{number}" for number in range(2)]
    rails = [
        tuple(replace(rail, netns=host) for rail, host in zip(one.rails, hosts, strict=True)) for one in (before, now)
    ]
    shown = screen(view_of(replace(before, rails=rails[0]), replace(now, rails=rails[1])), width=166, height=40)
    assert [any(f"~{host[-9:]}" in line for line in shown) for host in hosts] == [True, True]
