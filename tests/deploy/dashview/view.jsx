// Renders one Grafana dashboard JSON with Grafana's own field-config engine (@grafana/data:
// units, thresholds, mappings, overrides, reducers, display names) and its own
// visualisation components (@grafana/ui), fed by a real Prometheus. What is ours, and so
// not proof of what the server would do: variable interpolation, the query runner, the
// layout, and the panel types listed under "fallback".
import { createRoot } from 'react-dom/client';
import { useEffect, useMemo, useState } from 'react';
import {
  applyFieldOverrides, createDataFrame, createTheme, dateTime, FieldType, getDisplayProcessor,
  getFieldDisplayValues, identityOverrideProcessor, reduceField, renderMarkdown,
  standardFieldConfigEditorRegistry, FieldConfigOptionsRegistry, getFieldDisplayName, formattedValueToString,
  transformDataFrame, standardTransformersRegistry, standardTransformers,
} from '@grafana/data';
import {
  BarGauge, BigValue, PanelChrome, Table, ThemeContext, TimeSeries, GlobalStyles,
} from '@grafana/ui';
import 'uplot/dist/uPlot.min.css';

const q = new URLSearchParams(location.search);
const WIDTH = Number(q.get('width') || 1600), CELL = 30, GAP = 8;
const theme = createTheme({ colors: { mode: q.get('theme') || 'dark' } });
const problems = [];
window.__problems = problems;

const STD = ['displayName', 'unit', 'min', 'max', 'decimals', 'noValue', 'links', 'mappings', 'thresholds', 'color', 'filterable', 'description', 'fieldMinMax'];
const CUSTOM = ['drawStyle', 'lineInterpolation', 'barAlignment', 'lineWidth', 'fillOpacity', 'gradientMode', 'lineStyle', 'spanNulls', 'insertNulls', 'showPoints', 'pointSize', 'stacking', 'axisPlacement', 'axisLabel', 'axisWidth', 'axisSoftMin', 'axisSoftMax', 'axisGridShow', 'axisCenteredZero', 'axisColorMode', 'scaleDistribution', 'hideFrom', 'thresholdsStyle', 'transform', 'fillBelowTo', 'align', 'width', 'cellOptions', 'inspect', 'lineColor', 'fillColor', 'axisBorderShow'];
const item = (id, custom) => ({
  id: custom ? 'custom.' + id : id, path: id, name: id, isCustom: custom,
  process: identityOverrideProcessor, shouldApply: () => true, override: () => null, editor: () => null,
});
standardFieldConfigEditorRegistry.setInit(() => STD.map((s) => item(s, false)));
const registry = new FieldConfigOptionsRegistry(() => [...STD.map((s) => item(s, false)), ...CUSTOM.map((s) => item(s, true))]);
standardTransformersRegistry.setInit(() => [...new Map(Object.values(standardTransformers).map((t) => [t.id, t])).values()].map((t) => ({ id: t.id, name: t.name, transformation: t, editor: () => null, imageDark: '', imageLight: '' })));

const sec = (s) => {
  const m = /^now(?:-(\d+)([smhdw]))?$/.exec(s || 'now');
  return m ? (m[1] ? +m[1] * { s: 1, m: 60, h: 3600, d: 86400, w: 604800 }[m[2]] : 0) : 0;
};
const now = Number(q.get('now') || Date.now()) / 1000;

async function api(path, params) {
  const r = await fetch('/prom' + path + '?' + new URLSearchParams(params));
  const j = await r.json();
  if (j.status !== 'success') throw new Error(j.error || r.status);
  return j.data;
}

