// Small charts as SVG: sparklines, stacked areas over time, proportional bars, scatter plots.

import { h, s } from "./dom.js";

const STEPS = [1, 2, 5, 10];

// Returns a round number at or above `highest`, and the ticks from 0 to it.
export function scale(highest, about = 4) {
  if (!(highest > 0)) return { top: 1, ticks: [0, 1] };
  const rough = highest / about, unit = 10 ** Math.floor(Math.log10(rough));
  const step = STEPS.map((each) => each * unit).find((each) => each >= rough * 0.9999);
  const number = Math.ceil(highest / step - 1e-9);
  return { top: number * step, ticks: Array.from({ length: number + 1 }, (_, at) => at * step) };
}

// Values may be null where nothing was measured; the line has a gap there.
export function sparkline(values, target) {
  const width = 120, height = 30;
  const known = values.filter((each) => each !== null);
  const top = Math.max(...known, target || 0, 1e-9) * 1.1;
  const x = (at) => (values.length < 2 ? width : (at / (values.length - 1)) * width);
  const y = (value) => height - 1 - (value / top) * (height - 3);
  let path = "", pen = false;
  values.forEach((value, at) => {
    if (value !== null) path += `${pen ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}${pen ? "" : "h0.1"}`; // a point alone is a dot
    pen = value !== null;
  });
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    target ? s("line", { class: "target", x1: 0, x2: width, y1: y(target), y2: y(target) }) : null,
    s("path", { d: path || "M0 0", class: "line" }));
}

// One bar divided in proportion; parts are {value, kind, label}. `marks` are fractions of the whole.
export function bar(parts, total, label, marks = []) {
  const whole = total || parts.reduce((sum, part) => sum + part.value, 0) || 1;
  return h("div", { class: "bar", role: "img", "aria-label": label, title: label },
    parts.filter((part) => part.value > 0).map((part) =>
      h("span", { class: `part ${part.kind}`, style: { width: `${Math.max(0.4, (part.value / whole) * 100)}%` } })),
    marks.map((mark) => h("i", { class: "mark", style: { left: `${mark * 100}%` } })));
}

export function legend(series, values) {
  return h("ul", { class: "legend" }, series.map((each) =>
    h("li", {}, h("span", { class: `key ${each.kind}`, "aria-hidden": "true" }), each.label,
      values ? h("b", {}, values(each)) : null)));
}

// points: [{at_s, [name]: number}], series: [{name, kind, label}] from the bottom up. `chosen` is the index of the point that is read.
export function stackedArea({ points, series, width, height, chosen, choose, label, unit }) {
  const left = 46, bottom = 20, right = 4, topGap = 8;
  const inner = Math.max(10, width - left - right);
  const sums = points.map((point) => series.reduce((sum, each) => sum + point[each.name], 0));
  const { top, ticks } = scale(Math.max(0, ...sums));
  const first = points.length ? points[0].at_s : 0, last = points.length ? points.at(-1).at_s : 1;
  const span = Math.max(last - first, 60);
  const x = (at_s) => left + inner - ((last - at_s) / span) * inner;
  const y = (value) => topGap + (1 - value / top) * (height - bottom - topGap);
  const floor = points.map(() => 0);
  const areas = series.map((each) => {
    const lower = floor.map((value, at) => `${x(points[at].at_s).toFixed(1)} ${y(value).toFixed(1)}`);
    points.forEach((point, at) => (floor[at] += point[each.name]));
    const upper = floor.map((value, at) => `${x(points[at].at_s).toFixed(1)} ${y(value).toFixed(1)}`);
    return s("path", { class: `area ${each.kind}`, d: points.length ? `M${upper.join("L")}L${lower.reverse().join("L")}Z` : "M0 0" });
  });
  const nearest = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const at_s = last - (1 - (event.clientX - box.left - left) / inner) * span;
    let best = -1;
    points.forEach((point, at) => { if (best < 0 || Math.abs(point.at_s - at_s) < Math.abs(points[best].at_s - at_s)) best = at; });
    return best;
  };
  const keys = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !points.length) return;
    event.preventDefault();
    choose(Math.min(points.length - 1, Math.max(0, (chosen ?? points.length - 1) + step)));
  };
  const at = chosen !== null && points[chosen] ? x(points[chosen].at_s) : null;
  return s("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": label,
      onpointermove: (event) => choose(nearest(event)), onpointerleave: () => choose(null), onkeydown: keys },
    ticks.map((tick) => s("g", {},
      s("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      s("text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, unit(tick)))),
    areas,
    [0, 0.5, 1].map((part) => s("text", { class: "tick", x: left + inner * part, y: height - 4,
      "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle" }, part === 1 ? "now" : ago(span * (1 - part)))),
    at === null ? null : s("line", { class: "cursor", x1: at, x2: at, y1: topGap, y2: height - bottom }));
}

const ago = (value) => (value >= 90 ? `${Math.round(value / 60)} min ago` : `${Math.round(value)} s ago`);

// points: [[predicted, measured]] in seconds, on logarithmic scales.
export function scatter(points, width, height, format) {
  const margin = 58, flat = points.flat().filter((each) => each > 0);
  const low = 10 ** Math.floor(Math.log10(Math.min(...flat, 0.01))), high = 10 ** Math.ceil(Math.log10(Math.max(...flat, low * 10)));
  const part = (value) => Math.log(value / low) / Math.log(high / low);
  const x = (value) => margin + part(value) * (width - margin - 28), y = (value) => height - 36 - part(value) * (height - 62);
  const ticks = [];
  for (let tick = low; tick <= high * 1.001; tick *= 10) ticks.push(tick);
  return s("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Measured against predicted time to first token of ${points.length} requests` },
    ticks.map((tick) => s("g", {},
      s("line", { class: "grid", x1: x(low), x2: x(high), y1: y(tick), y2: y(tick) }),
      s("text", { class: "tick", x: margin - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
      s("text", { class: "tick", x: x(tick), y: height - 20, "text-anchor": tick === low ? "start" : "middle" }, format(tick)))),
    s("line", { class: "target", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }),
    points.map(([predicted, measured]) => s("circle", { class: "dot", r: 3, cx: x(predicted).toFixed(1), cy: y(measured).toFixed(1) })),
    s("text", { class: "tick", x: width - 8, y: height - 4, "text-anchor": "end" }, "predicted →"),
    s("text", { class: "tick", x: 2, y: 10 }, "↑ measured"));
}
