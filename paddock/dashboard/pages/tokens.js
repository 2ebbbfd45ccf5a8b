// The tokens of a rollout, coloured by log-probability, advantage, importance ratio or mask.

import { get, h, link, note, short } from "./dom.js";

const COLOURINGS = {
  logprob: ["log-probability", "nats; stronger colour: lower probability"],
  advantage: ["advantage", "weight of the token in the policy gradient"],
  log_ratio: ["importance ratio", "trainer / engine, before the update"],
  mask: ["mask", ""],
};
let colouring = "logprob"; // kept between visits

export async function show(page, query) {
  const { run, ordinal, rollout, branch } = query;
  const found = await get("/api/rollout", { run, ordinal, rollout, branch });
  const count = found.ids.length;
  const text = h("div", { class: "tokens", tabindex: 0, role: "listbox", "aria-label": "tokens" });
  const card = h("aside", { class: "token-card" }), legend = h("div", { class: "scale" }), buttons = h("div", { class: "ways", role: "group", "aria-label": "colour by" });
  const others = [+rollout - 1, +rollout + 1].filter((m) => m >= 0 && m < found.size);
  page.classList.add("wide");
  page.append(
    h("p", { class: "lead" }, h("a", { href: link("rollouts", { run }) }, "rollouts"), " / ", h("a", { href: link("group", { run, ordinal }) }, `${found.task} ${found.number}`), ` / rollout ${rollout}`),
    h("h1", {}, `Rollout ${rollout} of ${found.task} ${found.number}`),
    h("p", {}, found.failure ? found.failure : `Reward ${short(found.reward, 3)}, ${found.status}${found.reason ? ": " + found.reason : ""}${found.step === null ? "" : ` in step ${found.step}`}. `,
      others.map((m) => h("a", { href: link("tokens", { run, ordinal, rollout: m }) }, ` rollout ${m} `)),
      found.branches > 1 ? Array.from({ length: found.branches }, (_, b) => h("a", { href: link("tokens", { run, ordinal, rollout, branch: b }) }, ` branch ${b} `)) : ""),
    h("div", { class: "choices" }, buttons, legend),
    h("div", { class: "reading" }, text, card),
    found.not_shown ? note(`${found.not_shown} more tokens are not shown.`) : "");

  const spans = found.pieces.map((piece, i) => {
    const shownAs = piece === "" ? "·" : piece.replaceAll("\n", "↵\n");
    return h("span", { "data-i": i, class: `${found.special[i] ? "marker" : ""}${found.sampled[i] ? " sampled" : ""}`, role: "option" }, shownAs);
  });
  const roles = new Set(["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]);
  spans.forEach((span, i) => {
    if (i && found.special[i] && roles.has(found.pieces[i])) text.append(h("br"));
    text.append(span);
  });

  function level(i) {
    if (colouring === "mask") return null;
    return found[colouring][i];
  }
  function paint() {
    const values = found.ids.map((_, i) => level(i)).filter((v) => v !== null);
    const most = colouring === "logprob" ? Math.max(1, ...values.map((v) => -v)) : Math.max(1e-6, ...values.map(Math.abs));
    spans.forEach((span, i) => {
      span.style.removeProperty("background");
      span.classList.remove("trained", "dropped", "untrained");
      if (colouring === "mask") {
        if (found.trained[i]) span.classList.add(found.kept[i] === false ? "dropped" : "trained");
        else if (found.sampled[i]) span.classList.add("untrained");
        return;
      }
      const value = level(i);
      if (value === null) return;
      const share = Math.round(65 * Math.min(1, Math.abs(value) / most));
      const tint = colouring === "logprob" || value < 0 ? "--c1" : "--c0";
      span.style.setProperty("background", `color-mix(in oklab, var(${tint}) ${share}%, transparent)`);
    });
    const [, about] = COLOURINGS[colouring];
    const shownMost = colouring === "log_ratio" ? `ratio ${short(Math.exp(-most), 4)}` : colouring === "advantage" ? short(-most, 3) : `${short(-most, 3)}`;
    const shownLeast = colouring === "log_ratio" ? `${short(Math.exp(most), 4)}` : colouring === "advantage" ? short(most, 3) : "0";
    legend.replaceChildren(...(colouring === "mask"
      ? [h("span", { class: "trained" }, "trained"), h("span", { class: "dropped" }, "trained, clipped or masked by the loss"), h("span", { class: "untrained" }, "sampled, masked"), h("span", {}, "prompt")]
      : values.length
        ? [h("span", {}, shownMost), h("i", { class: colouring === "logprob" ? "one" : "two" }), h("span", {}, shownLeast), h("small", {}, about)]
        : [h("small", {}, found.step === null ? "not trained" : "no training record for this rollout")]));
    for (const button of buttons.children) button.setAttribute("aria-pressed", String(button.dataset.colouring === colouring));
  }
  for (const [name, [title]] of Object.entries(COLOURINGS))
    buttons.append(h("button", { type: "button", "data-colouring": name, onclick: () => { colouring = name; paint(); } }, title));

  let pinned = null;
  function tell(i) {
    const probability = found.logprob[i] === null ? null : Math.exp(found.logprob[i]);
    const ratio = found.log_ratio[i] === null ? null : Math.exp(found.log_ratio[i]);
    const mask = found.trained[i] ? (found.kept[i] === false ? "trained, clipped or masked" : "trained") : found.sampled[i] ? "sampled, masked" : "prompt";
    const rows = [
      ["token", `${i + 1} of ${count}`], ["id", String(found.ids[i])], ["turn", String(found.turn[i] + 1)],
      ["log-probability", short(found.logprob[i], 5)], ["probability", probability === null ? "-" : `${(100 * probability).toPrecision(4)} %`],
      ["importance ratio", short(ratio, 6)], ["advantage", short(found.advantage[i], 4)], ["mask", mask], ["weight version", found.version[i] === null ? "-" : String(found.version[i])],
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
