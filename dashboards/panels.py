"""The kinds of panels that the dashboards are made of: one function a kind, each with what every panel must have.

Title, description and unit are positional, so that none is forgotten.  Positions and numbers are given by `page`.

A line of a rail has a legend that begins with its number, and so the same colour in all panels (`RAIL_COLOURS`).  A
legend with more than a few names stands to the right of its lines, where it takes none of their height.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from grafana_foundation_sdk.builders import common
from grafana_foundation_sdk.builders.dashboard import FieldColor, ThresholdsConfig
from grafana_foundation_sdk.builders.heatmap import HeatmapColorOptions, YAxisConfig
from grafana_foundation_sdk.builders.heatmap import Panel as HeatmapPanel
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.statetimeline import Panel as StateTimelinePanel
from grafana_foundation_sdk.builders.table import Panel as TablePanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeseriesPanel
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TableCellBackgroundDisplayMode,
    TableColoredBackgroundCellOptions,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from railscope.dashboards.variables import DATASOURCE

AnyPanel = StatPanel | TimeseriesPanel | TablePanel | HeatmapPanel | StateTimelinePanel

GOOD, WATCH, BAD = "green", "orange", "red"
NEVER_FINE: Final = ((None, GOOD), (1.0, BAD))
"""Thresholds of counts of which any is a problem."""
BETTER_NONE: Final = ((None, GOOD), (1.0, WATCH))
FULLNESS: Final = ((None, GOOD), (0.8, WATCH), (0.95, BAD))
NEUTRAL: Final = ((None, "blue"),)

RAIL_COLOURS: Final = ("blue", "orange", "green", "purple", "yellow", "red", "#37A2B5", "#D683CE")
"""Of rails 0 to 7; rail 8 has that of rail 0, and so on."""
_MOST_RAILS: Final = 32
NONE_REPORTED: Final = "none reported"
"""Stands in a panel that is empty while all is well."""
_FEW_VALUES: Final = frozenset({"cause", "direction", "error", "event", "op", "origin", "part", "state", "status"})
"""Labels with at most eight values at a time."""
_LABEL: Final = re.compile(r"\{\{(\w+)\}\}")

Thresholds = Sequence[tuple[float | None, str]]
"""(from this value on, colour); the first from None, which is everything below."""


def query(expression: str, legend: str = "") -> Dataquery:
    """A panel's query over time; `legend` names each series: `{{label}}` is replaced."""
    return Dataquery().expr(expression).legend_format(legend or "__auto").range().datasource(DATASOURCE)


def stat(
    title: str,
    description: str,
    unit: str,
    expression: str,
    *,
    thresholds: Thresholds = NEUTRAL,
    whole: bool = False,
    width: int = 4,
) -> StatPanel:
    """A panel of one number: the value now; `whole` where there are no fractions of what is counted."""
    panel = (
        StatPanel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .with_target(Dataquery().expr(expression).instant().datasource(DATASOURCE).ref_id("A"))
        .thresholds(_thresholds(thresholds))
        .color_scheme(FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .text_mode(BigValueTextMode.AUTO)
        .reduce_options(_last())
        .span(width)
        .height(4)
    )
    return panel.decimals(0) if whole else panel


def timeseries(
    title: str,
    description: str,
    unit: str,
    *queries: Dataquery,
    thresholds: Thresholds = NEUTRAL,
    stacked: bool = False,
    largest: float | None = None,
    whole: bool = False,
    width: int = 12,
) -> TimeseriesPanel:
    """A panel of lines over time; stacked where the parts make a whole, `largest` where the scale has an end.

    `whole`: there are no fractions of what is counted, on the scale neither.
    """
    panel = (
        TimeseriesPanel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .targets([one.ref_id(chr(ord("A") + at)) for at, one in enumerate(queries)])
        .min(0)
        .thresholds(_thresholds(thresholds))
        .legend(_legend(LegendPlacement.BOTTOM))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .show_points(VisibilityMode.NEVER)
        .fill_opacity(40 if stacked else 0)
        .span(width)
        .height(9)
    )
    if _may_be_many(queries):
        panel.legend(_legend(LegendPlacement.RIGHT))
    if any(_legend_of(one).startswith(RAIL) for one in queries):
        _colour_rails(panel, queries)
    if len(thresholds) > 1:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if largest is not None:
        panel.max(largest)
    if whole:
        panel.decimals(0)
    return panel


RAIL: Final = "rail {{rail}} {{device}}"
"""How the legend of a rail's line begins."""


def _legend(placement: LegendPlacement) -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.TABLE)
        .placement(placement)
        .calcs(["lastNotNull", "max"] if placement == LegendPlacement.BOTTOM else ["max"])
    )


