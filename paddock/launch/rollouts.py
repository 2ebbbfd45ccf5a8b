"""Batches of an RL run: live rollouts, or those recorded in a ledger."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.journal import LEDGER_FILE, TASKS_FILE
from paddock.launch.engine_stats import Row
from paddock.launch.errors import UserError
from paddock.launch.rollout_engines import (
    RolloutEngines,
    RoutingRecorder,
    discard_row,
    open_engines,
    paused,
)
from paddock.launch.run_gateway import RunGateway, open_run_gateway
from paddock.launch.run_tasks import RunTasks
from paddock.launch.task_states import written_states

if TYPE_CHECKING:
    from paddock.checkpoint import WeightPublisher
    from paddock.envs import Taskset
    from paddock.journal import TokenTrainRecord
    from paddock.launch.engines import ModelFolder
    from paddock.records import SamplingParams, Trajectory
    from paddock.rl import BatchSource, GroupFilter, RLSettings, RLTaskSettings, RolloutBatch
    from paddock.rollout import (
        InferenceClient,
        LogEvent,
        RolloutFn,
        RolloutSpec,
        RolloutWorker,
        TaskSpec,
        deterministic,
    )
    from paddock.train import policy


@dataclass(frozen=True, kw_only=True)
class RolloutSource:
    """Source of batches for the trainer, with the callbacks it needs."""

    batches: "BatchSource"
    publish_weights: "WeightPublisher"
    start: Callable[[int], None]  # after so many updates, once engines have the weights
    engine_busy_s: Callable[[], float] | None = None
    add_routing: "Callable[[Sequence[policy.PolicySample]], list[policy.PolicySample]]" = list
    record_token_stats: "Callable[[Mapping[tuple[str, int], TokenTrainRecord]], None]" = discard_row


# --- live -----------------------------------------------------------------------------------------


@asynccontextmanager
async def open_rollouts(
    settings: "RLSettings",
    folder: Path,
    model: "ModelFolder",
    group_filter: "GroupFilter",
    log_event: "LogEvent",
    row: Row,
) -> AsyncIterator[RolloutSource]:
    """Engines, environments and the orchestrator between them. `row` logs a row for every rollout,
    and the engines' statistics from time to time."""
    from paddock.journal import Ledger
    from paddock.rl import LiveBatchSource
    from paddock.rollout import EventLoopWatchdog, Orchestrator

    async with AsyncExitStack() as stack:
        sampling = await stack.enter_async_context(open_engines(settings, model, row))
        generate, recorder, barrier = _generate(settings, sampling)
        common, agents = _worker(settings, model, generate, sampling), None
        if settings.gateway.port or any(t.agent_elsewhere for t in settings.tasks.values()):
            agents = await stack.enter_async_context(open_run_gateway(settings, common, folder))
            log_event("gateway", url=agents.url)

        def make_spec(name: str) -> "TaskSpec":
            spec = task_spec(settings, name, common, group_filter, agents)
            return replace(spec, rollout_fn=with_timing_row(spec.rollout_fn, row))

        specs = {name: make_spec(name) for name in settings.tasks}
        ledger = stack.enter_context(Ledger(folder / LEDGER_FILE))
        orchestrator = Orchestrator(
            specs,
            settings.rollout,
            ledger,
            seed=settings.seed,
            log_event=log_event,
            barrier=barrier,
        )
        collector = LiveBatchSource(
            orchestrator,
            batches=settings.steps // settings.rollout.updates_per_batch,
            pressure=sampling.pressure,
            log_event=log_event,
        )
        await stack.enter_async_context(collector)
        stack.enter_context(EventLoopWatchdog(log_event))
        queues = {} if agents is None else agents.queues
        tasks = RunTasks(settings, orchestrator, collector, make_spec, log_event, queues)
        await stack.enter_async_context(written_states(folder / TASKS_FILE, tasks.run_state))
        if agents is not None:
            tasks.add_routes(agents.app, agents.app.state.access)
        yield RolloutSource(
            batches=collector,
            publish_weights=sampling.publish_weights,
            start=tasks.start,
            engine_busy_s=sampling.engine_busy_s,
            add_routing=list if recorder is None else recorder.add_routing,
            record_token_stats=ledger.record_token_stats,
        )


def _generate(
    settings: "RLSettings", sampling: RolloutEngines
) -> "tuple[InferenceClient, RoutingRecorder | None, deterministic.RequestBarrier | None]":
    """The inference client, wrapped for routing replay and deterministic mode as set."""
    from paddock.rollout import deterministic

    generate, recorder, barrier = sampling.generate, None, None
    if settings.routing_replay != "no":
        if not sampling.engines:
            raise UserError("'routing_replay' needs embedded engines: remove 'engines.urls'")
        generate = recorder = RoutingRecorder(generate)
    if settings.rollout.deterministic:
        if len(sampling.engines) != 1:
            raise UserError("'rollout.deterministic' needs one embedded engine")
        barrier = deterministic.RequestBarrier(partial(paused, sampling.engines[0]))
        generate = deterministic.DeterministicClient(generate, barrier)
    return generate, recorder, barrier


