"""Rejection sampling: completions of at least a given reward, kept for fine-tuning."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paddock.launch.dialogue_file import DialogueFile
from paddock.launch.errors import UserError
from paddock.launch.settings import StrPath
from paddock.records import Dialogue, Message, SamplingParams, ToolSpec, Verdict

if TYPE_CHECKING:
    from paddock.engine import Engine
    from paddock.envs import Policy, RolloutTrace, Taskset
    from paddock.launch.engines import ModelFolder
    from paddock.text import ThinkingKwargs

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


class ModelClient(Protocol):
    """A model that rollouts are sampled from."""

    name: str
    version: str

    def policy(self, thinking: "ThinkingKwargs", sampling: SamplingParams) -> "Policy":
        """The policy of one rollout; the seed of each reply is derived from that of `sampling`."""


def sample(  # noqa: PLR0913  keyword options of one command
    model: str,
    env: str,
    *,
    out: StrPath,
    n: int = 4,
    num_tasks: int = 100,
    min_reward: float = 1.0,
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
    with DialogueFile.open(Path(out), options) as dialogues:
        every = [(index, k) for index in range(num_tasks) for k in range(n)]
        todo = [each for each in every if job.sample_id(*each) not in dialogues.done]
        if todo:
            if on_start is not None:
                on_start(len(todo))
            with open_model_client(model, base_url, max_concurrent) as client:
                asyncio.run(_sample(job, client, dialogues, todo, max_concurrent, on_update))
        return dialogues.counts


async def _sample(
    job: RejectionSamplingJob,
    client: ModelClient,
    dialogues: DialogueFile,
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
            seed = _seed(job.seed, name)
            policy = client.policy(THINKING_MODES[job.thinking], replace(job.sampling, seed=seed))
            env = job.taskset.make_env(task)
            trace = await run_rollout(env, policy)
            if isinstance(trace.outcome, Verdict):
                line = _line(job, client, trace, name, env.tools) | {"sample": k, "seed": seed}
                dialogues.add(name, line, trace.outcome, job.min_reward)
            else:
                dialogues.add_failure(name, trace.outcome)
            if on_update is not None:
                on_update(dialogues.counts)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(max_concurrent, len(todo))):
            group.create_task(work())


def _line(
    job: RejectionSamplingJob,
    client: ModelClient,
    trace: "RolloutTrace",
    name: str,
    tools: tuple[ToolSpec, ...],
) -> dict[str, Any]:
    from paddock.data import dialogue_to_json

    verdict = trace.outcome
    assert isinstance(verdict, Verdict)
    dialogue = Dialogue(
        messages=trace.messages,
        tools=tools,
        thinking=job.thinking,
        id=name,
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
    }


@contextmanager
def open_model_client(
    name: str, base_url: str | None, max_concurrent: int
) -> Iterator[ModelClient]:
    """A client of the server at `base_url`, else of an engine with the checkpoint `name`."""
    if base_url is not None:
        yield OpenAIModelClient(name, base_url)
        return
    from paddock.engine import EngineSettings
    from paddock.launch.engines import load_engines, open_model_folder, pick_devices, pick_dtype

    model = open_model_folder(Path(name), None)
    (device,) = pick_devices(None, 1)
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    settings = EngineSettings(max_running_requests=max_concurrent, stop_token_ids=stops or None)
    (engine,) = load_engines(
        model, [device], pick_dtype(model.folder, device, None), settings, fits=True
    )
    with engine:
        yield EngineModelClient(model, engine)


class EngineModelClient:
    """A model in an engine of this process."""

    def __init__(self, model: "ModelFolder", engine: "Engine") -> None:
        self._model, self._engine = model, engine
        self.name = str(model.folder)
        step = model.folder.parent.name
        self.version = step if step.startswith("step-") else str(engine.version)

    def policy(self, thinking: "ThinkingKwargs", sampling: SamplingParams) -> "Policy":
        from paddock.engine import (
            ContextLengthExceededError,
            EngineError,
            InvalidRequestError,
            Request,
        )
        from paddock.envs import RolloutFailed
        from paddock.text import parse_completion

        async def reply(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
            prompt = self._model.renderer.render_prompt(
                messages, tools=tools, thinking=thinking
            ).token_ids
            chosen = replace(sampling, seed=_seed(sampling.seed, len(messages)))
            try:
                output = await self._engine.async_generate(
                    Request(token_ids=prompt, sampling_params=chosen)
                )
            except ContextLengthExceededError as error:
                raise RolloutFailed("policy", "engine", str(error)) from None
            except InvalidRequestError as error:
                raise RolloutFailed("infrastructure", "engine", str(error)) from None
            except EngineError as error:
                raise RolloutFailed("infrastructure", "engine", str(error)) from None
            completion = output.completion
            if completion.finish == "length":
                what = f"the reply does not end within {len(completion.token_ids)} tokens"
                raise RolloutFailed("policy", "engine", what)
            return parse_completion(
                self._model.tokenizer,
                completion.token_ids,
                finish=completion.finish,
                tools=tools,
                prompt=prompt,
                call_id=f"call_{len(messages)}_{{}}".format,
            ).message

        return reply


class OpenAIModelClient:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, name: str, url: str) -> None:
        import httpx

        self.name, self._url = name, url.rstrip("/").removesuffix("/v1")
        self.version = ""
        try:
            info = httpx.get(f"{self._url}/get_model_info", timeout=10)
            httpx.get(f"{self._url}/v1/models", timeout=10).raise_for_status()
        except httpx.HTTPError as error:
            raise UserError(f"{url}: server unreachable ({error})") from None
        if info.is_success:
            self.version = str(info.json().get("weight_version", ""))

    def policy(self, thinking: "ThinkingKwargs", sampling: SamplingParams) -> "Policy":
        import httpx

        from paddock.envs import RolloutFailed
        from paddock.text import message_to_openai, parse_messages, tool_to_openai

        async def reply(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
            body: dict[str, Any] = {
                "model": self.name,
                "messages": [message_to_openai(message) for message in messages],
                "temperature": sampling.temperature,
                "seed": _seed(sampling.seed, len(messages)),
                "chat_template_kwargs": thinking.as_kwargs,
            }
            body |= {"tools": [tool_to_openai(tool) for tool in tools]} if tools else {}
            limit = sampling.max_new_tokens
            body |= {} if limit is None else {"max_tokens": limit}
            try:
                async with httpx.AsyncClient(timeout=600) as http:
                    response = await http.post(f"{self._url}/v1/chat/completions", json=body)
                    response.raise_for_status()
            except httpx.HTTPError as error:
                raise RolloutFailed("infrastructure", "server", repr(error)) from None
            (choice,) = response.json()["choices"]
            if choice["finish_reason"] == "length":
                raise RolloutFailed("policy", "server", "the reply does not end")
            (message,) = parse_messages([choice["message"]])
            return message

        return reply


def _seed(*parts: object) -> int:
    """A 31-bit seed derived from these values."""
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
