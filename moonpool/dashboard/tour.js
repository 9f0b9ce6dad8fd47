// The tour (`moonpool serve --tour`): buttons that send a shared prefix, kill a worker and fill the pool, and what happens then.

import { call } from "./api.js";
import { bar } from "./charts.js";
import { recordOf } from "./chat.js";
import { h, show } from "./dom.js";
import { bytes, clock, count, percent, seconds } from "./format.js";

const TOKEN = "moonpool-tour", HEADER = "x-moonpool-tour";
const WORDS_PER_BLOCK = 60, BLOCKS = 4, ANSWER_TOKENS = 8;
const state = { token: sessionStorage.getItem(TOKEN) || "", allowed: null, error: null, busy: { prefix: false, kill: false, fill: false },
  lines: { prefix: [], kill: [], fill: [] }, worker: "", watch: null };
let redraw = () => {};

const ask = async (path, body) => {
  const headers = { [HEADER]: state.token, "Content-Type": "application/json" };
  return (await call(`/v1/tour${path}`, body, undefined, headers)).json();
};

function note(part, text, tone = "") {
  state.lines[part].push({ text: `${clock(Date.now() / 1e3)} ${text}`, tone });
  redraw();
}

async function check() {
  if (!state.token) return;
  try {
    await ask("");
    state.allowed = true;
    state.error = null;
    sessionStorage.setItem(TOKEN, state.token);
  } catch (error) {
    state.allowed = false;
    state.error = error.message;
  }
  redraw();
}

// The banner of the service links to #tour/TOKEN. The token leaves the address bar at once; it is kept in this tab.
export function enter(page, draw) {
  redraw = draw;
  const given = location.hash.split("/")[1];
  if (given) {
    state.token = decodeURIComponent(given);
    history.replaceState(null, "", "#tour");
  }
  if (page.status?.has_tour !== false) check();
}

// Runs the work of one button; its failure is a line beside the button.
async function run(part, work) {
  state.busy[part] = true;
  state.lines[part] = [];
  redraw();
  try {
    await work();
  } catch (error) {
    note(part, error.message, "bad");
  }
  state.busy[part] = false;
  redraw();
}

async function complete(page, prompt) {
  const body = { model: page.status.model, prompt, max_tokens: ANSWER_TOKENS, temperature: 0 };
  const answer = await (await call("/v1/completions", body)).json();
  return { usage: answer.usage, record: await recordOf(answer.id) };
}

const cachedOf = (usage) => usage.prompt_tokens_details?.cached_tokens || 0;

async function sendPrefix(page) {
  const name = Math.random().toString(36).slice(2);
  const story = `Ledger ${name}. ` + `The ${name} clerk copies page after page into a ledger that others keep as well. `.repeat(
    Math.ceil((WORDS_PER_BLOCK * BLOCKS * page.status.block_tokens) / 64 / 14));
  for (const [at, question] of ["What did the clerk copy?", "Who else keeps the ledger?"].entries()) {
    const { usage, record } = await complete(page, `${story}\n${question}`);
    const cached = cachedOf(usage), where = record ? `, ${record.prefill} → ${record.decode}, first token after ${seconds(record.measured_ttft_s)}` : "";
    note("prefix", `${at ? "second" : "first"} prompt: ${count(cached)} of ${count(usage.prompt_tokens)} tokens were cached` +
      ` (${percent(cached / usage.prompt_tokens)})${where}`, cached ? "good" : "");
  }
  note("prefix", "The two prompts begin alike: the second one computed only what differs.");
}

async function killWorker(page) {
  const name = state.worker || page.status.workers[0].name, began = performance.now();
  await ask("/kill", { worker: name });
  note("kill", `${name} was killed (SIGKILL)`);
  const since = () => seconds((performance.now() - began) / 1e3);
  await seen(name, false);
  note("kill", `${name} is gone after ${since()}: ${page.status.health.sentence}`, "bad");
  const { record } = await complete(page, `While ${name} is away, who answers? ${Math.random()}`);
  note("kill", record ? `a request sent meanwhile was answered by ${record.prefill} → ${record.decode}` : "a request sent meanwhile was answered", "good");
  await seen(name, true);
  note("kill", `${name} is back after ${since()}: ${page.status.health.sentence}`, "good");
}

