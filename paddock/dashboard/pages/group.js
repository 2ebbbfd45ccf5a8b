// The attempts of a group, side by side.

import { get, h, link, note, short, tiles } from "./dom.js";
import { talk } from "./talk.js";

export async function show(page, query) {
  const { run, ordinal } = query;
  const found = await get("/api/group", { run, ordinal });
  page.classList.add("wide");
  const shared = common(found.attempts.filter((attempt) => attempt.branches).map((attempt) => attempt.messages));
  page.append(
    h("p", { class: "lead" }, h("a", { href: link("rl", { run }) }, "rollouts"), ` / group ${ordinal}`),
    h("h1", {}, `${found.task} ${found.number}`),
    tiles([
      ["status", found.status, found.reason], ["update", String(found.update)],
      ["attempts", `${found.rewards.length} of ${found.size}`], ["tokens", short(found.tokens, 3), "sampled, mean"],
    ]),
    shared.length ? h("section", {}, h("h2", {}, "What all of them read first"), talk(shared)) : "",
    h("section", {}, h("h2", {}, "Side by side"),
      found.attempts.length ? h("div", { class: "cards" }, found.attempts.map((attempt) => card(attempt, shared.length))) : note("No attempt has ended."),
      found.left_out ? note(`${found.left_out} more are not shown.`) : ""));

  function card(attempt, skip) {
    const reward = attempt.failed ? h("span", { class: "status stopped" }, attempt.failed) : h("span", { class: `reward${attempt.reward > 0 ? " some" : ""}` }, `reward ${short(attempt.reward, 3)}`);
    const parts = Object.entries(attempt.parts).map(([name, value]) => `${name} ${short(value, 3)}`).join(", ");
    const versions = attempt.oldest === null ? "" : attempt.oldest === attempt.newest ? `version ${attempt.oldest}` : `versions ${attempt.oldest} to ${attempt.newest}`;
    const facts = [`${attempt.tokens} tokens`, attempt.turns > 1 ? `${attempt.turns} turns` : "", attempt.finish !== "stop" ? attempt.finish : "", versions, attempt.branches > 1 ? `${attempt.branches} branches` : ""];
    return h("article", { class: "card" },
      h("div", { class: "head" }, h("b", {}, `attempt ${attempt.member}`), reward),
      h("p", { class: "facts" }, facts.filter(Boolean).join(", "), parts ? h("br") : null, parts, attempt.note ? h("br") : null, attempt.note),
      attempt.branches ? talk(attempt.messages.slice(skip)) : h("p", { class: "facts" }, "its tokens were dropped after it was trained"),
      !attempt.branches ? null : h("a", { class: "to-tokens", href: link("tokens", { run, ordinal, member: attempt.member }) }, "token by token"));
  }
}

// The messages that every attempt begins with and nobody sampled.
function common(all) {
  if (!all.length) return [];
  const told = (message) => JSON.stringify([message.role, message.parts.map((part) => [part.kind, part.text])]);
  const same = [];
  for (const [i, message] of all[0].entries()) {
    if (message.sampled || !all.every((other) => other[i] && !other[i].sampled && told(other[i]) === told(message))) break;
    same.push(message);
  }
  return same;
}
