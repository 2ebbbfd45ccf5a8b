// Failed rollouts by kind, and groups that were not trained.

import { get, h, link, note, section, short, table } from "./dom.js";
import { colour, draw, plain } from "./plot.js";

export async function show(page, query) {
  const { run } = query;
  const groups = h("div"), rollouts = h("div"), chart = h("div");
  page.append(h("h1", {}, "Failures"),
    section("Failed rollouts", chart, rollouts),
    section("Groups not trained", groups));

  async function refresh() {
    const found = await get("/api/failures", query);
    const { step, kinds } = found.by_step;
    const names = Object.keys(kinds);
    chart.hidden = !names.length;
    if (names.length) await draw(chart, names.map((kind, i) => ({ type: "bar", name: plain(kind), x: step, y: kinds[kind], marker: { color: colour(`c${i % 4}`) }, hovertemplate: "%{y} rollouts<extra>%{fullData.name}</extra>" })),
      { barmode: "stack", showlegend: true, xaxis: { title: { text: "step" } }, yaxis: { title: { text: "rollouts" } } }, { high: 220 });
    rollouts.replaceChildren(found.rollouts.length
      ? table(["kind", "where", "message", "task", "rollouts", ""], found.rollouts.map((one) => [
          one.kind, one.where, one.message, one.task, short(one.count),
          h("a", { href: link("tokens", { run, ordinal: one.ordinal, rollout: one.rollout }) }, "show last")]), 4)
      : note(`None in the ${found.window.toLocaleString("en")} newest groups.`));
    const untrained = found.groups.filter((one) => one.reason);
    const trained = found.groups.filter((one) => !one.reason).reduce((sum, one) => sum + one.count, 0);
    groups.replaceChildren(untrained.length
      ? table(["task", "status", "reason", "groups", ""], untrained.map((one) => [one.task, one.status, one.reason, short(one.count), h("a", { href: link("rollouts", { run, task: one.task, status: one.status }) }, "show")]), 3)
      : note("None."), note(`${short(trained)} other groups were trained or are in flight.`));
  }
  await refresh();
  return refresh;
}
