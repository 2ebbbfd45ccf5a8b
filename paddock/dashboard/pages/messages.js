// A conversation: thoughts folded, calls as code, results of tools folded where they are long.

import { h } from "./dom.js";

const LONG = 400; // characters of what was read; longer, it is folded

export function talk(messages) {
  return h("div", { class: "talk" }, messages.map((message) =>
    h("div", { class: `said ${message.role || "start"}${message.sampled ? " sampled" : ""}` },
      h("b", {}, message.role || "start"), message.parts.map((one) => part(one, message.sampled)))));
}

function part(one, wrote) {
  const text = one.text.trim();
  if (one.kind === "thinking") return h("details", { class: "thinking" }, h("summary", {}, `thought for ${one.until - one.first} tokens`), h("p", {}, text));
  if (one.kind === "call") {
    const [name, ...given] = text.split("\n").map((line) => line.trim()).filter(Boolean);
    return h("code", { class: "call" }, `${name ?? ""}(${given.join(", ")})`);
  }
  if (one.kind === "result") return text.length > LONG
    ? h("details", { class: "result" }, h("summary", {}, `${text.slice(0, 80)}…`), h("pre", {}, text))
    : h("pre", { class: "result" }, text);
  return !wrote && text.length > LONG
    ? h("details", {}, h("summary", {}, `${text.slice(0, 80).replaceAll("\n", " ")}…`), h("p", {}, text))
    : h("p", {}, text);
}
