"""Prompt rendering, request building and generation, shared by all routes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from uuid import uuid4

from starlette.requests import Request as HttpRequest

from paddock.api import (
    ApiRequest,
    ChatRequest,
    Prompt,
    ThinkingOptions,
    TokenDecoder,
    context_length_error,
    fit_to_context,
    formatter,
)
from paddock.engine import (
    DuplicateRequestIdError,
    Engine,
    EngineError,
    EngineQueueFullError,
    InvalidRequestError,
    Request,
    WeightVersionLabels,
)
from paddock.http import to_api_error
from paddock.records import ApiError, SamplingParams
from paddock.serve.generation import Generation
from paddock.serve.load_balancer import ReplicaLoadBalancer
from paddock.serve.settings import ServeSettings
from paddock.text import (
    ChatTemplateError,
    NotPrefixPreservingError,
    Renderer,
    TextTooLongError,
    ThinkingKwargs,
    Tokenizer,
)

ROUTING_KEY_HEADER = "x-smg-routing-key"  # header with the session of a request
log = getLogger("paddock.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnOptions:
    """Extra outputs that only some APIs request from the engine."""

    prompt_logprobs_start: int | None = None
    top_logprobs: int | None = None  # None: that of the ApiRequest
    logprob_token_ids: tuple[int, ...] = ()
    return_routing: bool = False


NO_EXTRA_OUTPUTS = ReturnOptions()


class ChatService:
    """Turns API requests into engine requests and their outputs.

    Without a renderer only raw prompts are supported.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        tokenizer: Tokenizer,
        renderer: Renderer | None,
        settings: ServeSettings,
    ) -> None:
        self.replicas = ReplicaLoadBalancer(engines)
        self.tokenizer, self.renderer, self.settings = tokenizer, renderer, settings
        self.token_decoder = TokenDecoder(tokenizer)
        self.formatter_context = formatter.FormatterContext(
            self.token_decoder, settings.served_model_name
        )
        self.capacity = engines[0].capacity
        self.vocab = engines[0].config.vocab
        self.sessions: dict[str, int] = {}  # generations in flight, by session
        self.live: dict[str, int] = {}  # replica of every request in flight
        self.labels = WeightVersionLabels()  # of weight versions
        self._warned: set[str] = set()

    @property
    def max_requests(self) -> int:
        """Maximum number of requests that one replica queues and runs."""
        engine = self.replicas.engines[0].settings
        return engine.max_queued_requests + engine.max_running_requests

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Sampling defaults of chat requests."""
        params = self.settings
        return SamplingParams(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k
        )

    @property
    def default_thinking(self) -> ThinkingOptions:
        """Thinking defaults of chat requests."""
        enable = None if self.settings.enable_thinking else False
        params = ThinkingKwargs(enable_thinking=enable, clear_thinking=self.settings.clear_thinking)
        return ThinkingOptions(thinking=params)

    def check_model(self, model: str | None) -> None:
        """Raise ApiError 404 if the client names a model that is not served; none is accepted."""
        names = self.settings.served_model_names
        if model and model not in names:
            served = ", ".join(map(repr, names))
            raise ApiError(
                f"model {model!r:.80} not found; served models: {served}",
                status=404,
                param="model",
                code="model_not_found",
            )

    # --- prompts ----------------------------------------------------------------------------------

    async def render_prompt(
        self, request: ChatRequest, *, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """The token ids of a conversation and the generation prompt, rendered in a thread.

        Raises ApiError if it is much longer than `max_tokens` (default: the context length) without
        tokenizing all of it.
        """
        max_tokens = max_tokens or self.capacity.context_length
        try:
            return await asyncio.to_thread(self._render, request, max_tokens)
        except TextTooLongError as error:
            raise context_length_error(str(error), max_tokens, "messages") from None

    def _render(self, request: ChatRequest, max_tokens: int) -> tuple[int, ...]:
        self._warn_ignored(request)
        if request.prompt_ids is not None:
            return request.prompt_ids
        renderer = self._renderer()
        params = {"tools": request.tools, "thinking": request.thinking, "max_tokens": max_tokens}
        try:
            if request.continues:
                return renderer.render_dialogue(request.messages, closed=False, **params).token_ids  # type: ignore[arg-type]
            return renderer.render_prompt(request.messages, **params).token_ids  # type: ignore[arg-type]
        except (ChatTemplateError, NotPrefixPreservingError) as error:
            raise ApiError(f"messages: {error}", param="messages") from None

    async def tokenize_prompt(
        self, prompt: Prompt, *, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """The token ids of a raw prompt. Its text may contain special tokens, as templates do.
        `max_tokens` as in `render_prompt`."""
        if not isinstance(prompt, str):
            return prompt
        max_tokens = max_tokens or self.capacity.context_length
        try:
            return await asyncio.to_thread(self._encode, prompt, max_tokens)
        except TextTooLongError as error:
            raise context_length_error(str(error), max_tokens, "prompt") from None

    def _encode(self, text: str, max_tokens: int) -> tuple[int, ...]:
        self.tokenizer.check_max_tokens([text], max_tokens, specials=True)
        return tuple(self.tokenizer.encode(text, specials=True))

    @property
    def max_tokenize_tokens(self) -> int:
        """Limit of /tokenize and token counting. It exceeds the context length, so that clients can
        find out how much of a long text fits."""
        return max(65536, 8 * self.capacity.context_length)

    def _renderer(self) -> Renderer:
        if self.renderer is None:
            raise ApiError(
                "this model has no chat template: use /v1/completions or /generate", status=404
            )
        return self.renderer

    def _warn_ignored(self, request: ChatRequest) -> None:
        for kind in request.skipped_tools:
            self.warn_once(f"tools of type {kind!r} are skipped: this server does not run them")
        if self.renderer is not None:
            params = request.thinking
            if params.clear_thinking == self.settings.clear_thinking:
                params = replace(
                    params, clear_thinking=None
                )  # the default, not the client's choice
            for why in self.renderer.ignored_kwargs(params).values():
                self.warn_once(why)

    def warn_once(self, message: str) -> None:
        if message not in self._warned and len(self._warned) < 1000:
            self._warned.add(message)
            log.warning("%s", message)

    # --- requests ---------------------------------------------------------------------------------

    def build_requests(
        self,
        api_request: ApiRequest,
        prompt: tuple[int, ...],
        *,
        n: int = 1,
        options: ReturnOptions = NO_EXTRA_OUTPUTS,
    ) -> list[Request]:
        """`n` engine requests for one prompt."""
        sampling = fit_to_context(api_request, len(prompt), self.capacity.context_length)
        # A required tool call replaces the response format, which constrains content only.
        if isinstance(api_request, ChatRequest) and api_request.must_call:
            sampling = replace(sampling, grammar=api_request.tool_call_grammar(self.tokenizer))
        top = options.top_logprobs
        if top is None:
            top = api_request.top_logprobs or 0
        request = Request(
            token_ids=prompt,
            sampling_params=sampling,
            id=api_request.id or uuid4().hex,
            priority=max(-(2**31), min(2**31, api_request.priority)),
            cache_salt=api_request.salt,
            prompt_logprobs_start=options.prompt_logprobs_start,
            top_logprobs=top,
            logprob_token_ids=options.logprob_token_ids,
            return_routing=options.return_routing,
        )
        if n == 1:
            return [request]
        return [
            replace(request, id=f"{request.id}-{i}", sampling_params=_with_offset_seed(sampling, i))
            for i in range(n)
        ]

    def new_generation(
        self, http: HttpRequest, api_request: ApiRequest, requests: Sequence[Request]
    ) -> Generation:
        session = http.headers.get(ROUTING_KEY_HEADER) or api_request.session
        replica = self.replicas.select_replica(session, api_request.replica)
        return Generation(
            replicas=self.replicas,
            sessions=self.sessions,
            live=self.live,
            replica=replica,
            requests=list(requests),
            session=session,
        )

    def abort(self, request_id: str) -> int:
        """Abort a request, or all that it was split into; returns how many."""
        found = [
            i
            for i in self.live
            if i == request_id or i.startswith((f"{request_id}-", f"{request_id}_"))
        ]
        for each in found:
            self.replicas.engines[self.live[each]].abort(each)
        return len(found)


def _with_offset_seed(sampling: SamplingParams, i: int) -> SamplingParams:
    """The parameters of the i-th of several completions, with its own seed."""
    seed = None if sampling.seed is None else (sampling.seed + i) % 2**63
    return replace(sampling, seed=seed)


def engine_error_to_api_error(error: Exception) -> ApiError:
    """The ApiError for an exception of a handler or an engine."""
    if isinstance(error, InvalidRequestError):
        error = ApiError(str(error))
    if isinstance(error, EngineQueueFullError):
        error = ApiError(str(error), status=503, code="overloaded")
    if isinstance(error, DuplicateRequestIdError):
        error = ApiError(str(error), status=409, code="duplicate_id")
    if isinstance(error, EngineError):
        error = ApiError(str(error), status=500, code="engine_failed")
    return to_api_error(error)
