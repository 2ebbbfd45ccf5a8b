// List of all runs, and curves of the selected ones.

import { get, h, link, note, section, select, short, span } from "./dom.js";
import { draw, plain, series } from "./plot.js";

const MAX_SELECTED = 8; // runs selected at first
let selected = null, metric = null, xAxis = "step", smooth = true; // kept between visits

export async function show(page) {
  const place = h("div", { class: "curves" }), choices = h("div", { class: "choices" });
  const list = h("div");
  let found = await get("/api/runs");
  page.classList.add("wide");
  page.append(h("h1", {}, "Runs"));
  if (!found.runs.length) page.append(note("No runs found. A run is a folder with metrics.jsonl or events.jsonl."));
  if (found.engine) page.append(h("p", {}, h("a", { href: link("engine") }, "Live engine")));
  page.append(section("Curves", choices, place), section("All runs", list));

  const metrics = () => [...new Set(found.runs.flatMap((run) => run.metrics))];
  if (!metrics().includes(metric)) metric = ["reward", "val_loss", "loss"].find((name) => metrics().includes(name)) ?? metrics()[0];
  const having = () => found.runs.filter((run) => run.metrics.includes(metric));
  selected ??= new Set(having().slice(0, MAX_SELECTED).map((run) => run.run));

  function controls() {
    choices.replaceChildren(
      select("metric", metrics().map((name) => [name, name.replaceAll("_", " ")]), metric, (value) => {
        metric = value;
        if (!having().some((run) => selected.has(run.run))) selected = new Set(having().slice(0, MAX_SELECTED).map((run) => run.run));
        rows(); curves();
      }),
      select("x-axis", [["step", "steps"], ["tokens", "tokens"], ["seconds", "time"]], xAxis, (value) => { xAxis = value; curves(); }),
      h("label", { class: "choice" }, h("input", { type: "checkbox", checked: smooth, onchange: (event) => { smooth = event.target.checked; curves(); } }), " smoothing"));
  }

  async function curves() {
    const wanted = found.runs.filter((run) => selected.has(run.run) && run.metrics.includes(metric));
    const data = wanted.length ? await get("/api/curves", { metric, run: wanted.map((run) => run.run), smooth: smooth ? Math.max(1, Math.round(Math.max(...wanted.map((run) => run.step)) / 100)) : 0 }) : {};
    const traces = [];
    let unit = "", log = false;
    wanted.forEach((run, i) => {
      const one = data[run.run];
      if (!one) return;
      const x = one[xAxis].length ? one[xAxis] : one.step;
      const style = series(i);
      unit = [one.title, one.unit].filter(Boolean).join(", "); log = one.log;
      const line = { x, type: "scatter", mode: one.marks || one.y.length < 3 ? "lines+markers" : "lines", hovertemplate: "%{y:.5g}<extra>%{fullData.name}</extra>" };
      if (one.smooth.length) traces.push({ ...line, y: one.y, name: plain(run.run), showlegend: false, hoverinfo: "skip", hovertemplate: null, line: { ...style, width: 1 }, opacity: 0.25 });
      traces.push({ ...line, y: one.smooth.length ? one.smooth : one.y, name: plain(run.run), line: { ...style, width: 2 } });
    });
    const xTitle = { step: "steps", tokens: "tokens", seconds: "seconds since the first step" }[xAxis];
    await draw(place, traces, {
      showlegend: wanted.length > 0, hovermode: "x unified",
      xaxis: { title: { text: xTitle }, rangemode: "tozero" }, yaxis: { title: { text: unit }, type: log ? "log" : "linear" },
    }, { high: 360 });
  }

  function rows() {
    const head = ["", "run", "stage", "status", "step", "metric", "elapsed", "last update", ""];
    list.replaceChildren(h("div", { class: "scroll" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, head.map((text, i) => h("th", { class: [4, 5, 6].includes(i) ? "number" : null }, text)))),
      h("tbody", {}, found.runs.map((run) => {
        const box = h("input", { type: "checkbox", checked: selected.has(run.run), disabled: !run.metrics.includes(metric), "aria-label": `plot ${run.run}`,
          onchange: (event) => { event.target.checked ? selected.add(run.run) : selected.delete(run.run); curves(); } });
        const to = (name, text) => h("a", { href: link(name, { run: run.run }) }, text);
        const report = h("a", { href: `/report?${new URLSearchParams({ run: run.run })}` }, "report");
        return h("tr", { "data-run": run.run },
          h("td", {}, box),
          h("td", {}, run.ledger ? to("rollouts", run.run) : report.cloneNode(false).appendChild(document.createTextNode(run.run)).parentNode),
          h("td", {}, run.pipeline ? "pipeline" : run.stage),
          h("td", {}, h("span", { class: `status ${run.status}` }, run.status)),
          h("td", { class: "number" }, run.of || run.step ? `${run.step.toLocaleString("en")}${run.of ? " of " + run.of.toLocaleString("en") : ""}` : ""),
          h("td", { class: "number" }, run.metric ? `${run.metric.replaceAll("_", " ")} ${short(run.value)}` : ""),
          h("td", { class: "number" }, run.seconds ? span(run.seconds) : ""),
          h("td", { class: "when" }, run.last_update ? `${span(Math.max(0, found.now - run.last_update))} ago` : ""),
          h("td", { class: "links" }, report, run.ledger ? [to("rollouts", "rollouts"), to("timeline", "timeline"), to("failures", "failures"), to("engine", "engine")] : null, run.pipeline ? null : to("network", "network")));
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
