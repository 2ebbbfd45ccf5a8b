"""An agent that knows nothing of Paddock: the stock openai client and a message list of its own.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... PADDOCK_TASK=task.json python examples/openai_agent.py

In a recipe:  [tasks.NAME.agent]  command = "python examples/openai_agent.py"
It calls the tools of the task, and drops its first call from the history once it has made two.
"""

import json
import os
from pathlib import Path
from typing import Any

import openai

MAX_TURNS = 8


def play(client: openai.OpenAI, task: dict[str, Any]) -> None:
    messages, tools = list(task["messages"]), task["tools"] or openai.omit
    for turn in range(MAX_TURNS):
        made = client.chat.completions.create(model="policy", messages=messages, tools=tools)
        reply = made.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return
        messages += call_tools(client, reply.tool_calls)
        if turn == 1:  # what it knows is in its newest thoughts
            del messages[1 : 2 + len(messages[1]["tool_calls"])]


def call_tools(client: openai.OpenAI, calls: list[Any]) -> list[dict[str, Any]]:
    """The results of the environment's tools; an agent with tools of its own runs them here."""
    asked = [
        {"id": c.id, "name": c.function.name, "arguments": json.loads(c.function.arguments)}
        for c in calls
    ]
    done: Any = client.post("/tools", cast_to=object, body={"calls": asked})
    return [
        {"role": "tool", "tool_call_id": each["id"], "content": each["content"]}
        for each in done["results"]
    ]


if __name__ == "__main__":  # the client itself reads OPENAI_BASE_URL and OPENAI_API_KEY
    play(openai.OpenAI(), json.loads(Path(os.environ["PADDOCK_TASK"]).read_text()))