async function variables(dash, range) {
  const vars = {};
  for (const v of dash.templating?.list || []) {
    if (v.type === 'query') {
      const src = interpolate(typeof v.query === 'string' ? v.query : v.query?.query || v.definition || '', vars); // of variables before it
      let vals = [];
      const lv = /^label_values\(\s*(?:(.+),\s*)?([a-zA-Z_]\w*)\s*\)$/.exec(src);
      try {
        if (lv) vals = await api(`/api/v1/label/${lv[2]}/values`, lv[1] ? { 'match[]': lv[1], start: now - range, end: now } : {});
        const qr = /^query_result\((.+)\)$/.exec(src);
        if (qr) vals = (await api('/api/v1/query', { query: qr[1], time: now })).result.map((r) => JSON.stringify(r.metric));
      } catch (e) { problems.push(`variable ${v.name}: ${e.message}`); }
      if (v.regex) { const re = new RegExp(v.regex.replace(/^\/|\/$/g, '')); vals = vals.map((x) => re.exec(x)).filter(Boolean).map((m) => m[1] ?? m[0]); }
      if (!vals.length) problems.push(`variable ${v.name}: no values`);
      vars[v.name] = v.includeAll || v.multi ? vals : vals.slice(0, 1);
    } else if (v.type === 'datasource') vars[v.name] = ['prometheus'];
    else if (v.type === 'interval') vars[v.name] = [String(v.current?.value && v.current.value !== '$__auto_interval' ? v.current.value : (v.query || '1m').split(',')[0])];
    else vars[v.name] = [].concat(v.current?.value ?? String(v.query ?? '').split(',')[0]);
  }
  return vars;
}
const esc = (s) => s.replace(/[.*+?^${}()|[\]\\]/g, '\\\\$&');
function interpolate(s, vars, extra = {}) {
  return String(s ?? '').replace(/\$\{(\w+)(?::(\w+))?\}|\$(\w+)|\[\[(\w+)\]\]/g, (all, a, fmt, b, c) => {
    const name = a || b || c;
    if (name in extra) return extra[name];
    if (!(name in vars)) return all;
    const v = vars[name];
    if (fmt === 'csv') return v.join(',');
    if (fmt === 'raw') return v.join(',');
    return v.length === 1 ? v[0] : '(' + v.map(esc).join('|') + ')';
  });
}
const legend = (fmt, labels, expr) => {
  if (fmt && fmt !== '__auto') return fmt.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, k) => labels[k] ?? '');
  const rest = Object.entries(labels).filter(([k]) => k !== '__name__').map(([k, v]) => `${k}="${v}"`).join(', ');
  return (labels.__name__ || '') + (rest ? `{${rest}}` : '') || expr;
};

