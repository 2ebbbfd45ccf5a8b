"""Pipeline report: metrics of the suites after each stage, time, curves and sample rollouts."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddock.dashboard.bar_charts import heat_map, stacked_bar
from paddock.dashboard.html import Html, details, join, page, section, table, tag, tiles
from paddock.dashboard.metrics import metric_chart, reward_chart
from paddock.dashboard.old_names import rename_event
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
# Curves shown for a stage, as far as its run has them.
STAGE_CURVES = (
    *("val_loss", "loss", "indexer_loss", "reward", "staleness", "entropy", "teacher_kl"),
    *("logprob_diff", "trainer_idle", "engine_idle"),
)


EXCERPT = 300  # characters shown of a long message, at either end


@dataclass(frozen=True, slots=True)
class StageResult:
    """A finished stage with the results of its suites."""

    name: str
    description: str = ""
    seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)  # by metric
    errors: dict[str, float] = field(default_factory=dict)  # standard errors, by metric
    examples: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """What a pipeline recorded in its folder."""

    path: Path
    seed: int
    stages: tuple[StageResult, ...]
    metrics: tuple[str, ...]
    lower_is_better: frozenset[str]  # metrics

    def best_score(self, metric: str) -> float | None:
        found = [stage.scores[metric] for stage in self.stages if metric in stage.scores]
        if not found:
            return None
        return min(found) if metric in self.lower_is_better else max(found)

    def last_score(self, metric: str) -> float | None:
        found = [stage.scores[metric] for stage in self.stages if metric in stage.scores]
        return found[-1] if found else None

    def retained(self, metric: str) -> str:
        """The last score as a share of the best one; a difference if lower is better."""
        best, last = self.best_score(metric), self.last_score(metric)
        if best is None or last is None:
            return ""
        if metric in self.lower_is_better:
            return f"{last - best:+.3f}"
        return f"{last / best:.0%}" if best else "-"


def read_pipeline_report(folder: str | Path) -> PipelineReport:
    """Read the events of a pipeline, finished or not. Raises ReportError if there are none."""
    path = Path(folder)
    if not is_own_file(path / EVENTS_FILE):
        raise ReportError(f"{path}: not a pipeline run, {EVENTS_FILE} not found")
    stages: dict[str, StageResult] = {}
    metrics: dict[str, None] = {}
    lower_is_better: set[str] = set()
    seed = 0
    for record, _ in follow(path / EVENTS_FILE):
        event = rename_event(record) if isinstance(record, Mapping) else record
        match event:
            case {"kind": "pipeline_started", "seed": int(seed)}:
                pass
            case {"kind": "stage_reset", "stage": str(name)}:
                stages.pop(name, None)
            case {"kind": "stage_finished", "stage": str(name)}:
                stages[name] = StageResult(
                    name,
                    str(event.get("description", "")),
                    parse_number_or_none(event.get("seconds")) or 0.0,
                )
            case {"kind": "suite_result", "stage": str(name), "suite": str(metric)} if (
                name in stages
            ):
                _add_result(stages[name], metric, event)
                metrics[metric] = None
                if event.get("better") == "lower":
                    lower_is_better.add(metric)
    return PipelineReport(
        path, seed, tuple(stages.values()), tuple(metrics), frozenset(lower_is_better)
    )


def _add_result(stage: StageResult, metric: str, event: Mapping[str, Any]) -> None:
    score, error = (
        parse_number_or_none(event.get("score")),
        parse_number_or_none(event.get("stderr")),
    )
    if score is not None:
        stage.scores[metric] = score
    if error is not None:
        stage.errors[metric] = error
    stage.examples[metric] = list(event.get("examples") or [])


def write_pipeline_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a pipeline to `out`, by default report.html in its folder; returns it."""
    report = read_pipeline_report(folder)
    file = Path(out) if out is not None else report.path / REPORT
    file.write_text(
        page(report.path.resolve().name, *pipeline_report_page(report)), "utf-8", "replace"
    )
    return file