def _legend_of(one: Dataquery) -> str:
    return one.build().legend_format or ""


def _may_be_many(queries: Sequence[Dataquery]) -> bool:
    """Whether there may be more than eight lines, by the labels that tell them apart."""
    labels = [label for one in queries for label in _LABEL.findall(_legend_of(one))]
    return bool(labels) and (len(labels) > 1 or not _FEW_VALUES.issuperset(labels))


def _colour_rails(panel: TimeseriesPanel, queries: Sequence[Dataquery]) -> None:
    for at, colour in enumerate(RAIL_COLOURS):
        numbers = "|".join(str(number) for number in range(at, _MOST_RAILS, len(RAIL_COLOURS)))
        value = {"mode": "fixed", "fixedColor": colour}
        panel.override_by_regexp(f"/^rail ({numbers}) /", [DynamicConfigValue(id_val="color", value=value)])
    if any("{{direction}}" in _legend_of(one) for one in queries):
        dashed = DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]})
        panel.override_by_regexp("/ receive$/", [dashed])


def table(
    title: str,
    description: str,
    columns: str,
    series: str,
    *,
    aggregate: str = "max",
    links: Mapping[str, str] | None = None,
    value: str = "",
    value_unit: str = "none",
    empty: str = "",
    width: int = 12,
) -> TablePanel:
    """A panel of the series of this moment, a row each: these labels in order, and their value where `value` heads it.

    Other labels, such as the scrape's own, are aggregated away.  The cluster comes last, where series have one.
    `links` gives a column's cells an address; `empty` is said where there is no row.
    """
    labels = [*columns.split(), "cluster"]
    rename = {"exported_job": "job"} | ({"Value": value} if value else {})
    panel = (
        TablePanel()
        .title(title)
        .description(description)
        # With any other unit Grafana takes a label for a number that looks like one: 84e6543210987654 is a hash.
        .unit("string")
        .datasource(DATASOURCE)
        .with_target(
            Dataquery()
            .expr(f"{aggregate} by ({', '.join(labels)}) ({series})")
            .instant()
            .format(PromQueryFormat.TABLE)
            .datasource(DATASOURCE)
            .ref_id("A")
        )
        .with_transformation(
            DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True} | ({} if value else {"Value": True}),
                    "indexByName": {label: at for at, label in enumerate([*labels, "Value"])},
                    "renameByName": rename,
                },
            )
        )
        .filterable(True)
        # All columns are seen at once.
        .min_width(80)
        .thresholds(_thresholds(NEUTRAL))
        .span(width)
        .height(9)
    )
    if empty:
        # Grafana says it in empty cells, too, if it is not told otherwise.
        panel.no_value(empty).override_by_regexp("/.*/", [DynamicConfigValue(id_val="noValue", value="")])
    if value:
        panel.override_by_name(value, [DynamicConfigValue(id_val="unit", value=value_unit)])
        panel.sort_by([common.TableSortByFieldState().display_name(value).desc(True)])
    for field, url in (links or {}).items():
        panel.override_by_name(
            field, [DynamicConfigValue(id_val="links", value=[{"title": f"Open this {field}", "url": url}])]
        )
    return panel


