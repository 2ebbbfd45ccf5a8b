"""A model that rollouts are sampled from: an engine of this process, or a server."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paddock.launch.errors import UserError
from paddock.records import Message, SamplingParams, ToolSpec

if TYPE_CHECKING:
    from paddock.engine import Engine
    from paddock.envs import Policy
    from paddock.launch.engines import ModelFolder
    from paddock.text import ThinkingKwargs


class ModelClient(Protocol):
    """A model that rollouts are sampled from."""

    name: str
    version: str

    def policy(self, thinking: "ThinkingKwargs", sampling: SamplingParams) -> "Policy":
        """The policy of one rollout; the seed of each reply is derived from that of `sampling`."""


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
            chosen = replace(sampling, seed=derive_seed(sampling.seed, len(messages)))
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
        self.version, self._headers = "", api_key_header()
        try:
            info = httpx.get(f"{self._url}/get_model_info", timeout=10, headers=self._headers)
            models = httpx.get(f"{self._url}/v1/models", timeout=10, headers=self._headers)
            models.raise_for_status()
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
                "seed": derive_seed(sampling.seed, len(messages)),
                "chat_template_kwargs": thinking.as_kwargs,
            }
            body |= {"tools": [tool_to_openai(tool) for tool in tools]} if tools else {}
            limit = sampling.max_new_tokens
            body |= {} if limit is None else {"max_tokens": limit}
            try:
                async with httpx.AsyncClient(timeout=600, headers=self._headers) as http:
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


def first_model(url: str) -> str:
    """The first model that an OpenAI-compatible server lists."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(f"{base}/v1/models", timeout=10, headers=api_key_header())
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise UserError(f"{url}: server unreachable ({error})") from None


def api_key_header() -> dict[str, str]:
    """The key of a server, if OPENAI_API_KEY is set."""
    key = os.environ.get("OPENAI_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def derive_seed(*parts: object) -> int:
    """A 31-bit seed derived from these values."""
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
