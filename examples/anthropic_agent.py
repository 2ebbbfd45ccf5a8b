"""An agent that knows nothing of Paddock: the stock anthropic client and a message list of its own.

    ANTHROPIC_BASE_URL=... ANTHROPIC_API_KEY=... PADDOCK_TASK=task.json python examples/anthropic_agent.py

In a recipe:  [tasks.NAME.agent]  command = "python examples/anthropic_agent.py"
It calls the tools of the task, and drops its first call from the history once it has made two.
"""  # noqa: E501  a command line

import json
import os
from pathlib import Path
from typing import Any

import anthropic

MAX_TURNS, MAX_TOKENS = 8, 256


def play(client: anthropic.Anthropic, task: dict[str, Any]) -> None:
    messages: list[Any] = list(task["messages"])
    tools: list[Any] = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"].get("description", ""),
            "input_schema": tool["function"]["parameters"],
        }
        for tool in task["tools"]
    ]
    for turn in range(MAX_TURNS):
        reply = client.messages.create(
            model="policy", max_tokens=MAX_TOKENS, messages=messages, tools=tools
        )
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return
        messages.append({"role": "user", "content": call_tools(client, calls)})
        if turn == 1:  # what it knows is in its newest thoughts
            del messages[1:3]


def call_tools(client: anthropic.Anthropic, calls: list[Any]) -> list[dict[str, Any]]:
    """The results of the environment's tools; an agent with tools of its own runs them here."""
    asked = [{"id": call.id, "name": call.name, "arguments": call.input} for call in calls]
    done: Any = client.post("/v1/tools", cast_to=object, body={"calls": asked})
    return [
        {"type": "tool_result", "tool_use_id": each["id"], "content": each["content"]}
        for each in done["results"]
    ]


if __name__ == "__main__":  # the client itself reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
    play(anthropic.Anthropic(), json.loads(Path(os.environ["PADDOCK_TASK"]).read_text()))
