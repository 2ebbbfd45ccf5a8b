// Chat messages: reasoning collapsed, tool calls as code, long prompts and tool results collapsed.

import { h } from "./dom.js";

const LONG = 400; // characters; longer prompts and results are collapsed

export function messageList(messages) {
  return h("div", { class: "messages" }, messages.map((message) =>
    h("div", { class: `message ${message.role || "start"}${message.sampled ? " sampled" : ""}` },
      h("b", {}, message.role || "start"), message.parts.map((one) => part(one, message.sampled)))));
}

function part(one, sampled) {
  const text = one.text.trim();
  if (one.kind === "reasoning") return h("details", { class: "reasoning" }, h("summary", {}, `reasoning, ${one.until - one.first} tokens`), h("p", {}, text));
  if (one.kind === "call") {
    const [name, ...parameters] = text.split("\n").map((line) => line.trim()).filter(Boolean);
    return h("code", { class: "call" }, `${name ?? ""}(${parameters.join(", ")})`);
  }
  if (one.kind === "result") return text.length > LONG
    ? h("details", { class: "result" }, h("summary", {}, `${text.slice(0, 80)}…`), h("pre", {}, text))
    : h("pre", { class: "result" }, text);
  return !sampled && text.length > LONG
    ? h("details", {}, h("summary", {}, `${text.slice(0, 80).replaceAll("\n", " ")}…`), h("p", {}, text))
    : h("p", {}, text);
}
