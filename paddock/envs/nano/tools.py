"""nano-tools: a store that only tools can see into.

follow  Find sage .         look up keys until one has a number
plus    Find sage plus 3 .  the same, and the calculator adds to it
file    Read sage .         the same with files
search  Search boat .       a search names the key to look up

Each result tells the value and then a stale one behind another word: `is see elm , end 4`. In
training no pair of key and value, stale ones included, is of the held-out eighth; the path of a
test task ends in one that is.
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
TOOLS_BY_KIND: dict[
    Kind, tuple[ToolSpec, ...]
] = {  # by name, as dialogues of several tasks list them
    "follow": (CALC, LOOK),
    "plus": (CALC, LOOK),
    "file": (CALC, READ),
    "search": (LOOK, SEARCH),
}


class NanoToolsSettings(EnvSettings):
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("follow",)
    hops: Annotated[int, Field(ge=1, le=3)] = 3  # look-ups at most
    seed: int = 0

    def make_taskset(self) -> "NanoToolsTaskset":
        return NanoToolsTaskset(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTask:
    kind: Kind
    question: str
    path: tuple[str, ...]  # what is looked up, in order
    store: dict[str, str]  # what each key on the path and some others say
    plus: int  # 0: no sum is asked
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
        ask = Message(role="user", content=self.lookup_task(name).question)
        return Task(id=name, env=NAME, messages=(ask,), budget=LIMITS)

    def make_env(self, task: Task) -> "NanoToolsEnv":
        return NanoToolsEnv(task, self.lookup_task(task.id))

    def lookup_task(self, name: str) -> LookupTask:
        """What belongs to a task, by its id."""
        test = name.split("/")[1] == "test"
        chance = Random(f"{name}/{self._settings.seed}")
        while True:
            found = self._drawn(chance)
            held_out = [is_held_out(f"{key} {found.store[key]}") for key in found.path]
            if held_out[-1] if test else not any(held_out):
                return found

    def _drawn(self, chance: Random) -> LookupTask:
        kind = chance.choice(self._settings.kinds)
        most = {"plus": 2, "search": 2}.get(kind, 3)
        least = 2 if kind == "search" else 1
        hops = chance.randint(least, max(least, min(most, self._settings.hops)))
        keys = chance.sample(KEYS, KEYS_IN_STORE)
        if kind == "search":
            keys[0] = chance.choice(NOUNS)
        path = tuple(keys[:hops])
        plus = chance.randint(1, 5) if kind == "plus" else 0
        value = chance.randint(0, 4 if plus else 9)
        store = {here: f"see {there}" for here, there in pairwise(path)}
        store |= {path[-1]: str(value)}
        store |= {key: generate_entry(chance, key) for key in keys[hops:]}
        verb = {"file": "Read", "search": "Search"}.get(kind, "Find")
        return LookupTask(
            kind=kind,
            question=f"{verb} {path[0]}{f' plus {plus}' if plus else ''} .",
            path=path,
            store=store,
            plus=plus,
            answer=str(value + plus),
        )

    def demonstrate(self, task: Task, manner: DemonstrationStyle, chance: Random) -> Dialogue:
        return _Demonstration(task, self.lookup_task(task.id), manner).run(chance)

    def solver(self, task: Task) -> Policy:
        return replay_policy(self.demonstrate(task, DemonstrationStyle(style="full"), Random(0)))


class NanoToolsEnv:
    def __init__(self, task: Task, puzzle: LookupTask) -> None:
        self.task, self._puzzle = task, puzzle
        self.tools = TOOLS_BY_KIND[puzzle.kind]
        self._lent = [Tool(spec, getattr(self, f"_{spec.name}")) for spec in self.tools]
        self._said = ""

    async def reset(self) -> None:
        pass

    async def step(self, reply: Message) -> tuple[Message, ...]:
        self._said = "" if reply.tool_calls else reply.content
        return await execute_tool_calls(self._lent, reply)

    async def score(self) -> Verdict:
        right = float(self._said.strip() == self._puzzle.answer)
        return Verdict(reward=right, parts={"right": right})

    async def close(self) -> None:
        pass

    async def _look(self, key: str) -> str:
        return tool_result(self.task.id, self._puzzle, key)

    async def _read(self, path: str) -> str:
        return tool_result(self.task.id, self._puzzle, path)

    async def _search(self, query: str) -> str:
        return tool_result(self.task.id, self._puzzle, query)

    async def _calc(self, sum: str) -> str:
        return evaluate_sum(sum)


def tool_result(task: str, puzzle: LookupTask, key: str) -> str:
    """What a tool says about a key: its value, then a stale one; the same each time."""
    if key not in puzzle.store:
        return f"no entry {key}"
    return f"is {puzzle.store[key]} , end {generate_entry(Random(f'{task}/{key}'), key)}"


def evaluate_sum(text: str) -> str:
    """
    >>> evaluate_sum("1 + 3"), evaluate_sum("one")
    ('total 4', 'bad sum')
    """
    parts = text.replace(" ", "").split("+")
    if len(parts) == 2 and all(part.isdecimal() and len(part) < 10 for part in parts):
        return f"total {int(parts[0]) + int(parts[1])}"
    return "bad sum"


class _Demonstration:
    """One puzzle, solved step by step; each thought says again what was just read."""

    def __init__(self, task: Task, puzzle: LookupTask, manner: DemonstrationStyle) -> None:
        self._task, self._puzzle, self._manner = task, puzzle, manner
        self._messages = list(task.messages)
        self._untrained: list[LossMaskSpan] = []

    def run(self, chance: Random) -> Dialogue:
        puzzle = self._puzzle
        if self._manner.style == "guess":
            self._reply("I know this", content=puzzle.answer)
        else:
            self._solve(chance)
        return Dialogue(
            messages=tuple(self._messages),
            tools=TOOLS_BY_KIND[puzzle.kind],
            untrained=tuple(self._untrained),
            id=self._task.id,
            source=self._task.env,
        )

    def _solve(self, chance: Random) -> None:
        puzzle, known = self._puzzle, ""
        slip = chance.randrange(len(puzzle.path)) if self._manner.slips else None
        for i, key in enumerate(puzzle.path):
            tool = puzzle.tool_for(key)
            if i == slip:
                wrong = chance.choice([k for k in KEYS if k not in puzzle.store])
                self._slip(f"{known}{tool} {wrong}", tool, wrong)
                known = "no , "
            self._call(f"{known}{tool} {key}", tool, key, tool_result(self._task.id, puzzle, key))
            known = f"{key} {puzzle.store[key]} , "
        if puzzle.plus:
            asked = f"{puzzle.store[puzzle.path[-1]]} + {puzzle.plus}"
            result = evaluate_sum(asked)
            self._call(f"{known}plus {puzzle.plus} , add {asked}", "calc", asked, result)
            known = f"{result} , "
        self._reply(known.removesuffix(" , "), content=puzzle.answer)

    def _slip(self, thought: str, tool: str, wrong: str) -> None:
        """A wrong call, its thought and the answer to it; the reply is marked."""
        self._untrained.append(LossMaskSpan(message=len(self._messages)))
        self._call(thought, tool, wrong, tool_result(self._task.id, self._puzzle, wrong))

    def _call(self, thought: str, tool: str, value: str, result: str) -> None:
        name = f"call_{len(self._messages)}"
        call = ToolCall(id=name, name=tool, arguments={ARGUMENT[tool]: value})
        self._reply(thought, calls=(call,))
        self._messages.append(Message(role="tool", content=result, tool_call_id=name))

    def _reply(self, thought: str, content: str = "", calls: tuple[ToolCall, ...] = ()) -> None:
        reasoning = thought if self._manner.thinks else None
        self._messages.append(
            Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
        )
