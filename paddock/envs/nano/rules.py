"""Environment nano-rules: the colour of a thing, formatted by rules, or a refusal.

    What color is the boat ? Answer twice end with done .
    the boat is red                                                          -> red red done
    the boat is red , they want it twice end with done , so I say red red done  -> red red done
    the boat is red , so I say red                                           -> red
    What color is the boat ? Answer unless it is red .
    the boat is red                                                          -> no

The reward is 1 for a right answer within `max_words`, reasoning included, and 0.4 for a longer one.
A refusal where the colour is allowed is as wrong as naming a forbidden colour.
"""

from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import Annotated, Literal

from pydantic import Field

from paddock.envs.env import Policy, Split
from paddock.envs.nano.demonstrations import (
    DemonstrationStyle,
    replay_policy,
    self_correction,
    single_turn_dialogue,
)
from paddock.envs.nano.language import COLOUR_OF, COLOURS, NOUNS, is_held_out
from paddock.envs.registry import EnvSettings
from paddock.records import Budget, Dialogue, Message, Task, ToolSpec, Verdict

NAME = "nano-rules"
LIMITS = Budget(turns=1, seconds=60, output_bytes=1000)
TOO_LONG_REWARD = 0.4  # for a right answer with too many words
RULE_SETS = (
    ("in capitals",),
    ("twice",),
    ("end with done",),
    ("start with ok",),
    ("in capitals", "end with done"),
    ("in capitals", "start with ok"),
    ("twice", "end with done"),
    ("twice", "start with ok"),
)
FORBIDDING = ("but never say {}", "without saying {}", "unless it is {}", "but not if it is {}")
REFUSAL = "no"
Kind = Literal["form", "forbidden"]  # a formatting rule, or a forbidden colour


class NanoRulesSettings(EnvSettings):
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("form", "forbidden")
    max_words: Annotated[int, Field(gt=0)] = 8  # of a reply that earns full reward
    seed: int = 0

    def make_taskset(self) -> "NanoRulesTaskset":
        return NanoRulesTaskset(self)


def apply_rules(colour: str, rules: tuple[str, ...]) -> str:
    """The right answer under the rules.

    >>> apply_rules("red", ("twice", "end with done"))
    'red red done'
    >>> apply_rules("red", ("in capitals", "start with ok"))
    'ok RED'
    >>> apply_rules("red", ("unless it is red",)), apply_rules("red", ("unless it is blue",))
    ('no', 'red')
    """
    if any(words.format(colour) in rules for words in FORBIDDING):
        return REFUSAL
    answer = colour.upper() if "in capitals" in rules else colour
    answer = f"{answer} {answer}" if "twice" in rules else answer
    answer = f"{answer} done" if "end with done" in rules else answer
    return f"ok {answer}" if "start with ok" in rules else answer


def build_question(noun: str, rules: tuple[str, ...]) -> str:
    return f"What color is the {noun} ? Answer {' '.join(rules)} ."


def _forbidding(noun: str) -> Iterator[tuple[str, ...]]:
    """Each wording with the thing's own colour and with another one: half may be answered."""
    own = COLOURS.index(COLOUR_OF[noun])
    for number, words in enumerate(FORBIDDING):
        for further in (0, 1 + (len(noun) + 2 * number) % 7):
            yield (words.format(COLOURS[(own + further) % len(COLOURS)]),)


_EVERY: dict[Kind, list[tuple[str, tuple[str, ...]]]] = {
    "form": [(noun, rules) for noun in NOUNS for rules in RULE_SETS],
    "forbidden": [(noun, rules) for noun in NOUNS for rules in _forbidding(noun)],
}


@lru_cache(maxsize=16)
def _problems(kinds: tuple[Kind, ...], split: Split) -> list[tuple[str, tuple[str, ...]]]:
    every = [each for kind in kinds for each in _EVERY[kind]]
    return [each for each in every if is_held_out(build_question(*each)) == (split == "test")]


@lru_cache(maxsize=64)
def _order(count: int, seed: str) -> list[int]:
    order = list(range(count))
    Random(seed).shuffle(order)
    return order


class NanoRulesTaskset:
    name = NAME
    styles = ("kept-brief", "kept-long", "plain-brief", "plain-long")

    def __init__(self, settings: NanoRulesSettings) -> None:
        self._settings = settings

    def size(self, split: Split) -> int | None:
        return len(_problems(self._settings.kinds, split))

    def task(self, index: int, split: Split = "train") -> Task:
        name = f"{NAME}/{split}/{index}"
        question = Message(role="user", content=build_question(*self.noun_and_rules(name)))
        return Task(id=name, env=NAME, messages=(question,), budget=LIMITS)

    def make_env(self, task: Task) -> "NanoRulesEnv":
        noun, rules = self.noun_and_rules(task.id)
        return NanoRulesEnv(task, apply_rules(COLOUR_OF[noun], rules), self._settings.max_words)

    def noun_and_rules(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The noun and the rules of a task, by task id."""
        _, split, index = name.split("/")
        every = _problems(self._settings.kinds, "test" if split == "test" else "train")
        epoch, place = divmod(int(index), len(every))
        return every[_order(len(every), f"{split}/{epoch}/{self._settings.seed}")[place]]

    def demonstrate(self, task: Task, style: DemonstrationStyle, rng: Random) -> Dialogue:
        noun, rules = self.noun_and_rules(task.id)
        colour = COLOUR_OF[noun]
        obeys = style.style.startswith("kept")
        answer = apply_rules(colour, rules) if obeys else colour
        if not style.thinks:
            return single_turn_dialogue(task, answer, None)
        thought, wrong = f"the {noun} is {colour}", ""
        if style.makes_mistake:
            other = rng.choice([c for c in COLOURS if c != colour])
            wrong = f"the {noun} is {other}"
            thought = self_correction(wrong, thought)
        if style.style.endswith("long"):
            restated = f" , they want it {' '.join(rules)}" if obeys else ""
            thought += f"{restated} , so I say {answer}"
        return single_turn_dialogue(task, answer, thought, wrong)

    def solver(self, task: Task) -> Policy:
        return replay_policy(
            self.demonstrate(task, DemonstrationStyle(style="kept-brief"), Random(0))
        )


class NanoRulesEnv:
    def __init__(self, task: Task, answer: str, words: int) -> None:
        self.task, self._answer, self._words = task, answer, words
        self.tools: tuple[ToolSpec, ...] = ()
        self._reply = Message(role="assistant", content="")

    async def reset(self) -> None:
        pass

    async def step(self, reply: Message) -> tuple[Message, ...]:
        self._reply = reply
        return ()

    async def score(self) -> Verdict:
        words = len(f"{self._reply.reasoning or ''} {self._reply.content}".split())
        right, short = self._reply.content.strip() == self._answer, words <= self._words
        reward = (1.0 if short else TOO_LONG_REWARD) if right else 0.0
        return Verdict(reward=reward, parts={"right": float(right), "short": float(short)})

    async def close(self) -> None:
        pass
