/**
 * Heat maps and state timelines: Grafana's code for them is not in its npm packages.
 *
 * What is drawn here is ours, on Grafana's axes; the page says so at each of them.  The data, their order and
 * the colours of states are those that Grafana would use, but not how they look.
 */
import { DataFrame, Field, GrafanaTheme2, formattedValueToString, getValueFormat } from '@grafana/data';
import { AxisPlacement, GraphDrawStyle, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { UPLOT_AXIS_FONT_SIZE, UPlotChart, UPlotConfigBuilder, measureText, useTheme2 } from '@grafana/ui';
import { useMemo } from 'react';
import uPlot from 'uplot';

import { Panel, Question } from './dashboard';
import { TIME_ZONE } from './frames';
import { step } from './prometheus';

/** A rectangle: when, in which row (0 is the lowest), and its colour. */
interface Cell {
  from: number;
  to: number;
  row: number;
  colour: string;
}

interface Rows {
  /** Of each row, lowest first. */
  names: string[];
  /** Where a name stands in its row: its middle or, for the bounds of buckets, its upper end. */
  at: 0.5 | 1;
  /** Part of a row's height that is filled. */
  filled: number;
  cells: Cell[];
}

export interface StandInProps {
  panel: Panel;
  frames: DataFrame[];
  asked: Question;
  width: number;
  height: number;
}

const LINE_PIXELS = 16;
/** Between names and cells. */
const AXIS_PIXELS = 18;

function Grid({ rows, asked, width, height }: Omit<StandInProps, 'panel' | 'frames'> & { rows: Rows }) {
  const theme = useTheme2();
  const builder = useMemo(() => plot(rows, asked, theme), [rows, asked, theme]);
  const times = [asked.from, asked.to];
  return <UPlotChart config={builder} data={[times, times.map(() => null)]} width={width} height={height} />;
}

function plot(rows: Rows, asked: Question, theme: GrafanaTheme2): UPlotConfigBuilder {
  const builder = new UPlotConfigBuilder(TIME_ZONE);
  builder.addScale({
    scaleKey: 'x',
    isTime: true,
    orientation: ScaleOrientation.Horizontal,
    direction: ScaleDirection.Right,
    range: () => [asked.from, asked.to],
  });
  builder.addScale({
    scaleKey: 'y',
    orientation: ScaleOrientation.Vertical,
    direction: ScaleDirection.Up,
    range: () => [0, rows.names.length],
  });
  builder.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone: TIME_ZONE, theme });
  const named = (u: uPlot) => {
    const every = Math.max(1, Math.ceil((LINE_PIXELS * rows.names.length) / (u.bbox.height / devicePixelRatio)));
    return rows.names.flatMap((_, row) => (row % every === 0 ? [row + rows.at] : []));
  };
  builder.addAxis({
    scaleKey: 'y',
    placement: AxisPlacement.Left,
    theme,
    size: Math.max(...rows.names.map((name) => measureText(name, UPLOT_AXIS_FONT_SIZE).width)) + AXIS_PIXELS,
    grid: { show: false },
    splits: named,
    values: (_, places) => places.map((place) => rows.names[Math.ceil(place) - 1]),
  });
  builder.addSeries({
    scaleKey: 'y',
    theme,
    drawStyle: GraphDrawStyle.Line,
    pathBuilder: () => null,
    pointsBuilder: () => undefined,
  });
  builder.addHook('draw', (u: uPlot) => paint(u, rows));
  return builder;
}

function paint(u: uPlot, rows: Rows) {
  u.ctx.save();
  u.ctx.beginPath();
  u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  u.ctx.clip();
  for (const cell of rows.cells) {
    const left = Math.round(u.valToPos(cell.from, 'x', true));
    const right = Math.round(u.valToPos(cell.to, 'x', true));
    const top = u.valToPos(cell.row + 0.5 + rows.filled / 2, 'y', true);
    const bottom = u.valToPos(cell.row + 0.5 - rows.filled / 2, 'y', true);
    u.ctx.fillStyle = cell.colour;
    u.ctx.fillRect(left, top, Math.max(1, right - left), Math.max(1, bottom - top));
  }
  u.ctx.restore();
}

