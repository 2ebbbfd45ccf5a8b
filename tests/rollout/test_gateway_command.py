"""`paddock gateway`, and agents that know one URL and one key only."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import anthropic
import openai
import pytest

from paddock.data.dialogue import parse_dialogue
from paddock.records import Trajectory, Verdict
from paddock.records.json_codec import decode, encode
from tests.patience import PATIENCE_S, until
from tests.rollout.agents import AGENTS, HTTP, ChatAgent, SessionEndpoint
from tests.rollout.engines import RandomEngine
from tests.rollout.test_gateway import ADMIN, converse, exported, gateway, opened

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", AGENTS)
def test_a_key_alone_finds_its_session(name):
    found = []
    for prefix in ("", "/sessions/s"):
        with gateway(RandomEngine(pieces=3)) as (url, sessions):
            key, other = opened(url, "s").key, opened(url, "other").key
            converse(AGENTS[name](SessionEndpoint(url + prefix, key), stream=True), Random(3), 3)
            found.append(exported(url, "s"))
            assert other != key and sessions["other"].session.tree.nodes == []
    assert found[0] == found[1] and len(found[0][0]["turns"]) == 3


def test_the_root_routes_refuse_keys_of_no_session():
    with gateway(RandomEngine()) as (url, sessions):
        closed = opened(url, "s")
        HTTP.delete(closed.url, headers=ADMIN).raise_for_status()
        for headers in ({}, ADMIN, closed.headers, {"x-api-key": ""}):
            for path in ("chat/completions", "responses", "messages", "messages/count_tokens"):
                refused = HTTP.post(f"{url}/v1/{path}", json={}, headers=headers)
                assert refused.status_code == 401, path
            assert HTTP.get(f"{url}/v1/models", headers=headers).status_code == 401
        agent = AGENTS["messages"](SessionEndpoint(url, "guess"), stream=False)
        agent.say("Hi")
        with pytest.raises(anthropic.AuthenticationError, match="missing or invalid API key"):
            agent.turn()
        assert len(sessions) == 0


def test_a_verdict_is_posted_once_and_by_its_grader_only():
    with gateway(RandomEngine()) as (url, sessions):
        for id in ("own", "other"):
            opened(url, id)
        own = sessions["own"]
        where = f"{url}/sessions/own/verdict"
        strangers = (own.api_key, sessions["other"].verdict_key, sessions["other"].api_key, "x")
        for key in strangers:
            refused = HTTP.post(where, json={"reward": 1.0}, headers={"x-api-key": key})
            assert refused.status_code == 401
        grader = {"x-api-key": own.verdict_key}
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        assert HTTP.post(f"{url}/v1/chat/completions", json=chat, headers=grader).status_code == 401
        assert exported(url, "own")[0]["outcome"]["kind"] == "grader"
        for body, status in (
            ({}, 400),
            ({"reward": 1e9}, 400),
            ({"kind": "bad luck", "where": "a", "what": "b"}, 400),
            ({"reward": 0.5, "parts": {"style": 1.0}}, 200),
            ({"reward": 0.5, "parts": {"style": 1.0}}, 200),  # repeated after a lost response
            ({"reward": 1.0}, 409),
        ):
            assert HTTP.post(where, json=body, headers=grader).status_code == status, body
        (branch,) = exported(url, "own")
        assert decode(Trajectory, branch).outcome == Verdict(reward=0.5, parts={"style": 1.0})
        again = encode(Verdict(reward=0.25))
        assert exported(url, "own", outcome=again)[0]["outcome"] == again


@pytest.fixture
def command(folder, tmp_path):
    """The command with its options, its URL and what it wrote to --out."""
    running = []

    def start(*options, **environment):
        out = tmp_path / "sessions.jsonl"
        words = [sys.executable, "-m", "paddock.cli", "gateway", str(folder), "--port", "0"]
        process = subprocess.Popen(
            [*words, "--out", str(out), *options],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        return process, "".join(lines), out

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_the_command_serves_stock_clients_and_keeps_their_sessions(command, tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("of the admin\n")
    process, printed, out = command(
        "--admin-key-file", str(key_file), "--served-model-name", "pony"
    )
    url = re.search(r"ANTHROPIC_BASE_URL=(\S+)", printed)[1]
    assert f"OPENAI_BASE_URL={url}/v1" in printed and f"of {key_file}" in printed
    assert "of the admin" not in printed and "pony" in printed
    admin = {"x-api-key": "of the admin"}
    made = HTTP.post(f"{url}/sessions", json={"temperature": 0.0, "id": "a"}, headers=admin).json()
    ask = [{"role": "user", "content": "Say hello."}]
    told = openai.OpenAI(base_url=f"{url}/v1", api_key=made["api_key"]).chat.completions.create(
        model="any", messages=ask
    )
    assert told.choices[0].message.content == "Hello there, friend!"
    grader = {"x-api-key": made["verdict_key"]}
    HTTP.post(f"{url}/sessions/a/verdict", json={"reward": 1.0}, headers=grader).raise_for_status()
    HTTP.delete(f"{url}/sessions/a", headers=admin).raise_for_status()
    (line,) = out.read_text().splitlines()
    HTTP.post(f"{url}/sessions", json={"id": "unused"}, headers=admin).raise_for_status()
    left = HTTP.post(f"{url}/sessions", json={"id": "left"}, headers=admin).json()
    anthropic.Anthropic(base_url=url, api_key=left["api_key"]).messages.create(
        model="any", messages=ask, max_tokens=3
    )
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, rest) == (0, "stopped\n")
    first, second = map(json.loads, out.read_text().splitlines())
    assert first == json.loads(line) and (first["id"], second["id"]) == ("a/0", "left/0")
    assert (first["reward"], second["reward"]) == (1.0, None)
    trajectory = decode(Trajectory, first["trajectory"])
    assert trajectory.outcome == Verdict(reward=1.0) and sum(trajectory.loss_mask) == 10
    dialogue = parse_dialogue(first)
    assert [message.content for message in dialogue.messages] == [
        "Say hello.",
        "Hello there, friend!",
    ]


def test_without_a_key_a_new_one_is_printed(command):
    _, printed, out = command(PADDOCK_ADMIN_KEY="")
    key = re.search(r"admin key +(\S{43}) \(new\)", printed)[1]
    url = re.search(r"ANTHROPIC_BASE_URL=(\S+)", printed)[1]
    headers = {"Authorization": f"Bearer {key}"}
    endpoint = HTTP.post(f"{url}/sessions", json={"max_tokens": 4}, headers=headers).json()
    agent = ChatAgent(SessionEndpoint(url, endpoint["api_key"]), stream=True)
    agent.say("Hi")
    agent.turn()
    assert HTTP.get(f"{url}/sessions", headers=headers).json()["sessions"][0]["turns"] == 1
    brief = {"id": "brief", "idle_timeout_s": 0.2}
    endpoint = HTTP.post(f"{url}/sessions", json=brief, headers=headers).json()
    agent = ChatAgent(SessionEndpoint(url, endpoint["api_key"]), stream=True)
    agent.say("Hi")
    agent.turn()
    until(lambda: out.exists() and "brief/0" in out.read_text())
    gone = HTTP.get(f"{url}/sessions/brief", headers={"x-api-key": endpoint["api_key"]})
    assert gone.status_code == 401 and "the session is closed" in gone.text