def matrix(
    title: str,
    description: str,
    unit: str,
    row: str,
    column: str,
    series: str,
    *,
    aggregate: str = "sum",
    numbered: bool = True,
    largest: float | None = None,
    links: Mapping[str, str] | None = None,
    width: int = 24,
) -> TablePanel:
    """A panel of the series of this moment, aggregated by two labels: a table of coloured cells, a line for each `row`.

    Values of `row` that are `numbered` are sorted as numbers, others as texts.  Those are names of things, and of two
    that have one name in two clusters the table has one.
    """
    panel = (
        TablePanel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATASOURCE)
        .with_target(
            Dataquery()
            .expr(f"{aggregate} by ({'' if numbered else 'cluster, '}{row}, {column}) ({series})")
            .instant()
            .format(PromQueryFormat.TABLE)
            .datasource(DATASOURCE)
            .ref_id("A")
        )
        .min(0)
        .thresholds(_thresholds(NEUTRAL))
        .color_scheme(FieldColor().mode(FieldColorModeId.CONTINUOUS_BL_YL_RD))
        .cell_options(TableColoredBackgroundCellOptions(mode=TableCellBackgroundDisplayMode.BASIC))
        .override_by_name(
            f"{row}\\{column}",
            [
                DynamicConfigValue(id_val="custom.cellOptions", value={"type": "auto"}),
                DynamicConfigValue(id_val="unit", value="none" if numbered else "string"),
                *(
                    DynamicConfigValue(id_val="links", value=[{"title": f"Open this {name}", "url": url}])
                    for name, url in (links or {}).items()
                ),
            ],
        )
        .span(width)
        .height(12)
    )
    if largest is not None:
        panel.max(largest)
    if numbered:
        conversions = [{"targetField": row, "destinationType": "number"}]
        panel.with_transformation(
            DataTransformerConfig(id_val="convertFieldType", options={"conversions": conversions, "fields": {}})
        )
    # The store answers in any order, and columns come in that in which they are first met.
    for name, options in (
        ("sortBy", {"fields": {}, "sort": [{"field": column}]}),
        ("groupingToMatrix", {"rowField": row, "columnField": column, "valueField": "Value", "emptyValue": "null"}),
        ("sortBy", {"fields": {}, "sort": [{"field": f"{row}\\{column}"}]}),
    ):
        panel.with_transformation(DataTransformerConfig(id_val=name, options=options))
    return panel


def heatmap(title: str, description: str, unit: str, buckets: str, *, width: int = 12) -> HeatmapPanel:
    """A panel of how a histogram's observations spread over time; `buckets`: increases by the label `le`, in `unit`."""
    return (
        HeatmapPanel()
        .title(title)
        .description(description)
        .unit("short")
        .datasource(DATASOURCE)
        .with_target(
            Dataquery()
            .expr(buckets)
            .legend_format("{{le}}")
            .range()
            .format(PromQueryFormat.HEATMAP)
            .datasource(DATASOURCE)
            .ref_id("A")
        )
        .calculate(False)
        .y_axis(YAxisConfig().unit(unit))
        .color(HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Viridis").steps(64))
        .show_legend()
        .span(width)
        .height(9)
    )


def states(
    title: str,
    description: str,
    *queries: Dataquery,
    words: Mapping[str, tuple[str, str]],
    width: int = 12,
) -> StateTimelinePanel:
    """A panel of what state things were in, a line each; `words` gives each value a word and a colour."""
    return (
        StateTimelinePanel()
        .title(title)
        .description(description)
        .unit("none")
        .datasource(DATASOURCE)
        .targets([one.ref_id(chr(ord("A") + at)) for at, one in enumerate(queries)])
        .mappings([_mapping(words)])
        .thresholds(_thresholds(NEUTRAL))
        .color_scheme(FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .show_value(VisibilityMode.NEVER)
        .row_height(0.8)
        .span(width)
        .height(9)
    )


UP_OR_DOWN: Final = {"0": ("down", BAD), "1": ("up", GOOD)}
FINE_OR_FAILED: Final = {"0": ("failed", BAD), "1": ("fine", GOOD)}
STALLED: Final = {"0": ("moving", GOOD), "1": ("stalled", BAD)}


def _mapping(words: Mapping[str, tuple[str, str]]) -> ValueMapping:
    options = {value: ValueMappingResult(text=text, color=colour) for value, (text, colour) in words.items()}
    return ValueMap(options=options)


def _thresholds(thresholds: Thresholds) -> ThresholdsConfig:
    steps = [Threshold(value=value, color=colour) for value, colour in thresholds]
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])
