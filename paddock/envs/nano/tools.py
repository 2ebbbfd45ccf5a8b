"""Environment nano-tools: look-ups in a store that only tools can read.

follow  Find sage .         look up keys until one has a number
plus    Find sage plus 3 .  the same, and the calculator adds to it
file    Read sage .         the same with files
search  Search boat .       a search names the key to look up

Each result has the value and then an outdated one after another word: `is see elm , end 4`.
Training tasks contain no key-value pair of the held-out eighth, outdated ones included; the path of
a test task ends in such a pair.
"""

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Annotated, Literal

from pydantic import Field

from paddock.envs.env import Policy, Split
from paddock.envs.nano.demonstrations import DemonstrationStyle, replay_policy
from paddock.envs.nano.language import KEYS, NOUNS, generate_entry, is_held_out
from paddock.envs.registry import EnvSettings
from paddock.envs.tools import Tool, execute_tool_calls
from paddock.records import (
    Budget,
    Dialogue,
    LossMaskSpan,
    Message,
    Task,
    ToolCall,
    ToolSpec,
    Verdict,
)

NAME = "nano-tools"
LIMITS = Budget(turns=5, seconds=60, output_bytes=1000)
KEYS_IN_STORE = 8

Kind = Literal["follow", "plus", "file", "search"]


def _spec(name: str, description: str, argument: str) -> ToolSpec:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}}
    return ToolSpec(
        name=name, description=description, parameters=schema | {"required": [argument]}
    )


LOOK = _spec("look", "read one entry of the store", "key")
CALC = _spec("calc", "work out a sum", "sum")
READ = _spec("read", "read a file", "path")
SEARCH = _spec("search", "search the store", "query")
ARGUMENT = {"look": "key", "calc": "sum", "read": "path", "search": "query"}
# Sorted by name, as dialogues of several tasks list them.
TOOLS_BY_KIND: dict[Kind, tuple[ToolSpec, ...]] = {
    "follow": (CALC, LOOK),
    "plus": (CALC, LOOK),
    "file": (CALC, READ),
    "search": (LOOK, SEARCH),
}


