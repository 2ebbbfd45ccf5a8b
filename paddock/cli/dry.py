"""What a plan would do, checked without doing it: recipes resolved, memory against the chips."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.cli.errors import UserError
from paddock.cli.numbers import count

if TYPE_CHECKING:
    from paddock.cli.plan import ClusterPlan, Step
    from paddock.rl.settings import RLSettings

GIB = 1 << 30


def described(step: "Step", cluster: "ClusterPlan | None") -> Iterator[str]:
    """What a stage costs, in lines; a UserError says what cannot be."""
    if step.stage.verb == "train":
        yield _trained(step, cluster)
    elif step.stage.verb in ("rl", "distill"):
        yield _reinforced(step)


def _trained(step: "Step", cluster: "ClusterPlan | None") -> str:
    from paddock.config import load_recipe, resolve
    from paddock.train import TrainSettings
    from paddock.train.plan import plan
    from paddock.train.run import start_config

    settings = resolve(TrainSettings, load_recipe(step.recipe, step.sets))
    start = settings.start
    if start.folder is not None and start.like is None and not Path(start.folder).exists():
        return f"{count(settings.steps)} steps; its memory is known once {start.folder} is there"
    planned = plan(settings, start_config(settings))
    shape = settings.parallel
    layout = f"data {shape.data} x expert {shape.expert} x context {shape.context}"
    told = f"{count(planned.tokens)} tokens, {count(planned.parameters)} parameters"
    if cluster is None:
        return f"{told}, {planned.rank_bytes / GIB:,.1f} GiB"
    if planned.ranks > cluster.chips:
        raise UserError(
            f"stage {step.stage.name!r} wants {planned.ranks} chips ({layout}), "
            f"{cluster.name} has {cluster.chips}"
        )
    if planned.rank_bytes > cluster.gib * GIB:
        raise UserError(
            f"stage {step.stage.name!r} needs {planned.rank_bytes / GIB:,.1f} GiB a chip "
            f"({layout}), {cluster.name} has {cluster.gib:g}"
        )
    return (
        f"{told}, {planned.ranks} of {cluster.chips} chips ({layout}), "
        f"{planned.rank_bytes / GIB:,.1f} of {cluster.gib:g} GiB each"
    )


def _reinforced(step: "Step") -> str:
    from paddock.config import load_recipe, resolve
    from paddock.rl.settings import RLSettings
    from paddock.rl.stages import staged

    settings = resolve(RLSettings, staged(load_recipe(step.recipe, step.sets)))
    _check_worlds(settings)
    pace = settings.pace
    kind = "synchronous" if pace.synchronous else f"stale by {pace.max_staleness} at most"
    tasks = ", ".join(
        f"{name} ({task.world}, groups of {task.group_size})"
        for name, task in settings.tasks.items()
    )
    return f"{settings.steps} updates of {pace.batch_groups} groups, {kind}: {tasks}"


def _check_worlds(settings: "RLSettings") -> None:
    """Every world's own settings; its files need not be there yet."""
    from paddock.envs import world_settings

    for task in settings.tasks.values():
        world_settings(task.world, task.settings)
