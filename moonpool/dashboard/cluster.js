// Machines with their workers and nodes, and what moves between them.

import { bar, legend } from "./charts.js";
import { h, s, show } from "./dom.js";
import { bytes, count, many, rate } from "./format.js";

const PAGES = [
  { kind: "used", label: "used" }, { kind: "reserved", label: "reserved for hand-offs" },
  { kind: "cached", label: "cached, reusable" }, { kind: "free", label: "free" },
];

function workerRow(worker) {
  const free = worker.num_pages - worker.used_pages - worker.reserved_pages - worker.cached_pages;
  const label = `${worker.name}: of ${many(worker.num_pages, "page")} ${worker.used_pages} used, ${worker.reserved_pages} reserved, ` +
    `${worker.cached_pages} cached, ${free} free`;
  return h("li", { class: worker.is_up ? "row" : "row gone", "data-worker": worker.name },
    h("span", {}, h("b", { class: "name" }, worker.name), " ",
      h("span", { class: `badge ${worker.is_up ? worker.is_late ? "warn" : "good" : "bad"}` },
        worker.is_up ? worker.is_late ? "late" : "up" : "gone"), " ",
      h("span", { class: "badge" }, worker.is_elastic ? `${worker.role}, elastic` : worker.role)),
    h("span", { class: "hint" }, worker.is_late ? "its engine does not go on; requests go to others" : worker.is_up
      ? `batch ${worker.num_running} of ${worker.max_num_seqs} · queue ${worker.num_waiting}` : "its requests continue elsewhere"),
    bar(worker.is_up ? [{ value: worker.used_pages, kind: "used" }, { value: worker.reserved_pages, kind: "reserved" },
      { value: worker.cached_pages, kind: "cached" }] : [], worker.num_pages, label));
}

function segmentRow(segment) {
  const label = `${segment.tier.toUpperCase()}: ${bytes(segment.used_nbytes)} of ${bytes(segment.capacity_nbytes)}, ` +
    `eviction begins at ${Math.round(segment.high_watermark * 100)} %`;
  return h("div", { class: "row" }, h("span", {}, segment.tier.toUpperCase(), " ",
      segment.status === "ok" ? null : h("span", { class: "badge warn" }, segment.status)),
    h("span", { class: "hint" }, `${bytes(segment.used_nbytes)} of ${bytes(segment.capacity_nbytes)} · ${many(segment.num_objects, "block")}`),
    bar([{ value: segment.used_nbytes, kind: segment.tier }], segment.capacity_nbytes, label, [segment.high_watermark]));
}

function nodeRow(node) {
  return h("li", { class: "rows", "data-node": node.name },
    h("span", {}, h("b", {}, node.name), " ", h("span", { class: `badge ${node.is_up ? "good" : "bad"}` }, node.is_up ? "up" : "gone")),
    node.segments.map(segmentRow));
}

function machine(name, workers, nodes) {
  return h("section", { class: "card" }, h("h2", {}, name === "this machine" ? "This machine" : `Machine ${name}`),
    workers.length ? h("ul", { class: "rows" }, workers.map(workerRow)) : null,
    workers.length ? h("div", {}, h("p", { class: "hint" }, "KV pages:"), legend(PAGES)) : null,
    nodes.length ? h("h3", {}, "Pool on this machine (the mark is where eviction begins)") : null,
    nodes.length ? h("ul", { class: "rows" }, nodes.map(nodeRow)) : null);
}

