"""The world `service`: a customer writes to a shop's help desk, and the desk has tools.

The customer is scripted: states one wish after the other, gives the email when asked for it, says
yes to a question, and asks once more for what is refused. Graded by what the database is in the end
and by what had to be said.
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
_MOST_YES = 2  # to questions about one wish: nobody is asked for ever


class ServiceSettings(EnvSettings):
    task_keys = ("level", "seed")

    level: Annotated[int, Field(ge=1, le=LEVELS)] = 2  # wishes of one customer
    seed: int = 0
    max_turns: Annotated[int, Field(ge=2)] = 40
    timeout_s: Annotated[float, Field(gt=0)] = 1200.0

    def make_taskset(self) -> "ServiceTaskset":
        return ServiceTaskset(self)


class ServiceTaskset:
    name = NAME

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._label = settings.shape_hash
        self._scenario = lru_cache(maxsize=1024)(self._drawn)

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def task(self, index: int, split: Split = "train") -> Task:
        settings = self._settings
        opening = SimulatedUser(self._scenario(split, index)).first_message
        return Task(
            id=f"{NAME}/{self._label}/{split}/{index}",
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
        """What belongs to a task, by its id."""
        return self._scenario(*parse_task_id(task, NAME, self._label))

    def solver(self, task: Task) -> Policy:
        scenario = self.scenario(task)
        replies = [] if scenario.gives_email else [_say("May I have your email, please?")]
        look = ToolCall(
            id="look", name="find_customer", arguments={"email": scenario.customer.email}
        )
        replies.append(Message(role="assistant", content="", tool_calls=(look,)))
        for wish in scenario.wishes:
            replies += _granting(wish)
        return scripted_policy(*replies)

    def _drawn(self, split: Split, index: int) -> CustomerScenario:
        chance = Random(f"{self._settings.seed}/{index}")
        while True:
            scenario = generate_scenario(chance, self._settings.level)
            if assign_split(scenario.text) == split:
                return scenario


def _granting(wish: CustomerIntent) -> list[Message]:
    if wish.tempting:
        return [_say("I am sorry, the rules do not allow that.")] * 2
    done = _say(f"It is done. {wish.told}" if wish.act else f"It is {wish.told}.")
    if wish.act is None:
        return [done]
    call = ToolCall(id="do", name=wish.act.tool, arguments=wish.act.arguments)
    return [Message(role="assistant", content="", tool_calls=(call,)), done]


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


class SimulatedUser:
    """A customer who follows a script."""

    def __init__(self, scenario: CustomerScenario) -> None:
        self._scenario = scenario
        self._email_known = scenario.gives_email
        self._pushed = False
        self._agreed = 0
        self.at = 0  # the wish that is open

    @property
    def first_message(self) -> str:
        who = self._scenario.customer
        mail = f" My email is {who.email}." if self._scenario.gives_email else ""
        return f"Hello, this is {who.name}.{mail} {self._scenario.wishes[0].said}"

    def respond(self, text: str) -> str | None:
        """What the customer says next; None: goodbye."""
        if not self._email_known and re.search(r"(?i)e-?mail", text):
            self._email_known = True
            return f"It is {self._scenario.customer.email}."
        if "?" in text and not _CLOSING.search(text) and self._agreed < _MOST_YES:
            self._agreed += 1
            return "Yes, please."
        wishes = self._scenario.wishes
        if wishes[self.at].push and not self._pushed:
            self._pushed = True
            return wishes[self.at].push
        self.at, self._pushed, self._agreed = self.at + 1, False, 0
        return wishes[self.at].said if self.at < len(wishes) else None


class ServiceEnv:
    """Parts of the verdict: `database` (1 if it is as it should be), `told` (share of what had to
    be said that was said while its wish was open), `ended` (1 if the customer has said goodbye).
    Only all of them together are worth something."""

    def __init__(self, task: Task, scenario: CustomerScenario) -> None:
        self.task = task
        self._scenario = scenario
        self._desk = StoreAPI(scenario.shop)
        self._user = SimulatedUser(scenario)
        self._said = [""] * len(scenario.wishes)  # while each wish was open
        self._ended = False

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self._desk.tools)

    async def reset(self) -> None:
        pass

    async def step(self, reply: Message) -> tuple[Message, ...]:
        self._said[self._user.at] += f" {reply.content}"
        if reply.tool_calls:
            return await execute_tool_calls(self._desk.tools, reply)
        next_words = self._user.respond(reply.content)
        self._ended = next_words is None
        return () if next_words is None else (Message(role="user", content=next_words),)

    async def score(self) -> Verdict:
        wishes = self._scenario.wishes
        told = [_says(t, w.told) for w, t in zip(wishes, self._said, strict=True) if w.told]
        parts = {
            "database": float(self._desk.shop == self._scenario.goal_state),
            "told": fmean(told) if told else 1.0,
            "ended": float(self._ended),
        }
        return Verdict(reward=float(all(value == 1 for value in parts.values())), parts=parts)

    async def close(self) -> None:
        pass


def _says(text: str, what: str) -> bool:
    """Whether an amount or a word is said, thousands with a comma or without.

    >>> _says("You get $1,205.50 back.", "$1205.50"), _says("It is undelivered", "delivered")
    (True, False)
    """
    plain = text.lower().replace(",", "")
    return bool(re.search(rf"(?<!\w){re.escape(what.lower())}(?!\w)", plain))
