"""An RL run put together: trainer, rollout engines, environments, teachers and the run folder."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paddock.launch.errors import UserError
from paddock.launch.event_loop import run_with_grace
from paddock.launch.settings import StrPath, default_run_dir, load_rl_settings

if TYPE_CHECKING:
    from paddock.journal import Journal
    from paddock.rl import Learner, RLSettings, UpdateMetrics

DebugMode = Literal["rollout-only", "train-only"]
RESUMABLE_CHANGES = (
    "engines",
    "alerts",
    "gateway",
)  # settings that may differ when a run is resumed


class RLCallbacks:
    """What a caller may observe of an RL run; override what is needed."""

    def on_start(self, step: int, steps: int) -> None:
        """Engines and trainer are ready; training goes on from `step`."""

    def on_event(self, kind: str, **fields: Any) -> None:
        """An event of the orchestrator, such as a stalled rollout or a disabled task."""

    def on_update(self, metrics: "UpdateMetrics") -> None:
        """A batch was trained."""

    def on_alert(self, kind: str, message: str) -> None:
        """A health check fails that passed after the batch before."""


def rl(
    recipe: "StrPath | RLSettings",
    *,
    out: StrPath | None = None,
    overrides: Sequence[str] = (),
    debug: DebugMode | None = None,
    replay: StrPath | None = None,
    callbacks: RLCallbacks | None = None,
) -> Path:
    """Train by reinforcement and return the run folder; called again, it resumes.

    `recipe` is a TOML file or resolved settings, which need `out`. With debug "rollout-only"
    nothing is trained; with "train-only" the batches recorded in the run folder `replay` are
    trained again without engines.
    """
    if (debug == "train-only") != (replay is not None):
        raise UserError("--debug train-only and --replay FOLDER need each other")
    if isinstance(recipe, str | os.PathLike):
        settings = load_rl_settings(recipe, overrides)
        folder = default_run_dir(recipe) if out is None else Path(out)
    elif out is None or overrides:
        raise UserError("resolved settings need `out` and take no `overrides`")
    else:
        settings, folder = recipe, Path(out)
    recorded = None if replay is None else Path(replay)
    try:
        run_with_grace(run_rl(settings, folder, callbacks or RLCallbacks(), debug, recorded))
    except SystemExit as error:
        raise UserError(
            f"an environment called sys.exit({error.code!r}) in a callback or a task of its own,"
            f" which ended the run; run the same command to resume from the last checkpoint in"
            f" {folder}"
        ) from error
    return folder


async def run_rl(
    settings: "RLSettings",
    run_dir: Path,
    callbacks: RLCallbacks,
    debug: DebugMode | None = None,
    replay: Path | None = None,
) -> None:
    """Train until `settings.steps` or `settings.stop_at_reward`, from the newest checkpoint on."""
    from paddock.journal import Journal
    from paddock.launch.engines import open_model_folder
    from paddock.launch.inspect_network import inspect_network, longest_rollout
    from paddock.launch.rollout_engines import open_teachers
    from paddock.launch.rollouts import open_replay, open_rollouts
    from paddock.rl import GroupFilter, RLTrainer
    from paddock.train import CHECKPOINTS, claim_run_folder

    assert settings.init.checkpoint is not None
    policy = open_model_folder(Path(settings.init.checkpoint), settings.chat_template)
    group_filter = GroupFilter(settings)
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(run_dir))  # locks the folder
        claim_run_folder(run_dir, settings, may_change=RESUMABLE_CHANGES)
        learner = _open_learner(settings, run_dir, debug)
        log = _RunLog(journal, callbacks)
        journal.log_event(
            "started",
            step=learner.updates,
            of=settings.steps,
            debug=debug or "",
            machine=_hardware(learner),
        )
        teachers = await stack.enter_async_context(open_teachers(settings, policy))
        source = await stack.enter_async_context(
            open_rollouts(settings, run_dir, policy, group_filter, log.log_event, journal.log_row)
            if replay is None
            else open_replay(replay, group_filter, learner.updates)
        )
        await asyncio.to_thread(source.publish_weights, learner.weights())
        source.start(learner.updates)

        def on_update(metrics: "UpdateMetrics") -> None:
            log.log_update(metrics)
            source.record_token_stats(metrics.train_stats.token_records)

        trainer = RLTrainer(
            batches=source.batches,
            learner=learner,
            publish_weights=source.publish_weights,
            checkpoints=run_dir / CHECKPOINTS,
            group_filter=group_filter,
            teachers=teachers,
            extra_files=policy.tokenizer.files,
            on_update=on_update,
            engine_busy_s=source.engine_busy_s,
            add_routing=source.add_routing,
        )
        callbacks.on_start(learner.updates, settings.steps)
        await trainer.run()
        journal.log_event("finished", step=learner.updates)
        if token_ids := longest_rollout(run_dir):
            row = inspect_network(learner.trainer.network, token_ids, policy.tokenizer)
            journal.log_row("network", step=learner.updates, **row)


class _RunLog:
    """Writes metrics, events and alerts to the journal and passes them on."""

    def __init__(self, journal: "Journal", callbacks: RLCallbacks) -> None:
        self._journal, self._callbacks = journal, callbacks
        self._active_alerts: set[str] = set()

    def log_event(self, kind: str, **fields: Any) -> None:
        self._journal.log_event(kind, **fields)
        self._callbacks.on_event(kind, **fields)

    def log_update(self, metrics: "UpdateMetrics") -> None:
        self._journal.log_metrics(metrics.update, **metrics.metrics())
        for alert in metrics.alerts:
            if alert.kind not in self._active_alerts:  # once, until it has passed
                self._journal.log_event(
                    "alert", alert=alert.kind, what=alert.message, step=metrics.update
                )
                self._callbacks.on_alert(alert.kind, alert.message)
        self._active_alerts = {alert.kind for alert in metrics.alerts}
        self._callbacks.on_update(metrics)


def _hardware(learner: "Learner") -> dict[str, object]:
    """Where the run is, for its report."""
    import platform

    import torch

    return {
        "device": str(learner.trainer.network.embed.weight.device),
        "chip": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _open_learner(settings: "RLSettings", folder: Path, debug: DebugMode | None) -> "Learner":
    """The learner at the newest checkpoint; with "rollout-only" one that does not train."""
    from paddock.rl import RolloutOnlyLearner, open_learner
    from paddock.train import CHECKPOINTS

    learner = open_learner(settings, folder / "non_finite_batch.npz")
    if debug == "rollout-only":
        learner = RolloutOnlyLearner(learner.trainer, learner.objective, settings)
    learner.restore(folder / CHECKPOINTS)
    return learner
