"""Checks of a dry run: recipes resolve, memory fits, environments open, data files exist."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.launch.errors import UserError
from paddock.launch.settings import load_rl_settings, load_train_settings
from paddock.launch.units import format_count

if TYPE_CHECKING:
    from paddock.config import RequiredFile
    from paddock.launch.pipeline import PipelineSettings, PipelineStage, ResourceSettings
    from paddock.rl import RLSettings, RLTaskSettings
    from paddock.train import TrainSettings

GIB = 1 << 30
CHECKPOINT = "a checkpoint or run folder: config.json, *.safetensors, tokenizer.json"
TOKENIZER = "a tokenizer: tokenizer.json"


def describe_stage(step: "PipelineStage", resources: "ResourceSettings | None") -> Iterator[str]:
    """Lines about the cost of a stage. Raises UserError if it does not fit the resources."""
    if step.stage.command == "train":
        yield _describe_train(step, resources)
    elif step.stage.command in ("rl", "distill"):
        yield _describe_rl(step)


def _describe_train(step: "PipelineStage", resources: "ResourceSettings | None") -> str:
    from paddock.train import estimate_training, load_init_config

    settings = load_train_settings(step.recipe, step.overrides)
    init = settings.init
    if init.checkpoint is not None and init.like is None and not Path(init.checkpoint).exists():
        steps = format_count(settings.steps)
        return f"{steps} steps; memory unknown until {init.checkpoint} exists"
    estimate = estimate_training(settings, load_init_config(settings))
    shape = settings.parallel
    layout = f"data {shape.data} x expert {shape.expert} x context {shape.context}"
    amount = (
        f"{format_count(estimate.tokens)} tokens, {format_count(estimate.parameters)} parameters"
    )
    gib = f"{estimate.rank_bytes / GIB:,.1f}"
    if resources is None:
        return f"{amount}, {gib} GiB"
    if estimate.ranks > resources.accelerators:
        raise UserError(
            f"stage {step.stage.name!r} needs {estimate.ranks} accelerators ({layout}), "
            f"{resources.name} has {resources.accelerators}"
        )
    if estimate.rank_bytes > resources.accelerator_memory_gib * GIB:
        raise UserError(
            f"stage {step.stage.name!r} needs {gib} GiB per accelerator "
            f"({layout}), {resources.name} has {resources.accelerator_memory_gib:g}"
        )
    return (
        f"{amount}, {estimate.ranks} of {resources.accelerators} accelerators ({layout}), "
        f"{gib} of {resources.accelerator_memory_gib:g} GiB each"
    )


def _describe_rl(step: "PipelineStage") -> str:
    settings = load_rl_settings(step.recipe, step.overrides)
    check_environments(settings, f"stage {step.stage.name!r}, ")
    rollout = settings.rollout
    mode = "synchronous" if rollout.is_synchronous else f"max staleness {rollout.max_staleness}"
    tasks = ", ".join(
        f"{name} ({task.env}, groups of {task.group_size})" for name, task in settings.tasks.items()
    )
    return f"{settings.steps} steps of {rollout.groups_per_batch} groups, {mode}: {tasks}"


# --- environments and data ------------------------------------------------------------------------


def check_environments(settings: "RLSettings", where: str = "") -> None:
    """Make every task's environment and its rewards, as far as the data exists.

    Raises UserError with the task and what is wrong with it.
    """
    for name, task in settings.tasks.items():
        _check_environment(name, task, f"{where}task {name!r}")


def _check_environment(name: str, task: "RLTaskSettings", where: str) -> None:
    from paddock.envs import load_env_settings
    from paddock.launch.rollouts import select_tasks

    try:
        settings = load_env_settings(task.env, task.args)
        if any(file.is_missing for file in _task_files(task)):
            settings.make_without_data()
        elif select_tasks(name, task, settings.make_taskset()).size("train") == 0:
            raise UserError(f"env {task.env!r} has no training tasks")
    except (ValueError, OSError) as error:
        raise UserError(f"{where}: {error}") from error


def _task_files(task: "RLTaskSettings") -> "Iterator[RequiredFile]":
    """The files that a task reads."""
    from paddock.config import RequiredFile
    from paddock.envs import load_env_settings

    yield from load_env_settings(task.env, task.args).data_files()
    if task.task_file is not None:
        kept = "JSONL: tasks that `paddock sample --pass-rate` kept"
        yield RequiredFile(path=task.task_file, contains=kept)


def rl_data_files(settings: "RLSettings") -> "Iterator[RequiredFile]":
    """The files and folders that an RL stage reads."""
    from paddock.config import RequiredFile

    for folder in (
        settings.init.checkpoint,
        *(each.checkpoint for each in settings.teachers.values()),
    ):
        if folder is not None:
            yield RequiredFile(path=folder, contains=CHECKPOINT)
    for task in settings.tasks.values():
        yield from _task_files(task)


def _train_data(settings: "TrainSettings") -> "Iterator[RequiredFile]":
    from paddock.config import RequiredFile

    if settings.init.checkpoint is not None:
        yield RequiredFile(path=settings.init.checkpoint, contains=CHECKPOINT)
    if settings.tokenizer.path is not None:
        yield RequiredFile(path=settings.tokenizer.path, contains=TOKENIZER)
    for source in (*settings.corpus.sources, *settings.tokenizer.extra_sources):
        yield from source.data_files()


def _stage_data(step: "PipelineStage") -> "Iterator[RequiredFile]":
    if step.stage.command == "train":
        yield from _train_data(load_train_settings(step.recipe, step.overrides))
    elif step.stage.command in ("rl", "distill"):
        yield from rl_data_files(load_rl_settings(step.recipe, step.overrides))


def _suite_data(pipeline: "PipelineSettings") -> "Iterator[tuple[str, RequiredFile]]":
    from paddock.envs import load_env_settings

    for suite in pipeline.suites:
        if suite.kind == "env":
            for file in load_env_settings(suite.env, suite.args).data_files():
                yield f"suite {suite.name}", file


def missing_pipeline_data(
    pipeline: "PipelineSettings", todo: "Iterable[PipelineStage]"
) -> list[str]:
    """Lines about the files that stages and suites read and that neither exist nor are written by
    an earlier stage."""
    todo = tuple(todo)
    made = {step.out for step in todo}
    read = [(step.stage.name, file) for step in todo for file in _stage_data(step)]
    every = [*read, *_suite_data(pipeline)]
    return missing_files((reader, file) for reader, file in every if Path(file.path) not in made)


def missing_files(read: "Iterable[tuple[str, RequiredFile]]") -> list[str]:
    """Lines about required files that do not exist, each with its readers."""
    missing: dict[RequiredFile, list[str]] = {}
    for reader, file in read:
        if file.is_missing:
            missing.setdefault(file, []).append(reader)
    lines = []
    for file, readers in missing.items():
        by = ", ".join(dict.fromkeys(filter(None, readers)))
        lines.append(f"{file.path}: {file.contains}{f' (for {by})' if by else ''}")
    return ["missing:", *(f"  {line}" for line in lines)] if lines else []
