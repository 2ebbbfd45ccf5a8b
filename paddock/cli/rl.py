"""The verb that trains by reinforcement: worlds, engines and the trainer, all from one recipe."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from paddock.cli.errors import UserError
from paddock.cli.tables import print_parts, table
from paddock.cli.units import format_count
from paddock.launch.event_loop import run_with_grace

if TYPE_CHECKING:
    from paddock.rl import Learner, RLSettings, UpdateMetrics

Debug = Literal["rollout-only", "train-only"]
RESUMABLE_CHANGES = ("engines", "alerts")  # between two calls on the same folder


def rl(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe of an RL stage.")],
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: runs/RECIPE'S FOLDER/NAME.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one setting.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe, and stop.")
    ] = False,
    debug: Annotated[
        Debug | None,
        typer.Option(help="rollout-only: nothing is learnt. train-only: from --replay."),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="A run folder whose recorded batches are trained again.")
    ] = None,
) -> None:
    """Train by reinforcement; called again, it goes on from the newest checkpoint.

    What was rolled out is kept in the run folder and can be trained again without engines:
    paddock rl RECIPE --debug train-only --replay RUN --out OTHER
    """
    run_rl(recipe, out, sets or [], dry_run=dry_run, debug=debug, replay=replay)


def run_rl(
    recipe: Path,
    out: Path | None,
    sets: Sequence[str],
    *,
    dry_run: bool = False,
    debug: Debug | None = None,
    replay: Path | None = None,
) -> None:
    """What `rl` and `distill` do."""
    from paddock.config import dump_toml, load_recipe, resolve
    from paddock.dashboard import write_report
    from paddock.launch.dry_run import check_environments, missing_files, rl_data_files
    from paddock.rl import RLSettings, with_stage_defaults

    if (debug == "train-only") != (replay is not None):
        raise UserError("--debug train-only and --replay FOLDER go together")
    settings = resolve(RLSettings, with_stage_defaults(load_recipe(recipe, sets)))
    if dry_run:
        check_environments(settings)
        print_parts(dump_toml(settings).rstrip(), _plan(settings))
        for line in missing_files(("", file) for file in rl_data_files(settings)):
            print_parts(line)
        return
    folder = out or Path("runs") / recipe.resolve().parent.name / recipe.stem
    try:
        run_with_grace(_run(settings, folder, debug, replay))
    except SystemExit as error:
        raise UserError(
            f"an environment called sys.exit({error.code!r}) in a callback or a task of its own,"
            f" which ended the run; the same command goes on from the last checkpoint in {folder}"
        ) from error
    except KeyboardInterrupt:
        typer.echo(f"stopped; the same command goes on from the last checkpoint in {folder}")
        raise typer.Exit(130) from None
    print_parts(f"done: {folder / 'checkpoints'}\nreport: {write_report(folder)}")


def _plan(settings: "RLSettings") -> Table:
    """What a run will do, said before it starts."""
    pace = settings.rollout
    ratios = sum(task.ratio for task in settings.tasks.values())
    made = table("task", "world", "teacher", numbers=("groups a batch", "attempts a group"))
    attempts = 0.0
    for name, task in settings.tasks.items():
        groups = pace.groups_per_batch * task.ratio / ratios
        attempts += groups * task.group_size
        made.add_row(name, task.env, task.teacher or "", f"{groups:.3g}", str(task.group_size))
    batches = settings.steps // pace.updates_per_batch
    made.add_row(
        "in all", f"{batches} batches", "", "", f"{format_count(int(batches * attempts))} at least"
    )
    return made


def _machine(learner: "Learner") -> dict[str, object]:
    """What a report says about where the run is."""
    import platform

    import torch

    return {
        "device": str(learner.trainer.network.embed.weight.device),
        "chip": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _learner(settings: "RLSettings", folder: Path, debug: Debug | None) -> "Learner":
    """Who learns, or with `rollout-only` looks on, where the last checkpoint left off."""
    from paddock.rl import RolloutOnlyLearner, open_learner
    from paddock.train import CHECKPOINTS

    learner = open_learner(settings, folder / "non_finite_batch.npz")
    if debug == "rollout-only":
        learner = RolloutOnlyLearner(learner.trainer, learner.objective, settings)
    learner.restore(folder / CHECKPOINTS)
    return learner


async def _run(
    settings: "RLSettings", folder: Path, debug: Debug | None, replay: Path | None
) -> None:
    from paddock.cli.look import inspect_network, longest_rollout
    from paddock.cli.rl_progress import RLProgress
    from paddock.journal import Journal
    from paddock.launch.engines import open_model_folder
    from paddock.launch.rollout_engines import open_teachers
    from paddock.launch.rollouts import open_replay, open_rollouts
    from paddock.rl import GroupFilter, RLTrainer
    from paddock.train import CHECKPOINTS, claim_run_folder

    assert settings.init.checkpoint is not None
    model = open_model_folder(Path(settings.init.checkpoint), settings.chat_template)
    sifter = GroupFilter(settings)
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(folder))  # locks the folder
        claim_run_folder(folder, settings, may_change=RESUMABLE_CHANGES)
        learner = _learner(settings, folder, debug)
        watcher = stack.enter_context(RLProgress(journal, settings))
        journal.log_event(
            "started",
            step=learner.updates,
            of=settings.steps,
            debug=debug or "",
            machine=_machine(learner),
        )
        scores = await stack.enter_async_context(open_teachers(settings, model))
        fed = await stack.enter_async_context(
            open_rollouts(settings, folder, model, sifter, watcher.log_event, journal.log_row)
            if replay is None
            else open_replay(replay, sifter, learner.updates)
        )
        await asyncio.to_thread(fed.publish_weights, learner.weights())
        fed.start(learner.updates)

        def watch(moment: "UpdateMetrics") -> None:
            watcher.on_update(moment)
            fed.record_token_stats(moment.train_stats.token_records)

        loop = RLTrainer(
            batches=fed.batches,
            learner=learner,
            publish_weights=fed.publish_weights,
            checkpoints=folder / CHECKPOINTS,
            group_filter=sifter,
            teachers=scores,
            extra_files=model.tokenizer.files,
            on_update=watch,
            engine_busy_s=fed.engine_busy_s,
            add_routing=fed.add_routing,
        )
        watcher.print(f"update {learner.updates} of {settings.steps}")
        await loop.run()
        journal.log_event("finished", step=learner.updates)
        if ids := longest_rollout(folder):
            row = inspect_network(learner.trainer.network, ids, model.tokenizer)
            journal.log_row("network", step=learner.updates, **row)
