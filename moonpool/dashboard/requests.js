// The newest requests; a row opens the decision: candidates, what happened when, and earlier attempts.

import { call, getJson } from "./api.js";
import { bar, legend } from "./charts.js";
import { h, show } from "./dom.js";
import { clock, count, seconds, words } from "./format.js";

const POLL_MS = 2000, LIMIT = 1000;
const SOURCES = [{ kind: "own", label: "own pages" }, { kind: "dram", label: "pool DRAM" }, { kind: "ssd", label: "SSD" },
  { kind: "remote", label: "other machines" }, { kind: "computed", label: "computed" }];
const TERMS = [{ kind: "queue", label: "queue" }, { kind: "pull", label: "pull" }, { kind: "compute", label: "compute" },
  { kind: "handoff", label: "hand-off" }, { kind: "decode", label: "decode" }];
const state = { records: [], text: "", outcome: "", chosen: null, detail: null, timer: null, error: null };
let redraw = () => {}, dirty = true, epoch = -1, lastText = "";

async function load() {
  try {
    const text = await (await call(`/v1/records?limit=${LIMIT}`)).text();
    if (text === lastText && !state.error) return;
    lastText = text;
    state.records = JSON.parse(text).data.reverse();
    state.error = null;
  } catch (error) {
    state.error = error.message;
  }
  redraw();
}

export function enter(page, draw) {
  redraw = () => { dirty = true; draw(); };
  lastText = "";
  load();
  state.timer = setInterval(() => { if (!document.hidden) load(); }, POLL_MS);
}

export function leave() {
  clearInterval(state.timer);
  state.chosen = state.detail = null;
}

async function open(id) {
  state.chosen = id;
  state.detail = null;
  redraw();
  try {
    state.detail = (await getJson(`/v1/records/${encodeURIComponent(id)}`)).data[0];
  } catch (error) {
    state.detail = { record: state.records.find((each) => each.request_id === id), lines: [error.message] };
  }
  redraw();
  document.getElementById("detail")?.focus();
}

function sources(record) {
  const dram = record.pool_tokens - record.ssd_tokens - record.remote_tokens, own = record.cached_tokens - record.pool_tokens;
  const parts = [["own", own], ["dram", dram], ["ssd", record.ssd_tokens], ["remote", record.remote_tokens],
    ["computed", Math.max(0, record.num_tokens - record.cached_tokens)]];
  const label = parts.map(([kind, value]) => `${SOURCES.find((each) => each.kind === kind).label} ${value}`).join(", ");
  return record.measured_ttft_s === null ? h("span", { class: "hint" }, "–")
    : bar(parts.map(([kind, value]) => ({ kind, value })), record.num_tokens, `of ${record.num_tokens} prompt tokens: ${label}`);
}

const tone = (outcome) => (outcome === "done" ? "good" : outcome === "open" ? "" : outcome === "cancelled" ? "warn" : "bad");

function row(record) {
  return h("tr", { "aria-selected": record.request_id === state.chosen ? "true" : null },
    h("td", {}, clock(record.routed_at_s)),
    h("td", {}, h("button", { class: "link mono", onclick: () => open(record.request_id), "data-request": record.request_id }, record.request_id.slice(0, 12))),
    h("td", { class: "num" }, count(record.num_tokens)), h("td", {}, sources(record)),
    h("td", { class: "num" }, seconds(record.measured_ttft_s)), h("td", { class: "num" }, seconds(record.predicted_ttft_s)),
    h("td", {}, record.prefill ? `${record.prefill} → ${record.decode}` : "–"), h("td", { class: "num" }, count(record.output_tokens)),
    h("td", {}, h("span", { class: `badge ${tone(record.outcome)}` }, words(record.outcome)), record.attempt > 1 ? ` attempt ${record.attempt}` : ""));
}

function candidates(record) {
  const longest = Math.max(...record.candidates.map((each) => each.queue_s + each.transfer_s + each.prefill_s), 1e-9);
  return record.candidates.map((each) => {
    const ttft = each.queue_s + each.transfer_s + each.prefill_s - each.overlap_s;
    const label = `${each.worker}: queue ${seconds(each.queue_s)}, pull ${seconds(each.transfer_s)}, compute ${seconds(each.prefill_s)}, both at once ${seconds(each.overlap_s)}`;
    return h("div", { class: "cand" }, h(each.worker === record.prefill ? "b" : "span", {}, each.worker),
      bar([{ kind: "queue", value: each.queue_s }, { kind: "pull", value: each.transfer_s }, { kind: "compute", value: each.prefill_s }], longest, label),
      h("span", { class: "hint" }, `${seconds(ttft)} · ${each.local_blocks} own, ${each.pulled_blocks} pulled`));
  });
}

