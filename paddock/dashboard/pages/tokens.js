// One attempt, token by token, coloured by what sampler and trainer thought of each.

import { get, h, link, note, short } from "./dom.js";

const WAYS = {
  logprob: ["log-probability", "nats; the stronger, the less likely the sampler found it"],
  advantage: ["advantage", "what the loss multiplied by"],
  log_ratio: ["ratio", "trainer over sampler, before the update"],
  mask: ["mask", "what was trained"],
};
let way = "logprob"; // as left by the last visit

export async function show(page, query) {
  const { run, ordinal, member, branch } = query;
  const found = await get("/api/attempt", { run, ordinal, member, branch });
  const count = found.ids.length;
  const text = h("div", { class: "tokens", tabindex: 0, role: "listbox", "aria-label": "tokens" });
  const card = h("aside", { class: "token-card" }), legend = h("div", { class: "scale" }), buttons = h("div", { class: "ways", role: "group", "aria-label": "colour by" });
  const others = [+member - 1, +member + 1].filter((m) => m >= 0 && m < found.size);
  page.classList.add("wide");
  page.append(
    h("p", { class: "lead" }, h("a", { href: link("rl", { run }) }, "rollouts"), " / ", h("a", { href: link("group", { run, ordinal }) }, `${found.task} ${found.number}`), ` / attempt ${member}`),
    h("h1", {}, `Attempt ${member} of ${found.task} ${found.number}`),
    h("p", {}, found.failed ? found.failed : `Reward ${short(found.reward, 3)}, ${found.status}${found.reason ? ": " + found.reason : ""}${found.update === null ? "" : ` in update ${found.update}`}. `,
      others.map((m) => h("a", { href: link("tokens", { run, ordinal, member: m }) }, ` attempt ${m} `)),
      found.branches > 1 ? Array.from({ length: found.branches }, (_, b) => h("a", { href: link("tokens", { run, ordinal, member, branch: b }) }, ` branch ${b} `)) : ""),
    h("div", { class: "choices" }, buttons, legend),
    h("div", { class: "reading" }, text, card),
    found.cut ? note(`${found.cut} more tokens are not shown.`) : "");

  const spans = found.pieces.map((piece, i) => {
    const shownAs = piece === "" ? "·" : piece.replaceAll("\n", "↵\n");
    return h("span", { "data-i": i, class: `${found.added[i] ? "marker" : ""}${found.sampled[i] ? " sampled" : ""}`, role: "option" }, shownAs);
  });
  const roles = new Set(["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]);
  spans.forEach((span, i) => {
    if (i && found.added[i] && roles.has(found.pieces[i])) text.append(h("br"));
    text.append(span);
  });

  function level(i) {
    if (way === "mask") return null;
    return found[way][i];
  }
  function paint() {
    const values = found.ids.map((_, i) => level(i)).filter((v) => v !== null);
    const most = way === "logprob" ? Math.max(1, ...values.map((v) => -v)) : Math.max(1e-6, ...values.map(Math.abs));
    spans.forEach((span, i) => {
      span.style.removeProperty("background");
      span.classList.remove("trained", "dropped", "untrained");
      if (way === "mask") {
        if (found.trained[i]) span.classList.add(found.kept[i] === false ? "dropped" : "trained");
        else if (found.sampled[i]) span.classList.add("untrained");
        return;
      }
      const value = level(i);
      if (value === null) return;
      const share = Math.round(65 * Math.min(1, Math.abs(value) / most));
      const tint = way === "logprob" || value < 0 ? "--c1" : "--c0";
      span.style.setProperty("background", `color-mix(in oklab, var(${tint}) ${share}%, transparent)`);
    });
    const [, about] = WAYS[way];
    const shownMost = way === "log_ratio" ? `ratio ${short(Math.exp(-most), 4)}` : way === "advantage" ? short(-most, 3) : `${short(-most, 3)}`;
    const shownLeast = way === "log_ratio" ? `${short(Math.exp(most), 4)}` : way === "advantage" ? short(most, 3) : "0";
    legend.replaceChildren(...(way === "mask"
      ? [h("span", { class: "trained" }, "trained"), h("span", { class: "dropped" }, "trained, beyond the loss's trust"), h("span", { class: "untrained" }, "sampled, not trained"), h("span", {}, "read")]
      : values.length
        ? [h("span", {}, shownMost), h("i", { class: way === "logprob" ? "one" : "two" }), h("span", {}, shownLeast), h("small", {}, about)]
        : [h("small", {}, found.update === null ? "the trainer has not seen this attempt" : "the trainer wrote nothing down about this attempt")]));
    for (const button of buttons.children) button.setAttribute("aria-pressed", String(button.dataset.way === way));
  }
  for (const [name, [title]] of Object.entries(WAYS))
    buttons.append(h("button", { type: "button", "data-way": name, onclick: () => { way = name; paint(); } }, title));

  let pinned = null;
  function tell(i) {
    const probability = found.logprob[i] === null ? null : Math.exp(found.logprob[i]);
    const ratio = found.log_ratio[i] === null ? null : Math.exp(found.log_ratio[i]);
    const mask = found.trained[i] ? (found.kept[i] === false ? "trained, no gradient" : "trained") : found.sampled[i] ? "sampled, not trained" : "read";
    const rows = [
      ["token", `${i + 1} of ${count}`], ["id", String(found.ids[i])], ["turn", String(found.turn[i] + 1)],
      ["log-probability", short(found.logprob[i], 5)], ["probability", probability === null ? "-" : `${(100 * probability).toPrecision(4)} %`],
      ["ratio", short(ratio, 6)], ["advantage", short(found.advantage[i], 4)], ["mask", mask], ["version", found.version[i] === null ? "-" : String(found.version[i])],
    ];
    card.replaceChildren(h("code", { class: "piece" }, JSON.stringify(found.pieces[i])), h("dl", {}, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
  }
  function pin(i) {
    if (pinned !== null) spans[pinned].removeAttribute("aria-selected");
    pinned = i;
    spans[i].setAttribute("aria-selected", "true");
    spans[i].scrollIntoView({ block: "nearest" });
    tell(i);
  }
  const at = (event) => event.target.closest?.("[data-i]")?.dataset.i;
  text.addEventListener("click", (event) => at(event) !== undefined && pin(+at(event)));
  text.addEventListener("pointerover", (event) => at(event) !== undefined && tell(+at(event)));
  text.addEventListener("pointerleave", () => pinned !== null && tell(pinned));
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    pin(Math.max(0, Math.min(count - 1, (pinned ?? -1) + step)));
  });
  paint();
  if (count) pin(Math.max(0, found.sampled.indexOf(true)));
}