class NanoToolsSettings(EnvSettings):
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("follow",)
    hops: Annotated[int, Field(ge=1, le=3)] = 3  # max look-ups
    seed: int = 0

    def make_taskset(self) -> "NanoToolsTaskset":
        return NanoToolsTaskset(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTask:
    kind: Kind
    question: str
    path: tuple[str, ...]  # keys to look up, in order
    store: dict[str, str]  # values of the keys on the path and of some others
    plus: int  # 0: no addition
    answer: str

    def tool_for(self, name: str) -> str:
        if self.kind == "file":
            return "read"
        return "search" if self.kind == "search" and name == self.path[0] else "look"


class NanoToolsTaskset:
    name = NAME
    styles = ("full", "guess")

    def __init__(self, settings: NanoToolsSettings) -> None:
        self._settings = settings

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def task(self, index: int, split: Split = "train") -> Task:
        name = f"{NAME}/{split}/{index}"
        question = Message(role="user", content=self.lookup_task(name).question)
        return Task(id=name, env=NAME, messages=(question,), budget=LIMITS)

    def make_env(self, task: Task) -> "NanoToolsEnv":
        return NanoToolsEnv(task, self.lookup_task(task.id))

    def lookup_task(self, name: str) -> LookupTask:
        """The content of a task, by task id."""
        test = name.split("/")[1] == "test"
        rng = Random(f"{name}/{self._settings.seed}")
        while True:
            found = self._draw(rng)
            held_out = [is_held_out(f"{key} {found.store[key]}") for key in found.path]
            if held_out[-1] if test else not any(held_out):
                return found

    def _draw(self, rng: Random) -> LookupTask:
        kind = rng.choice(self._settings.kinds)
        max_hops = {"plus": 2, "search": 2}.get(kind, 3)
        min_hops = 2 if kind == "search" else 1
        hops = rng.randint(min_hops, max(min_hops, min(max_hops, self._settings.hops)))
        keys = rng.sample(KEYS, KEYS_IN_STORE)
        if kind == "search":
            keys[0] = rng.choice(NOUNS)
        path = tuple(keys[:hops])
        plus = rng.randint(1, 5) if kind == "plus" else 0
        value = rng.randint(0, 4 if plus else 9)
        store = {here: f"see {there}" for here, there in pairwise(path)}
        store |= {path[-1]: str(value)}
        store |= {key: generate_entry(rng, key) for key in keys[hops:]}
        verb = {"file": "Read", "search": "Search"}.get(kind, "Find")
        return LookupTask(
            kind=kind,
            question=f"{verb} {path[0]}{f' plus {plus}' if plus else ''} .",
            path=path,
            store=store,
            plus=plus,
            answer=str(value + plus),
        )

    def demonstrate(self, task: Task, style: DemonstrationStyle, rng: Random) -> Dialogue:
        return _Demonstration(task, self.lookup_task(task.id), style).run(rng)

    def solver(self, task: Task) -> Policy:
        return replay_policy(self.demonstrate(task, DemonstrationStyle(style="full"), Random(0)))


class NanoToolsEnv:
    def __init__(self, task: Task, lookup: LookupTask) -> None:
        self.task, self._lookup = task, lookup
        self.tools = TOOLS_BY_KIND[lookup.kind]
        self._bound_tools = [Tool(spec, getattr(self, f"_{spec.name}")) for spec in self.tools]
        self._answer = ""

    async def reset(self) -> None:
        pass

    async def step(self, reply: Message) -> tuple[Message, ...]:
        self._answer = "" if reply.tool_calls else reply.content
        return await execute_tool_calls(self._bound_tools, reply)

    async def score(self) -> Verdict:
        right = float(self._answer.strip() == self._lookup.answer)
        return Verdict(reward=right, parts={"right": right})

    async def close(self) -> None:
        pass

    async def _look(self, key: str) -> str:
        return tool_result(self.task.id, self._lookup, key)

    async def _read(self, path: str) -> str:
        return tool_result(self.task.id, self._lookup, path)

    async def _search(self, query: str) -> str:
        return tool_result(self.task.id, self._lookup, query)

    async def _calc(self, sum: str) -> str:
        return evaluate_sum(sum)


def tool_result(task: str, lookup: LookupTask, key: str) -> str:
    """The result for a key: its value, then an outdated one; the same on every call."""
    if key not in lookup.store:
        return f"no entry {key}"
    return f"is {lookup.store[key]} , end {generate_entry(Random(f'{task}/{key}'), key)}"


def evaluate_sum(text: str) -> str:
    """The result of the calculator.

    >>> evaluate_sum("1 + 3"), evaluate_sum("one")
    ('total 4', 'bad sum')
    """
    parts = text.replace(" ", "").split("+")
    if len(parts) == 2 and all(part.isdecimal() and len(part) < 10 for part in parts):
        return f"total {int(parts[0]) + int(parts[1])}"
    return "bad sum"


class _Demonstration:
    """Step-by-step solution of one task; each thought restates what was just read."""

    def __init__(self, task: Task, lookup: LookupTask, style: DemonstrationStyle) -> None:
        self._task, self._lookup, self._style = task, lookup, style
        self._messages = list(task.messages)
        self._untrained: list[LossMaskSpan] = []

    def run(self, rng: Random) -> Dialogue:
        lookup = self._lookup
        if self._style.style == "guess":
            self._reply("I know this", content=lookup.answer)
        else:
            self._solve(rng)
        return Dialogue(
            messages=tuple(self._messages),
            tools=TOOLS_BY_KIND[lookup.kind],
            untrained=tuple(self._untrained),
            id=self._task.id,
            source=self._task.env,
        )

    def _solve(self, rng: Random) -> None:
        lookup, known = self._lookup, ""
        mistake = rng.randrange(len(lookup.path)) if self._style.makes_mistake else None
        for i, key in enumerate(lookup.path):
            tool = lookup.tool_for(key)
            if i == mistake:
                wrong = rng.choice([k for k in KEYS if k not in lookup.store])
                self._wrong_call(f"{known}{tool} {wrong}", tool, wrong)
                known = "no , "
            self._call(f"{known}{tool} {key}", tool, key, tool_result(self._task.id, lookup, key))
            known = f"{key} {lookup.store[key]} , "
        if lookup.plus:
            expression = f"{lookup.store[lookup.path[-1]]} + {lookup.plus}"
            result = evaluate_sum(expression)
            self._call(f"{known}plus {lookup.plus} , add {expression}", "calc", expression, result)
            known = f"{result} , "
        self._reply(known.removesuffix(" , "), content=lookup.answer)

    def _wrong_call(self, thought: str, tool: str, wrong: str) -> None:
        """A wrong call with its result; the reply is untrained."""
        self._untrained.append(LossMaskSpan(message=len(self._messages)))
        self._call(thought, tool, wrong, tool_result(self._task.id, self._lookup, wrong))

    def _call(self, thought: str, tool: str, value: str, result: str) -> None:
        name = f"call_{len(self._messages)}"
        call = ToolCall(id=name, name=tool, arguments={ARGUMENT[tool]: value})
        self._reply(thought, calls=(call,))
        self._messages.append(Message(role="tool", content=result, tool_call_id=name))

    def _reply(self, thought: str, content: str = "", calls: tuple[ToolCall, ...] = ()) -> None:
        reasoning = thought if self._style.thinks else None
        self._messages.append(
            Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
        )
