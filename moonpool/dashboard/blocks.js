// What lies where: the tree of prefixes over nodes and tiers, and the life of one block.

import { call, getJson } from "./api.js";
import { legend } from "./charts.js";
import { h, show } from "./dom.js";
import { bytes, count, many } from "./format.js";

const TIERS = [{ kind: "dram", label: "DRAM" }, { kind: "ssd", label: "SSD" }, { kind: "used", label: "DRAM and SSD" }];
const CELL = 9, GAP = 1, MOST_TREES = 200;
const state = { blocks: [], trees: [], cells: [], total: 0, next: null, pages: [{ cursor: 0, before: 0 }], chosen: null, detail: null, cursor: 0, error: null, loading: false, open: null };
let redraw = () => {}, dirty = true, epoch = -1;

// Rows of the answer as objects; children and trees by way of the parents' positions.
function read(answer) {
  const blocks = answer.blocks.map((row, at) => ({ at, ...Object.fromEntries(answer.fields.map((name, column) => [name, row[column]])), children: [] }));
  const roots = [];
  for (const block of blocks) {
    const parent = block.parent >= 0 ? blocks[block.parent] : null;
    if (parent && parent !== block) parent.children.push(block);
    else roots.push(block);
  }
  const trees = roots.map((root) => {
    const members = [], waiting = [root];
    while (waiting.length) {
      const block = waiting.pop();
      members.push(block);
      waiting.push(...[...block.children].reverse());
    }
    return { root, members, uses: Math.max(...members.map((each) => each.uses)), nbytes: members.reduce((sum, each) => sum + each.nbytes, 0) };
  });
  trees.sort((one, two) => two.uses - one.uses || two.members.length - one.members.length);
  const leaves = blocks.filter((each) => !each.children.length && each.rank !== null && !each.is_kept).sort((one, two) => one.rank - two.rank);
  leaves.slice(0, Math.max(1, Math.ceil(leaves.length / 20))).forEach((each) => { each.goes_next = true; });
  Object.assign(state, { blocks, trees, cells: trees.flatMap((tree) => tree.members), total: answer.total, next: answer.next, segments: answer.segments });
}

// Reads one part of the pool; only this part is kept, so a pool of any size can be looked through.
async function load() {
  state.loading = true;
  redraw();
  try {
    read(await getJson(`/v1/blocks?cursor=${state.pages.at(-1).cursor}`));
    state.cursor = 0;
    state.error = null;
  } catch (error) {
    state.error = error.message;
  }
  state.loading = false;
  redraw();
}

function forward() {
  state.pages.push({ cursor: state.next, before: state.pages.at(-1).before + state.blocks.length });
  load();
}

function back() {
  state.pages.pop();
  load();
}

export function enter(page, draw) {
  redraw = () => { dirty = true; draw(); };
  state.pages = [{ cursor: 0, before: 0 }];
  load();
}

export const leave = () => { state.chosen = state.detail = null; };

const tierOf = (block) => {
  const tiers = new Set(block.segments.map((number) => state.segments[number].tier));
  return tiers.size > 1 ? "used" : [...tiers][0] || "free";
};

async function choose(block) {
  state.chosen = block;
  state.detail = null;
  state.cursor = state.cells.indexOf(block);
  redraw();
  try {
    state.detail = await getJson(`/v1/blocks/${block.key}`);
  } catch (error) {
    state.detail = { why: error.message, replicas: [] };
  }
  redraw();
  document.getElementById("life")?.focus();
}

async function verify() {
  const block = state.chosen;
  state.detail = { ...state.detail, verified: "Reading and checking every byte." };
  redraw();
  try {
    state.detail = { ...state.detail, verified: (await (await call(`/v1/blocks/${block.key}/verify`, {})).json()).sentence };
  } catch (error) {
    state.detail = { ...state.detail, verified: error.message };
  }
  redraw();
}

