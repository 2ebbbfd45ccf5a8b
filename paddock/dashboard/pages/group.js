// The rollouts of a group, side by side.

import { get, h, link, note, short, tiles } from "./dom.js";
import { messageList } from "./messages.js";

export async function show(page, query) {
  const { run, ordinal } = query;
  const found = await get("/api/group", { run, ordinal });
  page.classList.add("wide");
  const shared = sharedMessages(found.rollouts.filter((rollout) => rollout.branches).map((rollout) => rollout.messages));
  page.append(
    h("p", { class: "lead" }, h("a", { href: link("rollouts", { run }) }, "rollouts"), ` / group ${ordinal}`),
    h("h1", {}, `${found.task} ${found.number}`),
    tiles([
      ["status", found.status, found.reason], ["step", String(found.step)],
      ["rollouts", `${found.rewards.length} of ${found.size}`], ["mean sampled tokens", short(found.mean_tokens, 3)],
    ]),
    shared.length ? h("section", {}, h("h2", {}, "Shared prompt"), messageList(shared)) : "",
    h("section", {}, h("h2", {}, "Rollouts"),
      found.rollouts.length ? h("div", { class: "cards" }, found.rollouts.map((rollout) => card(rollout, shared.length))) : note("No finished rollouts."),
      found.not_shown ? note(`${found.not_shown} more rollouts are not shown.`) : ""));

  function card(rollout, skip) {
    const reward = rollout.failure ? h("span", { class: "status stopped" }, rollout.failure) : h("span", { class: `reward${rollout.reward > 0 ? " some" : ""}` }, `reward ${short(rollout.reward, 3)}`);
    const parts = Object.entries(rollout.parts).map(([name, value]) => `${name} ${short(value, 3)}`).join(", ");
    const versions = rollout.oldest === null ? "" : rollout.oldest === rollout.newest ? `weight version ${rollout.oldest}` : `weight versions ${rollout.oldest} to ${rollout.newest}`;
    const facts = [`${rollout.tokens} tokens`, rollout.turns > 1 ? `${rollout.turns} turns` : "", rollout.finish !== "stop" ? rollout.finish : "", versions, rollout.branches > 1 ? `${rollout.branches} branches` : ""];
    return h("article", { class: "card" },
      h("div", { class: "head" }, h("b", {}, `rollout ${rollout.rollout}`), reward),
      h("p", { class: "facts" }, facts.filter(Boolean).join(", "), parts ? h("br") : null, parts, rollout.note ? h("br") : null, rollout.note),
      rollout.branches ? messageList(rollout.messages.slice(skip)) : h("p", { class: "facts" }, "tokens were deleted after training"),
      !rollout.branches ? null : h("a", { class: "to-tokens", href: link("tokens", { run, ordinal, rollout: rollout.rollout }) }, "view tokens"));
  }
}

// Messages that all rollouts start with and that were not sampled.
function sharedMessages(all) {
  if (!all.length) return [];
  const key = (message) => JSON.stringify([message.role, message.parts.map((part) => [part.kind, part.text])]);
  const same = [];
  for (const [i, message] of all[0].entries()) {
    if (message.sampled || !all.every((other) => other[i] && !other[i].sampled && key(other[i]) === key(message))) break;
    same.push(message);
  }
  return same;
}
