// Talk to the model. Under each answer: time to first token, cached tokens, and the workers that computed it.

import { call, getJson } from "./api.js";
import { h, show } from "./dom.js";
import { count, percent, seconds } from "./format.js";

const SAMPLE = "Here is a short story. " +
  "A river town kept its ledgers in one deep cellar, and every clerk copied the same pages each morning before work could begin. ".repeat(6) +
  "One day they left the copied pages on a shared table. In one sentence: what did that save?";
const state = { turns: [], busy: null, error: null };
let redraw = () => {};

export function enter(page, draw) {
  redraw = draw;
}

function messagesBefore(turn) {
  const before = state.turns.slice(0, state.turns.indexOf(turn));
  return [...before.flatMap((each) => [{ role: "user", content: each.question }, { role: "assistant", content: each.answer }]),
    { role: "user", content: turn.question }];
}

// Reads server-sent events and calls `take` with each.
async function events(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") take(JSON.parse(line.slice(6)));
  }
}

// Returns the record of a request that has ended; null if there is none after a second.
export async function recordOf(id) {
  for (let tries = 0; tries < 10; tries++) {
    try {
      const { record } = (await getJson(`/v1/records/${id}`)).data[0];
      if (record.ended_at_s !== null) return record;
    } catch {
      // the conductor hears of the end a moment after the client
    }
    await new Promise((resume) => setTimeout(resume, 100));
  }
  return null;
}

async function ask(turn, page) {
  const messages = messagesBefore(turn);
  const run = { ttft: null, cached: null, prompt: null, record: null };
  turn.answer = "";
  turn.runs.push(run);
  state.busy = new AbortController();
  state.error = null;
  redraw();
  const began = performance.now();
  try {
    const body = { model: page.status.model, messages, stream: true, max_tokens: 64, temperature: 0, stream_options: { include_usage: true } };
    const response = await call("/v1/chat/completions", body, state.busy.signal);
    let id = null;
    await events(response, (event) => {
      if (event.error) throw new Error(event.error.message);
      id = event.id || id;
      const piece = event.choices?.[0]?.delta?.content;
      if (piece) {
        run.ttft ??= (performance.now() - began) / 1e3;
        turn.answer += piece;
      }
      if (event.usage) {
        run.prompt = event.usage.prompt_tokens;
        run.cached = event.usage.prompt_tokens_details.cached_tokens;
      }
      redraw();
    });
    run.record = id && (await recordOf(id));
  } catch (error) {
    if (error.name !== "AbortError") state.error = error.message;
  }
  state.busy = null;
  redraw();
}

function facts(run, number, page) {
  if (run.prompt === null) return null;
  const hit = run.cached > 0, size = page.status.block_tokens;
  const short = !hit && run.prompt <= size ? ` (a prompt shorter than one block of ${size} tokens is not kept)` : "";
  return h("p", { class: "facts", "data-run": number, "data-cached": run.cached },
    number > 1 ? `sent again (${number}):` : null,
    h("span", { class: `badge ${hit ? "good" : ""}` }, hit ? `hit: ${percent(run.cached / run.prompt)} reused` : "computed"),
    `first token ${seconds(run.ttft)}`, `· ${count(run.cached)} of ${count(run.prompt)} prompt tokens cached${short}`,
    run.record ? `· ${run.record.prefill} → ${run.record.decode}` : null);
}

function turnView(turn, page) {
  const isLast = turn === state.turns.at(-1);
  return h("li", { class: "turn" }, h("p", { class: "said user" }, turn.question),
    h("p", { class: "said" }, turn.answer || (state.busy ? "…" : "")),
    turn.runs.map((run, at) => facts(run, at + 1, page)),
    isLast && !state.busy ? h("div", {}, h("button", { onclick: () => ask(turn, page), "data-again": true }, "Send again")) : null);
}

function send(event, page) {
  event.preventDefault();
  const input = document.getElementById("question"), question = input.value.trim();
  if (!question || state.busy) return;
  const turn = { question, answer: "", runs: [] };
  state.turns.push(turn);
  input.value = "";
  ask(turn, page);
}

export function draw(root, page) {
  const keys = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event, page); };
  show(root, h("section", { class: "card talk" }, h("h2", {}, `Talk to ${page.status.model}`),
    h("p", { class: "hint" }, "“Send again” sends the same prompt once more: its KV is then found instead of computed."),
    h("ul", { class: "talk" }, state.turns.map((turn) => turnView(turn, page))),
    state.error ? h("p", { class: "badge bad", role: "alert" }, state.error) : null,
    h("form", { class: "ask", onsubmit: (event) => send(event, page) },
      h("label", { for: "question", class: "hint" }, "Your message (Ctrl+Enter sends it)"),
      h("textarea", { id: "question", "data-keep": true, onkeydown: keys }),
      h("div", { class: "tools" }, h("button", { class: "main", disabled: state.busy !== null }, "Send"),
        h("button", { type: "button", onclick: () => { document.getElementById("question").value = SAMPLE; } }, "Use a long sample"),
        state.busy ? h("button", { type: "button", onclick: () => state.busy?.abort() }, "Stop") : null,
        state.turns.length && !state.busy ? h("button", { type: "button", onclick: () => { state.turns = []; redraw(); } }, "New conversation") : null))));
}