async function run(panel, vars, range) {
  const frames = [];
  const from = now - range;
  const minStep = 1;
  const step = Math.max(minStep, Math.ceil(range / 400));
  const rate = Math.max(step + 1, 4 * Number(q.get('scrape') || 15)); // Grafana: max($__interval + scrape, 4 * scrape)
  const extra = { __interval: step + 's', __rate_interval: rate + 's', __range: range + 's', __range_s: String(range), __interval_ms: String(step * 1000), __rate_interval_ms: String(rate * 1000) };
  for (const t of panel.targets || []) {
    if (t.hide || !t.expr) continue;
    const expr = interpolate(t.expr, vars, extra);
    const instant = t.instant || (t.format === 'table' && t.range !== true);
    let res;
    try {
      res = instant ? await api('/api/v1/query', { query: expr, time: now }) : await api('/api/v1/query_range', { query: expr, start: from, end: now, step });
    } catch (e) { problems.push(`${panel.title}: ${expr}: ${e.message}`); continue; }
    let series = res.resultType === 'scalar' ? [{ metric: {}, values: [res.result] }] : res.result;
    if (!series.length) problems.push(`${panel.title}: no data: ${expr}`);
    if (t.format === 'table') {
      const keys = [...new Set(series.flatMap((s) => Object.keys(s.metric)))];
      const last = series.map((s) => s.value ?? s.values.at(-1));
      frames.push(createDataFrame({ refId: t.refId, fields: [
        { name: 'Time', type: FieldType.time, values: last.map((v) => v[0] * 1000), config: {} },
        ...keys.map((k) => ({ name: k, type: FieldType.string, values: series.map((s) => s.metric[k] ?? ''), config: {} })),
        { name: series.length && (panel.targets.length > 1) ? `Value #${t.refId}` : 'Value', type: FieldType.number, values: last.map((v) => Number(v[1])), config: {} },
      ] }));
      continue;
    }
    for (const s of series) {
      const byT = new Map((s.values ?? [s.value]).map(([ts, v]) => [Math.round(ts * 1000), Number(v)]));
      const ts = instant ? [...byT.keys()] : Array.from({ length: Math.floor(range / step) + 1 }, (_, i) => Math.round((from + i * step) * 1000));
      frames.push(createDataFrame({ refId: t.refId, name: legend(t.legendFormat, s.metric, expr), fields: [
        { name: 'Time', type: FieldType.time, values: ts, config: {} },
        { name: 'Value', type: FieldType.number, labels: s.metric, values: ts.map((x) => (byT.has(x) ? byT.get(x) : null)), config: { displayNameFromDS: legend(t.legendFormat, s.metric, expr) } },
      ] }));
    }
  }
  return frames;
}
function transformed(frames, transformations) {
  return new Promise((done) => {
    if (!transformations?.length) return done(frames);
    let out = frames;
    transformDataFrame(transformations.filter((t) => !t.disabled), frames, { interpolate: (x) => x }).subscribe({
      next: (v) => (out = v), error: (e) => { problems.push('transformation: ' + e.message); done(frames); }, complete: () => done(out),
    });
  });
}
function prepare(panel, frames, vars) {
  const fieldConfig = { defaults: { ...(panel.fieldConfig?.defaults || {}) }, overrides: panel.fieldConfig?.overrides || [] };
  if (panel.type === 'timeseries') fieldConfig.defaults.custom = { drawStyle: 'line', lineWidth: 1, fillOpacity: 0, showPoints: 'auto', pointSize: 5, axisPlacement: 'auto', spanNulls: false, stacking: { mode: 'none', group: 'A' }, thresholdsStyle: { mode: 'off' }, hideFrom: { legend: false, tooltip: false, viz: false }, ...fieldConfig.defaults.custom };
  fieldConfig.defaults.color ??= { mode: ['stat', 'gauge', 'bargauge', 'table'].includes(panel.type) ? 'thresholds' : 'palette-classic' };
  fieldConfig.defaults.thresholds ??= { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] };
  if (fieldConfig.defaults.thresholds?.steps?.[0]) fieldConfig.defaults.thresholds = { ...fieldConfig.defaults.thresholds, steps: fieldConfig.defaults.thresholds.steps.map((s, i) => (i === 0 ? { ...s, value: -Infinity } : s)) };
  return applyFieldOverrides({ data: frames, fieldConfig, replaceVariables: (s) => interpolate(s, vars), theme, timeZone: 'browser', fieldConfigRegistry: registry });
}

