"""An agent without any client library, quick to start; how it behaves is its argument.

python agent_script.py HOW            one rollout, as a run starts it
python agent_script.py pull FILE TASK rollouts from the queue of the run whose gateway.json is FILE
"""

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def post(url, key, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"x-api-key": key})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def play(url, key, task, pause_s=0.0, *, talks=False):
    """Turns and tool calls until a reply has none, and no user asks more; the last reply's text."""
    messages = list(task["messages"])
    while True:
        body = {"messages": messages, "tools": task["tools"] or None}
        reply = post(f"{url}/chat/completions", key, body)["choices"][0]["message"]
        messages.append(reply)
        time.sleep(pause_s)
        if not reply.get("tool_calls"):
            said = post(f"{url}/reply", key, {})["messages"] if talks else []
            if not said:
                return reply["content"]
            messages += said
            continue
        calls = [
            {
                "id": call["id"],
                "name": call["function"]["name"],
                "arguments": json.loads(call["function"]["arguments"]),
            }
            for call in reply["tool_calls"]
        ]
        for each in post(f"{url}/tools", key, {"calls": calls})["results"]:
            messages.append(
                {"role": "tool", "tool_call_id": each["id"], "content": each["content"]}
            )


def pull(file, name):
    told = json.loads(Path(file).read_text())
    where = f"{told['url']}/tasks/{name}/rollouts/next"
    while True:
        try:
            rollout = post(where, told["worker_key"], {"wait_s": 5})["rollout"]
            if rollout is None:
                continue
            url = f"{rollout['base_url']}/v1"
            reply = play(url, rollout["api_key"], rollout["task"], pause_s=0.02)
            if "verdict_url" in rollout:
                score = {"reward": float("done" in reply), "note": "by the worker"}
                post(rollout["verdict_url"], rollout["verdict_key"], score)
            else:
                post(f"{url}/end", rollout["api_key"], {})
        except urllib.error.HTTPError as error:
            if error.code == 410:  # the run is over
                return
            if error.code not in (401, 409):  # the rollout was given to another worker
                raise


def main(how, *more):
    if how == "pull":
        pull(*more)
        return
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    task = json.loads(Path(os.environ["PADDOCK_TASK"]).read_text())
    if how == "dies" or (how == "dies once" and is_first(Path(*more) / "died")):
        post(f"{url}/chat/completions", key, {"messages": task["messages"]})
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "breaks":
        sys.exit("no such file")
    if how == "too long":
        words = [{"role": "user", "content": "Vault 1 . " * 400}]
        post(f"{url}/chat/completions", key, {"messages": words})
    if how == "does nothing":
        return
    play(url, key, task, pause_s=0.3 if how == "slow" else 0.0, talks=how == "talks")


def is_first(mark):
    """Whether no other process has left this mark."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
