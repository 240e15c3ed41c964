/** From answers to Grafana's data frames, with units, colours, mappings, overrides and transformations applied. */
import {
  DataFrame,
  DataTransformerConfig,
  Field,
  FieldConfig,
  FieldConfigSource,
  FieldType,
  GrafanaTheme2,
  fieldMatchers,
  getDisplayProcessor,
  standardTransformers,
} from '@grafana/data';
import { lastValueFrom, of } from 'rxjs';

import { Panel, Target } from './dashboard';
import { Series, legend } from './prometheus';

export const TIME_ZONE = 'utc';

/** What Grafana's own panels set where a dashboard says nothing. */
const CUSTOM: Record<string, object> = {
  timeseries: {
    drawStyle: 'line',
    lineInterpolation: 'linear',
    lineWidth: 1,
    fillOpacity: 0,
    gradientMode: 'none',
    showPoints: 'auto',
    pointSize: 5,
    spanNulls: false,
    axisPlacement: 'auto',
    scaleDistribution: { type: 'linear' },
    thresholdsStyle: { mode: 'off' },
    hideFrom: { legend: false, tooltip: false, viz: false },
  },
  table: { align: 'auto', inspect: false, cellOptions: { type: 'auto' } },
};
const COLOUR: Record<string, string> = { timeseries: 'palette-classic' };

function ofSeries(target: Target, series: Series, intervalMilliseconds: number): DataFrame {
  const time: Field = {
    name: 'Time',
    type: FieldType.time,
    // Where points are missing, lines have gaps.
    config: { interval: intervalMilliseconds },
    values: series.times,
  };
  const value: Field = {
    name: 'Value',
    type: FieldType.number,
    config: { displayNameFromDS: legend(target, series.labels) },
    labels: series.labels,
    values: series.values,
  };
  return { refId: target.refId, fields: [time, value], length: series.times.length };
}

/** A row a series: the time, a column a label, the value. */
function table(target: Target, series: Series[]): DataFrame {
  const labels = [...new Set(series.flatMap((one) => Object.keys(one.labels)))].sort();
  const fields: Field[] = [
    { name: 'Time', type: FieldType.time, config: {}, values: series.map((one) => one.times[0]) },
    ...labels.map((label) => ({
      name: label,
      type: FieldType.string,
      config: {},
      values: series.map((one) => one.labels[label] ?? ''),
    })),
    { name: 'Value', type: FieldType.number, config: {}, values: series.map((one) => one.values[0]) },
  ];
  return { refId: target.refId, fields, length: series.length };
}

/** The frames that a panel of Grafana's would get. */
export async function frames(
  panel: Panel,
  answers: Map<Target, Series[]>,
  intervalMilliseconds: number,
  theme: GrafanaTheme2
): Promise<DataFrame[]> {
  const found = [...answers].flatMap(([target, series]) => {
    if (target.format === 'table') {
      return series.length > 0 ? [table(target, series)] : [];
    }
    return series.map((one) => ofSeries(target, one, intervalMilliseconds));
  });
  const transformed = await transform(found, panel.transformations ?? []);
  return configured(transformed, panel.fieldConfig, panel.type, theme);
}

async function transform(found: DataFrame[], wanted: DataTransformerConfig[]): Promise<DataFrame[]> {
  let made = found;
  for (const one of wanted) {
    const known = Object.values(standardTransformers).find((each) => each.id === one.id);
    if (known === undefined) {
      throw new Error(`@grafana/data has no transformation ${one.id}`);
    }
    const options = { ...known.defaultOptions, ...one.options };
    made = await lastValueFrom(of(made).pipe(known.operator(options, { interpolate: (text: string) => text })));
  }
  return made;
}

function configured(made: DataFrame[], source: FieldConfigSource, kind: string, theme: GrafanaTheme2): DataFrame[] {
  const all = made.flatMap((frame) => frame.fields).filter((field) => field.type === FieldType.number);
  const numbers = all.flatMap((field) => field.values).filter(Number.isFinite);
  let numbered = 0;
  for (const frame of made) {
    for (const field of frame.fields) {
      if (field.type !== FieldType.time) {
        field.config = config(field, frame, made, source, kind);
        // Colours by value are one scale for all of a panel.
        const min = field.config.min ?? Math.min(...numbers);
        const max = field.config.max ?? Math.max(...numbers);
        field.state = { ...field.state, seriesIndex: numbered++, range: { min, max, delta: max - min } };
        field.getLinks = links(field);
      }
      field.display = getDisplayProcessor({ field, theme, timeZone: TIME_ZONE });
    }
  }
  return made;
}

function config(
  field: Field,
  frame: DataFrame,
  all: DataFrame[],
  source: FieldConfigSource,
  kind: string
): FieldConfig {
  const made: any = {
    color: { mode: COLOUR[kind] ?? 'thresholds' },
    ...source.defaults,
    ...field.config,
    custom: { ...CUSTOM[kind], ...source.defaults.custom },
  };
  for (const override of source.overrides) {
    if (!fieldMatchers.get(override.matcher.id).get(override.matcher.options)(field, frame, all)) {
      continue;
    }
    for (const { id, value } of override.properties) {
      const [place, name] = id.startsWith('custom.') ? [made.custom, id.slice('custom.'.length)] : [made, id];
      place[name] = value;
    }
  }
  return made;
}

/** Links of a field's values; they lead to the address that they would have in Grafana. */
function links(field: Field): Field['getLinks'] {
  return ({ valueRowIndex }) => {
    const text = String(field.values[valueRowIndex ?? 0]);
    return (field.config.links ?? []).map((one) => ({
      title: one.title,
      href: one.url.replace('${__value.text}', encodeURIComponent(text)),
      target: undefined,
      origin: field,
    }));
  };
}
