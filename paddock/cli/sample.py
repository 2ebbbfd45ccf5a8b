"""The verb that samples answers and keeps those that a world accepts: rejection sampling."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer
from rich.console import Console

from paddock.cli.errors import UserError
from paddock.cli.tables import print_parts, table
from paddock.config import parse_overrides
from paddock.launch.dialogue_file import DialogueFile
from paddock.records import Dialogue, Message, SamplingParams, ToolSpec, Verdict

if TYPE_CHECKING:
    from paddock.engine import Engine
    from paddock.envs import Policy, RolloutTrace, Taskset
    from paddock.launch.engines import ModelFolder
    from paddock.text import ThinkingKwargs

Mode = Literal["interleaved", "preserved", "off"]


def sample(  # noqa: PLR0913  one option each
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint or run; or a name.")],
    world: Annotated[str, typer.Argument(metavar="WORLD", help="Whose tasks are answered.")],
    out: Annotated[Path, typer.Option(help="JSONL of the dialogues that were kept.")],
    n: Annotated[int, typer.Option(min=1, help="Answers to each task.")] = 4,
    count: Annotated[int, typer.Option(min=1, help="Tasks.")] = 100,
    at_least: Annotated[float, typer.Option(help="Reward that is kept.")] = 1.0,
    split: Annotated[
        Literal["train", "test"], typer.Option(help="Of the world's tasks.")
    ] = "train",
    url: Annotated[str | None, typer.Option(help="A server's; else MODEL is run here.")] = None,
    thinking: Annotated[Mode, typer.Option(help="How the model thinks.")] = "interleaved",
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a reply at most.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    at_once: Annotated[int, typer.Option(min=1, help="Attempts under way together.")] = 32,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A=B", help="Change the world.")
    ] = None,
) -> None:
    """Sample N answers to each task and write down those that the world gives AT_LEAST, as
    dialogues for fine-tuning that say where they come from.

    Called again it goes on: no answer is asked for twice, none is written twice. With a higher
    --count or --n it adds to the file.
    """
    from paddock.envs import make

    made = parse_overrides(sets or [])
    plan = RejectionSamplingJob(
        world=make(world, made),
        split=split,
        mode=thinking,
        sampling=SamplingParams(temperature=temperature, max_new_tokens=max_tokens),
        seed=seed,
        at_least=at_least,
    )
    begun: dict[str, Any] = {
        "model": model,
        "world": world,
        "set": made,
        "split": split,
        "thinking": thinking,
    }
    begun |= {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    begun |= {"at_least": at_least}
    with DialogueFile.open(out, begun) as harvest:
        jobs = [(index, k) for index in range(count) for k in range(n)]
        todo = [job for job in jobs if plan.sample_id(*job) not in harvest.done]
        if todo:
            with open_model_client(model, url, at_once) as player:
                asyncio.run(_sample(plan, player, harvest, todo, at_once))
        _tell(out, harvest, asked=len(jobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionSamplingJob:
    """What is asked of the model, and what is kept."""

    world: "Taskset"
    split: Literal["train", "test"]
    mode: Mode
    sampling: SamplingParams
    seed: int
    at_least: float

    def sample_id(self, index: int, k: int) -> str:
        """Of one answer."""
        return f"{self.world.task(index, self.split).id}#{k}"


class ModelClient(Protocol):
    """A model that can be asked."""

    name: str
    version: str

    def policy(self, thinking: "ThinkingKwargs", sampling: SamplingParams) -> "Policy":
        """One that plays one attempt; its first reply is sampled with the seed, the others with
        seeds made of it."""


async def _sample(
    plan: RejectionSamplingJob,
    player: ModelClient,
    harvest: DialogueFile,
    todo: Sequence[tuple[int, int]],
    at_once: int,
) -> None:
    """All attempts, so many at a time. A bug in our own code ends them all."""
    from paddock.data import THINKING_MODES
    from paddock.envs import run_rollout

    jobs = iter(todo)
    shown = RejectionSamplingProgress(len(todo))

    async def work() -> None:
        for index, k in jobs:
            task = plan.world.task(index, plan.split)
            name = f"{task.id}#{k}"
            seed = _seed(plan.seed, name)
            sampling = replace(plan.sampling, seed=seed)
            policy = player.policy(THINKING_MODES[plan.mode], sampling)
            env = plan.world.make_env(task)
            episode = await run_rollout(env, policy)
            if isinstance(episode.outcome, Verdict):
                line = _line(plan, player, episode, name, env.tools) | {"sample": k, "seed": seed}
                harvest.add(name, line, episode.outcome, plan.at_least)
            else:
                harvest.add_failure(name, episode.outcome)
            shown.update(harvest.counts)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(todo))):
            group.create_task(work())


def _line(
    plan: RejectionSamplingJob,
    player: ModelClient,
    episode: "RolloutTrace",
    name: str,
    tools: tuple[ToolSpec, ...],
) -> dict[str, Any]:
    from paddock.data import dialogue_to_json

    verdict = episode.outcome
    assert isinstance(verdict, Verdict)
    dialogue = Dialogue(
        messages=episode.messages,
        tools=tools,
        thinking=plan.mode,
        id=name,
        source=f"{episode.task.env} by {player.name} {player.version}".rstrip(),
    )
    return dialogue_to_json(dialogue) | {
        "task": episode.task.id,
        "world": episode.task.env,
        "split": plan.split,
        "model": player.name,
        "version": player.version,
        "reward": verdict.reward,
        "parts": dict(verdict.parts),
    }


# --- who is asked ---------------------------------------------------------------------------------


@contextmanager
def open_model_client(name: str, url: str | None, at_once: int) -> Iterator[ModelClient]:
    if url is not None:
        yield OpenAIModelClient(name, url)
        return
    from paddock.engine import EngineSettings
    from paddock.launch.engines import load_engines, open_model_folder, pick_devices, pick_dtype

    model = open_model_folder(Path(name), None)
    (place,) = pick_devices(None, 1)
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    settings = EngineSettings(max_running_requests=at_once, stop_token_ids=stops or None)
    (engine,) = load_engines(
        model, [place], pick_dtype(model.folder, place, None), settings, fits=True
    )
    with engine:
        yield EngineModelClient(model, engine)


class EngineModelClient:
    """A model in this process."""

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
                answer = await self._engine.async_generate(
                    Request(token_ids=prompt, sampling_params=chosen)
                )
            except ContextLengthExceededError as error:
                raise RolloutFailed("policy", "engine", str(error)) from None
            except InvalidRequestError as error:
                raise RolloutFailed("infrastructure", "engine", str(error)) from None
            except EngineError as error:
                raise RolloutFailed("infrastructure", "engine", str(error)) from None
            completion = answer.completion
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
    """A model behind OpenAI's chat completions, ours or another's."""

    def __init__(self, name: str, url: str) -> None:
        import httpx

        self.name, self._url = name, url.rstrip("/").removesuffix("/v1")
        self.version = ""
        try:
            found = httpx.get(f"{self._url}/get_model_info", timeout=10)
            httpx.get(f"{self._url}/v1/models", timeout=10).raise_for_status()
        except httpx.HTTPError as error:
            raise UserError(f"{url}: no server answers there ({error})") from None
        if found.is_success:
            self.version = str(found.json().get("weight_version", ""))

    def policy(self, thinking: "ThinkingKwargs", sampling: SamplingParams) -> "Policy":
        import httpx

        from paddock.data import message_to_json
        from paddock.envs import RolloutFailed
        from paddock.text import parse_messages, tool_to_openai

        async def reply(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
            body: dict[str, Any] = {
                "model": self.name,
                "messages": [message_to_json(message) for message in messages],
                "temperature": sampling.temperature,
                "seed": _seed(sampling.seed, len(messages)),
                "chat_template_kwargs": thinking.as_kwargs,
            }
            body |= {"tools": [tool_to_openai(tool) for tool in tools]} if tools else {}
            limit = sampling.max_new_tokens
            body |= {} if limit is None else {"max_tokens": limit}
            try:
                async with httpx.AsyncClient(timeout=600) as http:
                    answer = await http.post(f"{self._url}/v1/chat/completions", json=body)
                    answer.raise_for_status()
            except httpx.HTTPError as error:
                raise RolloutFailed("infrastructure", "server", repr(error)) from None
            (choice,) = answer.json()["choices"]
            if choice["finish_reason"] == "length":
                raise RolloutFailed("policy", "server", "the reply does not end")
            (said,) = parse_messages([choice["message"]])
            return said

        return reply


def _seed(*parts: object) -> int:
    """31 bits that stand for these values."""
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


# --- what is shown --------------------------------------------------------------------------------


class RejectionSamplingProgress:
    """A line now and then, on stderr."""

    def __init__(self, attempts: int) -> None:
        self._attempts, self._seen = attempts, 0
        self._console = Console(stderr=True)
        self._began = self._said_at = time.monotonic()

    def update(self, counts: Counter[str]) -> None:
        self._seen += 1
        now = time.monotonic()
        pause = 0.2 if self._console.is_terminal else 5
        if now - self._said_at < pause and self._seen < self._attempts:
            return
        self._said_at = now
        rate = self._seen / max(1e-9, now - self._began)
        left = (self._attempts - self._seen) / rate
        fates = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
        text = f"{self._seen}/{self._attempts} answers, {fates}; {rate:.1f}/s, {left:.0f} s left"
        end = "\r" if self._console.is_terminal and self._seen < self._attempts else "\n"
        self._console.print(text, end=end, highlight=False, soft_wrap=True)


def _tell(out: Path, harvest: DialogueFile, asked: int) -> None:
    counts = harvest.counts
    made = table("answers", numbers=("", "share"))
    for fate in ("kept", "said before", "rejected", "unusable", "failed"):
        made.add_row(fate, f"{counts[fate]:,}", f"{counts[fate] / max(1, asked):.1%}")
    print_parts(made, f"dialogues: {out}")
    if counts["failed"]:
        raise UserError(f"{counts['failed']} attempts failed; call again to repeat them")
