/** What of Grafana's dashboard JSON is read here: all that railscope's dashboards use. */
import { DataTransformerConfig, FieldConfigSource } from '@grafana/data';

export interface Target {
  expr: string;
  refId: string;
  legendFormat?: string;
  instant?: boolean;
  format?: 'time_series' | 'table' | 'heatmap';
}

export interface Panel {
  id: number;
  type: string;
  title: string;
  description?: string;
  gridPos: { x: number; y: number; w: number; h: number };
  targets?: Target[];
  fieldConfig: FieldConfigSource;
  // Each kind of panel has options of its own.
  options?: any;
  transformations?: DataTransformerConfig[];
  panels?: Panel[];
}

export interface Variable {
  name: string;
  type: string;
  label?: string;
  query: string;
  allValue?: string;
}

export interface Dashboard {
  uid: string;
  title: string;
  panels: Panel[];
  templating: { list: Variable[] };
}

/** What the page was asked to show. */
export interface Question {
  name: string;
  from: number;
  to: number;
  /** Seconds between scrapes, as set at a Grafana data source. */
  scrape: number;
  /** Only what begins above this line of the grid. */
  lines: number;
  /** Chosen values by variable; a variable that is not named here chooses all. */
  chosen: Map<string, string[]>;
}

export function question(search: string): Question {
  const given = new URLSearchParams(search);
  const chosen = new Map<string, string[]>();
  for (const key of new Set(given.keys())) {
    if (key.startsWith('var-')) {
      chosen.set(key.slice('var-'.length), given.getAll(key));
    }
  }
  return {
    name: given.get('dashboard') ?? '',
    from: Number(given.get('from')),
    to: Number(given.get('to')),
    scrape: Number(given.get('scrape')),
    lines: Number(given.get('lines') ?? Infinity),
    chosen,
  };
}

/** The panels in the order of the grid, those of folded rows among them. */
export function shown(dashboard: Dashboard, asked: Question): Panel[] {
  return dashboard.panels.flatMap((one) => [one, ...(one.panels ?? [])]).filter((one) => one.gridPos.y < asked.lines);
}
