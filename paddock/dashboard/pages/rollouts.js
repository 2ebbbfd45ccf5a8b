// Histogram of rewards, and the list of groups.

import { get, h, link, note, section, select, short, table, tiles } from "./dom.js";
import { colour, draw, plain } from "./plot.js";

export async function show(page, query) {
  const { run } = query;
  const go = (change) => { location.hash = link("rollouts", { ...query, ...change }); };
  const facts = h("div"), choices = h("div", { class: "choices" }), chart = h("div"), caption = h("div"), list = h("div");
  page.append(h("h1", {}, "Rollouts"), facts, section("Rewards", choices, chart, caption), section("Groups", list));

  async function refresh() {
    const found = await get("/api/rollouts", query);
    const all = found.counts;
    facts.replaceChildren(tiles([
      ["groups issued", short(all.issued), "rollouts of one task that share a baseline"],
      ["trained", short(all.trained)], ["filtered", short(all.filtered), "zero variance, too stale, or unused at the end"],
      ["failed", short(all.failed), "too few valid rollouts"], ["in flight", short(all.in_flight)],
      ["steps", short(found.steps.length)],
    ]));
    choices.replaceChildren(
      select("task", [["", "all"], ...found.tasks.map((task) => [task, task])], query.task, (task) => go({ task, low: "", high: "", before: "" })),
      select("status", [["", "all"], ...["trained", "filtered", "failed", "finished", "in flight"].map((s) => [s, s])], query.status, (status) => go({ status, low: "", high: "", before: "" })),
      select("step", [["", "newest"], ...found.steps.slice().reverse().map((n) => [n, String(n)])], query.step, (step) => go({ step, low: "", high: "", before: "" })));
    const { edges, counts } = found.histogram;
    const middles = edges.slice(1).map((edge, i) => (edge + edges[i]) / 2);
    const width = edges.length > 1 ? edges[1] - edges[0] : 1;
    const inside = (x) => query.low === undefined || (x >= +query.low && x <= +query.high);
    await draw(chart, Object.entries(counts).map(([task, y], i) => ({
      type: "bar", name: plain(task), x: middles, y, width,
      marker: { color: colour(`c${i % 4}`), opacity: middles.map((x) => (inside(x) ? 1 : 0.3)), line: { width: 0 } },
      customdata: edges.slice(1).map((edge, at) => [short(edges[at], 3), short(edge, 3)]),
      hovertemplate: "%{y} rollouts<br>reward %{customdata[0]} to %{customdata[1]}<extra>%{fullData.name}</extra>",
    })), {
      barmode: "stack", showlegend: Object.keys(counts).length > 1,
      xaxis: { title: { text: "reward" } }, yaxis: { title: { text: "rollouts" } },
    }, { high: 240, clicked: (point) => {
      const at = point.pointNumber;
      go({ low: edges[at] - 1e-9, high: edges[at + 1] + 1e-9, before: "" });
    } });
    const filtered = query.low !== undefined;
    caption.replaceChildren(h("p", { class: "lead" },
      `${found.rollouts.toLocaleString("en")} rollouts of the ${found.window.toLocaleString("en")} newest groups selected. `,
      filtered ? h("a", { href: link("rollouts", { ...query, low: "", high: "" }) }, `Only groups with a reward of ${short(+query.low, 3)} to ${short(+query.high, 3)}; show all`) : "Click a bar to show its groups."));
    list.replaceChildren(groups(found, query));
  }

  function groups(found) {
    if (!found.groups.length) return note("None.");
    const rows = found.groups.map((group) => [
      h("a", { href: link("group", { run, ordinal: group.ordinal }), class: "group" }, `${group.task} ${group.number}`),
      group.status + (group.reason ? `: ${group.reason}` : ""), marks(group),
      String(group.step), short(mean(group.rewards), 3), short(group.mean_tokens, 3),
    ]);
    const last = found.groups.at(-1).ordinal;
    const more = found.more || found.matching > found.groups.length;
    return h("div", {}, table(["group", "status", "rewards", "step", "mean reward", "mean sampled tokens"], rows, 3),
      more ? h("p", {}, h("a", { href: link("rollouts", { ...query, before: last }) }, "older groups")) : null);
  }

  await refresh();
  return query.before ? null : refresh;
}

const mean = (values) => {
  const found = values.filter((value) => value !== null);
  return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null;
};

// A bar per rollout, as high as its reward; a cross for a failed one.
function marks(group) {
  const rewards = group.rewards.filter((r) => r !== null);
  const low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  return h("span", { class: "marks", role: "img", "aria-label": group.rewards.map((r, i) => (r === null ? group.failures[i] : short(r, 3))).join(", ") },
    group.rewards.map((reward, i) => reward === null
      ? h("i", { class: "lost", title: group.failures[i] }, "×")
      : h("i", { title: short(reward, 3), style: { "--share": `${(100 * (reward - low)) / (high - low)}%` } })));
}
