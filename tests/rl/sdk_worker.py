"""A worker process whose agent is one of examples/: rollouts from the queue of a run, some at once.

python -m tests.rl.sdk_worker openai FILE TASK     FILE: the run's gateway.json
"""

import json
import sys
import threading
import urllib.error
from importlib import import_module
from pathlib import Path

from tests.rl.agent_script import post

AT_ONCE = 8


def work(client_name, play, told, name):
    """Take rollouts until the gateway is gone."""
    client_type = {"openai": "OpenAI", "anthropic": "Anthropic"}[client_name]
    make = getattr(import_module(client_name), client_type)
    path = "/v1" if client_name == "openai" else ""
    where = f"{told['url']}/tasks/{name}/rollouts/next"
    while True:
        try:
            rollout = post(where, told["worker_key"], {"wait_s": 5})["rollout"]
        except urllib.error.URLError:
            return
        if rollout is not None:
            key, url = rollout["api_key"], rollout["base_url"]
            play(make(base_url=url + path, api_key=key), rollout["task"])
            post(f"{url}/v1/end", key, {})


def main(client_name, file, name):
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    play = import_module(f"{client_name}_agent").play
    told = json.loads(Path(file).read_text())
    threads = [
        threading.Thread(target=work, args=(client_name, play, told, name)) for _ in range(AT_ONCE)
    ]
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
