"""Agents for each API, built on the real clients; they send the replies back as history."""

import json
from contextlib import suppress
from dataclasses import dataclass

import anthropic
import httpx
import openai

from tests.text.conversations import TOOLS

# One connection pool each: a client per test would load certificates every time, which is slow.
HTTP = httpx.Client(timeout=60)
OPENAI = openai.OpenAI(api_key="none", max_retries=0)
ANTHROPIC = anthropic.Anthropic(api_key="none", max_retries=0)


@dataclass(frozen=True)
class SessionEndpoint:
    """URL and API key of a session, as its agent receives them."""

    url: str
    key: str

    @property
    def headers(self):
        return {"Authorization": f"Bearer {self.key}"}


class ChatAgent:
    """OpenAI's chat completions."""

    def __init__(self, endpoint, *, stream, tools=TOOLS, system=None):
        self.client = OPENAI.with_options(base_url=f"{endpoint.url}/v1", api_key=endpoint.key)
        self.stream, self.tools = stream, tools
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text):
        self.messages.append({"role": "user", "content": text})

    def answer(self, results):
        for call, text in results:
            self.messages.append({"role": "tool", "tool_call_id": call, "content": text})

    def turn(self, **more):
        """One turn; returns the ids of its tool calls."""
        body = {"model": "m", "messages": self.messages, "tools": self.tools, **more}
        create = self.client.chat.completions.create
        if self.stream:
            message = self._gathered(create(stream=True, **body))
        else:
            message = create(**body).choices[0].message.model_dump(exclude_none=True)
        self.messages.append(message)
        return [call["id"] for call in message.get("tool_calls", [])]

    def _gathered(self, chunks):
        found, calls = {"role": "assistant", "content": "", "reasoning_content": ""}, {}
        for chunk in chunks:
            for choice in chunk.choices:
                delta = choice.delta
                found["content"] += delta.content or ""
                found["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
                for part in delta.tool_calls or []:
                    call = calls.setdefault(part.index, {"type": "function", "function": {}})
                    call["id"] = part.id or call.get("id")
                    function = call["function"]
                    function["name"] = part.function.name or function.get("name")
                    function["arguments"] = function.get("arguments", "") + (
                        part.function.arguments or ""
                    )
        return found | ({"tool_calls": list(calls.values())} if calls else {})


class ResponsesAgent:
    """OpenAI's Responses."""

    def __init__(self, endpoint, *, stream, tools=TOOLS, system=None):
        self.client = OPENAI.with_options(base_url=f"{endpoint.url}/v1", api_key=endpoint.key)
        self.stream, self.system, self.items = stream, system, []
        self.tools = [{"type": "function", **tool["function"]} for tool in tools]

    def say(self, text):
        self.items.append({"role": "user", "content": text})

    def answer(self, results):
        for call, text in results:
            item = {"type": "function_call_output", "call_id": call, "output": text}
            self.items.append(item)

    def turn(self, **more):
        body = {"model": "m", "input": self.items, "tools": self.tools, **more}
        if self.system:
            body["instructions"] = self.system
        response = None
        if self.stream:
            for event in self.client.responses.create(stream=True, **body):
                if event.type in ("response.completed", "response.incomplete"):
                    response = event.response
        else:
            response = self.client.responses.create(**body)
        output = [item.model_dump(exclude_none=True) for item in response.output]
        self.items += [item for item in output if item.get("status") != "incomplete"]
        return [item["call_id"] for item in output if item["type"] == "function_call"]


class MessagesAgent:
    """Anthropic's messages."""

    def __init__(self, endpoint, *, stream, tools=TOOLS, system=None):
        self.client = ANTHROPIC.with_options(base_url=endpoint.url, api_key=endpoint.key)
        self.stream, self.system, self.messages = stream, system, []
        self.tools = [
            {
                "name": tool["function"]["name"],
                "description": tool["function"].get("description", ""),
                "input_schema": tool["function"].get("parameters", {}),
            }
            for tool in tools
        ]

    def say(self, text):
        self._add({"type": "text", "text": text})

    def answer(self, results):
        for call, text in results:
            self._add({"type": "tool_result", "tool_use_id": call, "content": text})

    def _add(self, block):
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages.append({"role": "user", "content": []})
        self.messages[-1]["content"].append(block)

    def turn(self, **more):
        body = {"model": "m", "max_tokens": 64, "messages": self.messages, "tools": self.tools}
        body |= {"system": self.system} if self.system else {}
        body |= more
        blocks = self._gathered(body) if self.stream else self._whole(body)
        self.messages.append({"role": "assistant", "content": blocks})
        return [block["id"] for block in blocks if block["type"] == "tool_use"]

    def _whole(self, body):
        reply = self.client.messages.create(**body)
        return [block.model_dump(exclude_none=True) for block in reply.content]

    def _gathered(self, body):
        blocks, inputs = [], {}
        for event in self.client.messages.create(stream=True, **body):
            match event.type:
                case "content_block_start":
                    blocks.append(event.content_block.model_dump(exclude_none=True))
                case "content_block_delta" if event.delta.type == "text_delta":
                    blocks[-1]["text"] += event.delta.text
                case "content_block_delta" if event.delta.type == "thinking_delta":
                    blocks[-1]["thinking"] += event.delta.thinking
                case "content_block_delta" if event.delta.type == "input_json_delta":
                    inputs[event.index] = inputs.get(event.index, "") + event.delta.partial_json
        for index, text in inputs.items():
            with suppress(ValueError):
                blocks[index]["input"] = json.loads(text)
        return blocks


AGENTS = {"chat": ChatAgent, "responses": ResponsesAgent, "messages": MessagesAgent}
