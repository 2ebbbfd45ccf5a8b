// Tasks of a run with their states, also those registered while it goes on, and rollouts that take long.

import { get, h, link, note, section, short, span, table, tiles } from "./dom.js";

const percent = (share) => (share === null || share === undefined ? "-" : `${(100 * share).toFixed(0)} %`);
const sum = (tasks, name) => tasks.reduce((total, [, task]) => total + (task[name] ?? 0), 0);
const failed = (task) => Object.values(task.failed ?? {}).reduce((a, b) => a + b, 0);

export async function show(page, query) {
  const { run } = query;
  const facts = h("div"), list = h("div"), slow = h("div"), when = h("div");
  page.classList.add("wide");
  page.append(h("h1", {}, "Tasks"), facts, section("States", list, when), section("Stragglers", slow));

  async function refresh() {
    const found = await get("/api/tasks", { run });
    const tasks = Object.entries(found.tasks);
    if (!found.time) {
      list.replaceChildren(note("No states of tasks in this run (tasks.json not found)."));
      return;
    }
    const age = Math.max(0, found.now - found.time);
    facts.replaceChildren(tiles([
      ["tasks", String(tasks.filter(([, task]) => task.state !== "removed").length)],
      ["running", short(sum(tasks, "running")), "rollouts"],
      ["waiting", short(sum(tasks, "waiting")), "rollouts that were issued, or that no worker has taken"],
      ["stragglers", short(found.stragglers.length), "run over three times the median of their task"],
    ]));
    list.replaceChildren(table(
      ["task", "state", "environment", "ratio", "running", "waiting", "pass rate", "mean reward", "groups trained", "filtered", "failed", "in flight"],
      tasks.map(([name, task]) => [
        h("a", { href: link("rollouts", { run, task: name }), class: "task" }, name),
        h("span", { class: `state ${task.state}`, title: task.disabled_reason }, task.state + (task.disabled_reason ? `: ${task.disabled_reason}` : "")),
        String(task.settings?.env ?? ""), short(task.ratio), short(task.running), short(task.waiting), percent(found.pass_rates[name]?.[0]), short(found.pass_rates[name]?.[1], 3),
        short(task.trained), short(task.filtered), short(failed(task)), short(task.in_flight),
      ]), 3));
    when.replaceChildren(note(`As of ${span(age)} ago. Pass rate: full rewards in the newest 512 groups.`));
    slow.replaceChildren(found.stragglers.length
      ? table(["rollout", "task", "runs for", "median of the task", "ratio"], found.stragglers.map((one) => [
          one.session_id, one.task, span(one.seconds), span(one.median_s), short(one.seconds / one.median_s, 3)]), 2)
      : note("None."));
  }
  await refresh();
  return refresh;
}
