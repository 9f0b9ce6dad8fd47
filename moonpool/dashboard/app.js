// The page: header, tabs, one view at a time. The status is read every second while the page is visible.

import { ApiError, getJson, hasKey, setKey } from "./api.js";
import * as blocks from "./blocks.js";
import * as chat from "./chat.js";
import * as cluster from "./cluster.js";
import { h, show } from "./dom.js";
import { duration } from "./format.js";
import * as overview from "./overview.js";
import * as predictions from "./predictions.js";
import * as requests from "./requests.js";
import * as tour from "./tour.js";

const VIEWS = { overview, cluster, residency: blocks, requests, predictions, chat, tour };
const TITLES = { overview: "Overview", cluster: "Cluster", residency: "Residency", requests: "Requests", predictions: "Predictions", chat: "Chat", tour: "Tour" };
const POLL_MS = 1000, KEPT_POINTS = 450, THEME = "moonpool-theme";

const page = { status: null, points: [], error: null, name: "", tabs: "", epoch: 0 }; // epoch: changes when everything must be drawn again
const $ = (id) => document.getElementById(id);

function wanted() {
  const name = location.hash.slice(1).split("/")[0];
  return name in VIEWS ? name : "overview";
}

function theme() {
  const chosen = localStorage.getItem(THEME);
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}

function nextTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  localStorage.setItem(THEME, now === "dark" ? "light" : "dark");
  theme();
  page.epoch++;
  draw();
}

function fact(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

function drawHead() {
  const status = page.status;
  show($("head"),
    h("h1", {}, h("img", { src: "icon.svg", alt: "" }), "Moonpool"),
    h("dl", {}, status ? [
      fact("model", status.model), fact("policy", status.policy || "–"),
      fact("up", duration(status.at_s - status.started_at_s)), fact("version", status.version)] : null),
    h("span", { class: "grow" }),
    page.error ? h("span", { class: "health unavailable", id: "health" }, page.error.message)
      : status ? h("span", { class: `health ${status.health.status}`, id: "health" }, status.health.sentence) : null,
    h("button", { onclick: nextTheme, "aria-label": "Change between light and dark" }, "◐"),
    hasKey() ? h("button", { onclick: () => { setKey(""); location.reload(); } }, "Forget the key") : null);
}

function drawTabs() {
  const names = Object.keys(VIEWS).filter((name) => name !== "tour" || page.name === "tour" || page.status?.has_tour);
  show($("tabs"), names.map((name) =>
    h("a", { href: `#${name}`, "aria-current": name === page.name ? "page" : null }, TITLES[name])));
  const shown = page.status ? `${page.name} of ${names}` : "";
  if (shown === page.tabs) return;
  page.tabs = shown; // a narrow window shows some tabs only
  document.querySelector("nav a[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
}

function drawKeyForm() {
  const input = h("input", { id: "key", type: "password", autocomplete: "off", "data-keep": true });
  const submit = (event) => { event.preventDefault(); setKey($("key").value); page.error = null; poll(); };
  show($("view"), h("section", { class: "card" }, h("h2", {}, "This service needs an API key"),
    h("p", { class: "hint" }, "A tenant's key shows that tenant's requests; an admin key shows everything. It is kept in this tab only."),
    h("form", { class: "tools", onsubmit: submit }, h("label", { for: "key" }, "API key", input), h("button", { class: "main" }, "Show"))));
}

function draw() {
  drawHead();
  drawTabs();
  if (page.error && page.error.status === 401) drawKeyForm();
  else if (page.status) VIEWS[page.name].draw($("view"), page);
  else show($("view"), h("p", { class: "hint" }, page.error ? "Waiting for the service." : "Reading the status."));
}

async function poll() {
  try {
    const since = page.points.length ? page.points.at(-1).at_s : 0;
    const status = await getJson(`/v1/status?since=${since}`);
    const fields = status.history.fields;
    const fresh = status.history.points.map((row) => Object.fromEntries(fields.map((name, at) => [name, row[at]])));
    page.points = [...page.points, ...fresh].slice(-KEPT_POINTS);
    page.status = status;
    page.error = null;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    page.error = error;
  }
  draw();
}

async function loop() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((resume) => setTimeout(resume, POLL_MS));
  }
}

function go() {
  const name = wanted();
  if (name !== page.name) {
    VIEWS[page.name]?.leave?.();
    page.name = name;
    $("view").replaceChildren();
    document.title = `${TITLES[name]} – Moonpool`;
    VIEWS[name].enter?.(page, draw);
  }
  draw();
}

addEventListener("hashchange", go);
addEventListener("resize", () => { page.epoch++; draw(); });
theme();
go();
loop();
