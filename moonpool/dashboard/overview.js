// Tiles with sparklines, and where prompt tokens come from: the picture of the product.

import { legend, sparkline, stackedArea } from "./charts.js";
import { h, show } from "./dom.js";
import { clock, count, percent, seconds, words } from "./format.js";

const SOURCES = [
  { name: "computed_tokens_s", kind: "computed", label: "computed" },
  { name: "own_tokens_s", kind: "own", label: "from own pages" },
  { name: "dram_tokens_s", kind: "dram", label: "from pool DRAM" },
  { name: "ssd_tokens_s", kind: "ssd", label: "from SSD" },
  { name: "remote_tokens_s", kind: "remote", label: "from other machines" },
];
const RECENT = 30; // points: one minute
let chosen = null;

function tile(name, big, sub, values, target, late) {
  return h("section", { class: "tile", "data-tile": name }, h("h3", {}, name),
    h("p", { class: late ? "big late" : "big" }, big), h("p", { class: "sub" }, sub), sparkline(values, target));
}

function timeTile(name, points, p50, p99, target) {
  const last = points.at(-1) || {};
  const late = target && last[p99] > target;
  const against = target ? ` · target ${seconds(target)}` : "";
  return tile(name, `p50 ${seconds(last[p50])}`, `p99 ${seconds(last[p99])}${against}`, points.map((each) => each[p99]), target, late);
}

// The part of prompt tokens whose KV was reused; null where there were no prompts.
function hitRate(point) {
  const all = SOURCES.reduce((sum, each) => sum + point[each.name], 0);
  return all ? 1 - point.computed_tokens_s / all : null;
}

function recentHitRate(points) {
  const sum = (name) => points.slice(-RECENT).reduce((total, each) => total + each[name], 0);
  const all = SOURCES.reduce((total, each) => total + sum(each.name), 0);
  return all ? 1 - sum("computed_tokens_s") / all : null;
}

function tiles({ status, points }) {
  const last = points.at(-1) || {};
  const pages = status.workers.reduce((sum, each) => sum + each.num_pages, 0);
  const used = status.workers.reduce((sum, each) => sum + each.used_pages + each.reserved_pages, 0);
  const refused = Object.entries(status.totals.refused).filter(([, number]) => number);
  const totals = status.totals;
  const reused = totals.own_tokens + totals.dram_tokens + totals.ssd_tokens + totals.remote_tokens;
  return h("div", { class: "tiles" },
    timeTile("Time to first token", points, "ttft_p50_s", "ttft_p99_s", status.ttft_slo_s),
    timeTile("Time between tokens", points, "tbt_p50_s", "tbt_p99_s", status.tbt_slo_s),
    tile("Requests / s", count(last.requests_s ?? 0), `${count(totals.by_outcome.done || 0)} done`, points.map((each) => each.requests_s)),
    tile("Output tokens / s", count(last.output_tokens_s ?? 0), `${count(totals.output_tokens)} in all`, points.map((each) => each.output_tokens_s)),
    tile("Prompt tokens reused", percent(recentHitRate(points)), `${percent(totals.prompt_tokens ? reused / totals.prompt_tokens : null)} since the start`, points.map(hitRate)),
    tile("Running", count(status.num_running), `${percent(pages ? used / pages : null)} of pages in use`, points.map((each) => each.num_running)),
    tile("Waiting", count(status.num_waiting), "in the conductor's queue", points.map((each) => each.num_waiting)),
    tile("Refused", count(refused.reduce((sum, [, number]) => sum + number, 0)),
      refused.map(([cause, number]) => `${words(cause)} ${count(number)}`).join(", ") || "none since the start", points.map((each) => each.refused_s)));
}

export function draw(root, page) {
  const { points } = page;
  const width = Math.max(280, (root.querySelector(".picture")?.clientWidth || root.clientWidth - 20) - 34);
  const read = chosen !== null && points[chosen] ? points[chosen] : points.at(-1);
  const choose = (at) => { if (at !== chosen) { chosen = at; draw(root, page); } };
  const label = "Prompt tokens per second by where their KV came from: " +
    SOURCES.map((each) => `${each.label} ${count(read ? read[each.name] : 0)}`).join(", ");
  show(root, tiles(page),
    h("section", { class: "card picture" }, h("h2", {}, "Prompt tokens per second, by where their KV came from"),
      legend(SOURCES, (each) => count(read ? read[each.name] : 0)),
      h("p", { class: "hint" }, read ? `at ${clock(read.at_s)}; arrow keys read earlier points` : "no points yet"),
      stackedArea({ points, series: SOURCES, width, height: 260, chosen, choose, label, unit: count })));
}

export const leave = () => { chosen = null; };