// Resolves when a status shows the worker up or gone.
const seen = (name, isUp) => new Promise((resolve) => { state.watch = { name, isUp, resolve }; });

async function fillPool() {
  note("fill", "objects are being written");
  const done = await ask("/fill", {});
  note("fill", `${count(done.num_written)} objects (${bytes(done.written_nbytes)}) were written: the pool went from ${bytes(done.used_before_nbytes)} to` +
    ` ${bytes(done.used_most_nbytes)} of ${bytes(done.capacity_nbytes)}; eviction begins at ${percent(done.high_watermark)}`);
  note("fill", done.num_evicted ? `${count(done.num_evicted)} objects were evicted; those used least and longest ago go first`
    : "nothing was evicted: this pool is too large to be filled in 20 s; start the service with a smaller --dram", done.num_evicted ? "good" : "bad");
  note("fill", "The objects of this tour were removed again.");
}

function part(name, title, text, tools, button, work) {
  return h("section", { class: "card", "data-tour": name }, h("h2", {}, title), h("p", { class: "hint" }, text),
    h("div", { class: "tools" }, tools, h("button", { class: "main", disabled: state.busy[name], onclick: () => run(name, work) }, state.busy[name] ? "Under way" : button)),
    h("ul", { class: "rows", "aria-live": "polite" }, state.lines[name].map((line) => h("li", { class: line.tone && `said ${line.tone}` }, line.text))));
}

function tokenForm() {
  const submit = (event) => { event.preventDefault(); state.token = document.getElementById("token").value.trim(); check(); };
  return h("section", { class: "card" }, h("h2", {}, "The tour needs its token"),
    h("p", { class: "hint" }, "The start of the service prints an address that ends in #tour/TOKEN: open it, or type the token here. It is kept in this tab only."),
    state.error ? h("p", { class: "badge bad", role: "alert" }, state.error) : null,
    h("form", { class: "tools", onsubmit: submit }, h("label", { for: "token" }, "Token", h("input", { id: "token", type: "password", autocomplete: "off", "data-keep": true })),
      h("button", { class: "main" }, "Begin")));
}

function poolBars(page) {
  const segments = page.status.nodes.flatMap((node) => node.segments.filter((each) => each.tier === "dram").map((each) => [node.name, each]));
  return segments.map(([node, each]) => h("div", { class: "row" }, h("span", {}, node), h("span", { class: "hint" }, `${bytes(each.used_nbytes)} of ${bytes(each.capacity_nbytes)}`),
    bar([{ value: each.used_nbytes, kind: "dram" }], each.capacity_nbytes, `${node}: ${bytes(each.used_nbytes)} of ${bytes(each.capacity_nbytes)}`, [each.high_watermark])));
}

export function draw(root, page) {
  const watched = state.watch, workers = page.status.workers;
  const found = watched && workers.find((each) => each.name === watched.name);
  if (found && found.is_up === watched.isUp) {
    state.watch = null;
    watched.resolve();
  }
  if (!page.status.has_tour) {
    show(root, h("section", { class: "card" }, h("h2", {}, "Tour"), h("p", {}, "This service has no tour. Start it with ", h("code", {}, "moonpool serve --tour"), ".")));
    return;
  }
  if (!state.allowed) {
    show(root, state.token && state.allowed === null ? h("p", { class: "hint" }, "Checking the token.") : tokenForm());
    return;
  }
  const choice = h("label", {}, "Worker", h("select", { id: "victim", onchange: (event) => { state.worker = event.target.value; } },
    workers.map((each) => h("option", { value: each.name }, `${each.name} (${each.is_up ? "up" : "gone"})`))));
  show(root, h("div", { class: "two" },
    part("prefix", "A shared prefix is computed once", "Sends two prompts that begin alike. The KV of the first one's blocks is kept, in the worker's pages and in the pool; the second prompt finds it.",
      null, "Send both prompts", () => sendPrefix(page)),
    part("kill", "A worker dies", "Kills a worker as a crash would. Requests go on at the others, or wait for it if it was the only one; the launcher starts it again.",
      choice, "Kill it", () => killWorker(page)),
    part("fill", "The pool fills up", "Writes objects until the pool must evict. What is used often stays; the mark is where eviction begins.",
      h("div", { class: "rows wide" }, poolBars(page)), "Fill the pool", fillPool)));
}
