"""The pictures of a report: heat map, distributions, strip chart, bars; as SVG and as PNG."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from railscope.agent.analysis.facts.fact_columns import Sizes, SizeUse
from railscope.agent.analysis.facts.report import Iteration, LatencyRow, ReceiveUse, RoleTime
from railscope.agent.analysis.pictures import pictures
from railscope.agent.analysis.pictures.axes import Scale, enclosing_powers, linear_ticks, log_ticks, time_ticks
from railscope.agent.analysis.pictures.heat import draw_heat_map, heat_levels, heat_map, heat_map_of
from railscope.agent.analysis.pictures.parts import (
    Box,
    Cells,
    Line,
    Picture,
    Words,
    join_horizontally,
    paint_colours,
    text_width,
)
from railscope.agent.analysis.pictures.png import png_bytes
from railscope.agent.analysis.pictures.svg import svg_file
from railscope.agent.analysis.report.picture_files import PICTURES, write_pictures
from railscope.agent.config.file import ConfigError
from tests.unit.model_shapes import GPT_3B
from tests.unit.reports import observed, report_of_shape, with_names

REPORT = replace(
    report_of_shape(GPT_3B),
    role_times=(RoleTime(0, "tp", 0.4, 0.2, 0.1, 0.05), RoleTime(0, "a role with a long name", 0.1, 0.05, 0.1, 0.05)),
)
SVG = "{http://www.w3.org/2000/svg}"


def all_pictures() -> dict[str, Picture]:
    return {name: picture for name, draw in PICTURES.items() if (picture := draw(REPORT)) is not None}


def boxes(picture: Picture, paint: str) -> list[Box]:
    return [part for part in picture.parts if isinstance(part, Box) and part.paint == paint]


def words(picture: Picture) -> list[str]:
    return [part.text for part in picture.parts if isinstance(part, Words)]


def extent(part: Words) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text, about."""
    # A tenth less than what is reserved: fonts are narrower than that.
    wide = 0.9 * text_width(part.text, part.points, bold=part.bold)
    left = part.x - {"start": 0.0, "middle": wide / 2, "end": wide}[part.anchor]
    return left, part.y - 0.8 * part.points, left + wide, part.y + 0.1 * part.points


def overlap(first: Words, second: Words) -> bool:
    a, b = extent(first), extent(second)
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def test_every_part_of_a_complete_report_has_its_picture() -> None:
    assert all_pictures().keys() == PICTURES.keys()


def test_a_picture_that_a_full_disk_does_not_take_is_named(tmp_path: Path) -> None:
    (tmp_path / "servers.svg").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"servers\.svg: cannot write the picture: No space left on device$"):
        list(write_pictures(REPORT, tmp_path))
    assert (tmp_path / "sizes.svg").stat().st_size > 0


@pytest.mark.parametrize("name", sorted(all_pictures()))
def test_no_label_lies_on_another(name: str) -> None:
    texts = [part for part in all_pictures()[name].parts if isinstance(part, Words)]
    assert [(a.text, b.text) for a, b in combinations(texts, 2) if overlap(a, b)] == []


@pytest.mark.parametrize("name", sorted(all_pictures()))
def test_everything_lies_inside_the_picture(name: str) -> None:
    picture = all_pictures()[name]
    for part in picture.parts:
        match part:
            case Words():
                corners = [extent(part)[:2], extent(part)[2:]]
            case Box():
                corners = [(part.x, part.y), (part.x + part.width, part.y + part.height)]
            case Line():
                corners = list(part.points)
            case Cells():
                corners = [(part.x, part.y)]
        for x, y in corners:
            assert -1 <= x <= picture.width + 1, part
            assert -1 <= y <= picture.height + 1, part


def test_a_small_heat_map_has_room_for_its_title() -> None:
    title = "Predicted wire bytes of an iteration, default mapping"
    picture = draw_heat_map(heat_map(2, np.array([0]), np.array([1]), np.array([7])), title)
    (shown,) = (part for part in picture.parts if isinstance(part, Words) and part.text == title)
    assert shown.x + text_width(title, shown.points, bold=True) <= picture.width


def test_the_heat_map_has_one_square_a_pair_that_tells_its_bytes() -> None:
    picture = draw_heat_map(heat_map_of(REPORT.matrix), "Wire bytes")
    told = [part.title for part in picture.parts if isinstance(part, Box) and part.title]
    assert len(told) == len(REPORT.matrix.pairs) == 128
    assert "GPU 0 → GPU 8: 39.1 GiB" in told


