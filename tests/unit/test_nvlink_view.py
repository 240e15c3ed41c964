"""What the live view shows of GPUs and their NVLinks.  The nodes are simulated."""

from __future__ import annotations

from dataclasses import replace

from railscope.agent.facts.hardware import GpuFacts, NodeGpus, NvlinkFacts
from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.series.selection import Selection
from railscope.exporters.top.node_view import NodeView, make_node_view
from railscope.exporters.top.nvlink_view import GpuView
from railscope.exporters.top.plain import render_lines
from railscope.exporters.top.screen import Frame, Status, render_frame
from railscope.exporters.top.state import Order, Pane, ViewState
from tests.unit.nodes import healthy, later, scraped, view_of

STATUS = Status("http://127.0.0.1:9779", 2.0)
SPEED = 25_000_000_000


def link(gpu: str, number: str, *, errors: tuple[tuple[str, int], ...] = (("crc", 1),)) -> NvlinkFacts:
    return NvlinkFacts(gpu, number, True, 1000, 2000, "data", errors, SPEED, "0000:90:00.0", "switch")


def gpu(number: str) -> GpuFacts:
    return GpuFacts(
        number, f"GPU-{number}", f"0000:1{number}:00.0", "NVIDIA H200", "0", "completed", (), None, None, None
    )


def node() -> Snapshot:
    """Two GPUs with four links each."""
    return replace(
        healthy(),
        gpus=NodeGpus((gpu("0"), gpu("1")), tuple(link(number, str(at)) for number in "01" for at in range(4))),
    )


def with_link(snapshot: Snapshot, changed: NvlinkFacts) -> Snapshot:
    return with_links(
        snapshot,
        *(changed if (one.gpu, one.link) == (changed.gpu, changed.link) else one for one in snapshot.gpus.nvlinks),
    )


def with_links(snapshot: Snapshot, *links: NvlinkFacts) -> Snapshot:
    return replace(snapshot, gpus=replace(snapshot.gpus, nvlinks=links))


def first_gpu(view: NodeView) -> GpuView:
    return view.gpus[0]


def shown(view: NodeView, state: ViewState | None = None, width: int = 80) -> Frame:
    return render_frame(view, state or ViewState(focus=Pane.GPUS, alone=True), STATUS, width, 24)


def rows(made: Frame) -> list[str]:
    lines = [line.plain for line in made.lines]
    at = next(index for index, line in enumerate(lines) if line.startswith("GPU  NVLINKS"))
    return [line for line in lines[at + 1 : -1] if line.strip()]


def styles(made: Frame, start: str) -> str:
    line = next(line for line in made.lines if line.plain.startswith(start))
    return " ".join(str(style) for style in (line.style, *(span.style for span in line.spans)))


def test_rates_are_of_all_links_of_a_gpu_and_so_is_the_speed() -> None:
    one = first_gpu(view_of(node(), later(node())))
    assert (one.gpu, one.name, one.links, one.links_up) == ("0", "NVIDIA H200", 4, 4)
    assert one.transmit_bytes_per_second == 4 * 10e9
    assert one.receive_bytes_per_second == 4 * 5e9
    assert one.speed_bytes_per_second == 4 * SPEED


def test_a_link_that_is_down_is_counted() -> None:
    now = with_link(later(node()), replace(link("0", "2"), up=False))
    one = first_gpu(view_of(node(), now))
    assert (one.links_up, one.links, one.links_down) == (3, 4, 1)


def test_a_counter_that_fell_leaves_no_sum_that_would_be_too_small() -> None:
    now = with_link(later(node()), replace(link("0", "2"), transmit_bytes=5, receive_bytes=10**12))
    one = first_gpu(view_of(node(), now))
    assert one.transmit_bytes_per_second is None
    assert one.receive_bytes_per_second is not None


def test_what_is_told_of_all_links_together_is_no_link() -> None:
    before = with_links(node(), *node().gpus.nvlinks[:4], link("1", "all", errors=(("replay", 2),)))
    now = with_link(
        later(before), replace(link("1", "all", errors=(("replay", 5),)), up=None, transmit_bytes=20_000_001_000)
    )
    agent = Selection()
    one = make_node_view(scraped(before, selection=agent), scraped(now, selection=agent)).gpus[1]
    assert (one.links, one.links_up) == (0, None)
    assert one.transmit_bytes_per_second == 10e9
    assert one.new_errors == (("replay", 3),)