// What was measured: waiting for its turn, at the worker, loading and computing, hand-off, decode.
function timeline(record) {
  const parts = record.parts;
  if (!parts || record.ended_at_s === null) return h("p", { class: "hint" }, "No times were measured.");
  const handoff = parts.handoff_s ?? 0;  // after the first token
  const decode = Math.max(0, record.ended_at_s - record.routed_at_s - record.measured_ttft_s - handoff);
  const pull = Math.min(parts.pull_s, parts.compute_s);
  const steps = [["queue", record.waited_s + parts.queue_s, "queue"], ["pull", pull, "pull (beside computing)"],
    ["compute", parts.compute_s - pull, "compute"], ["handoff", handoff, "hand-off"], ["decode", decode, "decode"]];
  const label = steps.filter(([, value]) => value > 0).map(([, value, name]) => `${name} ${seconds(value)}`).join(", ");
  return h("div", { class: "rows" }, bar(steps.map(([kind, value]) => ({ kind, value })), 0, label), h("p", { class: "hint" }, label), layers(parts));
}

// When each layer of the KV had come from the pool: the model computes a layer as soon as it is there.
function layers(parts) {
  const ends = parts.pull_layers_s;
  if (!ends.length) return null;
  const gaps = ends.map((end, at) => end - (at ? ends[at - 1] : 0));
  const label = `pull of ${ends.length} layers: the first was there after ${seconds(ends[0])}, the last after ${seconds(ends.at(-1))}, the slowest took ${seconds(Math.max(...gaps))}`;
  return [bar(gaps.map((value, at) => ({ kind: at % 2 ? "pull" : "pull odd", value })), 0, label), h("p", { class: "hint", "data-layers": ends.length }, label)];
}

function attempts(record) {
  if (!record.earlier.length) return null;
  return [h("h3", {}, "Earlier attempts"), h("ul", { class: "lines" }, record.earlier.map((each) => h("li", {},
    `${clock(each.routed_at_s)}, ${seconds(each.ended_at_s - each.routed_at_s)}: ${each.prefill || "–"} → ${each.decode || "–"}, ${words(each.outcome)}` +
    (each.reason ? ` (${each.reason})` : ""))))];
}

function detail() {
  if (!state.chosen) return null;
  const found = state.detail;
  return h("section", { class: "card rows", id: "detail", tabindex: -1, "aria-label": "The decision" },
    h("div", { class: "tools" }, h("h2", {}, `Request ${state.chosen}`), h("button", { onclick: () => { state.chosen = state.detail = null; redraw(); } }, "Close")),
    !found ? h("p", { class: "hint" }, "Reading.") : [
      h("h3", {}, "Candidates, as predicted"), legend(TERMS), found.record.candidates.length ? candidates(found.record) : h("p", { class: "hint" }, "It was sent to no worker."),
      h("h3", {}, "What happened"), timeline(found.record), attempts(found.record),
      h("h3", {}, "Why"), h("div", { class: "lines" }, found.lines.map((line) => h("p", {}, line)))]);
}

function matches(record) {
  const text = state.text.toLowerCase();
  return (!state.outcome || record.outcome === state.outcome) &&
    (!text || [record.request_id, record.prefill, record.decode].some((each) => each && each.toLowerCase().includes(text)));
}

// Draws only what has changed: a thousand rows take a while.
export function draw(root, page) {
  if (!dirty && epoch === page.epoch && root.childElementCount) return;
  dirty = false;
  epoch = page.epoch;
  const began = performance.now();
  const rows = state.records.filter(matches);
  const outcomes = [...new Set(state.records.map((each) => each.outcome))].sort();
  show(root, detail(), h("section", { class: "card rows" }, h("h2", {}, "Requests"),
    h("div", { class: "tools" },
      h("label", {}, "Filter by id or worker", h("input", { type: "search", "data-keep": true, id: "filter", oninput: (event) => { state.text = event.target.value; redraw(); } })),
      h("label", {}, "Outcome", h("select", { id: "outcome", onchange: (event) => { state.outcome = event.target.value; redraw(); } },
        h("option", { value: "" }, "all"), outcomes.map((each) => h("option", { value: each }, words(each)))))),
    legend(SOURCES),
    state.error ? h("p", { class: "hint" }, state.error) : null,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Newest requests", "data-drawn": rows.length }, h("table", {},
      h("thead", {}, h("tr", {}, ["time", "id"].map((name) => h("th", {}, name)), h("th", { class: "num" }, "prompt"), h("th", {}, "reused and computed"),
        h("th", { class: "num" }, "TTFT"), h("th", { class: "num" }, "predicted"), h("th", {}, "prefill → decode"), h("th", { class: "num" }, "output"), h("th", {}, "outcome"))),
      h("tbody", {}, rows.map(row)))),
    rows.length ? null : h("p", { class: "hint" }, "No request yet, or none that matches.")));
  void root.offsetHeight; // the layout counts, too
  performance.measure("draw requests", { start: began });
}