// Boxes of prefill workers, the pool and decode workers, and the bytes per second between them.
function flow(status, width) {
  const columns = [status.workers.filter((each) => each.role === "prefill"), [{ name: "pool", is_up: status.pool?.is_up }],
    status.workers.filter((each) => each.role !== "prefill")];
  const box = { width: Math.min(150, width * 0.26), height: 34, gap: 30 };
  const tallest = Math.max(columns[0].length, columns[2].length, 1);
  const height = tallest * (box.height + box.gap) + 26;
  const left = [1, (width - box.width) / 2, width - box.width - 1]; // the strokes of the outer boxes need a pixel
  const middle = (column, at) => 20 + ((at + 0.5) * (height - 26)) / Math.max(1, columns[column].length);
  const edge = (from, to, value, kind, text, above) => {
    const [x1, y1] = from, [x2, y2] = to, bend = (x1 + x2) / 2;
    return s("g", {},
      s("path", { d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`, class: value > 0 ? kind : "", "stroke-width": value > 0 ? 1.5 + Math.min(4, Math.log10(1 + value / 1e5)) : 1 }),
      value > 0 ? s("text", { class: "rate", x: bend, y: (y1 + y2) / 2 + (above ? -6 : 14), "text-anchor": "middle" }, text) : null);
  };
  const pool = middle(1, 0), edges = [];
  columns[0].forEach((each, at) => {
    const y = middle(0, at);
    edges.push(edge([left[0] + box.width, y - 6], [left[1], pool - 6], each.pool_read_nbytes_s, "busy", `← ${rate(each.pool_read_nbytes_s)}`, true));
    edges.push(edge([left[0] + box.width, y + 6], [left[1], pool + 6], each.pool_written_nbytes_s, "busy", `→ ${rate(each.pool_written_nbytes_s)}`, false));
  });
  columns[2].forEach((each, at) => edges.push(
    edge([left[1] + box.width, pool], [left[2], middle(2, at)], each.pool_written_nbytes_s, "busy", `← ${rate(each.pool_written_nbytes_s)}`, true)));
  const handed = columns[0].reduce((sum, each) => sum + each.handoff_nbytes_s, 0);
  return s("svg", { class: "flow", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Transfers: hand-offs from prefill to decode workers ${rate(handed)}; ` + status.workers.map((each) =>
        `${each.name} reads ${rate(each.pool_read_nbytes_s)} from the pool and writes ${rate(each.pool_written_nbytes_s)}`).join("; ") },
    s("text", { class: "rate", x: width / 2, y: 12, "text-anchor": "middle" }, `hand-offs from prefill to decode: ${rate(handed)}`),
    edges,
    columns.flatMap((boxes, column) => boxes.map((each, at) => s("g", {},
      s("rect", { x: left[column], y: middle(column, at) - box.height / 2, width: box.width, height: box.height, rx: 7, class: each.is_up ? "" : "away" }),
      s("text", { x: left[column] + box.width / 2, y: middle(column, at) + 5, "text-anchor": "middle" }, each.name)))));
}

// The width that an element's padding leaves for its content; 0 without an element.
function inner(element) {
  if (!element) return 0;
  const style = getComputedStyle(element);
  return element.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
}

// What the extra replicas of hot keys take, and what they saved; empty if there were none.
function hot(counters) {
  if (!counters.hot_objects && !counters.hot_replicas) return "";
  return ` Hot keys: ${many(counters.hot_objects, "block")} with extra replicas (${bytes(counters.hot_bytes)}); readers took about ${bytes(counters.hot_saved_bytes)} from them.`;
}

export function draw(root, { status }) {
  const names = [...new Set([...status.workers, ...status.nodes].map((each) => each.machine))].sort();
  const width = Math.max(280, inner(root.querySelector(".moves")) || inner(root) - 34); // 34: padding and border of a card; 280: before the layout
  const counters = status.pool?.counters || {};
  show(root,
    h("section", { class: "card moves" }, h("h2", {}, "Transfers"), flow(status, width),
      h("p", { class: "hint" }, !status.pool ? "This service has no pool." : !status.pool.is_up ? "The pool's master does not answer; requests run without the pool."
        : `The pool holds ${many(status.pool.num_objects, "block")}; ${count(counters.hits || 0)} look-ups found theirs, ${count(counters.misses || 0)} did not.${hot(counters)}`)),
    h("div", { class: "two" }, names.map((name) => machine(name,
      status.workers.filter((each) => each.machine === name), status.nodes.filter((each) => each.machine === name)))));
}
