"""Completions sampled and scored: dialogues kept for fine-tuning, or tasks by their pass rate."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paddock.launch.dialogue_file import DialogueFile, OutcomeLog
from paddock.launch.model_client import (
    ModelClient,
    derive_seed,
    first_model,
    open_model_client,
)
from paddock.launch.pass_rates import PassRates, SampledRollout
from paddock.launch.settings import StrPath
from paddock.records import Dialogue, SamplingParams, Verdict

if TYPE_CHECKING:
    from paddock.envs import Taskset

ThinkingMode = Literal["interleaved", "preserved", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionSamplingJob:
    """What is sampled from the model, and what is accepted."""

    taskset: "Taskset"
    split: Literal["train", "test"]
    thinking: ThinkingMode
    sampling: SamplingParams
    seed: int
    min_reward: float

    def sample_id(self, index: int, k: int) -> str:
        """Of the k-th completion of a task."""
        return f"{self.taskset.task(index, self.split).id}#{k}"


def sample(  # noqa: PLR0913  keyword options of one command
    model: str,
    env: str,
    *,
    out: StrPath,
    n: int = 4,
    num_tasks: int = 100,
    min_reward: float = 1.0,
    pass_rate: tuple[float, float] | None = None,
    stronger_url: str | None = None,
    stronger_model: str | None = None,
    split: Literal["train", "test"] = "train",
    base_url: str | None = None,
    thinking: ThinkingMode = "interleaved",
    temperature: float = 1.0,
    max_tokens: int | None = None,
    seed: int = 0,
    max_concurrent: int = 32,
    args: Mapping[str, Any] | None = None,
    on_start: Callable[[int], None] | None = None,
    on_update: Callable[[Counter[str]], None] | None = None,
) -> Counter[str]:
    """Sample `n` completions per task and append dialogues of at least `min_reward` to `out`.

    `model` is a checkpoint or run folder, or with `base_url` a model's name on that server. Returns
    how many completions of the file were accepted, duplicate, rejected, and so on. Called again, it
    samples only what is missing. `on_start` gets the number of completions to sample, `on_update`
    the counts after each.

    With `pass_rate` (lowest and highest) `out` gets the tasks of such a pass rate instead, where a
    completion of at least `min_reward` passes, and the counts are of tasks. With `stronger_url` a
    task must also be passed by the model of that server, at least once in `n`.
    """
    from paddock.envs import make

    changes = dict(args or {})
    job = RejectionSamplingJob(
        taskset=make(env, changes),
        split=split,
        thinking=thinking,
        sampling=SamplingParams(temperature=temperature, max_new_tokens=max_tokens),
        seed=seed,
        min_reward=min_reward,
    )
    # Keys of the file's first line: a file may only be continued with the same ones.
    options: dict[str, Any] = {
        "model": model,
        "world": env,
        "set": changes,
        "split": split,
        "thinking": thinking,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "seed": seed,
        "at_least": min_reward,
    }

    def run(sink: SampleSink, tasks: Sequence[int], name: str, url: str | None) -> None:
        """Sample from one model what the sink lacks of these tasks."""
        todo = [(i, k) for i in tasks for k in range(n) if not sink.has(job.sample_id(i, k))]
        if todo:
            if on_start is not None:
                on_start(len(todo))
            with open_model_client(name, url, max_concurrent) as client:
                asyncio.run(_sample(job, client, sink, todo, max_concurrent, on_update))

    if pass_rate is None:
        with DialogueFile.open(Path(out), options) as dialogues:
            run(_DialogueSink(job, dialogues), range(num_tasks), model, base_url)
            return dialogues.counts
    tasks = range(min(num_tasks, job.taskset.size(split) or num_tasks))
    with OutcomeLog.open(Path(out), options | {"pass_rate": True}) as log:
        rates = PassRates(log, job.taskset, split, n, min_reward, pass_rate)
        run(rates, tasks, model, base_url)
        if stronger_url is not None:
            rates.stronger = stronger_model or first_model(stronger_url)
            run(rates, rates.in_range(tasks), rates.stronger, stronger_url)
        return rates.write(Path(out), tasks)


class SampleSink(Protocol):
    """Where completions go."""

    @property
    def counts(self) -> Counter[str]: ...

    def has(self, sample_id: str) -> bool:
        """Whether this completion was sampled before."""

    def record(self, rollout: SampledRollout, client: ModelClient) -> None: ...


@dataclass(frozen=True, slots=True)
class _DialogueSink:
    """Keeps accepted dialogues."""

    job: RejectionSamplingJob
    dialogues: DialogueFile

    @property
    def counts(self) -> Counter[str]:
        return self.dialogues.counts

    def has(self, sample_id: str) -> bool:
        return sample_id in self.dialogues.done

    def record(self, rollout: SampledRollout, client: ModelClient) -> None:
        outcome = rollout.trace.outcome
        if isinstance(outcome, Verdict):
            line = _line(self.job, client, rollout)
            self.dialogues.add(rollout.name, line, outcome, self.job.min_reward)
        else:
            self.dialogues.add_failure(rollout.name, outcome)


async def _sample(
    job: RejectionSamplingJob,
    client: ModelClient,
    sink: SampleSink,
    todo: Sequence[tuple[int, int]],
    max_concurrent: int,
    on_update: Callable[[Counter[str]], None] | None,
) -> None:
    """All rollouts, `max_concurrent` at a time. A bug in our own code cancels them all."""
    from paddock.data import THINKING_MODES
    from paddock.envs import run_rollout

    remaining = iter(todo)

    async def work() -> None:
        for index, k in remaining:
            task = job.taskset.task(index, job.split)
            name = f"{task.id}#{k}"
            seed = derive_seed(job.seed, name)
            policy = client.policy(THINKING_MODES[job.thinking], replace(job.sampling, seed=seed))
            env = job.taskset.make_env(task)
            trace = await run_rollout(env, policy)
            sink.record(SampledRollout(name, k, seed, trace, env.tools), client)
            if on_update is not None:
                on_update(sink.counts)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(max_concurrent, len(todo))):
            group.create_task(work())


def _line(
    job: RejectionSamplingJob, client: ModelClient, rollout: SampledRollout
) -> dict[str, Any]:
    from paddock.data import dialogue_to_json

    trace, verdict = rollout.trace, rollout.trace.outcome
    assert isinstance(verdict, Verdict)
    dialogue = Dialogue(
        messages=trace.messages,
        tools=rollout.tools,
        thinking=job.thinking,
        id=rollout.name,
        source=f"{trace.task.env} by {client.name} {client.version}".rstrip(),
    )
    return dialogue_to_json(dialogue) | {
        "task": trace.task.id,
        "world": trace.task.env,
        "split": job.split,
        "model": client.name,
        "version": client.version,
        "reward": verdict.reward,
        "parts": dict(verdict.parts),
        "sample": rollout.k,
        "seed": rollout.seed,
    }
