"""What every door opens into: conversations become prompts, prompts requests, requests answers."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from threading import Event
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
    OutputCallback,
    OutputDelta,
    Request,
    RequestOutput,
    WeightVersionLabels,
)
from paddock.http import to_api_error
from paddock.records import ApiError, SamplingParams
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

# Threads that wait for grammars to be compiled, apart from those that tokenize conversations. More
# than two lanes of the engine let wait, so that nobody waits for a thread.
_COMPILING = ThreadPoolExecutor(80, thread_name_prefix="paddock-grammar")
ROUTING_KEY_HEADER = "x-smg-routing-key"  # the header that says which session a request belongs to
log = getLogger("paddock.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnOptions:
    """What only some dialects ask of the engine."""

    prompt_logprobs_from: int | None = None
    top_logprobs: int | None = None  # None: as the Ask says
    ask_ids: tuple[int, ...] = ()
    replay: bool = False


NO_EXTRA_OUTPUTS = ReturnOptions()


class ChatService:
    def __init__(
        self,
        engines: Sequence[Engine],
        tokenizer: Tokenizer,
        renderer: Renderer | None,
        settings: ServeSettings,
    ) -> None:
        """Without a renderer there is no chat, only prompts."""
        self.replicas = ReplicaLoadBalancer(engines)
        self.tokenizer, self.renderer, self.settings = tokenizer, renderer, settings
        self.spelling = TokenDecoder(tokenizer)
        self.speaker = formatter.FormatterContext(self.spelling, settings.served_model_name)
        self.capacity = engines[0].capacity
        self.vocab = engines[0].config.vocab
        self.sessions: dict[str, int] = {}  # calls being answered, by session
        self.live: dict[str, int] = {}  # the replica of every request being answered
        self.labels = WeightVersionLabels()  # of versions of the weights
        self._warned: set[str] = set()

    @property
    def max_requests(self) -> int:
        """That one replica may be asked for at once."""
        engine = self.replicas.engines[0].settings
        return engine.max_queued_requests + engine.max_running_requests

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Of chats that say nothing else."""
        said = self.settings
        return SamplingParams(temperature=said.temperature, top_p=said.top_p, top_k=said.top_k)

    @property
    def default_thinking(self) -> ThinkingOptions:
        """Of chats that say nothing else."""
        enable = None if self.settings.enable_thinking else False
        said = ThinkingKwargs(enable_thinking=enable, clear_thinking=self.settings.clear_thinking)
        return ThinkingOptions(thinking=said)

    def check_model(self, model: str | None) -> None:
        """As vLLM: a client that names a model must name one that is served; none is fine."""
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

    async def render_prompt(self, talk: ChatRequest, *, most: int | None = None) -> tuple[int, ...]:
        """The conversation in tokens, and the opening of the reply. A long one takes a while, so
        other clients are attended to meanwhile. One that is far longer than `most` tokens, or than
        the context, is refused without tokenizing all of it."""
        most = most or self.capacity.context_length
        try:
            return await asyncio.to_thread(self._prompt, talk, most)
        except TextTooLongError as error:
            raise context_length_error(str(error), most, "messages") from None

    def _prompt(self, talk: ChatRequest, most: int) -> tuple[int, ...]:
        self._warn(talk)
        if talk.prompt_ids is not None:
            return talk.prompt_ids
        renderer = self._renderer()
        said = {"tools": talk.tools, "thinking": talk.thinking, "most": most}
        try:
            if talk.continues:
                return renderer.render_dialogue(talk.messages, closed=False, **said).token_ids  # type: ignore[arg-type]
            return renderer.render_prompt(talk.messages, **said).token_ids  # type: ignore[arg-type]
        except (ChatTemplateError, NotPrefixPreservingError) as error:
            raise ApiError(f"messages: {error}", param="messages") from None

    async def tokenize_prompt(self, prompt: Prompt, *, most: int | None = None) -> tuple[int, ...]:
        """A prompt without a template. Its text may spell added tokens, as templates do. `most` as
        in `prompt_of`."""
        if not isinstance(prompt, str):
            return prompt
        most = most or self.capacity.context_length
        try:
            return await asyncio.to_thread(self._encoded, prompt, most)
        except TextTooLongError as error:
            raise context_length_error(str(error), most, "prompt") from None

    def _encoded(self, text: str, most: int) -> tuple[int, ...]:
        self.tokenizer.check_max_tokens([text], most, specials=True)
        return tuple(self.tokenizer.encode(text, specials=True))

    @property
    def max_tokenize_tokens(self) -> int:
        """Tokens of a text that is tokenized for its own sake: clients find out that way how much
        of a long one has room."""
        return max(65536, 8 * self.capacity.context_length)

    def _renderer(self) -> Renderer:
        if self.renderer is None:
            raise ApiError(
                "this model has no chat template: use /v1/completions or /generate", status=404
            )
        return self.renderer

    def _warn(self, talk: ChatRequest) -> None:
        for kind in talk.skipped_tools:
            self.warn_once(f"tools of type {kind!r} are skipped: this server does not run them")
        if self.renderer is not None:
            said = talk.thinking
            if said.clear_thinking == self.settings.clear_thinking:
                said = replace(said, clear_thinking=None)  # nobody asked for it
            for why in self.renderer.ignored_kwargs(said).values():
                self.warn_once(why)

    def warn_once(self, message: str) -> None:
        if message not in self._warned and len(self._warned) < 1000:
            self._warned.add(message)
            log.warning("%s", message)

    # --- requests ---------------------------------------------------------------------------------

    def build_requests(
        self,
        ask: ApiRequest,
        prompt: tuple[int, ...],
        *,
        n: int = 1,
        extras: ReturnOptions = NO_EXTRA_OUTPUTS,
    ) -> list[Request]:
        """The prompt, to be answered `n` times."""
        sampling = fit_to_context(ask, len(prompt), self.capacity.context_length)
        if (
            isinstance(ask, ChatRequest) and ask.must_call
        ):  # a format is for words; a call has its own
            sampling = replace(sampling, grammar=ask.tool_call_grammar(self.tokenizer))
        top = (ask.top_logprobs or 0) if extras.top_logprobs is None else extras.top_logprobs
        request = Request(
            token_ids=prompt,
            sampling_params=sampling,
            id=ask.id or uuid4().hex,
            priority=max(-(2**31), min(2**31, ask.priority)),
            cache_salt=ask.salt,
            prompt_logprobs_start=extras.prompt_logprobs_from,
            top_logprobs=top,
            logprob_token_ids=extras.ask_ids,
            return_routing=extras.replay,
        )
        if n == 1:
            return [request]
        return [
            replace(request, id=f"{request.id}-{i}", sampling_params=_nth(sampling, i))
            for i in range(n)
        ]

    def new_generation(
        self, http: HttpRequest, ask: ApiRequest, requests: Sequence[Request]
    ) -> "Generation":
        session = http.headers.get(ROUTING_KEY_HEADER) or ask.session
        replica = self.replicas.select_replica(session, ask.replica)
        return Generation(hall=self, replica=replica, requests=list(requests), session=session)

    def abort(self, name: str) -> int:
        """End the request called so, or the several that one was made into; how many."""
        found = [i for i in self.live if i == name or i.startswith((f"{name}-", f"{name}_"))]
        for each in found:
            self.replicas.engines[self.live[each]].abort(each)
        return len(found)


