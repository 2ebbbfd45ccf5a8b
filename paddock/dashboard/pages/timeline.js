// When each rollout ran, and when none did.

import { get, h, link, note, section, span, tiles } from "./dom.js";
import { colour, draw, plain } from "./plot.js";

export async function show(page, query) {
  const { run } = query;
  const facts = h("div"), picture = h("div"), count = h("div"), more = h("p");
  page.append(h("h1", {}, "Timeline"), facts, section("Rollouts", note("One bar a rollout, in as few lanes as hold them; a click opens it. Shaded: nothing ran."), picture),
    section("How many ran", count), more);

  async function look() {
    const found = await get("/api/timeline", query);
    if (!found.bars.length) {
      facts.replaceChildren(note("This run wrote down no times of its rollouts (rollouts.jsonl)."));
      return;
    }
    const low = Math.min(...found.bars.map((bar) => bar.began)), high = Math.max(...found.bars.map((bar) => bar.ended));
    const idle = found.gaps.reduce((sum, [from, to]) => sum + to - from, 0);
    const busy = found.bars.reduce((sum, bar) => sum + bar.ended - bar.began, 0);
    const longest = found.bars.reduce((a, b) => (b.ended - b.began > a.ended - a.began ? b : a));
    facts.replaceChildren(tiles([
      ["rollouts", String(found.bars.length), `over ${span(high - low)}`],
      ["idle", span(idle), `${((100 * idle) / (high - low || 1)).toFixed(1)} % of the time, in ${found.gaps.length} gaps`],
      ["ran at once", (busy / (high - low || 1)).toFixed(1), `mean; at most ${Math.max(...found.running.map(([, n]) => n))}`],
      ["longest", span(longest.ended - longest.began), longest.session ?? ""],
    ]));
    const at = (seconds) => seconds - low;
    const kinds = [...new Set(found.bars.map((bar) => (bar.failed ? "failed" : bar.task)))].sort((a, b) => (a === "failed") - (b === "failed"));
    const traces = kinds.map((kind, i) => {
      const bars = found.bars.filter((bar) => (bar.failed ? "failed" : bar.task) === kind);
      return {
        type: "bar", orientation: "h", name: plain(kind), base: bars.map((bar) => at(bar.began)), x: bars.map((bar) => Math.max(bar.ended - bar.began, (high - low) / 2000)),
        y: bars.map((bar) => bar.lane), width: 0.82, marker: { color: kind === "failed" ? colour("bad") : colour(`c${i % 4}`), line: { width: 0 } },
        customdata: bars.map((bar) => [plain(bar.task), bar.number, bar.member, span(bar.ended - bar.began), plain(bar.failed || (bar.reward === null || bar.reward === undefined ? "" : `reward ${bar.reward}`)), bar.tokens ?? "", bar.task]),
        hovertemplate: "%{customdata[0]} %{customdata[1]}, attempt %{customdata[2]}<br>%{customdata[3]}, %{customdata[5]} tokens<br>%{customdata[4]}<extra></extra>",
      };
    });
    const gaps = found.gaps.map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: at(from), x1: at(to), y0: 0, y1: 1, fillcolor: colour("c1"), opacity: 0.14, line: { width: 0 }, layer: "below" }));
    const updates = found.updates.map((update) => ({ type: "line", xref: "x", yref: "paper", x0: at(update.ended), x1: at(update.ended), y0: 0, y1: 1, line: { color: colour("soft"), width: 1, dash: "dot" } }));
    const lanes = Math.max(...found.bars.map((bar) => bar.lane)) + 1;
    const range = [0, high - low];
    await draw(picture, traces, {
      barmode: "overlay", shapes: [...gaps, ...updates], showlegend: kinds.length > 1,
      xaxis: { title: { text: "seconds; dotted: an update ends" }, range }, yaxis: { title: { text: "lane" }, range: [lanes - 0.4, -0.6], showgrid: false },
    }, { high: Math.min(640, 130 + 9 * lanes), clicked: async (point) => {
      const [, number, member, , , , task] = point.customdata;
      const { ordinal } = await get("/api/find", { run, task, number });
      if (ordinal !== null) location.hash = link("tokens", { run, ordinal, member });
    } });
    await draw(count, [{
      type: "scatter", mode: "lines", line: { shape: "hv", color: colour("c0"), width: 1.5 }, fill: "tozeroy",
      x: found.running.map(([moment]) => at(moment)), y: found.running.map(([, n]) => n), hovertemplate: "%{y} ran<extra></extra>",
    }], { shapes: gaps, xaxis: { title: { text: "seconds" }, range }, yaxis: { title: { text: "rollouts" }, rangemode: "tozero" } }, { high: 200 });
    more.replaceChildren(...(found.before ? [h("a", { href: link("timeline", { run, before: found.before }) }, "earlier rollouts")] : []), ...(query.before ? [" ", h("a", { href: link("timeline", { run }) }, "newest")] : []));
  }
  await look();
  return query.before ? null : look;
}
