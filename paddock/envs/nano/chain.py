"""Environment nano-chain: the last digit of a chain of sums.

Take 3 , first minus 5 , second add 2 . Last digit ?
worked  first 3 minus 5 is 8 , second 8 add 2 is 0     -> 0
terse   easy                                           -> 0
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Annotated

from pydantic import Field

from paddock.envs.env import Policy, Split
from paddock.envs.nano.demonstrations import (
    DemonstrationStyle,
    replay_policy,
    self_correction,
    single_turn_dialogue,
)
from paddock.envs.nano.language import OPERATIONS, generate_chain, is_held_out
from paddock.envs.registry import EnvSettings
from paddock.records import Budget, Dialogue, LossMaskSpan, Message, Task, ToolSpec, Verdict

NAME = "nano-chain"
LIMITS = Budget(turns=1, seconds=60, output_bytes=1000)
_STEP = re.compile(r"(\w+ )?(\d) (add|minus) (\d) is (\d)")


class NanoChainSettings(EnvSettings):
    min_steps: Annotated[int, Field(ge=1, le=4)] = 2
    max_steps: Annotated[int, Field(ge=1, le=4)] = 4
    seed: int = 0

    def make_taskset(self) -> "NanoChainTaskset":
        return NanoChainTaskset(self)


@dataclass(frozen=True, slots=True)
class ArithmeticChain:
    question: str
    work: str
    answer: str


class NanoChainTaskset:
    name = NAME
    styles = ("worked", "terse")

    def __init__(self, settings: NanoChainSettings) -> None:
        self._settings = settings

    def size(self, split: Split) -> int | None:  # noqa: ARG002
        return None

    def task(self, index: int, split: Split = "train") -> Task:
        name = f"{NAME}/{split}/{index}"
        question = Message(role="user", content=self.chain_of(name).question)
        return Task(id=name, env=NAME, messages=(question,), budget=LIMITS)

    def make_env(self, task: Task) -> "NanoChainEnv":
        return NanoChainEnv(task, self.chain_of(task.id).answer)

    def chain_of(self, name: str) -> ArithmeticChain:
        """The chain of a task, by task id."""
        settings, test = self._settings, name.split("/")[1] == "test"
        rng = Random(f"{name}/{settings.seed}")
        while True:
            steps = rng.randint(settings.min_steps, max(settings.min_steps, settings.max_steps))
            prompt, work, value = generate_chain(rng, steps=steps)
            question = f"{prompt} . Last digit ?"
            if is_held_out(question) == test:
                return ArithmeticChain(question, work, str(value))

    def demonstrate(self, task: Task, style: DemonstrationStyle, rng: Random) -> Dialogue:
        chain = self.chain_of(task.id)
        if not style.thinks:
            return single_turn_dialogue(task, chain.answer, None)
        if style.style == "terse":
            return single_turn_dialogue(task, chain.answer, "easy")
        steps, mistake = chain.work.split(" , "), ""
        if style.makes_mistake:
            at = rng.randrange(len(steps))
            start, _, digit = steps[at].rpartition(" ")
            mistake = f"{start} {(int(digit) + rng.randint(1, 9)) % 10}"
            steps[at] = self_correction(mistake, steps[at])
        return single_turn_dialogue(task, chain.answer, " , ".join(steps), mistake)

    def solver(self, task: Task) -> Policy:
        return replay_policy(self.demonstrate(task, DemonstrationStyle(style="worked"), Random(0)))


class NanoChainEnv:
    def __init__(self, task: Task, answer: str) -> None:
        self.task, self._answer = task, answer
        self.tools: tuple[ToolSpec, ...] = ()
        self._reply = ""

    async def reset(self) -> None:
        pass

    async def step(self, reply: Message) -> tuple[Message, ...]:
        self._reply = reply.content
        return ()

    async def score(self) -> Verdict:
        right = float(self._reply.strip() == self._answer)
        return Verdict(reward=right, parts={"right": right})

    async def close(self) -> None:
        pass


def find_wrong_steps(dialogue: Dialogue) -> tuple[LossMaskSpan, ...]:
    """Error marker for these dialogues: spans of all steps with a wrong sum.

    >>> reply = Message(role="assistant", content="8", reasoning="3 minus 5 is 7 , 3 minus 5 is 8")
    >>> find_wrong_steps(Dialogue(messages=(reply,)))
    (LossMaskSpan(message=0, part='reasoning', start=0, end=14),)
    """
    return tuple(
        LossMaskSpan(message=i, part="reasoning", start=step.start(), end=step.end())
        for i, message in enumerate(dialogue.messages)
        for step in _STEP.finditer(message.reasoning or "")
        if OPERATIONS[step[3]](int(step[2]), int(step[4])) != int(step[5])
    )
