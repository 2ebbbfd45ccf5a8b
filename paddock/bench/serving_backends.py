"""What `paddock bench serve` measures: servers over HTTP, or an engine in this process."""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paddock.bench.serving import (
    BenchmarkBackend,
    RequestFailedError,
    StreamedTokens,
    Workload,
)
from paddock.launch import UserError, engines, units
from paddock.records import SamplingParams

if TYPE_CHECKING:
    from paddock.engine import Engine
    from paddock.model import ModelConfig, Transformer
    from paddock.rollout import InferenceClient, sglang_client

BackendName = Literal["openai", "openai-chat", "sglang"]
CONNECT_TIMEOUT_S = 10.0  # for a server to say that it is there
MALFORMED = (KeyError, TypeError, AttributeError)  # of reading JSON of another shape
# One token each, with the space before them, in most tokenizers.
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "for",
    "was",
    "on",
    "are",
    "as",
    "with",
)


@contextmanager
def _request_failures(
    hint: str = "", malformed: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Errors of a client become RequestFailedError; `hint` follows the message of a rejection."""
    from paddock.rollout import EngineUnavailableError, sglang_client

    try:
        yield
    except sglang_client.RequestRejectedError as error:
        raise RequestFailedError(f"{error}{hint}") from None
    except EngineUnavailableError as error:
        raise RequestFailedError(str(error)) from None
    except malformed as error:
        raise RequestFailedError(f"unexpected response: {error!r}") from None


# --- servers --------------------------------------------------------------------------------------


@asynccontextmanager
async def connect_server(
    url: str,
    backend: BackendName = "openai",
    *,
    key: str | None = None,
    model: str | None = None,
    text_prompts: bool = False,
) -> AsyncIterator["ServerBackend"]:
    """`model`: its name at the server; by default the first that the server lists."""
    from paddock.rollout import sglang_client

    if not url.startswith(("http://", "https://")):
        raise UserError(f"--base-url {url}: expected a URL such as http://127.0.0.1:8000")
    async with sglang_client.connection_pool() as http:
        server = sglang_client.ServerClient(url.rstrip("/").removesuffix("/v1"), http, key)
        name = model or await _first_model(server)
        if backend == "sglang":
            yield SGLangBackend(server, name)
        else:
            yield OpenAIBackend(server, name, chat=backend == "openai-chat", text=text_prompts)


async def _first_model(server: "sglang_client.ServerClient") -> str:
    try:
        with _request_failures():
            found = await replace(server, timeout_s=CONNECT_TIMEOUT_S).get("/v1/models")
        return str(found["data"][0]["id"])
    except RequestFailedError as error:
        raise UserError(
            f"server unreachable: {error} (a server without /v1/models needs --model)"
        ) from None
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{server.url}/v1/models lists no model; pass --model") from None


@dataclass(frozen=True, slots=True)
class OpenAIBackend:
    """`/v1/completions` with token ids or text, or `/v1/chat/completions` with text."""

    server: "sglang_client.ServerClient"
    model: str
    chat: bool = False
    text: bool = False

    async def stream(
        self, prompt: tuple[int, ...], output_len: int
    ) -> AsyncGenerator[StreamedTokens, None]:
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        hint = "" if self.chat or self.text else " (no token ids? Try --text-prompts)"
        with _request_failures(hint, MALFORMED):
            async for event in self.server.stream_events(path, self._body(prompt, output_len)):
                usage = event.get("usage") or {}
                yield StreamedTokens(
                    any(map(_has_text, event.get("choices") or ())),
                    usage.get("prompt_tokens"),
                    usage.get("completion_tokens"),
                )

    def _body(self, prompt: tuple[int, ...], output_len: int) -> dict[str, Any]:
        words = " ".join(WORDS[i % len(WORDS)] for i in prompt)
        asked: dict[str, Any] = {"prompt": words if self.text else prompt}
        if self.chat:
            asked = {"messages": [{"role": "user", "content": words}]}
        return asked | {
            "model": self.model,
            "max_tokens": output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a streamed choice has tokens. The text of a token can be empty, but a chat begins
    with an event that has only a role."""
    if "delta" not in choice:
        return True
    texts = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("finish_reason") or any(choice["delta"].get(key) for key in texts))


