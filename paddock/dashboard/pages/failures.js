// What went wrong, by reason.

import { get, h, link, note, section, short, table } from "./dom.js";
import { colour, draw, plain } from "./plot.js";

export async function show(page, query) {
  const { run } = query;
  const groups = h("div"), attempts = h("div"), picture = h("div");
  page.append(h("h1", {}, "Failures"),
    section("Attempts without a verdict", picture, attempts),
    section("Groups that were not trained", groups));

  async function look() {
    const found = await get("/api/failures", query);
    const { step, kinds } = found.by_step;
    const names = Object.keys(kinds);
    picture.hidden = !names.length;
    if (names.length) await draw(picture, names.map((kind, i) => ({ type: "bar", name: plain(kind), x: step, y: kinds[kind], marker: { color: colour(`c${i % 4}`) }, hovertemplate: "%{y} attempts<extra>%{fullData.name}</extra>" })),
      { barmode: "stack", showlegend: true, xaxis: { title: { text: "update" } }, yaxis: { title: { text: "attempts" } } }, { high: 220 });
    attempts.replaceChildren(found.attempts.length
      ? table(["kind", "place", "what", "task", "attempts", ""], found.attempts.map((one) => [
          one.kind, one.place, one.what, one.task, short(one.count),
          h("a", { href: link("tokens", { run, ordinal: one.ordinal, member: one.member }) }, "the last")]), 4)
      : note(`None among the ${found.looked_at.toLocaleString("en")} newest groups.`));
    const lost = found.groups.filter((one) => one.reason);
    const trained = found.groups.filter((one) => !one.reason).reduce((sum, one) => sum + one.count, 0);
    groups.replaceChildren(lost.length
      ? table(["task", "why", "reason", "groups", ""], lost.map((one) => [one.task, one.status, one.reason, short(one.count), h("a", { href: link("rl", { run, task: one.task, status: one.status }) }, "show")]), 3)
      : note("None."), note(`${short(trained)} others were trained, or are on their way.`));
  }
  await look();
  return look;
}
