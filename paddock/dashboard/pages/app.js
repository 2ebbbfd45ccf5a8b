// Router: the part of the address behind the hash selects the page.

import { get, h, link } from "./dom.js";

const PAGES = {
  "": () => import("./runs.js"),
  rollouts: () => import("./rollouts.js"),
  group: () => import("./group.js"),
  tokens: () => import("./tokens.js"),
  tasks: () => import("./tasks.js"),
  timeline: () => import("./timeline.js"),
  failures: () => import("./failures.js"),
  engine: () => import("./engine.js"),
  network: () => import("./network.js"),
};
const LEDGER_TABS = ["rollouts", "tasks", "timeline", "failures", "engine"]; // of runs with a ledger
const TABS = ["network"]; // of every run
const REFRESH_MS = 3000;
const main = document.getElementById("main");
const live = document.getElementById("live");
let shown = 0; // number of the visit: a late response must not draw over a newer page
let refresh = null;

function where() {
  const [page, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { page, query: Object.fromEntries(new URLSearchParams(query)) };
}

const ledgers = new Map(); // run -> whether it has a ledger
async function tabs(page, run) {
  const place = document.getElementById("tabs");
  const current = { group: "rollouts", tokens: "rollouts" }[page] ?? page;
  const put = () => place.replaceChildren(...(run
    ? [h("b", {}, run), h("a", { href: `/report?${new URLSearchParams({ run })}` }, "report"),
       ...[...(ledgers.get(run) ? LEDGER_TABS : []), ...TABS].map((name) =>
         h("a", { href: link(name, { run }), "aria-current": current === name ? "page" : null }, name))]
    : page === "engine" ? [h("b", {}, "engine")] : []));
  put();
  if (!run || ledgers.get(run)) return;
  for (const each of (await get("/api/runs")).runs) ledgers.set(each.run, each.ledger);
  if (where().query.run === run) put();
}

async function show() {
  const visit = ++shown, address = location.hash;
  const { page, query } = where();
  refresh = null;
  tabs(page, query.run).catch(() => {}); // the page itself shows the error
  document.title = [query.run, page || "runs", "Paddock"].filter(Boolean).join(" / ");
  const inside = h("div", { class: "page" });
  main.replaceChildren(inside);
  try {
    if (!PAGES[page]) throw new Error(`page '${page}' not found`);
    const module = await PAGES[page]();
    const again = await module.show(inside, query);
    if (visit === shown) refresh = again ?? null;
  } catch (error) {
    if (visit === shown) inside.append(h("p", { class: "note" }, error.message));
  }
  if (visit === shown) Object.assign(main.dataset, { ready: page || "runs", address });
}

let busy = false;
async function tick() {
  if (!live.checked || document.hidden || busy || !refresh) return;
  busy = true;
  try {
    await refresh();
  } catch {
    // keep what is shown; the next refresh may succeed
  } finally {
    busy = false;
  }
}

addEventListener("hashchange", () => { delete main.dataset.ready; scrollTo(0, 0); show(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
setInterval(tick, REFRESH_MS);
show();
