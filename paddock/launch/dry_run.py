"""What a plan would do, checked without doing it: recipes resolved, memory against the chips,
environments and rewards opened, data looked for."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.cli.errors import UserError
from paddock.cli.units import format_count

if TYPE_CHECKING:
    from paddock.config import RequiredFile
    from paddock.launch.pipeline import PipelineSettings, PipelineStage, ResourceSettings
    from paddock.rl import RLSettings
    from paddock.train import TrainSettings

GIB = 1 << 30
CHECKPOINT = "a checkpoint, or a run's folder: config.json, *.safetensors, tokenizer.json"
TOKENIZER = "a tokenizer: tokenizer.json"


def describe_stage(step: "PipelineStage", cluster: "ResourceSettings | None") -> Iterator[str]:
    """What a stage costs, in lines; a UserError says what cannot be."""
    if step.stage.command == "train":
        yield _trained(step, cluster)
    elif step.stage.command in ("rl", "distill"):
        yield _reinforced(step)


def _trained(step: "PipelineStage", cluster: "ResourceSettings | None") -> str:
    from paddock.config import load_recipe, resolve
    from paddock.train import TrainSettings, estimate_training, load_init_config

    settings = resolve(TrainSettings, load_recipe(step.recipe, step.overrides))
    start = settings.init
    if start.checkpoint is not None and start.like is None and not Path(start.checkpoint).exists():
        return f"{format_count(settings.steps)} steps; its memory is known once {start.checkpoint} is there"
    planned = estimate_training(settings, load_init_config(settings))
    shape = settings.parallel
    layout = f"data {shape.data} x expert {shape.expert} x context {shape.context}"
    told = f"{format_count(planned.tokens)} tokens, {format_count(planned.parameters)} parameters"
    if cluster is None:
        return f"{told}, {planned.rank_bytes / GIB:,.1f} GiB"
    if planned.ranks > cluster.accelerators:
        raise UserError(
            f"stage {step.stage.name!r} wants {planned.ranks} chips ({layout}), "
            f"{cluster.name} has {cluster.accelerators}"
        )
    if planned.rank_bytes > cluster.accelerator_memory_gib * GIB:
        raise UserError(
            f"stage {step.stage.name!r} needs {planned.rank_bytes / GIB:,.1f} GiB a chip "
            f"({layout}), {cluster.name} has {cluster.accelerator_memory_gib:g}"
        )
    return (
        f"{told}, {planned.ranks} of {cluster.accelerators} chips ({layout}), "
        f"{planned.rank_bytes / GIB:,.1f} of {cluster.accelerator_memory_gib:g} GiB each"
    )


def _reinforced(step: "PipelineStage") -> str:
    settings = _rl_settings(step)
    check_environments(settings, f"stage {step.stage.name!r}, ")
    pace = settings.rollout
    kind = "synchronous" if pace.is_synchronous else f"stale by {pace.max_staleness} at most"
    tasks = ", ".join(
        f"{name} ({task.env}, groups of {task.group_size})" for name, task in settings.tasks.items()
    )
    return f"{settings.steps} updates of {pace.groups_per_batch} groups, {kind}: {tasks}"


def _rl_settings(step: "PipelineStage") -> "RLSettings":
    from paddock.config import load_recipe, resolve
    from paddock.rl import RLSettings, with_stage_defaults

    return resolve(RLSettings, with_stage_defaults(load_recipe(step.recipe, step.overrides)))


# --- environments and data ------------------------------------------------------------------------


def check_environments(settings: "RLSettings", where: str = "") -> None:
    """Open every task's environment and its rewards, as far as its data is there; a UserError
    says what is wrong with which."""
    for name, task in settings.tasks.items():
        _open(task.env, task.args, f"{where}task {name!r}")


def _open(env: str, args: Mapping[str, Any], where: str) -> None:
    from paddock.envs import load_env_settings

    try:
        settings = load_env_settings(env, args)
        if any(file.is_missing for file in settings.data_files()):
            settings.make_without_data()
        elif settings.make_taskset().size("train") == 0:
            raise UserError(f"{env!r} has no train problems")
    except (ValueError, OSError) as error:
        raise UserError(f"{where}: {error}") from error


def rl_data_files(settings: "RLSettings") -> "Iterator[RequiredFile]":
    """The files and folders that an RL stage reads."""
    from paddock.config import RequiredFile
    from paddock.envs import load_env_settings

    for folder in (
        settings.init.checkpoint,
        *(each.checkpoint for each in settings.teachers.values()),
    ):
        if folder is not None:
            yield RequiredFile(path=folder, contains=CHECKPOINT)
    for task in settings.tasks.values():
        yield from load_env_settings(task.env, task.args).data_files()


def _train_data(settings: "TrainSettings") -> "Iterator[RequiredFile]":
    from paddock.config import RequiredFile

    if settings.init.checkpoint is not None:
        yield RequiredFile(path=settings.init.checkpoint, contains=CHECKPOINT)
    if settings.tokenizer.path is not None:
        yield RequiredFile(path=settings.tokenizer.path, contains=TOKENIZER)
    for source in (*settings.corpus.sources, *settings.tokenizer.extra_sources):
        yield from source.data_files()


def _stage_data(step: "PipelineStage") -> "Iterator[RequiredFile]":
    from paddock.config import load_recipe, resolve
    from paddock.train import TrainSettings

    if step.stage.command == "train":
        yield from _train_data(resolve(TrainSettings, load_recipe(step.recipe, step.overrides)))
    elif step.stage.command in ("rl", "distill"):
        yield from rl_data_files(_rl_settings(step))


def _skill_data(plan: "PipelineSettings") -> "Iterator[tuple[str, RequiredFile]]":
    from paddock.envs import load_env_settings

    for skill in plan.suites:
        if skill.kind == "world":
            for file in load_env_settings(skill.env, skill.args).data_files():
                yield f"skill {skill.name}", file


def missing_pipeline_data(plan: "PipelineSettings", todo: "Iterable[PipelineStage]") -> list[str]:
    """In lines, what the stages and skills of a plan read that neither is there nor is made by an
    earlier stage."""
    todo = tuple(todo)
    made = {step.out for step in todo}
    read = [(step.stage.name, file) for step in todo for file in _stage_data(step)]
    every = [*read, *_skill_data(plan)]
    return missing_files((who, file) for who, file in every if Path(file.path) not in made)


def missing_files(read: "Iterable[tuple[str, RequiredFile]]") -> list[str]:
    """In lines, which of the files that somebody reads are not there."""
    wanted: dict[RequiredFile, list[str]] = {}
    for who, file in read:
        if file.is_missing:
            wanted.setdefault(file, []).append(who)
    lines = []
    for file, readers in wanted.items():
        by = ", ".join(dict.fromkeys(filter(None, readers)))
        lines.append(f"{file.path}: {file.contains}{f' (for {by})' if by else ''}")
    return ["missing:", *(f"  {line}" for line in lines)] if lines else []