def test_more_bytes_are_never_paler() -> None:
    moved = np.array([0, 1, 10, 1000, 10**12])
    assert heat_levels(moved, 1, 10**12, 24).tolist() == [-1, 0, 2, 6, 23]


def test_equal_bytes_all_have_the_darkest_colour() -> None:
    assert heat_levels(np.array([5, 0, 5]), 5, 5, 24).tolist() == [23, -1, 23]


@settings(max_examples=30)
@given(st.integers(1, 700), st.integers(0, 2**32))
def test_binning_keeps_all_bytes_and_the_limit(gpus: int, seed: int) -> None:
    noise = np.random.default_rng(seed)
    source, destination = noise.integers(0, gpus, (2, 50))
    moved = noise.integers(1, 2**40, 50)
    heat = heat_map(gpus, source, destination, moved)
    assert heat.side <= 256
    assert (heat.side - 1) * heat.gpus_a_cell < gpus <= heat.side * heat.gpus_a_cell
    assert int(heat.bytes.sum()) == int(moved.sum())
    assert bool(heat.note) == (gpus > 256)


def test_a_thousand_gpus_are_binned_and_the_picture_says_so() -> None:
    gpus = np.arange(1000)
    heat = heat_map(1000, gpus, (gpus + 1) % 1000, np.full(1000, 7), [f"node-{gpu // 8}" for gpu in gpus])
    assert heat.side == 250
    assert "each square is 4 × 4 of 1,000 GPUs, their bytes added up" in words(draw_heat_map(heat, "Ring"))


def test_a_crowded_heat_map_draws_runs_of_squares_that_cover_what_talks() -> None:
    side = 100
    source, destination = np.divmod(np.arange(side * side), side)
    moved = np.where((source + destination) % 3 == 0, 0, 1 + source)
    heat = heat_map(side, source, destination, moved)
    covered = np.zeros((side, side), dtype=int)
    for part in draw_heat_map(heat, "Crowd").parts:
        if isinstance(part, Cells):
            for row, column, count in part.runs:
                covered[row, column : column + count] += 1
    assert np.array_equal(covered, (moved.reshape(side, side) > 0).astype(int))


def test_servers_are_named_only_where_their_gpus_follow_each_other() -> None:
    mixed = ["a", "b"] * 4
    assert "a" not in words(draw_heat_map(heat_map_of(observed(replace(GPT_3B, pipeline=1, layers=4)), mixed), ""))
    apart = ["a"] * 4 + ["b"] * 4
    told = words(draw_heat_map(heat_map_of(observed(replace(GPT_3B, pipeline=1, layers=4)), apart), ""))
    assert "a" in told
    assert "b" in told


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 2**45), st.integers(1, 10**6)), min_size=1))
def test_the_distribution_of_sizes_rises_from_zero_to_one(uses: list[tuple[str, int, int]]) -> None:
    picture = pictures.size_cdf(Sizes.from_uses(SizeUse(*use) for use in uses))
    assert picture is not None
    lines = [part for part in picture.parts if isinstance(part, Line) and part.paint.startswith("series")]
    # Operations whose calls are alike in size share a line, which names them all.
    ops = {op for op, _, _ in uses}
    assert 1 <= len(lines) <= len(ops)
    assert all(any(f"{op} (" in line.title for line in lines) for op in ops)
    for line in lines:
        xs, ys = zip(*line.points, strict=True)
        assert list(xs) == sorted(xs)
        assert list(ys) == sorted(ys, reverse=True)  # up is less
    bottoms = {line.points[0][1] for line in lines}
    tops = {line.points[-1][1] for line in lines}
    assert len(bottoms) == len(tops) == 1
    assert min(bottoms) > max(tops)


def test_no_operation_hides_behind_another_of_the_same_sizes() -> None:
    uses = [SizeUse(op, size, 64) for op in ("Send", "Recv") for size in (4096, 1 << 20)]
    picture = pictures.size_cdf(Sizes.from_uses([*uses, SizeUse("AllReduce", 4096, 8)]))
    assert picture is not None
    lines = [part for part in picture.parts if isinstance(part, Line) and part.paint.startswith("series")]
    assert len(lines) == 2
    assert any(" and " in text and "Send (128 calls)" in text and "Recv (128 calls)" in text for text in words(picture))


def test_rarer_operations_than_there_are_colours_are_said_to_be_left_out() -> None:
    picture = pictures.size_cdf(
        Sizes.from_uses(SizeUse(f"Op{number}", 1 << number, 100 - number) for number in range(9))
    )
    assert picture is not None
    assert "Calls by size, cumulative (without 2 rarer operations)" in words(picture)
    assert "Op0 (100 calls)" in words(picture)
    assert "Op8 (92 calls)" not in words(picture)


