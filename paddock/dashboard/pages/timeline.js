// When each rollout ran, concurrency over time, idle spans.

import { get, h, link, note, section, span, tiles } from "./dom.js";
import { colour, draw, plain } from "./plot.js";

export async function show(page, query) {
  const { run } = query;
  const facts = h("div"), chart = h("div"), count = h("div"), more = h("p");
  page.append(h("h1", {}, "Timeline"), facts, section("Rollouts", note("One bar per rollout; click a bar to open it. Shaded: idle."), chart),
    section("Concurrent rollouts", count), more);

  async function refresh() {
    const found = await get("/api/timeline", query);
    if (!found.bars.length) {
      facts.replaceChildren(note("No rollout timings in this run (rollouts.jsonl not found)."));
      return;
    }
    const low = Math.min(...found.bars.map((bar) => bar.started)), high = Math.max(...found.bars.map((bar) => bar.finished));
    const idle = found.idle.reduce((sum, [from, to]) => sum + to - from, 0);
    const busy = found.bars.reduce((sum, bar) => sum + bar.finished - bar.started, 0);
    const longest = found.bars.reduce((a, b) => (b.finished - b.started > a.finished - a.started ? b : a));
    facts.replaceChildren(tiles([
      ["rollouts", String(found.bars.length), `over ${span(high - low)}`],
      ["idle", span(idle), `${((100 * idle) / (high - low || 1)).toFixed(1)} % of the time, in ${found.idle.length} spans`],
      ["concurrency", (busy / (high - low || 1)).toFixed(1), `mean; max ${Math.max(...found.concurrency.map(([, n]) => n))}`],
      ["longest", span(longest.finished - longest.started), longest.session ?? ""],
    ]));
    const at = (seconds) => seconds - low;
    const kinds = [...new Set(found.bars.map((bar) => (bar.failure ? "failed" : bar.task)))].sort((a, b) => (a === "failed") - (b === "failed"));
    const traces = kinds.map((kind, i) => {
      const bars = found.bars.filter((bar) => (bar.failure ? "failed" : bar.task) === kind);
      return {
        type: "bar", orientation: "h", name: plain(kind), base: bars.map((bar) => at(bar.started)), x: bars.map((bar) => Math.max(bar.finished - bar.started, (high - low) / 2000)),
        y: bars.map((bar) => bar.lane), width: 0.82, marker: { color: kind === "failed" ? colour("bad") : colour(`c${i % 4}`), line: { width: 0 } },
        customdata: bars.map((bar) => [plain(bar.task), bar.number, bar.rollout, span(bar.finished - bar.started), plain(bar.failure || (bar.reward === null || bar.reward === undefined ? "" : `reward ${bar.reward}`)), bar.tokens ?? "", bar.task]),
        hovertemplate: "%{customdata[0]} %{customdata[1]}, rollout %{customdata[2]}<br>%{customdata[3]}, %{customdata[5]} tokens<br>%{customdata[4]}<extra></extra>",
      };
    });
    const idleSpans = found.idle.map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: at(from), x1: at(to), y0: 0, y1: 1, fillcolor: colour("c1"), opacity: 0.14, line: { width: 0 }, layer: "below" }));
    const stepEnds = found.steps.map((step) => ({ type: "line", xref: "x", yref: "paper", x0: at(step.finished), x1: at(step.finished), y0: 0, y1: 1, line: { color: colour("soft"), width: 1, dash: "dot" } }));
    const lanes = Math.max(...found.bars.map((bar) => bar.lane)) + 1;
    const range = [0, high - low];
    await draw(chart, traces, {
      barmode: "overlay", shapes: [...idleSpans, ...stepEnds], showlegend: kinds.length > 1,
      xaxis: { title: { text: "seconds; dotted: end of a step" }, range }, yaxis: { title: { text: "lane" }, range: [lanes - 0.4, -0.6], showgrid: false },
    }, { high: Math.min(640, 130 + 9 * lanes), clicked: async (point) => {
      const [, number, rollout, , , , task] = point.customdata;
      const { ordinal } = await get("/api/group_id", { run, task, number });
      if (ordinal !== null) location.hash = link("tokens", { run, ordinal, rollout });
    } });
    await draw(count, [{
      type: "scatter", mode: "lines", line: { shape: "hv", color: colour("c0"), width: 1.5 }, fill: "tozeroy",
      x: found.concurrency.map(([time]) => at(time)), y: found.concurrency.map(([, n]) => n), hovertemplate: "%{y} running<extra></extra>",
    }], { shapes: idleSpans, xaxis: { title: { text: "seconds" }, range }, yaxis: { title: { text: "rollouts" }, rangemode: "tozero" } }, { high: 200 });
    more.replaceChildren(...(found.before ? [h("a", { href: link("timeline", { run, before: found.before }) }, "earlier rollouts")] : []), ...(query.before ? [" ", h("a", { href: link("timeline", { run }) }, "newest")] : []));
  }
  await refresh();
  return query.before ? null : refresh;
}