def test_errors_name_their_link_and_are_remembered_after_they_grew() -> None:
    first = node()
    second = with_link(later(first), link("0", "3", errors=(("crc", 4), ("replay", 0))))
    third = with_links(later(second), *second.gpus.nvlinks)
    scrapes = [scraped(one) for one in (first, second, third)]
    assert first_gpu(make_node_view(scrapes[0], scrapes[1], scrapes[0])).new_errors == (("crc_link3", 3),)
    last = first_gpu(make_node_view(scrapes[1], scrapes[2], scrapes[0]))
    assert (last.new_errors, last.past_errors) == ((), (("crc_link3", 3),))


def test_the_first_error_of_a_link_is_new_though_there_was_no_series_of_it_before() -> None:
    before = with_link(node(), link("0", "3", errors=(("crc", 0),)))
    now = with_link(later(before), link("0", "3", errors=(("crc", 2),)))
    assert first_gpu(view_of(before, now)).new_errors == (("crc_link3", 2),)


def test_the_first_scrape_knows_links_and_no_rates() -> None:
    one = first_gpu(make_node_view(None, scraped(node())))
    assert (one.links_up, one.links) == (4, 4)
    assert (one.transmit_bytes_per_second, one.new_errors) == (None, ())


def test_at_80_columns_a_gpu_shows_links_and_rates_as_bars_against_the_speed_of_all_of_them() -> None:
    made = shown(view_of(node(), later(node())))
    assert rows(made) == [
        "0        4/4 ███▎     40.0 GB █▋       20.0 GB",
        "1        4/4 ███▎     40.0 GB █▋       20.0 GB",
    ]
    assert all(line.cell_len <= 80 for line in made.lines)


def test_new_errors_are_red_and_an_unhealthy_fabric_and_a_link_that_is_down_stand_out() -> None:
    now = with_link(later(node()), replace(link("0", "3", errors=(("crc", 3),))))
    made = shown(view_of(node(), now))
    assert rows(made)[0].endswith("+2 crc_link3")
    assert "red" in styles(made, "0        4/4")
    down = with_link(later(node()), replace(link("1", "0"), up=False))
    ill = replace(down, gpus=replace(down.gpus, devices=(replace(gpu("0"), fabric_unhealthy=("route",)), gpu("1"))))
    made = shown(view_of(node(), ill))
    assert rows(made)[0].endswith("FABRIC route")
    assert "bold red" in styles(made, "0        4/4")
    assert "yellow" in styles(made, "1        3/4")


def test_gpus_are_sorted_by_what_is_wrong_and_filtered_by_words() -> None:
    now = with_link(later(node()), replace(link("1", "0"), up=False))
    view = view_of(node(), now)

    def order(state: ViewState) -> list[str]:
        return [row.split()[0] for row in rows(shown(view, state))]

    assert order(ViewState(focus=Pane.GPUS, alone=True)) == ["0", "1"]
    assert order(ViewState(focus=Pane.GPUS, alone=True, orders={Pane.GPUS: Order(1)})) == ["1", "0"]
    assert order(ViewState(focus=Pane.GPUS, alone=True, filter="3/4")) == ["1"]


def test_a_host_without_nvlinks_has_no_pane_of_them_unless_it_is_asked_for() -> None:
    bare = replace(healthy(), gpus=NodeGpus())
    view = view_of(bare, later(bare))
    everything = [line.plain for line in render_frame(view, ViewState(), STATUS, 80, 24).lines]
    assert not any("NVL" in line for line in everything)
    assert " no NVLink" in [line.plain for line in shown(view).lines]


def test_plain_lines_hold_links_rates_and_errors_in_units_that_their_names_tell() -> None:
    now = with_link(later(node()), replace(link("0", "3", errors=(("crc", 3),)), transmit_bytes=20_000_001_000))
    line = next(one for one in render_lines(view_of(node(), now)) if " kind=gpu " in one)
    assert line.partition(" kind=gpu ")[2] == (
        'gpu=0 name="NVIDIA H200" nvlinks=4 nvlinks_up=4 nvlink_speed_bytes_per_second=100000000000 '
        "nvlink_transmit_bytes_per_second=40000000000 nvlink_receive_bytes_per_second=15000000000 "
        "new_errors=crc_link3:2"
    )
