"""Environment `service`: a simulated customer writes to an agent with tools on a store database.

The customer is scripted: states one intent after the other, gives the email when asked, says yes to
a question, and insists once on what is refused. The verdict compares the final database with the
goal and checks that the required facts were stated.
"""

import re
from functools import lru_cache
from random import Random
from statistics import fmean
from typing import Annotated

from pydantic import Field

from paddock.envs.datasets import assign_split
from paddock.envs.env import Policy, Split, scripted_policy
from paddock.envs.qa import parse_task_id
from paddock.envs.registry import EnvSettings
from paddock.envs.service.scenarios import CustomerIntent, CustomerScenario, generate_scenario
from paddock.envs.service.store_api import POLICY, StoreAPI
from paddock.envs.tools import execute_tool_calls
from paddock.records import Budget, Message, Task, ToolCall, ToolSpec, Verdict

NAME = "service"
LEVELS = 5
_CLOSING = re.compile(r"(?i)anything else|anything more|further help|else .*help")
_MAX_YES = 2  # answers to questions about one intent, so that the dialogue cannot loop


class ServiceSettings(EnvSettings):
    task_keys = ("level", "seed")

    level: Annotated[int, Field(ge=1, le=LEVELS)] = 2  # number of intents
    seed: int = 0
    max_turns: Annotated[int, Field(ge=2)] = 40
    timeout_s: Annotated[float, Field(gt=0)] = 1200.0

    def make_taskset(self) -> "ServiceTaskset":
        return ServiceTaskset(self)


class ServiceTaskset:
    name = NAME

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._shape_hash = settings.shape_hash
        self._scenario = lru_cache(maxsize=1024)(self._generate)

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def task(self, index: int, split: Split = "train") -> Task:
        settings = self._settings
        opening = SimulatedUser(self._scenario(split, index)).first_message
        return Task(
            id=f"{NAME}/{self._shape_hash}/{split}/{index}",
            env=NAME,
            messages=(
                Message(role="system", content=POLICY),
                Message(role="user", content=opening),
            ),
            budget=Budget(
                turns=settings.max_turns, seconds=settings.timeout_s, output_bytes=20_000
            ),
        )

    def make_env(self, task: Task) -> "ServiceEnv":
        return ServiceEnv(task, self.scenario(task))

    def scenario(self, task: Task) -> CustomerScenario:
        """The scenario of a task, by task id."""
        return self._scenario(*parse_task_id(task, NAME, self._shape_hash))

    def solver(self, task: Task) -> Policy:
        scenario = self.scenario(task)
        replies = [] if scenario.gives_email else [_say("May I have your email, please?")]
        look = ToolCall(
            id="look", name="find_customer", arguments={"email": scenario.customer.email}
        )
        replies.append(Message(role="assistant", content="", tool_calls=(look,)))
        for intent in scenario.intents:
            replies += _solve(intent)
        return scripted_policy(*replies)

    def _generate(self, split: Split, index: int) -> CustomerScenario:
        rng = Random(f"{self._settings.seed}/{index}")
        while True:
            scenario = generate_scenario(rng, self._settings.level)
            if assign_split(scenario.text) == split:
                return scenario


def _solve(intent: CustomerIntent) -> list[Message]:
    if intent.forbidden_action:
        return [_say("I am sorry, the rules do not allow that.")] * 2
    done = _say(f"It is done. {intent.must_say}" if intent.action else f"It is {intent.must_say}.")
    if intent.action is None:
        return [done]
    call = ToolCall(id="do", name=intent.action.tool, arguments=intent.action.arguments)
    return [Message(role="assistant", content="", tool_calls=(call,)), done]


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


class SimulatedUser:
    """A scripted customer."""

    def __init__(self, scenario: CustomerScenario) -> None:
        self._scenario = scenario
        self._email_known = scenario.gives_email
        self._pushed = False
        self._agreed = 0
        self.at = 0  # index of the current intent

    @property
    def first_message(self) -> str:
        who = self._scenario.customer
        mail = f" My email is {who.email}." if self._scenario.gives_email else ""
        return f"Hello, this is {who.name}.{mail} {self._scenario.intents[0].request}"

    def respond(self, text: str) -> str | None:
        """The customer's next message; None if the conversation is over."""
        if not self._email_known and re.search(r"(?i)e-?mail", text):
            self._email_known = True
            return f"It is {self._scenario.customer.email}."
        if "?" in text and not _CLOSING.search(text) and self._agreed < _MAX_YES:
            self._agreed += 1
            return "Yes, please."
        intents = self._scenario.intents
        if intents[self.at].push and not self._pushed:
            self._pushed = True
            return intents[self.at].push
        self.at, self._pushed, self._agreed = self.at + 1, False, 0
        return intents[self.at].request if self.at < len(intents) else None


class ServiceEnv:
    """Parts of the verdict: `database` (1 if it equals the goal), `told` (fraction of required
    facts that were stated while their intent was current), `ended` (1 if the customer has ended the
    conversation). The reward is 1 if all parts are 1, else 0."""

    def __init__(self, task: Task, scenario: CustomerScenario) -> None:
        self.task = task
        self._scenario = scenario
        self._store_api = StoreAPI(scenario.store)
        self._user = SimulatedUser(scenario)
        self._replies = [""] * len(scenario.intents)  # text while each intent was current
        self._ended = False

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self._store_api.tools)

    async def reset(self) -> None:
        pass

    async def step(self, reply: Message) -> tuple[Message, ...]:
        self._replies[self._user.at] += f" {reply.content}"
        if reply.tool_calls:
            return await execute_tool_calls(self._store_api.tools, reply)
        message = self._user.respond(reply.content)
        self._ended = message is None
        return () if message is None else (Message(role="user", content=message),)

    async def score(self) -> Verdict:
        intents = self._scenario.intents
        told = [
            _states(text, intent.must_say)
            for intent, text in zip(intents, self._replies, strict=True)
            if intent.must_say
        ]
        parts = {
            "database": float(self._store_api.store == self._scenario.goal_state),
            "told": fmean(told) if told else 1.0,
            "ended": float(self._ended),
        }
        return Verdict(reward=float(all(value == 1 for value in parts.values())), parts=parts)

    async def close(self) -> None:
        pass


def _states(text: str, what: str) -> bool:
    """Whether the text contains an amount or a word; thousands may have a comma.

    >>> _states("You get $1,205.50 back.", "$1205.50"), _states("It is undelivered", "delivered")
    (True, False)
    """
    plain = text.lower().replace(",", "")
    return bool(re.search(rf"(?<!\w){re.escape(what.lower())}(?!\w)", plain))
