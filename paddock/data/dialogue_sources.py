"""Where dialogues come from: files, and worlds that show how their tasks are done."""

import asyncio
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from paddock.config import RequiredFile
from paddock.data.dialogue import read_dialogues
from paddock.data.rng import derive_seed
from paddock.data.sources import DataError, Document, SourceContext, SourceSettings, list_files
from paddock.data.tokenize_dialogue import THINKING_MODES, TrainOn
from paddock.envs import DemonstrationTaskset, EnvError, make, nano, run_rollout
from paddock.records import (
    Budget,
    Dialogue,
    LossMaskSpan,
    Message,
    Task,
    ThinkingMode,
    ToolSpec,
    Verdict,
)
from paddock.text import GlmVersion, SpecialToken, glm_chat_template

ErrorMarker = Callable[[Dialogue], Iterable[LossMaskSpan]]
StyleWeights = dict[str, Annotated[float, Field(ge=0)]]
ThinkingModeWeights = dict[ThinkingMode, Annotated[float, Field(ge=0)]]

_MARKERS = re.compile("|".join(re.escape(token) for token in SpecialToken))


class DialogueSourceSettings(SourceSettings):
    """What every source of dialogues has."""

    train_on: TrainOn = "assistant"  # "all": every token, as a base model reads
    # Marks errors besides those already marked: module:function, Dialogue -> spans; or world:NAME,
    # where every reply of an attempt that the world's grader does not give full reward is one.
    mask_errors_with: Annotated[str, Field(pattern=r"^(env:[\w-]+|[\w.]+:\w+)$")] | None = None

    def dialogues(self) -> Iterator[Dialogue]:
        """In the same order every time, judged."""
        judge = None if self.mask_errors_with is None else load_error_marker(self.mask_errors_with)
        for found in self._dialogues():
            marks = () if judge is None else tuple(judge(found))
            try:
                yield replace(found, untrained=(*found.untrained, *marks)) if marks else found
            except ValueError as error:
                raise self.error(
                    f"judge '{self.mask_errors_with}' of {found.id}: {error}"
                ) from None

    def documents(self, reading: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        """What a tokenizer is trained on: the words between the markers."""
        for dialogue in self.dialogues():
            for n, text in enumerate(text_between_markers(dialogue)):
                yield Document(text=text, id=f"{dialogue.id}/{n}", source=self.name)

    def _dialogues(self) -> Iterator[Dialogue]:
        raise NotImplementedError


class DialogueSource(DialogueSourceSettings):
    """JSONL in OpenAI's shape or ShareGPT's: a file, or every one in a folder; packed or not."""

    kind: Literal["dialogues"] = "dialogues"
    path: str
    thinking: ThinkingMode = "interleaved"  # of dialogues that say nothing

    def data_files(self) -> tuple[RequiredFile, ...]:
        contains = (
            "JSONL, .gz or not, a file or a folder of them, a dialogue a line: "
            '{"messages": [...]} as OpenAI has them, or {"conversations": [...]} as in ShareGPT'
        )
        return (RequiredFile(path=self.path, contains=contains),)

    def _dialogues(self) -> Iterator[Dialogue]:
        for file in list_files(self, self.path, (".jsonl", ".jsonl.gz")):
            yield from read_dialogues(file, thinking=self.thinking)


class DemonstrationSource(DialogueSourceSettings):
    """Dialogues in which a world shows how its tasks are done: in several styles, if it has them,
    or as its own solver plays them."""

    is_generated: ClassVar[bool] = True

    kind: Literal["demonstrations"] = "demonstrations"
    env: str
    args: dict[str, Any] = Field(default_factory=dict)  # of the world's settings
    count: Annotated[int, Field(gt=0)]
    styles: StyleWeights = Field(default_factory=dict)  # how often each; without any, all alike
    thinking: ThinkingModeWeights = {"interleaved": 1.0}  # noqa: RUF012  pydantic copies it
    tasks_per_dialogue: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (
        1,
        1,
    )  # in a dialogue
    mistake_rate: Annotated[float, Field(ge=0, le=1)] = (
        0.0  # share with a wrong step that is corrected
    )
    seed: int = 0
    held_out: bool = False

    @model_validator(mode="after")
    def _is_possible(self) -> "DemonstrationSource":
        if self.tasks_per_dialogue[0] > self.tasks_per_dialogue[1]:
            raise ValueError(
                f"tasks: {self.tasks_per_dialogue[0]} to {self.tasks_per_dialogue[1]} is no range"
            )
        known = self._world().styles
        unknown = sorted(set(self.styles) - set(known))
        if unknown:
            there = ", ".join(known)
            raise ValueError(f"styles: {self.env} knows no '{unknown[0]}', only {there}")
        for name, shares in (
            ("styles", self.styles.values()),
            ("thinking", self.thinking.values()),
        ):
            if shares and not sum(shares):
                raise ValueError(f"{name}: all shares are zero")
        return self

    def held_out_source(self, share: float) -> "DemonstrationSource | None":
        if self.held_out:
            return None
        return self.model_copy(update={"held_out": True, "count": max(1, int(self.count * share))})

    def _world(self) -> DemonstrationTaskset:
        try:
            world = make(self.env, self.args)
        except EnvError as error:
            raise ValueError(f"world: {error}") from None
        if hasattr(world, "demonstrate"):
            return cast(DemonstrationTaskset, world)
        if hasattr(world, "solver"):
            return SolverDemonstrator(world)
        raise ValueError(f"world: '{self.env}' cannot show how its tasks are done")

    def _dialogues(self) -> Iterator[Dialogue]:
        world = self._world()
        styles = self.styles or dict.fromkeys(world.styles, 1.0)
        for number in range(self.count):
            chance = Random(derive_seed(self.seed, self.env, self.held_out, number))
            (mode,) = chance.choices([*self.thinking], [*self.thinking.values()])
            shown = [
                self._shown(world, styles, mode, chance)
                for _ in range(chance.randint(*self.tasks_per_dialogue))
            ]
            joined = concat_dialogues(shown)
            yield replace(joined, thinking=mode, id=f"{self.name}/{number}", source=self.env)

    def _shown(
        self, world: DemonstrationTaskset, styles: StyleWeights, mode: ThinkingMode, chance: Random
    ) -> Dialogue:
        task = world.task(chance.getrandbits(40), "test" if self.held_out else "train")
        (style,) = chance.choices([*styles], [*styles.values()])
        thinks = mode != "off" and (mode != "turns" or chance.random() < 0.5)
        manner = nano.DemonstrationStyle(
            style=style, thinks=thinks, slips=chance.random() < self.mistake_rate
        )
        return world.demonstrate(task, manner, chance)


class SolverDemonstrator:
    """A world whose demonstrations are what its solver does."""

    styles: tuple[str, ...] = ("solved",)

    def __init__(self, world: Any) -> None:
        self.name, self._world = world.name, world
        self.size, self.task, self.make_env = world.size, world.task, world.make_env

    def demonstrate(self, task: Task, manner: nano.DemonstrationStyle, chance: Random) -> Dialogue:  # noqa: ARG002
        env = self._world.make_env(task)
        episode = asyncio.run(run_rollout(env, self._world.solver(task)))
        if not isinstance(episode.outcome, Verdict) or episode.outcome.reward < 1:
            raise DataError(f"{task.id}: its solver ends with {episode.outcome}")
        messages = episode.messages
        if not manner.thinks:
            messages = tuple(replace(message, reasoning=None) for message in messages)
        return Dialogue(messages=messages, tools=env.tools, id=task.id, source=task.env)


def concat_dialogues(dialogues: list[Dialogue]) -> Dialogue:
    """Several dialogues as one, with the tools of all of them."""
    messages: list[Message] = []
    untrained: list[LossMaskSpan] = []
    tools: dict[str, ToolSpec] = {}
    for dialogue in dialogues:
        untrained += [replace(s, message=s.message + len(messages)) for s in dialogue.untrained]
        messages += dialogue.messages
        tools |= {tool.name: tool for tool in dialogue.tools}
    return replace(
        dialogues[0],
        messages=tuple(messages),
        untrained=tuple(untrained),
        tools=tuple(tools[name] for name in sorted(tools)),
    )


def text_between_markers(dialogue: Dialogue, version: GlmVersion = "5") -> list[str]:
    """The words of a dialogue between the markers of GLM-5's template."""
    text = glm_chat_template(version).render(
        dialogue.messages, tools=dialogue.tools, thinking=THINKING_MODES["preserved"]
    )
    return [part for part in _MARKERS.split(text) if part.strip()]


# --- judges ---------------------------------------------------------------------------------------


def load_error_marker(name: str) -> ErrorMarker:
    """What marks errors: a function by its name, or a world's grader."""
    module, _, function = name.partition(":")
    try:
        if module == "env":
            return _graded(function)
        return cast(ErrorMarker, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, EnvError) as error:
        raise DataError(f"judge '{name}': {error}") from None


def _graded(name: str) -> ErrorMarker:
    """Plays a dialogue again in its world. Its id names the task, up to a '#'."""
    world = make(name)
    limits = Budget(turns=1000, seconds=60, output_bytes=1 << 20)

    def judge(dialogue: Dialogue) -> tuple[LossMaskSpan, ...]:
        replies = [i for i, m in enumerate(dialogue.messages) if m.role == "assistant"]
        asked = dialogue.messages[: replies[0]]
        task = Task(id=dialogue.id.split("#")[0], env=name, messages=asked, budget=limits)
        outcome = asyncio.run(
            run_rollout(world.make_env(task), nano.replay_policy(dialogue))
        ).outcome
        if isinstance(outcome, Verdict) and outcome.reward >= 1:
            return ()
        return tuple(LossMaskSpan(message=i) for i in replies)

    return judge