def task_spec(
    settings: "RLSettings",
    name: str,
    common: "RolloutWorker",
    group_filter: "GroupFilter",
    agents: RunGateway | None = None,
) -> "TaskSpec":
    """A task of the run, with its environment and whoever takes its turns."""
    from paddock.envs import make
    from paddock.records import SamplingParams
    from paddock.rollout import TaskSpec
    from paddock.text import ThinkingKwargs

    task, sampling = settings.tasks[name], settings.sampling_for(name)
    worker = replace(
        common,
        thinking=ThinkingKwargs(clear_thinking=False, enable_thinking=task.enable_thinking),
        context_management=task.context_management,
    )
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        thinking_budget=sampling.thinking_budget,
    )
    taskset, agent = select_tasks(name, task, make(task.env, task.args)), task.agent_elsewhere
    rollout_fn: RolloutFn = partial(_rollout, worker, taskset, params)
    if agent is not None and agents is not None:
        rollout_fn = agents.rollout_fn(name, agent, taskset, worker, params)
    return TaskSpec(
        rollout_fn=rollout_fn,
        settings=task,
        group_filter=group_filter,
        num_prompts=taskset.size("train"),
    )


def select_tasks(name: str, task: "RLTaskSettings", taskset: "Taskset") -> "Taskset":
    """The tasks that a run trains on. With prompt weights they keep one order in every epoch, so
    that a number says which prompt it is."""
    from paddock.envs import SelectedTaskset, read_task_indices

    size = min((n for n in (task.num_tasks, taskset.size("train")) if n is not None), default=None)
    if task.task_file is not None:
        return SelectedTaskset(taskset, read_task_indices(task.task_file, taskset))
    if task.prompt_weights is not None and size is None:
        raise UserError(
            f"'tasks.{name}.prompt_weights': environment '{task.env}' generates tasks without end,"
            f" so none comes twice: set 'tasks.{name}.num_tasks' or 'task_file'"
        )
    if task.prompt_weights is None and task.num_tasks is None:
        return taskset
    assert size is not None
    return SelectedTaskset(taskset, range(size))


def _worker(
    settings: "RLSettings",
    model: "ModelFolder",
    generate: "InferenceClient",
    sampling: RolloutEngines,
) -> "RolloutWorker":
    """What the rollouts of all tasks have in common."""
    from paddock.rollout import RolloutWorker

    # A teacher scores the whole sequence, and its engine needs room for one more token.
    spare, length = 1 if settings.teachers else 0, sampling.context_length
    return RolloutWorker(
        client=generate,
        renderer=model.renderer,
        context_length=None if length is None else length - spare,
    )


async def _rollout(
    worker: "RolloutWorker", taskset: "Taskset", sampling: "SamplingParams", spec: "RolloutSpec"
) -> "Sequence[Trajectory]":
    from paddock.envs import RolloutFailed, convert_errors
    from paddock.rollout import failed_trajectory

    try:
        with convert_errors("world", "task"):
            task = taskset.task(spec.number)
    except RolloutFailed as stop:
        return (failed_trajectory(spec, stop.failure),)
    found: Sequence[Trajectory] = await worker.rollout(
        taskset,
        task,
        replace(sampling, seed=spec.seed),
        session_id=spec.session_id,
        group_id=spec.group_id,
    )
    return found


def with_timing_row(
    rollout_fn: "RolloutFn", row: Row, clock: Callable[[], float] = time.time
) -> "RolloutFn":
    """The same rollout function, which logs a row of rollouts.jsonl however the rollout ends."""

    async def timed(spec: "RolloutSpec") -> "Sequence[Trajectory]":
        started, fields = clock(), {"failed": "cancelled"}
        try:
            branches = await rollout_fn(spec)
            fields = _outcome_fields(branches)
            return branches
        finally:
            row(
                "rollouts",
                began=started,
                task=spec.task,
                number=spec.number,
                member=spec.member,
                session=spec.session_id,
                **fields,
            )

    return timed


def _outcome_fields(branches: "Sequence[Trajectory]") -> dict[str, Any]:
    from paddock.records import Verdict

    outcome = branches[0].outcome
    tokens = sum(len(turn.completion.token_ids) for b in branches for turn in b.turns)
    if isinstance(outcome, Verdict):
        return {"tokens": tokens, "reward": outcome.reward}
    return {"tokens": tokens, "failed": f"{outcome.kind} at {outcome.where}"}


# --- from a ledger --------------------------------------------------------------------------------


@asynccontextmanager
async def open_replay(
    run: Path, group_filter: "GroupFilter", updates: int
) -> AsyncIterator[RolloutSource]:
    """The batches that a run was trained on; nothing is sampled, and weights are not published."""
    from paddock.rl import LedgerBatchSource

    ledger = run / LEDGER_FILE if run.is_dir() else run
    if not ledger.is_file():
        raise UserError(f"{ledger}: ledger not found")

    def publish(_updates: "Any") -> None:
        pass

    yield RolloutSource(
        batches=ReplayedBatches(LedgerBatchSource(ledger, first=updates), group_filter),
        publish_weights=publish,
        start=lambda _: None,
    )


@dataclass(frozen=True)
class ReplayedBatches:
    """Recorded batches; their groups pass the filter again, for its statistics."""

    queue: "BatchSource"
    group_filter: "GroupFilter"

    async def next_batch(self) -> "RolloutBatch | None":
        batch = await self.queue.next_batch()
        for group in batch.groups if batch is not None else ():
            self.group_filter(group)
        return batch

    async def await_or_fail(self, work: Awaitable[Any]) -> Any:
        return await self.queue.await_or_fail(work)

    def mark_trained(self, batch: "RolloutBatch") -> None:
        self.queue.mark_trained(batch)

    async def wait_quiescent(self) -> None:
        await self.queue.wait_quiescent()

    def mark_checkpointed(self, updates: int, name: str) -> None:
        self.queue.mark_checkpointed(updates, name)

    def mark_published(self, version: int) -> None:
        self.queue.mark_published(version)

    def finish(self) -> None:
        self.queue.finish()