def _nth(sampling: SamplingParams, i: int) -> SamplingParams:
    """Each of several replies has its own chance."""
    seed = None if sampling.seed is None else (sampling.seed + i) % 2**63
    return replace(sampling, seed=seed)


@dataclass(slots=True)
class Generation:
    """Requests of one client, on their way through one replica."""

    hall: ChatService
    replica: int
    requests: list[Request]
    session: str | None = None

    @property
    def version(self) -> int:
        return self.hall.replicas.engines[self.replica].version

    async def request_outputs(self) -> list[RequestOutput]:
        """Every answer, in order."""
        return [_answer(delta) for delta in await self.final_deltas()]

    async def final_deltas(self) -> list[OutputDelta]:
        """Of every request the last delta, which holds all of its answer."""
        found: dict[int, OutputDelta] = {}
        async for i, delta in self._deltas(streamed=False):
            found[i] = delta
        return [found[i] for i in range(len(self.requests))]

    async def stream_single(self) -> AsyncGenerator[OutputDelta, None]:
        """What is new of the only request; leaving early aborts it."""
        async with self.stream() as deltas:
            async for _, delta in deltas:
                yield delta

    def stream(self) -> "aclosing[AsyncGenerator[tuple[int, OutputDelta], None]]":
        """What is new, with the index of the request it answers, as it comes: to be iterated over
        in an `async with`, whose end aborts what is not answered yet."""
        return aclosing(self._deltas(streamed=True))

    async def _deltas(self, *, streamed: bool) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        inbox: asyncio.Queue[tuple[int, OutputDelta | Exception]] = asyncio.Queue()
        unanswered: dict[int, str] = {}
        with self._known(), self.hall.replicas.reserve(self.replica, len(self.requests)) as engine:
            try:
                for i, request in enumerate(self.requests):
                    deliver = engine.deliver_to(_IndexedInbox(inbox, i))
                    unanswered[i] = await _handed_in(engine, request, deliver, streamed=streamed)
                while unanswered:
                    i, delta = await inbox.get()
                    if isinstance(delta, Exception):
                        del unanswered[i]
                        raise delta
                    if delta.output is not None:
                        del unanswered[i]
                        self._log(delta.output)
                    yield i, _scored(delta, self.requests[i])
            finally:  # also where the client has left
                for name in unanswered.values():
                    log.info("%s replica=%d left unanswered", name, self.replica)
                    engine.abort(name)

    @contextmanager
    def _known(self) -> Iterator[None]:
        """The session and the requests are among those being answered until the block ends."""
        sessions, live, session = self.hall.sessions, self.hall.live, self.session
        names = [request.id for request in self.requests if request.id not in live]
        live.update({name: self.replica for name in names if name is not None})
        if session is not None:
            sessions[session] = sessions.get(session, 0) + 1
        try:
            yield
        finally:
            for name in names:
                live.pop(name or "", None)
            if session is not None:
                sessions[session] -= 1
                if not sessions[session]:
                    del sessions[session]

    def _log(self, answer: RequestOutput) -> None:
        first = f"{answer.ttft_s:.3f}s" if answer.ttft_s is not None else "-"
        log.info(
            "%s replica=%d prompt=%d cached=%d output=%d ttft=%s accept=%.2f total=%.3fs finish=%s",
            answer.id,
            self.replica,
            answer.prompt_tokens,
            answer.cached_tokens,
            len(answer.completion.token_ids),
            first,
            answer.accept_length,
            answer.e2e_latency_s,
            answer.completion.finish,
        )


