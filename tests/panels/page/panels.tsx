/** One panel: Grafana's frame around it, and within it Grafana's component for its kind. */
import { DataFrame, FieldDisplay, TimeRange, dateTime, getFieldDisplayValues } from '@grafana/data';
import { BigValue, PanelChrome, TimeSeries, useTheme2 } from '@grafana/ui';
// Named unstable, and what Grafana's own table panel is.
import { TableNG } from '@grafana/ui/unstable';
import { Component, ReactNode } from 'react';

import { Panel, Question } from './dashboard';
import { TIME_ZONE } from './frames';
import { HeatMap, StateTimeline, StandInProps } from './stand_ins';

/** What a panel has to show. */
export type Content = { frames: DataFrame[] } | { error: string };

interface Props {
  panel: Panel;
  asked: Question;
  content: Content;
  width: number;
  height: number;
}

const OF_GRAFANA: Record<string, (props: StandInProps) => ReactNode> = {
  timeseries: Lines,
  stat: Stat,
  table: Rows,
};
const STAND_INS: Record<string, (props: StandInProps) => ReactNode> = {
  heatmap: HeatMap,
  'state-timeline': StateTimeline,
};

/** Who draws a kind of panel; empty: nobody. */
export function drawnBy(kind: string): 'grafana' | 'stand-in' | '' {
  return kind in OF_GRAFANA ? 'grafana' : kind in STAND_INS ? 'stand-in' : '';
}

export function PanelInFrame({ panel, asked, content, width, height }: Props) {
  const mark =
    drawnBy(panel.type) === 'stand-in' ? (
      <span className="stand-in" title="Grafana's own is not in its npm packages">
        stand-in for Grafana&rsquo;s {panel.type}
      </span>
    ) : undefined;
  return (
    <PanelChrome
      width={width}
      height={height}
      title={panel.title}
      description={panel.description}
      titleItems={mark}
      padding={panel.type === 'table' ? 'none' : 'md'}
    >
      {(innerWidth, innerHeight) => (
        <Guarded>
          <Inside panel={panel} asked={asked} content={content} width={innerWidth} height={innerHeight} />
        </Guarded>
      )}
    </PanelChrome>
  );
}

function Inside({ panel, asked, content, width, height }: Props) {
  if ('error' in content) {
    return <Instead state="error">{content.error}</Instead>;
  }
  const Drawn = OF_GRAFANA[panel.type] ?? STAND_INS[panel.type];
  if (Drawn === undefined) {
    return <Instead state="error">nothing here draws panels of the kind {panel.type}</Instead>;
  }
  if (content.frames.every((frame) => frame.length === 0)) {
    return <Instead state="no data">{panel.fieldConfig.defaults.noValue ?? 'No data'}</Instead>;
  }
  return <Drawn panel={panel} frames={content.frames} asked={asked} width={width} height={height} />;
}

function Instead({ state, children }: { state: string; children: ReactNode }) {
  return (
    <div className="instead" data-instead={state}>
      {children}
    </div>
  );
}

/** An exception of a component is shown in its panel's place. */
class Guarded extends Component<{ children: ReactNode }, { failed?: string }> {
  state: { failed?: string } = {};

  static getDerivedStateFromError(error: Error) {
    return { failed: String(error) };
  }

  render() {
    return this.state.failed === undefined ? (
      this.props.children
    ) : (
      <Instead state="error">{this.state.failed}</Instead>
    );
  }
}

function range(asked: Question): TimeRange {
  const [from, to] = [dateTime(asked.from), dateTime(asked.to)];
  return { from, to, raw: { from, to } };
}

function Lines({ panel, frames, asked, width, height }: StandInProps) {
  return (
    <TimeSeries
      frames={frames}
      width={width}
      height={height}
      timeRange={range(asked)}
      timeZone={TIME_ZONE}
      legend={panel.options.legend}
      options={panel.options}
    />
  );
}

function Stat({ panel, frames, width, height }: StandInProps) {
  const theme = useTheme2();
  const found: FieldDisplay[] = getFieldDisplayValues({
    data: frames,
    fieldConfig: panel.fieldConfig,
    reduceOptions: panel.options.reduceOptions,
    replaceVariables: (text) => text,
    theme,
    timeZone: TIME_ZONE,
  });
  return (
    <div style={{ display: 'flex' }}>
      {found.map((one, at) => (
        <BigValue
          key={at}
          value={one.display}
          count={found.length}
          width={width / found.length}
          height={height}
          theme={theme}
          colorMode={panel.options.colorMode}
          graphMode={panel.options.graphMode}
          textMode={panel.options.textMode}
          justifyMode={panel.options.justifyMode}
        />
      ))}
    </div>
  );
}

function Rows({ panel, frames, width, height }: StandInProps) {
  return (
    <TableNG
      data={frames[0]}
      width={width}
      height={height}
      ariaLabel={panel.title}
      fieldConfig={panel.fieldConfig}
      sortBy={panel.options?.sortBy}
    />
  );
}
