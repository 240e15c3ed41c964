/** Questions to Prometheus, in the way of Grafana's data source: steps, rate intervals, variables, legends. */
import { Dashboard, Panel, Question, Target, Variable } from './dashboard';

export type Labels = Record<string, string>;

export interface Series {
  labels: Labels;
  /** Milliseconds since the Unix epoch. */
  times: number[];
  /** null where the expression has no value, as in 0 / 0. */
  values: Array<number | null>;
}

/** Points that a panel of half a page's width has at most. */
const MOST_POINTS = 700;
const NICE_STEPS = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600];

async function ask(path: string, parameters: Record<string, string>): Promise<any> {
  const answer = await fetch(`/api/v1/${path}`, { method: 'POST', body: new URLSearchParams(parameters) });
  const content = await answer.json();
  if (content.status !== 'success') {
    throw new Error(content.error);
  }
  return content.data;
}

function number(text: string): number | null {
  const infinite: Record<string, number> = { '+Inf': Infinity, '-Inf': -Infinity };
  const value = infinite[text] ?? Number(text);
  return Number.isNaN(value) ? null : value;
}

/** Seconds between two points. */
export function step(asked: Question): number {
  const least = Math.max(asked.scrape, (asked.to - asked.from) / 1000 / MOST_POINTS);
  return NICE_STEPS.find((one) => one >= least) ?? Math.ceil(least);
}

/** A variable with what it can be and what was chosen; nothing chosen: all of it. */
export interface Choice {
  variable: Variable;
  offered: string[];
  chosen: string[];
}

/** The choices of all variables that are queries, in their order: later ones may depend on earlier ones. */
export async function choices(dashboard: Dashboard, asked: Question): Promise<Choice[]> {
  const made: Choice[] = [];
  for (const variable of dashboard.templating.list) {
    if (variable.type !== 'query') {
      continue;
    }
    const parts = /^label_values\((.*), *(\w+)\)$/s.exec(variable.query.trim());
    if (parts === null) {
      throw new Error(`$${variable.name}: this is no label_values(series, label): ${variable.query}`);
    }
    const found: Labels[] = await ask('series', {
      'match[]': replaced(parts[1], made, asked),
      start: String(asked.from / 1000),
      end: String(asked.to / 1000),
    });
    const offered = [...new Set(found.map((labels) => labels[parts[2]] ?? ''))].filter((value) => value !== '').sort();
    made.push({ variable, offered, chosen: asked.chosen.get(variable.name) ?? [] });
  }
  return made;
}

function value(name: string, made: Choice[], asked: Question): string | undefined {
  const interval = step(asked);
  switch (name) {
    case '__rate_interval':
      return `${Math.max(interval + asked.scrape, 4 * asked.scrape)}s`;
    case '__interval':
      return `${interval}s`;
    case '__range':
      return `${Math.ceil((asked.to - asked.from) / 1000)}s`;
  }
  const choice = made.find((one) => one.variable.name === name);
  if (choice === undefined) {
    return undefined;
  }
  if (choice.chosen.length === 0) {
    return choice.variable.allValue ?? `(${choice.offered.map(escaped).join('|')})`;
  }
  return choice.chosen.length === 1 ? escaped(choice.chosen[0]) : `(${choice.chosen.map(escaped).join('|')})`;
}

/** A value as a regular expression within a PromQL string. */
function escaped(text: string): string {
  return text.replace(/[\\^$*+?.()|[\]{}]/g, '\\\\$&');
}

/** The text with the variables put in that there are. */
export function replaced(text: string, made: Choice[], asked: Question): string {
  return text.replace(/\$(?:(\w+)|\{(\w+)(?::\w+)?\})/g, (whole, plain, braced) => {
    return value(plain ?? braced, made, asked) ?? whole;
  });
}

/** The answers to all of a panel's queries. */
export async function answers(panel: Panel, made: Choice[], asked: Question): Promise<Map<Target, Series[]>> {
  const found = new Map<Target, Series[]>();
  for (const target of panel.targets ?? []) {
    const query = replaced(target.expr, made, asked);
    found.set(target, target.instant ? await now(query, asked) : await over(query, asked));
  }
  return found;
}

async function now(query: string, asked: Question): Promise<Series[]> {
  const data = await ask('query', { query, time: String(asked.to / 1000) });
  if (data.resultType === 'scalar') {
    return [{ labels: {}, times: [data.result[0] * 1000], values: [number(data.result[1])] }];
  }
  return data.result.map((one: any) => ({
    labels: one.metric,
    times: [one.value[0] * 1000],
    values: [number(one.value[1])],
  }));
}

async function over(query: string, asked: Question): Promise<Series[]> {
  const interval = step(asked);
  // Steps are whole, so that the same moments are asked for whenever the page is looked at.
  const start = Math.ceil(asked.from / 1000 / interval) * interval;
  const parameters = { query, start: String(start), end: String(asked.to / 1000), step: String(interval) };
  const data = await ask('query_range', parameters);
  // Native histograms come without values: nothing here draws them.
  return data.result.filter((one: any) => one.values !== undefined).map((one: any) => ({
    labels: one.metric,
    times: one.values.map((point: [number, string]) => point[0] * 1000),
    values: one.values.map((point: [number, string]) => number(point[1])),
  }));
}

/** The name of a series in legends. */
export function legend(target: Target, labels: Labels): string {
  const format = target.legendFormat ?? '__auto';
  if (format !== '__auto') {
    return format.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => labels[label] ?? '').trim();
  }
  const { __name__: name = '', ...others } = labels;
  const pairs = Object.entries(others).map(([label, text]) => `${label}="${text}"`);
  return pairs.length > 0 ? `${name}{${pairs.join(', ')}}` : name || target.expr;
}
