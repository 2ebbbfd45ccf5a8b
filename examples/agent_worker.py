"""Plays rollouts of a run that is going on, some at once, with the agent of openai_agent.py or of
anthropic_agent.py. Several workers may run, on any machine that reaches the gateway.

    python examples/agent_worker.py openai runs/my-agent/gateway.json store

In a recipe:  [tasks.store.agent]  pull = true
"""

import json
import sys
import threading
import urllib.request
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

AT_ONCE = 8


def work(client_name: str, gateway: dict[str, Any], task: str) -> None:
    """Take rollouts until the gateway is gone."""
    agent = import_module(f"{client_name}_agent")
    client = {"openai": "OpenAI", "anthropic": "Anthropic"}[client_name]
    path = "/v1" if client_name == "openai" else ""
    where = f"{gateway['url']}/tasks/{task}/rollouts/next"
    while True:
        try:
            rollout = post(where, gateway["worker_key"], {"wait_s": 30})["rollout"]
        except OSError:
            return
        if rollout is not None:
            url, key = rollout["base_url"], rollout["api_key"]
            made = getattr(import_module(client_name), client)(base_url=url + path, api_key=key)
            try:
                agent.play(made, rollout["task"])
            except Exception as error:  # the run knows why a turn failed
                print(f"{rollout['session']}: {error!r}", file=sys.stderr)
            with suppress(OSError):  # it may be over already
                post(f"{url}/v1/end", key, {})


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"x-api-key": key})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


if __name__ == "__main__":
    client_name, file, task = sys.argv[1:]
    told = json.loads(Path(file).read_text())
    for _ in range(AT_ONCE):
        threading.Thread(target=work, args=(client_name, told, task)).start()
