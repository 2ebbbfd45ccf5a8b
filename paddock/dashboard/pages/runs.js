// All runs, and some of their curves over each other.

import { get, h, link, note, section, select, short, span } from "./dom.js";
import { draw, plain, series } from "./plot.js";

const MOST = 8; // curves chosen at first
let chosen = null, metric = null, across = "step", smooth = true; // as left by the last visit

export async function show(page) {
  const place = h("div", { class: "curves" }), choices = h("div", { class: "choices" });
  const list = h("div");
  let found = await get("/api/runs");
  page.classList.add("wide");
  page.append(h("h1", {}, "Runs"));
  if (!found.runs.length) page.append(note("No run in these folders yet. A run is a folder with metrics.jsonl or events.jsonl."));
  if (found.engine) page.append(h("p", {}, h("a", { href: link("engine") }, "The engine that is watched")));
  page.append(section("Curves", choices, place), section("All of them", list));

  const metrics = () => [...new Set(found.runs.flatMap((run) => run.metrics))];
  if (!metrics().includes(metric)) metric = ["reward", "held_out", "loss"].find((name) => metrics().includes(name)) ?? metrics()[0];
  const having = () => found.runs.filter((run) => run.metrics.includes(metric));
  chosen ??= new Set(having().slice(0, MOST).map((run) => run.run));

  function controls() {
    choices.replaceChildren(
      select("metric", metrics().map((name) => [name, name.replaceAll("_", " ")]), metric, (value) => {
        metric = value;
        if (!having().some((run) => chosen.has(run.run))) chosen = new Set(having().slice(0, MOST).map((run) => run.run));
        rows(); curves();
      }),
      select("over", [["step", "steps"], ["tokens", "tokens"], ["seconds", "time"]], across, (value) => { across = value; curves(); }),
      h("label", { class: "choice" }, h("input", { type: "checkbox", checked: smooth, onchange: (event) => { smooth = event.target.checked; curves(); } }), " averaged"));
  }

  async function curves() {
    const wanted = found.runs.filter((run) => chosen.has(run.run) && run.metrics.includes(metric));
    const asked = wanted.length ? await get("/api/curves", { metric, run: wanted.map((run) => run.run), smooth: smooth ? Math.max(1, Math.round(Math.max(...wanted.map((run) => run.step)) / 100)) : 0 }) : {};
    const traces = [];
    let unit = "", log = false;
    wanted.forEach((run, i) => {
      const one = asked[run.run];
      if (!one) return;
      const x = one[across].length ? one[across] : one.step;
      const look = series(i);
      unit = one.unit || one.title; log = one.log;
      const line = { x, type: "scatter", mode: one.marks || one.y.length < 3 ? "lines+markers" : "lines", hovertemplate: "%{y:.5g}<extra>%{fullData.name}</extra>" };
      if (one.smooth.length) traces.push({ ...line, y: one.y, name: plain(run.run), showlegend: false, hoverinfo: "skip", hovertemplate: null, line: { ...look, width: 1 }, opacity: 0.25 });
      traces.push({ ...line, y: one.smooth.length ? one.smooth : one.y, name: plain(run.run), line: { ...look, width: 2 } });
    });
    const over = { step: "steps", tokens: "tokens", seconds: "seconds since the first step" }[across];
    await draw(place, traces, {
      showlegend: wanted.length > 0, hovermode: "x unified",
      xaxis: { title: { text: over }, rangemode: "tozero" }, yaxis: { title: { text: unit }, type: log ? "log" : "linear" },
    }, { high: 360 });
  }

  function rows() {
    const head = ["", "run", "stage", "", "step", "", "worked", "last word", ""];
    list.replaceChildren(h("div", { class: "scroll" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, head.map((text, i) => h("th", { class: [4, 5, 6].includes(i) ? "number" : null }, text)))),
      h("tbody", {}, found.runs.map((run) => {
        const box = h("input", { type: "checkbox", checked: chosen.has(run.run), disabled: !run.metrics.includes(metric), "aria-label": `draw ${run.run}`,
          onchange: (event) => { event.target.checked ? chosen.add(run.run) : chosen.delete(run.run); curves(); } });
        const to = (name, text) => h("a", { href: link(name, { run: run.run }) }, text);
        const report = h("a", { href: `/report?${new URLSearchParams({ run: run.run })}` }, run.plan ? "story" : "report");
        return h("tr", { "data-run": run.run },
          h("td", {}, box),
          h("td", {}, run.ledger ? to("rl", run.run) : report.cloneNode(false).appendChild(document.createTextNode(run.run)).parentNode),
          h("td", {}, run.plan ? "plan" : run.stage),
          h("td", {}, h("span", { class: `status ${run.status}` }, run.status)),
          h("td", { class: "number" }, run.of || run.step ? `${run.step.toLocaleString("en")}${run.of ? " of " + run.of.toLocaleString("en") : ""}` : ""),
          h("td", { class: "number" }, run.metric ? `${run.metric.replaceAll("_", " ")} ${short(run.value)}` : ""),
          h("td", { class: "number" }, run.seconds ? span(run.seconds) : ""),
          h("td", { class: "when" }, run.seen ? `${span(Math.max(0, found.now - run.seen))} ago` : ""),
          h("td", { class: "links" }, report, run.ledger ? [to("rl", "rollouts"), to("timeline", "timeline"), to("failures", "failures"), to("engine", "engine")] : null, run.plan ? null : to("network", "network")));
      })))));
  }

  controls(); rows();
  await curves();
  return async () => {
    const focused = document.activeElement?.closest("table.runs");
    found = await get("/api/runs");
    if (!focused) rows();
    await curves();
  };
}
