// Rewards, and the groups behind them.

import { get, h, link, note, section, select, short, table, tiles } from "./dom.js";
import { colour, draw, plain } from "./plot.js";

export async function show(page, query) {
  const { run } = query;
  const go = (change) => { location.hash = link("rl", { ...query, ...change }); };
  const facts = h("div"), choices = h("div", { class: "choices" }), picture = h("div"), told = h("div"), list = h("div");
  page.append(h("h1", {}, "Rollouts"), facts, section("Rewards", choices, picture, told), section("Groups", list));

  async function look() {
    const found = await get("/api/rl", query);
    const all = found.balance;
    facts.replaceChildren(tiles([
      ["groups issued", short(all.issued), "attempts at one task, compared with each other"],
      ["trained", short(all.trained)], ["filtered", short(all.filtered), "nothing to learn from, too stale, or unused when the run ended"],
      ["failed", short(all.failed), "too few verdicts"], ["in flight", short(all.in_flight)],
      ["updates", short(found.updates.length)],
    ]));
    choices.replaceChildren(
      select("task", [["", "all"], ...found.tasks.map((task) => [task, task])], query.task, (task) => go({ task, low: "", high: "", before: "" })),
      select("status", [["", "all"], ...["trained", "filtered", "failed", "finished", "in flight"].map((s) => [s, s])], query.status, (status) => go({ status, low: "", high: "", before: "" })),
      select("update", [["", "newest"], ...found.updates.slice().reverse().map((n) => [n, String(n)])], query.update, (update) => go({ update, low: "", high: "", before: "" })));
    const { edges, counts } = found.histogram;
    const middles = edges.slice(1).map((edge, i) => (edge + edges[i]) / 2);
    const width = edges.length > 1 ? edges[1] - edges[0] : 1;
    const inside = (x) => query.low === undefined || (x >= +query.low && x <= +query.high);
    await draw(picture, Object.entries(counts).map(([task, y], i) => ({
      type: "bar", name: plain(task), x: middles, y, width,
      marker: { color: colour(`c${i % 4}`), opacity: middles.map((x) => (inside(x) ? 1 : 0.3)), line: { width: 0 } },
      customdata: edges.slice(1).map((edge, at) => [short(edges[at], 3), short(edge, 3)]),
      hovertemplate: "%{y} attempts<br>reward %{customdata[0]} to %{customdata[1]}<extra>%{fullData.name}</extra>",
    })), {
      barmode: "stack", showlegend: Object.keys(counts).length > 1,
      xaxis: { title: { text: "reward" } }, yaxis: { title: { text: "attempts" } },
    }, { high: 240, clicked: (point) => {
      const at = point.pointNumber;
      go({ low: edges[at] - 1e-9, high: edges[at + 1] + 1e-9, before: "" });
    } });
    const some = query.low !== undefined;
    told.replaceChildren(h("p", { class: "lead" },
      `${found.attempts.toLocaleString("en")} attempts of the ${found.looked_at.toLocaleString("en")} newest groups of this choice. `,
      some ? h("a", { href: link("rl", { ...query, low: "", high: "" }) }, `Only groups with a reward of ${short(+query.low, 3)} to ${short(+query.high, 3)}; show all`) : "A click on a bar shows the groups behind it."));
    list.replaceChildren(groups(found, query));
  }

  function groups(found) {
    if (!found.groups.length) return note("None.");
    const rows = found.groups.map((group) => [
      h("a", { href: link("group", { run, ordinal: group.ordinal }), class: "group" }, `${group.task} ${group.number}`),
      group.status + (group.reason ? `: ${group.reason}` : ""), marks(group),
      String(group.update), short(mean(group.rewards), 3), short(group.tokens, 3),
    ]);
    const last = found.groups.at(-1).ordinal;
    const more = found.more || found.chosen > found.groups.length;
    return h("div", {}, table(["group", "status", "rewards", "update", "mean reward", "tokens"], rows, 3),
      more ? h("p", {}, h("a", { href: link("rl", { ...query, before: last }) }, "older groups")) : null);
  }

  await look();
  return query.before ? null : look;
}

const mean = (values) => {
  const found = values.filter((value) => value !== null);
  return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null;
};

// A bar for each attempt, as high as its reward; a cross where there is none.
function marks(group) {
  const rewards = group.rewards.filter((r) => r !== null);
  const low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  return h("span", { class: "marks", role: "img", "aria-label": group.rewards.map((r, i) => (r === null ? group.failed[i] : short(r, 3))).join(", ") },
    group.rewards.map((reward, i) => reward === null
      ? h("i", { class: "lost", title: group.failed[i] }, "×")
      : h("i", { title: short(reward, 3), style: { "--share": `${(100 * (reward - low)) / (high - low)}%` } })));
}