function paint(canvas) {
  const width = canvas.clientWidth, columns = Math.max(1, Math.floor(width / (CELL + GAP)));
  const rows = Math.max(1, Math.ceil(state.cells.length / columns)), ratio = devicePixelRatio || 1;
  const height = rows * (CELL + GAP);
  canvas.style.height = `${height}px`;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colour = Object.fromEntries(["dram", "ssd", "own", "free", "ink", "bad"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
  colour.used = colour.own;
  pen.scale(ratio, ratio);
  state.cells.forEach((block, at) => {
    const x = (at % columns) * (CELL + GAP), y = Math.floor(at / columns) * (CELL + GAP);
    pen.globalAlpha = 0.45 + 0.11 * Math.min(5, block.uses);
    pen.fillStyle = colour[tierOf(block)];
    pen.fillRect(x, y, CELL, CELL);
    pen.globalAlpha = 1;
    if (block.parent < 0) { pen.fillStyle = colour.ink; pen.fillRect(x, y, 2, CELL); }
    if (block.goes_next) { pen.fillStyle = colour.bad; pen.fillRect(x + 3, y + 3, 3, 3); }
    if (at === state.cursor) { pen.strokeStyle = colour.ink; pen.lineWidth = 2; pen.strokeRect(x, y, CELL, CELL); }
  });
  canvas.dataset.drawn = state.cells.length;
  canvas.columns = columns;
}

function map() {
  const at = (event) => {
    const box = event.currentTarget.getBoundingClientRect(), columns = event.currentTarget.columns;
    return Math.floor((event.clientY - box.top) / (CELL + GAP)) * columns + Math.floor((event.clientX - box.left) / (CELL + GAP));
  };
  const keys = (event) => {
    const columns = event.currentTarget.columns;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (step) state.cursor = Math.min(state.cells.length - 1, Math.max(0, state.cursor + step));
    else if (event.key === "Enter" && state.cells[state.cursor]) choose(state.cells[state.cursor]);
    else return;
    event.preventDefault();
    redraw();
  };
  return h("canvas", { id: "map", tabindex: 0, role: "img", "data-blocks": state.cells.length,
    "aria-label": `Map of ${many(state.cells.length, "block")} in the order of their prefixes. Arrow keys move, Enter opens a block.`,
    onclick: (event) => { const block = state.cells[at(event)]; if (block) choose(block); }, onkeydown: keys });
}

function life() {
  const block = state.chosen, found = state.detail;
  if (!block) return null;
  return h("section", { class: "card rows", id: "life", tabindex: -1, "aria-label": "The life of a block" },
    h("div", { class: "tools" }, h("h2", {}, "Block"), h("button", { onclick: () => { state.chosen = null; redraw(); } }, "Close")),
    h("dl", { class: "facts2" }, h("dt", {}, "key"), h("dd", { class: "mono" }, block.key), h("dt", {}, "size"), h("dd", {}, bytes(block.nbytes)),
      h("dt", {}, "used again"), h("dd", {}, block.uses >= 5 ? "5 times or more" : many(block.uses, "time")),
      h("dt", {}, "continued by"), h("dd", {}, many(block.children.length, "stored block")),
      h("dt", {}, "life"), h("dd", { "data-why": true }, found ? found.why : "Reading."),
      found ? [h("dt", {}, "replicas"), h("dd", {}, found.replicas.map((each) => `${each.node} (${each.tier.toUpperCase()})`).join(", ") || "none")] : null,
      found?.verified ? [h("dt", {}, "verified"), h("dd", { "data-verified": true }, found.verified)] : null),
    h("div", {}, h("button", { onclick: verify, disabled: !found, id: "verify" }, "Verify its bytes")));
}

function treeRow(tree) {
  const tiers = {};
  tree.members.forEach((each) => { const kind = tierOf(each); tiers[kind] = (tiers[kind] || 0) + 1; });
  const isOpen = state.open === tree.root.key;
  return [h("tr", {},
    h("td", {}, h("button", { class: "link mono", "aria-expanded": isOpen ? "true" : "false", onclick: () => { state.open = isOpen ? null : tree.root.key; redraw(); } }, tree.root.key.slice(0, 16))),
    h("td", { class: "num" }, count(tree.members.length)), h("td", { class: "num" }, bytes(tree.nbytes)),
    h("td", { class: "num" }, tree.uses >= 5 ? "5 or more" : tree.uses), h("td", {}, Object.entries(tiers).map(([kind, number]) => `${TIERS.find((each) => each.kind === kind)?.label || "nowhere"} ${number}`).join(", ")),
    h("td", { class: "num" }, tree.members.filter((each) => each.goes_next).length || "")),
  isOpen ? h("tr", {}, h("td", { colspan: 6 }, h("div", { class: "tools" }, tree.members.slice(0, 100).map((block, at) =>
    h("button", { onclick: () => choose(block), "aria-label": `Block ${at + 1} of this prefix` }, at + 1)),
    tree.members.length > 100 ? h("span", { class: "hint" }, `and ${tree.members.length - 100} more on the map`) : null))) : null];
}

function range() {
  const { before } = state.pages.at(-1), number = (value) => value.toLocaleString("en");
  if (!before && state.next === null) return `${many(state.blocks.length, "block")}. `;
  return `Blocks ${number(before + 1)} to ${number(before + state.blocks.length)} of ${number(state.total)}; a prefix may go on in another part. `;
}

// Draws only what has changed.
export function draw(root, page) {
  if (!dirty && epoch === page.epoch && root.childElementCount) return;
  dirty = false;
  epoch = page.epoch;
  const began = performance.now();
  const nodes = state.segments ? state.segments.map((segment, number) => {
    const held = state.blocks.filter((block) => block.segments.includes(number)).length;
    return `${segment.node} ${segment.tier.toUpperCase()}: ${many(held, "block")}`;
  }).join(" · ") : "";
  show(root, life(), h("section", { class: "card rows" },
    h("div", { class: "tools" }, h("h2", {}, "Blocks of the pool, hottest prefixes first"), h("button", { onclick: load, disabled: state.loading }, "Read again"),
      state.pages.length > 1 ? h("button", { id: "back", onclick: back, disabled: state.loading }, "Blocks before these") : null,
      state.next !== null ? h("button", { id: "forward", onclick: forward, disabled: state.loading }, "Blocks after these") : null),
    state.error ? h("p", { class: "badge bad", role: "alert" }, state.error) : null,
    h("p", { class: "hint" }, h("span", { "data-range": true }, range()),
      "Each square is a block; a dark edge begins a prefix, stronger colour was reused more often, a red point goes next when room is needed. ", nodes),
    legend(TIERS), state.cells.length ? map() : h("p", { class: "hint" }, state.loading ? "Reading." : "The pool holds no blocks.")),
  state.trees.length ? h("section", { class: "card" }, h("h2", {}, "Prefixes"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Prefixes" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "first block"), h("th", { class: "num" }, "blocks"), h("th", { class: "num" }, "size"), h("th", { class: "num" }, "reused"), h("th", {}, "tiers"), h("th", { class: "num" }, "go next"))),
    h("tbody", {}, state.trees.slice(0, MOST_TREES).map(treeRow)))),
    state.trees.length > MOST_TREES ? h("p", { class: "hint" }, `and ${state.trees.length - MOST_TREES} more prefixes`) : null) : null);
  const canvas = document.getElementById("map");
  if (canvas) paint(canvas);
  void root.offsetHeight; // the layout counts, too
  performance.measure("draw blocks", { start: began });
}
