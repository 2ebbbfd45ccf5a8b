"""A whole plan on one page: what each stage gained, what it forgot, what came back."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddock.dashboard.bar_charts import heat_map, stacked_bar
from paddock.dashboard.html import Html, details, join, page, section, table, tag, tiles
from paddock.dashboard.metrics import metric_chart, reward_chart
from paddock.dashboard.run_view import (
    ReportError,
    RunView,
    is_own_file,
    parse_number_or_none,
    read_run,
)
from paddock.dashboard.scale import format_duration, format_number
from paddock.journal import EVENTS_FILE, follow

REPORT = "report.html"
# Of each kind of stage, the curves that tell its story; those a run does not have are left out.
STAGE_CURVES = (
    *("held_out", "loss", "indexer", "reward", "staleness", "entropy", "teacher_gap", "gap"),
    *("trainer_idle", "engine_idle"),
)


EXCERPT = 300  # characters of a long reply that are shown at either end


@dataclass(frozen=True, slots=True)
class StageResult:
    name: str
    about: str = ""
    seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)  # by skill
    errors: dict[str, float] = field(default_factory=dict)  # standard errors, likewise
    examples: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineReport:
    path: Path
    seed: int
    stages: tuple[StageResult, ...]
    metrics: tuple[str, ...]
    lower_is_better: frozenset[str]  # skills of which less is better

    def best_score(self, skill: str) -> float | None:
        found = [stage.scores[skill] for stage in self.stages if skill in stage.scores]
        if not found:
            return None
        return min(found) if skill in self.lower_is_better else max(found)

    def last_score(self, skill: str) -> float | None:
        found = [stage.scores[skill] for stage in self.stages if skill in stage.scores]
        return found[-1] if found else None

    def retained(self, skill: str) -> str:
        """What is left in the end of the best there was."""
        best, last = self.best_score(skill), self.last_score(skill)
        if best is None or last is None:
            return ""
        if skill in self.lower_is_better:
            return f"{last - best:+.3f}"
        return f"{last / best:.0%}" if best else "-"


def read_pipeline_report(folder: str | Path) -> PipelineReport:
    """What a plan wrote down in its folder, finished or not."""
    path = Path(folder)
    if not is_own_file(path / EVENTS_FILE):
        raise ReportError(f"{path}: no run of a plan, it holds no {EVENTS_FILE}")
    stages: dict[str, StageResult] = {}
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
                about, seconds = (
                    str(event.get("about", "")),
                    parse_number_or_none(event.get("seconds")) or 0.0,
                )
                stages[name] = StageResult(name, about, seconds)
            case {"kind": "skill", "stage": str(name), "skill": str(skill)} if name in stages:
                _note(stages[name], skill, event)
                skills[skill] = None
                if event.get("better") == "lower":
                    falling.add(skill)
    return PipelineReport(path, seed, tuple(stages.values()), tuple(skills), frozenset(falling))


def _note(stage: StageResult, skill: str, event: Mapping[str, Any]) -> None:
    score, error = (
        parse_number_or_none(event.get("score")),
        parse_number_or_none(event.get("error")),
    )
    if score is not None:
        stage.scores[skill] = score
    if error is not None:
        stage.errors[skill] = error
    stage.examples[skill] = list(event.get("examples") or [])


def write_pipeline_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a plan, into its folder unless told otherwise; returns where it is."""
    story = read_pipeline_report(folder)
    file = Path(out) if out is not None else story.path / REPORT
    file.write_text(
        page(story.path.resolve().name, *pipeline_report_page(story)), "utf-8", "replace"
    )
    return file


def pipeline_report_page(story: PipelineReport) -> Iterator[Html]:
    whole = sum(stage.seconds for stage in story.stages)
    yield tag("h1", story.path.resolve().name)
    yield tag(
        "p",
        f"{len(story.stages)} stages in {format_duration(whole)}, seed {story.seed}.",
        class_="lead",
    )
    yield tiles(_headline(story))
    yield section("Skills after each stage", _lead(), *_skills(story))
    yield section("Time", stacked_bar({s.name: s.seconds for s in story.stages}, format_duration))
    for stage in story.stages:
        yield section(stage.name, *_stage(story, stage))


def _lead() -> Html:
    return tag(
        "p",
        "Always the same held-out tasks, none of which any stage was trained on. A row shows what "
        "a model could do after that stage; down a column one sees a skill come, fade and return.",
    )


def _headline(story: PipelineReport) -> Iterator[tuple[str, str, str]]:
    for skill in story.metrics:
        first = next(s.scores[skill] for s in story.stages if skill in s.scores)
        last = story.last_score(skill)
        assert last is not None
        yield (
            skill,
            format_number(last, 3),
            f"from {format_number(first, 3)}; {story.retained(skill)} of the best",
        )


def _skills(story: PipelineReport) -> Iterator[Html]:
    names = [stage.name for stage in story.stages]
    rising = [skill for skill in story.metrics if skill not in story.lower_is_better]
    if rising:
        values = [[stage.scores.get(skill) for skill in rising] for stage in story.stages]
        yield heat_map("Share of the reward there was", names, rising, values)
    rows = [
        (stage.name, *(_score(stage, skill) for skill in story.metrics)) for stage in story.stages
    ]
    rows.append(("kept of the best", *(story.retained(skill) for skill in story.metrics)))
    yield details("With standard errors", table(("stage", *story.metrics), rows))


def _score(stage: StageResult, skill: str) -> str:
    if skill not in stage.scores:
        return ""
    error = stage.errors.get(skill)
    return f"{stage.scores[skill]:.3f}" + (f" ± {error:.3f}" if error else "")


def _stage(story: PipelineReport, stage: StageResult) -> Iterator[Html]:
    yield tag("p", f"{stage.about}. " if stage.about else "", f"{format_duration(stage.seconds)}.")
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
            shown = join(_example(example) for example in examples)
            yield details(f"{skill}: how it answered", shown)


def _curves(run: RunView) -> Iterator[Html]:
    for name in STAGE_CURVES:
        # A dot or a flat line tells nothing.
        if name in run.metrics and len({*run.curve(name).y}) > 2:
            yield reward_chart(run) if name == "reward" else metric_chart(run, name)


def _example(example: Mapping[str, Any]) -> Html:
    said = [_message(message) for message in example.get("messages", [])]
    result = str(example.get("result", ""))
    return tag("div", join(said), tag("p", result, class_="note"), class_="dialogue")


def _message(message: Mapping[str, Any]) -> Html:
    parts = [tag("b", f"{message.get('role', '')} ")]
    if message.get("reasoning"):
        parts.append(tag("i", f"{message['reasoning']} "))
    parts.append(tag("span", _excerpt(str(message.get("content", "")))))
    for call in message.get("tool_calls") or []:
        told = json.dumps(call.get("arguments", {}), ensure_ascii=False)
        parts.append(tag("code", f" {call.get('name')}({told})"))
    return tag("p", join(parts))


def _excerpt(text: str) -> str:
    """
    >>> len(_excerpt("never " * 1000)), _excerpt("now")
    (628, 'now')
    """
    if len(text) <= 2 * EXCERPT + 50:
        return text
    left_out = len(text) - 2 * EXCERPT
    return f"{text[:EXCERPT]} ... ({left_out:,} characters) ... {text[-EXCERPT:]}"