def test_an_iteration_is_as_high_as_it_is_long() -> None:
    picture = pictures.iteration_strip(
        [
            Iteration(0.0, 1.0, 0.5, 0.5, 0.25, 0.25, None),
            Iteration(1.0, 2.0, 0.5, 0.25, 0.25, 0.125, None),
        ]
    )
    assert picture is not None
    columns = [[box for box in boxes(picture, paint) if box.title] for paint in ("series5", "series4", "grid")]
    heights = [[sum(box.height for box in column[number : number + 1]) for column in columns] for number in (0, 1)]
    assert sum(heights[1]) == pytest.approx(2 * sum(heights[0]))
    assert heights[0][0] == pytest.approx(sum(heights[0]) / 4)
    assert heights[0][0] == pytest.approx(heights[1][0])
    assert columns[2][1].width + 1 == pytest.approx(2 * (columns[2][0].width + 1))


def test_communication_that_nobody_knows_is_not_drawn_as_none() -> None:
    picture = pictures.iteration_strip([Iteration(float(place), 1.0, None, None, None, None, None) for place in (0, 1)])
    assert picture is not None
    assert not [word for word in words(picture) if "communication" in word]
    assert "length of an iteration" in words(picture)
    assert len([box for box in boxes(picture, "grid") if box.title]) == 2


def test_thousands_of_iterations_are_put_together_and_the_picture_says_so() -> None:
    many = [Iteration(float(number), 1.0, 0.5, 0.5, None, None, None) for number in range(5000)]
    picture = pictures.iteration_strip(many)
    assert picture is not None
    assert "Iterations over time (each column: the mean of up to 14 iterations)" in words(picture)
    assert len([box for box in boxes(picture, "grid") if box.title]) == 358


def test_the_parts_of_the_composition_are_as_long_as_their_shares() -> None:
    picture = pictures.composition_bars(REPORT.composition)
    assert picture is not None
    payload = [box for box in picture.parts if isinstance(box, Box) and box.title][: len(REPORT.composition.roles)]
    total = sum(role.payload_bytes for role in REPORT.composition.roles)
    whole = sum(box.width + 1 for box in payload[:2]) / sum(
        role.payload_bytes / total for role in REPORT.composition.roles[:2]
    )
    for box, role in zip(payload[:2], REPORT.composition.roles, strict=False):
        assert box.width + 1 == pytest.approx(role.payload_bytes / total * whole)
        assert box.title.endswith(("TiB", "GiB"))


def test_latencies_of_every_length_stay_in_order() -> None:
    row = LatencyRow("AllReduce", 8, "proxy", 10, 1e-6, 1e-5, 1e-2, 30.0)
    picture = pictures.latency_ranges([row])
    assert picture is not None
    (median,) = [box for box in boxes(picture, "series0") if box.height == 10 and box.width == 6]
    (ninety,) = [box for box in boxes(picture, "series5") if box.width == 2]
    assert median.x < ninety.x
    assert "longest 30 s" in median.title


def test_nothing_recorded_has_no_picture() -> None:
    empty = replace(REPORT.composition, roles=())
    assert pictures.size_cdf(Sizes.from_uses(())) is None
    assert pictures.iteration_strip([]) is None
    assert pictures.composition_bars(empty) is None
    assert pictures.server_bars(replace(REPORT.matrix, server_transmit_wire_bytes=())) is None
    assert pictures.latency_ranges([]) is None
    assert pictures.bandwidth_lines([]) is None
    assert pictures.non_uniformity_lines([]) is None
    assert pictures.receive_bars([]) is None
    assert words(draw_heat_map(heat_map(0, *(np.empty(0, dtype=np.int64),) * 3), "Nobody"))[0] == "Nobody"


def test_servers_that_sent_alike_are_one_bar_and_the_odd_one_stands_alone() -> None:
    sent = tuple((f"host{at:03d}", 1_000_000_000 + at) for at in range(64))
    odd = ("host064", 400_000_000)
    picture = pictures.server_bars(replace(REPORT.matrix, server_transmit_wire_bytes=(*sent, odd)))
    assert picture is not None
    assert [box.title for box in boxes(picture, "series0")] == [
        "954 MiB: " + ", ".join(name for name, _ in sent[:16]) + " and others",
        "381 MiB",
    ]
    assert {"64 servers alike", "954 MiB each", "host064"} <= set(words(picture))
    few = pictures.server_bars(replace(REPORT.matrix, server_transmit_wire_bytes=sent[:4]))
    assert few is not None
    assert len(boxes(few, "series0")) == 4