def pipeline_report_page(report: PipelineReport) -> Iterator[Html]:
    whole = sum(stage.seconds for stage in report.stages)
    yield tag("h1", report.path.resolve().name)
    yield tag(
        "p",
        f"{len(report.stages)} stages in {format_duration(whole)}, seed {report.seed}.",
        class_="lead",
    )
    yield tiles(_headline(report))
    yield section("Metrics after each stage", _lead(), *_metrics(report))
    yield section("Time", stacked_bar({s.name: s.seconds for s in report.stages}, format_duration))
    for stage in report.stages:
        yield section(stage.name, *_stage(report, stage))


def _lead() -> Html:
    return tag(
        "p",
        "The same held-out tasks after every stage; no stage was trained on them. Each row is a "
        "stage, each column a metric.",
    )


def _headline(report: PipelineReport) -> Iterator[tuple[str, str, str]]:
    for metric in report.metrics:
        first = next(s.scores[metric] for s in report.stages if metric in s.scores)
        last = report.last_score(metric)
        assert last is not None
        yield (
            metric,
            format_number(last, 3),
            f"from {format_number(first, 3)}; {report.retained(metric)} of best",
        )


def _metrics(report: PipelineReport) -> Iterator[Html]:
    names = [stage.name for stage in report.stages]
    rewards = [metric for metric in report.metrics if metric not in report.lower_is_better]
    if rewards:
        values = [[stage.scores.get(metric) for metric in rewards] for stage in report.stages]
        yield heat_map("Reward (0 to 1)", names, rewards, values)
    rows = [
        (stage.name, *(_score(stage, metric) for metric in report.metrics))
        for stage in report.stages
    ]
    rows.append(("retained (last/best)", *(report.retained(metric) for metric in report.metrics)))
    yield details("With standard errors", table(("stage", *report.metrics), rows))


def _score(stage: StageResult, metric: str) -> str:
    if metric not in stage.scores:
        return ""
    error = stage.errors.get(metric)
    return f"{stage.scores[metric]:.3f}" + (f" ± {error:.3f}" if error else "")


def _stage(report: PipelineReport, stage: StageResult) -> Iterator[Html]:
    yield tag(
        "p",
        f"{stage.description}. " if stage.description else "",
        f"{format_duration(stage.seconds)}.",
    )
    try:
        if (report.path / stage.name).resolve().parent != report.path.resolve():
            raise ReportError(f"{stage.name}: not a folder of this run")  # a link, or ".."
        run = read_run(report.path / stage.name)
    except ReportError:
        if not (report.path / stage.name).is_dir():
            yield tag("p", "Run folder not found.", class_="note")
    else:
        yield tag("div", *_curves(run), class_="grid")
    for metric, examples in stage.examples.items():
        if examples:
            shown = join(_example(example) for example in examples)
            yield details(f"{metric}: sample rollouts", shown)


def _curves(run: RunView) -> Iterator[Html]:
    for name in STAGE_CURVES:
        # A single point or a constant is not worth a chart.
        if name in run.metrics and len({*run.curve(name).y}) > 2:
            yield reward_chart(run) if name == "reward" else metric_chart(run, name)


def _example(example: Mapping[str, Any]) -> Html:
    messages = [_message(message) for message in example.get("messages", [])]
    result = str(example.get("result", ""))
    return tag("div", join(messages), tag("p", result, class_="note"), class_="dialogue")


def _message(message: Mapping[str, Any]) -> Html:
    parts = [tag("b", f"{message.get('role', '')} ")]
    if message.get("reasoning"):
        parts.append(tag("i", f"{message['reasoning']} "))
    parts.append(tag("span", _excerpt(str(message.get("content", "")))))
    for call in message.get("tool_calls") or []:
        arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
        parts.append(tag("code", f" {call.get('name')}({arguments})"))
    return tag("p", join(parts))


def _excerpt(text: str) -> str:
    """The beginning and end of a long text.

    >>> len(_excerpt("never " * 1000)), _excerpt("now")
    (628, 'now')
    """
    if len(text) <= 2 * EXCERPT + 50:
        return text
    left_out = len(text) - 2 * EXCERPT
    return f"{text[:EXCERPT]} ... ({left_out:,} characters) ... {text[-EXCERPT:]}"
