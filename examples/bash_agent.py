"""A coding agent whose only tool is bash: one command a turn, until it submits.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/bash_agent.py "Make the tests pass."

In a recipe:  [tasks.NAME.agent]  command = "python examples/bash_agent.py"
Commands run in the shell of the task, if it has one, else each in a new one in this folder.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai

MAX_TURNS, TIMEOUT_S, MAX_CHARS = 30, "60", 8000  # MAX_CHARS: of what a command prints
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SYSTEM = f"""Solve the task with bash. Every reply ends with exactly one command, such as
```bash
ls -a
```
You are then told what it prints. When all is done, the command is: {SUBMIT}"""
AGAIN = "That was not exactly one command between ```bash and ```. Nothing was run."


def play(client: openai.OpenAI, task: dict[str, Any]) -> None:
    messages = [{"role": "system", "content": SYSTEM}, *task["messages"]]
    model = client.models.list().data[0].id
    run = run_in_task if "shell" in str(task["tools"]) else run_here
    for _ in range(MAX_TURNS):
        made = client.chat.completions.create(model=model, messages=messages)
        reply = made.choices[0].message
        print(reply.content)
        messages.append(reply.model_dump(exclude_none=True))
        commands = re.findall(r"```bash\s*\n(.*?)\s*```", reply.content or "", re.DOTALL)
        if commands == [SUBMIT]:
            return
        seen = run(client, commands[0]) if len(commands) == 1 else AGAIN
        if len(seen) > MAX_CHARS:
            seen = f"{seen[: MAX_CHARS // 2]}\n[...]\n{seen[-MAX_CHARS // 2 :]}"
        messages.append({"role": "user", "content": seen})


def run_here(_: openai.OpenAI, command: str) -> str:
    words = ["timeout", TIMEOUT_S, "bash", "-c", command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return f"{done.stdout.decode(errors='replace')}(exit code {done.returncode})"


def run_in_task(client: openai.OpenAI, command: str) -> str:
    calls = [{"name": "shell", "arguments": {"command": command}}]
    done: Any = client.post("/tools", cast_to=object, body={"calls": calls})
    return str(done["results"][0]["content"])


if __name__ == "__main__":
    file, words = os.environ.get("PADDOCK_TASK"), " ".join(sys.argv[1:])
    own = {"messages": [{"role": "user", "content": words}], "tools": []}
    play(openai.OpenAI(), json.loads(Path(file).read_text()) if file else own)
