// How good the conductor's predictions are: measured against predicted, and the errors by quantile.

import { getJson } from "./api.js";
import { scatter } from "./charts.js";
import { h, show } from "./dom.js";
import { count, many, percent, rate, seconds } from "./format.js";

const NAMES = { prefill: "prefill of a prompt", decode: "one decode step", transfer: "pull from memory", transfer_ssd: "pull from SSD", handoff: "hand-off after the prompt",
  ttft: "time to first token", tbt: "time between tokens", decode_load: "sequences that decode" };
let records = [];

export async function enter(page, redraw) {
  try {
    records = (await getJson("/v1/records?limit=1000")).data;
  } catch {
    records = [];
  }
  redraw();
}

function advice(found) {
  if (!found) return "Nothing has been measured yet.";
  if (found.min_tokens === null) return "By what was measured, computing is always faster than fetching KV from the pool.";
  const bandwidth = found.measured_nbytes_s ? ` (${rate(found.measured_nbytes_s)})` : ""; // null: infinite, as seen so far
  const speed = found.pulled_tokens_s && found.computed_tokens_s
    ? ` A prefix of ${count(found.at_tokens)} tokens is pulled at ${count(found.pulled_tokens_s)} tokens/s${bandwidth} and computed at ${count(found.computed_tokens_s)} tokens/s.` : "";
  return `Prefixes from ${found.min_tokens} token${found.min_tokens === 1 ? "" : "s"} on are worth fetching.${speed}`;
}

export function draw(root, { status }) {
  const points = records.filter((each) => each.outcome === "done" && each.predicted_ttft_s > 0 && each.measured_ttft_s > 0)
    .map((each) => [each.predicted_ttft_s, each.measured_ttft_s]);
  const width = Math.min(720, Math.max(280, root.clientWidth - 60));
  show(root, h("div", { class: "two" },
    h("section", { class: "card" }, h("h2", {}, "Time to first token: measured against predicted"),
      points.length ? scatter(points, Math.min(width, 560), 340, seconds) : h("p", { class: "hint" }, "No request has ended yet."),
      h("p", { class: "hint" }, `${many(points.length, "request")}; on the dashed line a prediction is exact, above it the request was slower.`)),
    h("section", { class: "card" }, h("h2", {}, "Errors, relative to what was measured"),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Prediction errors" }, h("table", {},
        h("thead", {}, h("tr", {}, h("th", {}, "what"), h("th", { class: "num" }, "p50"), h("th", { class: "num" }, "p90"), h("th", { class: "num" }, "bias"), h("th", { class: "num" }, "measured"))),
        h("tbody", {}, status.predictions.map((each) => h("tr", {}, h("td", {}, NAMES[each.model] || each.model),
          h("td", { class: "num" }, each.count ? percent(each.p50) : "–"), h("td", { class: "num" }, each.count ? percent(each.p90) : "–"),
          h("td", { class: "num" }, each.count ? percent(each.bias) : "–"), h("td", { class: "num" }, count(each.count))))))),
      h("h2", {}, "Fetch or compute"), h("p", {}, advice(status.fetch_or_compute)))));
}