function values(frame: DataFrame): { times: number[]; field: Field } {
  return { times: frame.fields[0].values, field: frame.fields[1] };
}

// Viridis, of which Grafana has the same points from d3.
const VIRIDIS = ['#440154', '#482878', '#3e4989', '#31688e', '#26828e', '#1f9e89', '#35b779', '#6ece58', '#fde725'];

function viridis(part: number): string {
  return VIRIDIS[Math.min(VIRIDIS.length - 1, Math.floor(part * VIRIDIS.length))];
}

/** The bound of a bucket, from its series' name. */
function bound(frame: DataFrame): number {
  const text = values(frame).field.config.displayNameFromDS ?? '';
  return text === '+Inf' ? Infinity : Number(text);
}

/** Buckets in the order of their bounds; each holds what is not in the one before, as Prometheus' buckets add up. */
export function HeatMap({ panel, frames, asked, width, height }: StandInProps) {
  const rows = useMemo(() => heat(panel, frames, asked), [panel, frames, asked]);
  return <Grid rows={rows} asked={asked} width={width} height={height} />;
}

function heat(panel: Panel, frames: DataFrame[], asked: Question): Rows {
  const sorted = [...frames].sort((one, other) => bound(one) - bound(other));
  const format = getValueFormat(panel.options?.yAxis?.unit);
  const counts: Array<Map<number, number>> = [];
  let below = new Map<number, number>();
  for (const frame of sorted) {
    const { times, field } = values(frame);
    const upTo = new Map(times.map((time, at) => [time, field.values[at] as number]));
    counts.push(new Map(times.map((time) => [time, (upTo.get(time) ?? 0) - (below.get(time) ?? 0)])));
    below = upTo;
  }
  // Rates are extrapolated bucket by bucket: what should be 0 is nearly so.
  const none = panel.options?.filterValues?.le ?? 0;
  const most = Math.max(...counts.flatMap((row) => [...row.values()]));
  const wide = step(asked) * 1000;
  return {
    names: sorted.map((frame) => (bound(frame) === Infinity ? '+Inf' : formattedValueToString(format(bound(frame))))),
    at: 1,
    filled: 1,
    // A bucket's increase is that of the time before.
    cells: counts.flatMap((row, at) =>
      [...row]
        .filter(([, count]) => count > none)
        .map(([time, count]) => ({ from: time - wide, to: time, row: at, colour: viridis(count / most) }))
    ),
  };
}

/** A row a series; neighbours of one value are one piece. */
export function StateTimeline({ panel, frames, asked, width, height }: StandInProps) {
  const theme = useTheme2();
  const rows = useMemo(() => states(panel, frames, asked, theme), [panel, frames, asked, theme]);
  return <Grid rows={rows} asked={asked} width={width} height={height} />;
}

function states(panel: Panel, frames: DataFrame[], asked: Question, theme: GrafanaTheme2): Rows {
  const wide = step(asked) * 1000;
  const topmostFirst = [...frames].reverse();
  return {
    names: topmostFirst.map((frame) => values(frame).field.config.displayNameFromDS ?? ''),
    at: 0.5,
    filled: panel.options?.rowHeight ?? 0.9,
    cells: topmostFirst.flatMap((frame, row) => {
      const { times, field } = values(frame);
      const cells: Cell[] = [];
      times.forEach((time, at) => {
        const colour = field.display?.(field.values[at]).color ?? theme.colors.text.secondary;
        const last = cells[cells.length - 1];
        if (last?.to === time && last.colour === colour) {
          last.to = time + wide;
        } else {
          cells.push({ from: time, to: time + wide, row, colour });
        }
      });
      return cells;
    }),
  };
}