class _IndexedInbox:
    """The inbox of one of several requests that share a queue."""

    def __init__(
        self, queue: asyncio.Queue[tuple[int, OutputDelta | Exception]], index: int
    ) -> None:
        self._queue, self._index = queue, index

    def put_nowait(self, item: OutputDelta | Exception, /) -> None:
        self._queue.put_nowait((self._index, item))


async def _handed_in(
    engine: Engine, request: Request, deliver: OutputCallback, *, streamed: bool
) -> str:
    """The id of a request that the engine has taken. Compiling a grammar may take seconds, in which
    other clients are attended to; it is given up when the client disconnects."""
    if request.sampling_params.grammar is None:
        return engine.submit(request, deliver, streamed=streamed)
    cancelled = Event()
    handing = asyncio.get_running_loop().run_in_executor(
        _COMPILING,
        partial(engine.submit, request, deliver, streamed=streamed, cancelled=cancelled),
    )
    try:
        return await asyncio.shield(handing)
    except asyncio.CancelledError:  # the thread goes on: what it hands in is to be aborted

        def take_back(done: asyncio.Future[str]) -> None:
            if done.exception() is None:
                engine.abort(done.result())

        cancelled.set()
        handing.add_done_callback(take_back)
        raise


def _scored(delta: OutputDelta, request: Request) -> OutputDelta:
    """With a place for every prompt token whose log-probability was asked for. An engine has none
    for a prompt of one token, nor for what it had not read when the request was aborted."""
    answer, start = delta.output, request.prompt_logprobs_start
    if answer is None or start is None:
        return delta
    wanted = len(request.token_ids) - start
    if len(answer.prompt_logprobs) == wanted:
        return delta
    rows = {
        "prompt_logprobs": answer.prompt_logprobs,
        "prompt_top_logprobs": answer.prompt_top_logprobs,
    }
    rows["prompt_requested_logprobs"] = answer.prompt_requested_logprobs
    padded = {name: (*row, *[None] * (wanted - len(row))) for name, row in rows.items()}
    return replace(delta, output=replace(answer, **padded))  # type: ignore[arg-type]


def _answer(delta: OutputDelta) -> RequestOutput:
    assert delta.output is not None
    return delta.output


def engine_error_to_api_error(error: Exception) -> ApiError:
    """What a client is told of an error, an engine's complaints among them."""
    if isinstance(error, InvalidRequestError):
        error = ApiError(str(error))
    if isinstance(error, EngineQueueFullError):
        error = ApiError(str(error), status=503, code="overloaded")
    if isinstance(error, DuplicateRequestIdError):
        error = ApiError(str(error), status=409, code="duplicate_id")
    if isinstance(error, EngineError):
        error = ApiError(str(error), status=500, code="engine_failed")
    return to_api_error(error)
