"""A whole plan on one page: what each stage gained, what it forgot, what came back."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddock.dashboard.bars import heat_map, share_bar
from paddock.dashboard.curves import metric_chart, reward_chart
from paddock.dashboard.folder import ReportError, RunFolder, is_own_file, number, read_run
from paddock.dashboard.html import Html, folded, joined, page, section, table, tag, tiles
from paddock.dashboard.scale import short, span
from paddock.journal import EVENTS_FILE, follow

REPORT = "report.html"
# Of each kind of stage, the curves that tell its story; those a run does not have are left out.
TELLING = (
    *("held_out", "loss", "indexer", "reward", "staleness", "entropy", "teacher_gap", "gap"),
    *("trainer_idle", "engine_idle"),
)


EXCERPT = 300  # characters of a long reply that are shown at either end


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    about: str = ""
    seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)  # by skill
    errors: dict[str, float] = field(default_factory=dict)  # standard errors, likewise
    examples: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Story:
    path: Path
    seed: int
    stages: tuple[Stage, ...]
    skills: tuple[str, ...]
    falling: frozenset[str]  # skills of which less is better

    def best(self, skill: str) -> float | None:
        found = [stage.scores[skill] for stage in self.stages if skill in stage.scores]
        if not found:
            return None
        return min(found) if skill in self.falling else max(found)

    def last(self, skill: str) -> float | None:
        found = [stage.scores[skill] for stage in self.stages if skill in stage.scores]
        return found[-1] if found else None

    def kept(self, skill: str) -> str:
        """What is left in the end of the best there was."""
        best, last = self.best(skill), self.last(skill)
        if best is None or last is None:
            return ""
        if skill in self.falling:
            return f"{last - best:+.3f}"
        return f"{last / best:.0%}" if best else "-"


def read_story(folder: str | Path) -> Story:
    """What a plan wrote down in its folder, finished or not."""
    path = Path(folder)
    if not is_own_file(path / EVENTS_FILE):
        raise ReportError(f"{path}: no run of a plan, it holds no {EVENTS_FILE}")
    stages: dict[str, Stage] = {}
    skills: dict[str, None] = {}
    falling: set[str] = set()
    seed = 0
    for event, _ in follow(path / EVENTS_FILE):
        match event:
            case {"kind": "plan", "seed": int(seed)}:
                pass
            case {"kind": "stage_undone", "stage": str(name)}:
                stages.pop(name, None)
            case {"kind": "stage_done", "stage": str(name)}:
                about, seconds = str(event.get("about", "")), number(event.get("seconds")) or 0.0
                stages[name] = Stage(name, about, seconds)
            case {"kind": "skill", "stage": str(name), "skill": str(skill)} if name in stages:
                _note(stages[name], skill, event)
                skills[skill] = None
                if event.get("better") == "lower":
                    falling.add(skill)
    return Story(path, seed, tuple(stages.values()), tuple(skills), frozenset(falling))


def _note(stage: Stage, skill: str, event: Mapping[str, Any]) -> None:
    score, error = number(event.get("score")), number(event.get("error"))
    if score is not None:
        stage.scores[skill] = score
    if error is not None:
        stage.errors[skill] = error
    stage.examples[skill] = list(event.get("examples") or [])


def write_story(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a plan, into its folder unless told otherwise; returns where it is."""
    story = read_story(folder)
    file = Path(out) if out is not None else story.path / REPORT
    file.write_text(page(story.path.resolve().name, *story_page(story)), "utf-8", "replace")
    return file


def story_page(story: Story) -> Iterator[Html]:
    whole = sum(stage.seconds for stage in story.stages)
    yield tag("h1", story.path.resolve().name)
    yield tag(
        "p", f"{len(story.stages)} stages in {span(whole)}, seed {story.seed}.", class_="lead"
    )
    yield tiles(_headline(story))
    yield section("Skills after each stage", _lead(), *_skills(story))
    yield section("Time", share_bar({s.name: s.seconds for s in story.stages}, span))
    for stage in story.stages:
        yield section(stage.name, *_stage(story, stage))


def _lead() -> Html:
    return tag(
        "p",
        "Always the same held-out tasks, none of which any stage was trained on. A row shows what "
        "a model could do after that stage; down a column one sees a skill come, fade and return.",
    )


def _headline(story: Story) -> Iterator[tuple[str, str, str]]:
    for skill in story.skills:
        first = next(s.scores[skill] for s in story.stages if skill in s.scores)
        last = story.last(skill)
        assert last is not None
        yield skill, short(last, 3), f"from {short(first, 3)}; {story.kept(skill)} of the best"


def _skills(story: Story) -> Iterator[Html]:
    names = [stage.name for stage in story.stages]
    rising = [skill for skill in story.skills if skill not in story.falling]
    if rising:
        values = [[stage.scores.get(skill) for skill in rising] for stage in story.stages]
        yield heat_map("Share of the reward there was", names, rising, values)
    rows = [
        (stage.name, *(_score(stage, skill) for skill in story.skills)) for stage in story.stages
    ]
    rows.append(("kept of the best", *(story.kept(skill) for skill in story.skills)))
    yield folded("With standard errors", table(("stage", *story.skills), rows))


def _score(stage: Stage, skill: str) -> str:
    if skill not in stage.scores:
        return ""
    error = stage.errors.get(skill)
    return f"{stage.scores[skill]:.3f}" + (f" ± {error:.3f}" if error else "")


def _stage(story: Story, stage: Stage) -> Iterator[Html]:
    yield tag("p", f"{stage.about}. " if stage.about else "", f"{span(stage.seconds)}.")
    try:
        if (story.path / stage.name).resolve().parent != story.path.resolve():
            raise ReportError(f"{stage.name}: not a folder of this run")  # a link, or dots
        run = read_run(story.path / stage.name)
    except ReportError:
        if not (story.path / stage.name).is_dir():
            yield tag("p", "Its run folder is gone.", class_="note")
    else:
        yield tag("div", *_curves(run), class_="grid")
    for skill, examples in stage.examples.items():
        if examples:
            shown = joined(_example(example) for example in examples)
            yield folded(f"{skill}: how it answered", shown)


def _curves(run: RunFolder) -> Iterator[Html]:
    for name in TELLING:
        # A dot or a flat line tells nothing.
        if name in run.metrics and len({*run.curve(name).y}) > 2:
            yield reward_chart(run) if name == "reward" else metric_chart(run, name)


def _example(example: Mapping[str, Any]) -> Html:
    said = [_message(message) for message in example.get("messages", [])]
    result = str(example.get("result", ""))
    return tag("div", joined(said), tag("p", result, class_="note"), class_="dialogue")


def _message(message: Mapping[str, Any]) -> Html:
    parts = [tag("b", f"{message.get('role', '')} ")]
    if message.get("reasoning"):
        parts.append(tag("i", f"{message['reasoning']} "))
    parts.append(tag("span", _excerpt(str(message.get("content", "")))))
    for call in message.get("tool_calls") or []:
        told = json.dumps(call.get("arguments", {}), ensure_ascii=False)
        parts.append(tag("code", f" {call.get('name')}({told})"))
    return tag("p", joined(parts))


def _excerpt(text: str) -> str:
    """
    >>> len(_excerpt("never " * 1000)), _excerpt("now")
    (628, 'now')
    """
    if len(text) <= 2 * EXCERPT + 50:
        return text
    left_out = len(text) - 2 * EXCERPT
    return f"{text[:EXCERPT]} ... ({left_out:,} characters) ... {text[-EXCERPT:]}"
