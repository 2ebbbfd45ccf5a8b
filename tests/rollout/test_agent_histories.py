"""Agents that send back whatever they like: every exported token was sampled, after that prompt.

Generated agents reorder keys, drop reasoning, edit, shorten and summarise their history and run
branches in parallel. Every message they write has a mark of its own, so that a prompt shows which
messages the engine really had.
"""

import asyncio
import json
import re
from functools import cache
from itertools import count
from random import Random

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.records import Trajectory, Verdict
from paddock.rollout.gateway import build_gateway
from paddock.rollout.prefix_matcher import MATCHERS
from paddock.rollout.session_manager import SessionConfig, SessionManager
from tests.rollout.engines import RandomEngine, renderer, tokenizer
from tests.text.conversations import TOOLS

MARK = re.compile(r"\[m\d+\]")
CHANGES = (
    *("none", "none", "none", "reorder", "drop reasoning", "drop all reasoning", "edit reply"),
    *("edit own", "drop oldest", "summarise", "go back", "parallel", "system"),
)


def reordered(rng, value):
    """The same JSON value with its keys in another order, arguments included."""
    if isinstance(value, dict):
        keys = rng.sample(list(value), len(value))
        return {
            key: rewritten(rng, value[key]) if key == "arguments" else reordered(rng, value[key])
            for key in keys
        }
    if isinstance(value, list):
        return [reordered(rng, each) for each in value]
    return value


def rewritten(rng, arguments):
    """The JSON text of arguments in another order, spaced otherwise."""
    value = json.loads(arguments)
    keys = rng.sample(list(value), len(value))
    return json.dumps({key: value[key] for key in keys}, indent=rng.choice([None, 1]))


class WildAgent:
    """A message list, and changes to it. Its requests are what a chat client would send."""

    def __init__(self, seed):
        self.rng, self.marks = Random(seed), (f"[m{i}]" for i in count())
        self.messages = [self.said("user")]

    def said(self, role, **more):
        return {"role": role, "content": f"pony {next(self.marks)} box", **more}

    def take(self, reply):
        """A reply, then the results of its calls or a new question."""
        self.messages.append(reply)
        for call in reply.get("tool_calls") or []:
            self.messages.append(self.said("tool", tool_call_id=call["id"]))
        if self.messages[-1]["role"] == "assistant":
            self.messages.append(self.said("user"))

    def change(self, how):  # noqa: C901  a table of changes
        replies = [m for m in self.messages if m["role"] == "assistant"]
        match how:
            case "reorder":
                self.messages = [
                    m if m["role"] == "tool" else reordered(self.rng, m) for m in self.messages
                ]
            case "drop reasoning" if replies:
                self.rng.choice(replies).pop("reasoning_content", None)
            case "drop all reasoning":
                for reply in replies:
                    reply.pop("reasoning_content", None)
            case "edit reply" if replies:
                self.rng.choice(replies)["content"] = f"edited {next(self.marks)}"
            case "edit own":
                own = [m for m in self.messages if m["role"] != "assistant"]
                self.rng.choice(own)["content"] = f"edited {next(self.marks)}"
            case "drop oldest" if len(replies) > 1:
                second = self.messages.index(replies[1])
                del self.messages[1:second]
            case "summarise":
                self.messages = [self.said("user"), self.said("user")]
            case "go back" if replies:
                del self.messages[self.messages.index(self.rng.choice(replies)) :]
            case "system":
                self.messages.insert(0, self.said("system"))

    def body(self):
        return json.loads(json.dumps({"messages": self.messages, "tools": TOOLS}))


def marks_of(messages):
    """The marks of a conversation, in order; those of tool results of one reply as a set."""
    return sorted(MARK.findall(json.dumps([m.get("content") for m in messages])))


@cache
def gateway():
    """One for all agents: its engine, its sessions and its transport."""
    engine = RandomEngine()
    sessions = SessionManager(engine, renderer())
    return engine, sessions, httpx.ASGITransport(build_gateway(sessions))


async def play(seed, changes, matcher):
    """A session of one agent: the engine's log, and the session."""
    engine, sessions, transport = gateway()
    engine.log.clear()
    for left in list(sessions):
        sessions.close(left)
    live, agent = (
        sessions.open(f"s{seed}", SessionConfig(matcher=MATCHERS[matcher])),
        WildAgent(seed),
    )
    headers = {"x-api-key": live.api_key}
    async with httpx.AsyncClient(transport=transport, base_url="http://g", headers=headers) as http:

        async def turn(body):
            known = len(engine.log)
            reply = await http.post("/v1/chat/completions", json=body)
            if reply.status_code != 200:
                assert reply.status_code == 400, reply.text
                assert reply.json()["error"]["message"] and len(engine.log) == known
                return None
            return reply.json()["choices"][0]["message"]

        for how in changes:
            agent.change(how)
            bodies = [agent.body()] * (2 if how == "parallel" else 1)
            replies = await asyncio.gather(*map(turn, bodies))
            for request in engine.log[-len(bodies) :] if replies[0] is not None else ():
                prompt = tokenizer().decode(request.prompt)
                assert sorted(MARK.findall(prompt)) == marks_of(bodies[0]["messages"])
            if replies[-1] is None:
                agent.messages = [agent.said("user")]
            else:
                agent.take(replies[-1])
    return list(engine.log), live.session


def check_export(log, session):
    """Every trained token was sampled after exactly the tokens before it, and is trained once."""
    sampled = [(logged.prompt, logged.completion) for logged in log]
    branches = session.trajectories(task_id="t", group_id="g", outcome=Verdict(reward=1.0))
    trained = []
    for branch in branches:
        prompt = ()
        for turn in branch.turns:
            prompt += turn.added_ids
            assert (prompt, turn.completion) in sampled
            if turn.trained:
                trained.append((prompt, turn.completion))
            prompt += turn.completion.token_ids
        mask = [
            turn.trained and is_sampled
            for turn in branch.turns
            for is_sampled in (*[False] * len(turn.added_ids), *turn.completion.sampled)
        ]
        assert isinstance(branch, Trajectory) and list(branch.loss_mask) == mask
    assert sorted(map(str, trained)) == sorted(map(str, sampled)), "each is trained once"


def check_agent(seed, changes, matcher):
    log, session = asyncio.run(play(seed, changes, matcher))
    assert len(log) == len(session.tree.nodes)
    check_export(log, session)


@settings(max_examples=120)
@given(
    seed=st.integers(0, 1 << 32),
    changes=st.lists(st.sampled_from(CHANGES), min_size=2, max_size=8),
    matcher=st.sampled_from(sorted(MATCHERS)),
)
def test_whatever_an_agent_sends_back_each_trained_token_was_sampled(seed, changes, matcher):
    check_agent(seed, changes, matcher)
