// The AI SDK's agent loop, unchanged; copied by real_agents.py to where its packages are installed.
//
//     OPENAI_BASE_URL=... OPENAI_API_KEY=... node real_agents_node.mjs KIND [stream]

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [kind, stream] = process.argv.slice(2);
const own = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const models = {
  responses: () => createOpenAI(own).responses("policy"),
  chat: () => createOpenAI(own).chat("policy"),
  compatible: () => createOpenAICompatible({ name: "paddock", ...own })("policy"),
};
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});
const asked = {
  model: models[kind](),
  tools: { add },
  stopWhen: stepCountIs(30),
  system: "Add numbers with the tool.",
  prompt: "What is 1 and 2?",
};
if (stream) {
  const result = streamText(asked);
  for await (const _ of result.textStream);
  console.log(await result.text);
} else {
  console.log((await generateText(asked)).text);
}