function Body({ panel, frames, width, height, range, vars }) {
  const tr = { from: dateTime((now - range) * 1000), to: dateTime(now * 1000), raw: { from: 'now-' + range + 's', to: 'now' } };
  const o = panel.options || {};
  if (panel.type === 'text') return <div style={{ padding: 8 }} className="markdown-html" dangerouslySetInnerHTML={{ __html: o.mode === 'html' ? o.content : renderMarkdown(interpolate(o.content, vars)) }} />;
  const data = useMemo(() => prepare(panel, frames, vars), [frames]);
  if (!data.length || !data.some((f) => f.length)) return <div style={{ padding: 16, opacity: 0.6 }}>No data</div>;
  if (panel.type === 'timeseries' || panel.type === 'graph') {
    return <TimeSeries frames={data} structureRev={1} timeRange={tr} timeZone="browser" width={width} height={height} legend={{ showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [], ...o.legend }} options={o} />;
  }
  if (['stat', 'gauge', 'bargauge'].includes(panel.type)) {
    const vals = getFieldDisplayValues({ fieldConfig: panel.fieldConfig || { defaults: {}, overrides: [] }, reduceOptions: { calcs: ['lastNotNull'], values: false, ...o.reduceOptions }, replaceVariables: (s) => interpolate(s, vars), theme, data, sparkline: panel.type === 'stat' && (o.graphMode ?? 'area') !== 'none', timeZone: 'browser' });
    const n = vals.length || 1;
    const vertical = panel.type !== 'bargauge' ? height > width : o.orientation !== 'vertical';
    return <div style={{ display: 'flex', flexDirection: vertical ? 'column' : 'row', gap: 4 }}>
      {vals.map((v, i) => {
        const w = vertical ? width : (width - 4 * (n - 1)) / n, h = vertical ? (height - 4 * (n - 1)) / n : height;
        if (panel.type === 'stat') return <BigValue key={i} value={n > 1 || o.textMode === 'value_and_name' ? v.display : { ...v.display, title: o.textMode === 'name' ? v.display.title : '' }} sparkline={v.sparkline} colorMode={o.colorMode || 'value'} graphMode={o.graphMode || 'area'} textMode={o.textMode} justifyMode={o.justifyMode} width={w} height={h} theme={theme} />;
        if (panel.type === 'gauge') return <Arc key={i} field={v.field} value={v.display} title={n > 1} width={w} height={h} />;
        return <BarGauge key={i} field={v.field} value={v.display} display={v.view?.getFieldDisplayProcessor(v.colIndex ?? 0) || getDisplayProcessor({ field: { config: v.field }, theme })} orientation={vertical ? 'horizontal' : 'vertical'} displayMode={o.displayMode || 'gradient'} theme={theme} width={w} height={h} itemSpacing={8} lcdCellWidth={8} />;
      })}
    </div>;
  }
  if (panel.type === 'table') return <Table data={data[0]} width={width} height={height} />;
  // fallback: state-timeline, status-history, heatmap, barchart, ... drawn as one strip per series
  return <Strips data={data} panel={panel} width={width} height={height} />;
}
// @grafana/ui's Gauge draws through a jQuery plugin that only the server's page carries
function Arc({ field, value, title, width, height }) {
  const r = Math.min(width / 2 - 20, (height - (title ? 54 : 36)) / 1.46), cx = width / 2, cy = r + 18;
  const lo = field.min ?? 0, hi = field.max ?? 100;
  const at = (x, k = r) => { const a = Math.PI * (1.15 + -1.3 * Math.min(1, Math.max(0, x))); return `${cx + k * Math.cos(a)},${cy - k * Math.sin(a)}`; };
  const arc = (a, b, k, w, c) => <path d={`M${at(a, k)} A${k},${k} 0 ${(b - a) * 1.3 > 1 ? 1 : 0} 1 ${at(b, k)}`} stroke={c} strokeWidth={w} fill="none" />;
  const f = hi > lo ? (value.numeric - lo) / (hi - lo) : 0;
  const steps = field.thresholds?.steps || [];
  const pos = (s) => (s.value === -Infinity ? 0 : Math.min(1, Math.max(0, field.thresholds.mode === 'percentage' ? s.value / 100 : (s.value - lo) / (hi - lo))));
  return <svg width={width} height={height}>{arc(0, 1, r, 14, theme.colors.background.secondary)}
    {arc(0, Math.max(0.001, Math.min(1, f)), r, 14, value.color)}
    {steps.map((s, i) => <g key={i}>{arc(pos(s), i + 1 < steps.length ? pos(steps[i + 1]) : 1, r + 10, 3, theme.visualization.getColorByName(s.color))}</g>)}
    <text x={cx} y={cy} textAnchor="middle" fontSize={r * 0.4} fill={value.color}>{formattedValueToString(value)}</text>
    {title && <text x={cx} y={height - 6} textAnchor="middle" fontSize="13" fill={theme.colors.text.primary}>{value.title}</text>}</svg>;
}
function Strips({ data, panel, width, height }) {
  const rows = data.slice(0, Math.max(1, Math.floor(height / 18)));
  const all = data.flatMap((f) => f.fields[1].values).filter((v) => v != null && isFinite(v));
  const max = Math.max(...all, 1e-9);
  return <div style={{ fontSize: 11, padding: 4 }}>{rows.map((f, i) => {
    const fl = f.fields[1], vs = [...fl.values], d = fl.display || getDisplayProcessor({ field: fl, theme });
    return <div key={i} style={{ display: 'flex', height: Math.min(26, height / rows.length), alignItems: 'center' }}>
      <div style={{ width: 130, overflow: 'hidden', textOverflow: 'ellipsis', whiteSpace: 'nowrap' }}>{getFieldDisplayName(fl, f, data)}</div>
      <svg width={width - 150} height="80%" preserveAspectRatio="none" viewBox={`0 0 ${vs.length} 1`}>{vs.map((v, k) => v == null ? null : <rect key={k} x={k} y="0" width="1.05" height="1" fill={panel.type === 'heatmap' ? `rgba(115,191,105,${0.08 + 0.92 * v / max})` : d(v).color} />)}</svg>
    </div>; })}</div>;
}
function Panel({ panel, vars, range }) {
  const [frames, set] = useState(null);
  useEffect(() => { run(panel, vars, range).then((f) => transformed(f, panel.transformations)).then(set).catch((e) => { problems.push(panel.title + ': ' + e.message); set([]); }); }, []);
  const unit = (WIDTH - GAP) / 24, g = panel.gridPos;
  const box = { position: 'absolute', left: g.x * unit + GAP / 2, top: g.y * (CELL + GAP), width: g.w * unit - GAP, height: g.h * (CELL + GAP) - GAP };
  useEffect(() => { if (frames) window.__done = (window.__done || 0) + 1; }, [frames]);
  if (panel.type === 'row') return <div style={{ ...box, height: CELL, color: theme.colors.text.primary, fontWeight: 500, paddingTop: 6 }}>▾ {interpolate(panel.title, vars)}</div>;
  return <div style={box}><PanelChrome title={interpolate(panel.title, vars)} description={panel.description} width={box.width} height={box.height}>
    {(w, h) => frames ? <Body panel={panel} frames={frames} width={w} height={h} range={range} vars={vars} /> : <span />}
  </PanelChrome></div>;
}
function App({ dash, vars }) {
  const range = Number(q.get('range') || 0) || sec(dash.time?.from) || 3600;
  const panels = dash.panels.flatMap((p) => (p.type === 'row' && p.panels?.length ? [p, ...p.panels] : [p]));
  const bottom = Math.max(...panels.map((p) => p.gridPos.y + p.gridPos.h)) * (CELL + GAP) + 60;
  window.__want = panels.length; window.__height = bottom;
  return <ThemeContext.Provider value={theme}><GlobalStyles />
    <div style={{ width: WIDTH, height: bottom, position: 'relative', background: theme.colors.background.canvas, fontFamily: theme.typography.fontFamily }}>
      <div style={{ padding: '12px 8px', fontSize: 20, color: theme.colors.text.primary }}>{dash.title}
        <span style={{ fontSize: 12, marginLeft: 24, opacity: 0.7 }}>{Object.entries(vars).map(([k, v]) => `${k}: ${v.join(' + ')}`).join('   ')}</span></div>
      <div style={{ position: 'absolute', top: 48, left: 0 }}>{panels.map((p, i) => <Panel key={i} panel={p} vars={vars} range={range} />)}</div>
    </div></ThemeContext.Provider>;
}
window.addEventListener('error', (e) => problems.push('script: ' + e.message));
(async () => {
  let dash = await (await fetch('/dashboard.json')).json();
  dash = dash.dashboard || dash;
  const vars = await variables(dash, Number(q.get('range') || 0) || sec(dash.time?.from) || 3600);
  document.body.style.margin = 0;
  createRoot(document.getElementById('root')).render(<App dash={dash} vars={vars} />);
})();