def test_gpus_that_waited_alike_are_one_bar() -> None:
    alike = [ReceiveUse(gpu, 6.0 + gpu / 1e6, 3.0, 0.3) for gpu in range(512) if gpu != 7]
    picture = pictures.receive_bars([ReceiveUse(7, 6.0, 0.5, 0.1), *alike])
    assert picture is not None
    assert len(boxes(picture, "series2")) == 2 + 1, "with the legend's"
    assert {"511 GPUs alike", "9 s each", "GPU 7", "6.5 s"} <= set(words(picture))


def test_an_svg_file_stands_alone_and_its_text_is_text() -> None:
    root = ElementTree.fromstring(svg_file(all_pictures()["pairs"]))
    assert {element.tag for element in root.iter()} == {
        f"{SVG}{name}" for name in ("svg", "title", "style", "rect", "text", "polyline")
    }
    assert "gpu-node-3" in [element.text for element in root.iter(f"{SVG}text")]
    assert not [name for element in root.iter() for name in element.attrib if "href" in name or name.startswith("on")]
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")


def test_a_hostile_name_stays_text_in_svg() -> None:
    evil = "</text><script>alert(1)</script>\x00\x1b]\u202e&\"'"
    report = with_names(REPORT, evil)
    for picture in (
        draw_heat_map(heat_map_of(report.matrix, [gpu.server for gpu in report.gpus]), evil),
        pictures.latency_ranges(report.latency.rows),
        pictures.server_bars(report.matrix),
        pictures.bandwidth_lines(report.bandwidth),
    ):
        assert picture is not None
        text = svg_file(picture)
        assert not ElementTree.fromstring(text).findall(f".//{SVG}script")
        assert "<script" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_a_png_shows_the_squares_in_their_colours() -> None:
    heat = heat_map(2, np.array([0]), np.array([1]), np.array([9]))
    picture = draw_heat_map(heat, "Two")
    (square,) = [part for part in picture.parts if isinstance(part, Box) and part.title]
    (ground,) = boxes(picture, "empty")
    image = Image.open(io.BytesIO(png_bytes(picture, 1.0)))
    colours = paint_colours()[0]
    assert image.size == (round(picture.width), round(picture.height))

    def colour(x: float, y: float) -> str:
        red, green, blue = image.convert("RGB").crop((int(x), int(y), int(x) + 1, int(y) + 1)).tobytes()
        return f"#{red:02x}{green:02x}{blue:02x}"

    assert colour(square.x + square.width / 2, square.y + square.height / 2) == colours["heat23"]
    assert colour(ground.x + 5, ground.y + 5) == colours["empty"]
    assert colour(1, picture.height - 2) == colours["surface"]


def test_two_pictures_beside_each_other_do_not_touch() -> None:
    one, other = (draw_heat_map(heat_map_of(REPORT.matrix), name) for name in ("One", "Other"))
    both = join_horizontally([one, other])
    assert both.width > one.width + other.width
    titles = [part for part in both.parts if isinstance(part, Words) and part.text in ("One", "Other")]
    assert titles[1].x - titles[0].x > one.width
    assert len(both.parts) == len(one.parts) + len(other.parts)


def test_light_and_dark_ground_have_the_same_paints() -> None:
    light, dark = paint_colours()
    assert light.keys() == dark.keys()
    assert len(set(light.values())) == len(light)


@settings(max_examples=100)
@given(st.floats(1e-9, 1e15), st.floats(1.0001, 1e9))
def test_ticks_lie_in_the_range_and_are_few(low: float, times: float) -> None:
    high = low * times
    for ticks in (linear_ticks(low, high), log_ticks(*enclosing_powers([low, high], 2.0), 2.0)):
        assert 0 < len(ticks) <= 10
        assert list(ticks) == sorted(set(ticks))
    places = [Scale(low, high, 0.0, 100.0, logarithmic=True).pixel_of(tick) for tick in linear_ticks(low, high)]
    assert places == sorted(places)
    assert all(-1e-9 <= place <= 100.0 + 1e-9 for place in places)


@pytest.mark.parametrize(
    ("seconds", "step"),
    [(2660.0, 600.0), (7200.0, 1200.0), (100_000.0, 21_600.0), (10.0**7, 2_764_800.0), (300.0, 60.0)],
)
def test_ticks_of_time_are_round_for_people(seconds: float, step: float) -> None:
    ticks = time_ticks(seconds)
    assert ticks[1] == step
    assert len(ticks) <= 7