@dataclass(frozen=True, slots=True)
class SGLangBackend:
    """`/generate` with token ids."""

    server: "sglang_client.ServerClient"
    model: str

    async def stream(
        self, prompt: tuple[int, ...], output_len: int
    ) -> AsyncGenerator[StreamedTokens, None]:
        sampling = {"max_new_tokens": output_len, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        before = 0
        with _request_failures(malformed=MALFORMED):
            async for event in self.server.stream_events("/generate", body):
                meta = event["meta_info"]
                finish = meta.get("finish_reason") or {}
                if finish.get("type") == "abort":
                    raise RequestFailedError(f"aborted: {finish.get('message', '')}")
                total = meta["completion_tokens"]
                yield StreamedTokens(total > before, meta["prompt_tokens"], total)
                before = total


ServerBackend = OpenAIBackend | SGLangBackend


# --- engines --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineBackend:
    """Any inference client, for example an engine in this process."""

    client: "InferenceClient"

    async def stream(
        self, prompt: tuple[int, ...], output_len: int
    ) -> AsyncGenerator[StreamedTokens, None]:
        from paddock.rollout import InferenceRequest

        sampling = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
        request = InferenceRequest(token_ids=prompt, sampling_params=sampling, session_id="bench")
        total = 0
        with _request_failures():
            async with aclosing(self.client.stream(request)) as deltas:
                async for delta in deltas:
                    if delta.output is not None and delta.output.completion.finish == "abort":
                        raise RequestFailedError(f"aborted: {delta.output.abort_reason}")
                    total += len(delta.token_ids)
                    yield StreamedTokens(bool(delta.token_ids), len(prompt), total)


@dataclass(frozen=True, slots=True)
class BenchmarkEngine:
    """An engine sized for a workload, and what it serves."""

    backend: BenchmarkBackend
    engine: "Engine"
    config: "ModelConfig"
    device: str
    dtype: str


def open_benchmark_engine(  # noqa: PLR0913  keyword options
    model: str,
    load: Workload,
    max_running_requests: int,
    *,
    mtp: int,
    device: str | None,
    dtype: str | None,
    quant: engines.Quant | None = None,
) -> BenchmarkEngine:
    """An engine with a checkpoint, a run's newest one, or a preset with fresh weights."""
    from paddock.engine import (
        ContextLengthExceededError,
        Engine,
        EngineError,
        EngineSettings,
        InvalidRequestError,
        Request,
    )
    from paddock.rollout import InProcessClient

    (chosen,) = engines.pick_devices(device, 1)
    dtype = dtype or ("float32" if chosen == "cpu" else "bfloat16")
    network = _network(model, chosen, dtype)
    if chosen == "cpu" or quant is not None:
        engines.pack_for_cpu(network, wait=True, quant=quant)
    settings = EngineSettings(
        max_running_requests=max_running_requests,
        num_speculative_tokens=mtp,
        stop_token_ids=(),
        context_length=load.input_len + load.output_len,
    )
    tokens = load.input_len + load.output_len + 2 * mtp + 2 * settings.page_size
    pages = math.ceil(1.25 * max_running_requests * tokens / settings.page_size)
    engine = Engine(network, None, settings.model_copy(update={"num_pages": pages}))
    client = InProcessClient(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )
    return BenchmarkEngine(EngineBackend(client), engine, network.config, chosen, dtype)


def _network(model: str, device: str, dtype: str) -> "Transformer":
    import torch

    from paddock.checkpoint import latest_model, load_pretrained
    from paddock.model import PRESETS, Transformer, cost
    from paddock.train import free_memory_bytes

    if Path(model).is_dir():
        return load_pretrained(latest_model(Path(model)), dtype, device)
    if model not in PRESETS:
        raise UserError(
            f"'{model}' is neither a folder nor a preset; presets: {', '.join(PRESETS)}"
        )
    config = PRESETS[model]
    needed, free = 4 * cost.count_parameters(config).total, free_memory_bytes(torch.device("cpu"))
    if needed > free:  # fresh weights are initialised in float32, in host memory
        raise UserError(
            f"{model}: fresh weights need {units.format_bytes(needed)}, "
            f"{units.format_bytes(free)} are free"
        )
    return Transformer.from_config(config, seed=0).cast(getattr(torch, dtype)).to(device).eval()
