/**
 * A dashboard on one page, drawn by Grafana's component packages from what Prometheus says.
 *
 * The address says what to show: dashboard, from and to (milliseconds), scrape (seconds), var-NAME, and lines (only the
 * first ones of the grid).  When everything stands, the body has the attribute data-settled.
 */
import '@fontsource/inter/latin-400.css';
import '@fontsource/inter/latin-500.css';

import { createTheme, dateTimeFormat } from '@grafana/data';
import { GlobalStyles, ThemeContext } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

import { Dashboard, Panel, Question, question, shown } from './dashboard';
import { TIME_ZONE, frames } from './frames';
import { Content, PanelInFrame, drawnBy } from './panels';
import { Choice, answers, choices, step } from './prometheus';

// Grafana's grid, in pixels.
const COLUMNS = 24;
const LINE = 30;
const GAP = 8;
const MARGIN = 16;
const HEAD = 64;
/** Nothing has changed for so long: everything stands. */
const QUIET_MILLISECONDS = 600;

const theme = createTheme({ colors: { mode: 'dark' } });

const STYLE = `
  body { margin: 0; background: ${theme.colors.background.canvas}; overflow: hidden; }
  .head { position: absolute; left: ${MARGIN}px; right: ${MARGIN}px; top: 10px; height: ${HEAD - 20}px; }
  .head h1 { font-size: 18px; margin: 0 0 4px; }
  .head p { margin: 0; color: ${theme.colors.text.secondary}; font-size: 12px; }
  .head .by { position: absolute; right: 0; top: 4px; text-align: right; }
  .panel, .row { position: absolute; }
  .row { font-size: 16px; line-height: ${LINE}px; margin: 0; }
  .instead { display: grid; place-items: center; height: 100%; color: ${theme.colors.text.secondary}; }
  .stand-in { color: ${theme.colors.warning.text}; font-size: 11px; white-space: nowrap; padding: 0 8px; }
`;

interface PageProps {
  dashboard: Dashboard;
  asked: Question;
  made: Choice[];
  panels: Panel[];
  contents: Map<number, Content>;
}

function Page({ dashboard, asked, made, panels, contents }: PageProps) {
  const column = (innerWidth - 2 * MARGIN + GAP) / COLUMNS;
  const place = ({ gridPos: { x, y, w, h } }: Panel) => ({
    left: MARGIN + x * column,
    top: HEAD + y * (LINE + GAP),
    width: w * column - GAP,
    height: h * (LINE + GAP) - GAP,
  });
  const time = (moment: number) => dateTimeFormat(moment, { timeZone: TIME_ZONE });
  const bottom = Math.max(...panels.map((one) => place(one).top + place(one).height));
  return (
    <main style={{ position: 'relative', height: bottom + MARGIN }}>
      <div className="head">
        <h1>{dashboard.title}</h1>
        <p>
          {made.map(({ variable, chosen, offered }) => (
            <span key={variable.name} data-variable={variable.name} data-offered={offered.length}>
              {variable.label}: {chosen.length > 0 ? chosen.join(' + ') : `All (${offered.length})`} &emsp;
            </span>
          ))}
        </p>
        <p className="by">
          {time(asked.from)} to {time(asked.to)} UTC, a point every {step(asked)} s
          <br />
          drawn by Grafana&rsquo;s component packages {process.env.GRAFANA_PACKAGES}, without a Grafana server
        </p>
      </div>
      {panels.map((panel) =>
        panel.type === 'row' ? (
          <h2 key={panel.id} className="row" style={place(panel)}>
            {panel.title}
          </h2>
        ) : (
          <div
            key={panel.id}
            className="panel"
            style={place(panel)}
            data-panel={panel.id}
            data-title={panel.title}
            data-kind={panel.type}
            data-drawn-by={drawnBy(panel.type)}
          >
            <PanelInFrame
              panel={panel}
              asked={asked}
              content={contents.get(panel.id)!}
              width={place(panel).width}
              height={place(panel).height}
            />
          </div>
        )
      )}
    </main>
  );
}

async function content(panel: Panel, made: Choice[], asked: Question): Promise<Content> {
  try {
    return { frames: await frames(panel, await answers(panel, made, asked), step(asked) * 1000, theme) };
  } catch (error) {
    return { error: String(error) };
  }
}

/** Components measure themselves and draw anew some times. */
function settled(): Promise<void> {
  return new Promise((resolve) => {
    let timer = setTimeout(end, QUIET_MILLISECONDS);
    const watch = new MutationObserver(() => {
      clearTimeout(timer);
      timer = setTimeout(end, QUIET_MILLISECONDS);
    });
    function end() {
      watch.disconnect();
      resolve();
    }
    watch.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
  });
}

async function start() {
  const asked = question(location.search);
  const dashboard: Dashboard = await (await fetch(`/dashboards/${asked.name}.json`)).json();
  const made = await choices(dashboard, asked);
  const panels = shown(dashboard, asked);
  const contents = new Map<number, Content>();
  for (const panel of panels) {
    if (panel.type !== 'row') {
      contents.set(panel.id, await content(panel, made, asked));
    }
  }
  await Promise.all([400, 500].map((weight) => document.fonts.load(`${weight} 12px Inter`)));
  createRoot(document.getElementById('page')!).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <style>{STYLE}</style>
      <Page dashboard={dashboard} asked={asked} made={made} panels={panels} contents={contents} />
    </ThemeContext.Provider>
  );
  await settled();
}

start()
  .then(() => (document.body.dataset.settled = ''))
  .catch((error) => (document.body.dataset.settled = String(error)));
