"""Engine: the public, thread-safe API of the inference engine."""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from threading import Event, Lock
from typing import Any

from paddock.engine.engine_loop import EngineLoop, LoadWeights, PauseMode
from paddock.engine.grammar import GrammarBackend
from paddock.engine.request import (
    ContextLengthExceededError,
    DuplicateRequestIdError,
    EngineError,
    EngineQueueFullError,
    InvalidRequestError,
    OutputCallback,
    OutputDelta,
    Request,
    RequestOutput,
    Sequence,
)
from paddock.engine.settings import EngineSettings
from paddock.engine.stats import EngineStats
from paddock.engine.stop_strings import StopStringChecker
from paddock.engine.stream_bridge import StreamBridge
from paddock.engine.thinking_budget import ThinkingBudget
from paddock.model import Transformer
from paddock.records import Completion, Grammar, SamplingParams
from paddock.text import Tokenizer


class Engine(StreamBridge):
    """Inference engine. Safe to use from any thread and any event loop.

    The engine owns the network: only the engine thread may run or change it. Without a tokenizer
    there are no stop strings, grammars or thinking budgets.
    """

    def __init__(
        self,
        network: Transformer,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings | None = None,
        *,
        version: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.settings = settings or EngineSettings()
        self.tokenizer, self.config, self.clock = tokenizer, network.config, clock
        network.eval()
        self._loop = EngineLoop(network, self.settings, clock)
        self._loop.scheduler.version = version
        self.capacity = self._loop.capacity
        self.stop_ids = frozenset(self._default_stops())
        self._serial = count()
        self._ids: set[str] = set()
        self._lock = Lock()
        self._grammars: GrammarBackend | None = None
        self._grammars_lock = Lock()

    # --- generation -------------------------------------------------------------------------------

    def generate(self, token_ids: Many[int], sampling: SamplingParams | None = None) -> Completion:
        """Generate the completion of one prompt. Blocks."""
        ids = tuple(int(i) for i in token_ids)
        request = Request(token_ids=ids, sampling_params=sampling or SamplingParams())
        return self.generate_output(request).completion

    def generate_output(self, request: Request) -> RequestOutput:
        """As `generate`, for a full request and output. Blocks."""
        return self.generate_outputs([request])[0]

    def generate_outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Generate many outputs concurrently, returned in the order of requests. Blocks."""
        # A list, not a dict: an id may be reused.
        submitted: list[tuple[str, SimpleQueue[OutputDelta | Exception]]] = []
        try:
            for request in requests:
                inbox: SimpleQueue[OutputDelta | Exception] = SimpleQueue()
                submitted.append((self.submit(request, inbox.put), inbox))
            return [_final_output(inbox.get()) for _, inbox in submitted]
        except BaseException:
            for name, _ in submitted:
                self.abort(name)
            raise

    def submit(
        self,
        request: Request,
        deliver: OutputCallback,
        *,
        streamed: bool = False,
        cancelled: Event | None = None,
    ) -> str:
        """Submit a request; returns its id. `deliver` is called on the engine thread, must not
        block, and receives one delta per step if `streamed`, else only the last (or an error).
        With a grammar this blocks until it is compiled or `cancelled` is set.

        Raises InvalidRequestError if the engine's settings rule the request out
        (ContextLengthExceededError if it is too long), otherwise EngineError
        (EngineQueueFullError, DuplicateRequestIdError, or the engine was closed)."""
        if self._loop.broken is not None:
            raise EngineError(self._loop.broken)
        self._check(request)
        serial = next(self._serial)
        with self._lock:
            name = request.id or f"request-{serial}"
            if name in self._ids:
                raise DuplicateRequestIdError(f"request id {name!r} is already in use")
            if (
                len(self._ids)
                >= self.settings.max_queued_requests + self.settings.max_running_requests
            ):
                raise EngineQueueFullError(
                    f"the queue is full: {len(self._ids)} requests are queued or running"
                )
            self._ids.add(name)

        def on_output(delta: OutputDelta | Exception) -> None:
            if isinstance(delta, Exception) or delta.output is not None:
                with self._lock:
                    self._ids.discard(name)
            deliver(delta)

        try:
            sequence = self._sequence(request, name, serial, on_output, streamed)
            if request.sampling_params.grammar is not None:
                self._constrain(sequence, request.sampling_params.grammar, cancelled)
            self._loop.submit(sequence)
        except BaseException:
            with self._lock:
                self._ids.discard(name)
            raise
        return name

    # --- control ----------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """End a request now; its output holds the tokens so far. Does not block."""
        with suppress(EngineError):  # a closed engine has no requests
            self._loop.run_between_steps(lambda: self._loop.abort(request_id))

    def abort_all(self) -> int:
        """End all requests; returns how many there were."""
        return int(self._do(lambda: self._loop.abort_all("aborted by the client")))

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop stepping. Running requests end ("abort"), are preempted ("retract") or keep their
        pages ("in_place"). New requests are queued."""
        self._do(lambda: self._loop.pause(mode))

    def resume(self) -> None:
        self._do(self._loop.resume)

    def update_weights(self, load: LoadWeights, version: int, mode: PauseMode = "in_place") -> int:
        """Weight update between two steps; returns how many requests were running.

        `load` is called with the network on the engine thread. Started requests end ("abort"), are
        preempted and recomputed with the new weights ("retract"), or continue with their old KV
        entries ("in_place"). Every token is attributed to the version that sampled it; the prefix
        cache is never shared across versions.
        """
        if version < 0:
            raise InvalidRequestError(f"version must not be negative, got {version}")
        return int(self._do(lambda: self._loop.update_weights(load, version, mode)))

    def flush_cache(self) -> bool:
        """Empty the prefix cache; does nothing and returns False while there are requests."""
        return bool(self._do(self._loop.flush_cache))

    def run_between_steps(self, run: Callable[[Transformer], Any]) -> Future[Any]:
        """Run a function with the network between two steps, on the engine thread."""
        return self._loop.run_between_steps(lambda: run(self._loop.network))

    def stats(self) -> EngineStats:
        """Current statistics, taken between two steps. Blocks."""
        return self.stats_future().result()

    def stats_future(self) -> "Future[EngineStats]":
        """As `stats`, without blocking."""
        return self._loop.run_between_steps(self._loop.stats)

    def audit(self) -> list[str]:
        """Inconsistencies in pages, slots and requests; empty if there are none."""
        return list(self._do(self._loop.audit))

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._loop.scheduler.version

    @property
    def healthy(self) -> bool:
        return self._loop.broken is None

    def close(self) -> None:
        """End all requests and the engine thread. Further requests are rejected."""
        self._loop.close()

    # --- internals --------------------------------------------------------------------------------

    def _do(self, run: Callable[[], Any]) -> Any:
        return self._loop.run_between_steps(run).result()

    def _default_stops(self) -> Iterable[int]:
        token_ids = self.settings.stop_token_ids
        if token_ids is None:
            own = (
                self.tokenizer.special_token_ids.stop_token_ids
                if self.tokenizer is not None
                else ()
            )
            token_ids = (*self.config.eos, *own)
        # A small vocabulary may lack ids that its configuration names.
        return (token for token in token_ids if 0 <= token < self.config.vocab)

    def _check(self, request: Request) -> None:
        """Raise InvalidRequestError, with the numbers, for a request that cannot be served."""
        prompt, sampling = len(request.token_ids), request.sampling_params
        context, vocab = self.capacity.context_length, self.config.vocab
        if not prompt:
            raise InvalidRequestError("the prompt is empty")
        if prompt >= context:
            raise ContextLengthExceededError(
                f"the prompt has {prompt} tokens, which leaves no room for output in this model's "
                f"context of {context} tokens"
            )
        max_new = sampling.max_new_tokens
        if max_new is not None and prompt + max_new > context:
            raise ContextLengthExceededError(
                f"the prompt has {prompt} tokens and max_new_tokens is {max_new}, together "
                f"{prompt + max_new}, which exceeds this model's context of {context} tokens"
            )
        biased = tuple(bias.token_id for bias in sampling.logit_bias)
        named = {
            "the prompt": request.token_ids,
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": biased,
            "logprob_token_ids": request.logprob_token_ids,
        }
        for name, ids in named.items():
            if set(map(type, ids)) - {int}:
                wrong = next(i for i in ids if type(i) is not int)
                raise InvalidRequestError(f"{name}: token ids must be integers, got {wrong!r}")
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                wrong = next(i for i in ids if not 0 <= i < vocab)
                raise InvalidRequestError(f"{name}: token id {wrong} is not in [0, {vocab})")
        self._check_extras(request)

    def _check_extras(self, request: Request) -> None:
        sampling, limit = request.sampling_params, self.settings.max_logprobs
        if not 0 <= request.top_logprobs <= limit:
            raise InvalidRequestError(
                f"top_logprobs must be in [0, {limit}], got {request.top_logprobs}"
            )
        start, prompt = request.prompt_logprobs_start, len(request.token_ids)
        if start is not None and not 0 <= start <= prompt:
            raise InvalidRequestError(
                f"prompt_logprobs_start must be in [0, {prompt}], got {start}"
            )
        if request.return_routing and not self.settings.capture_routing:
            raise InvalidRequestError(
                "return_routing needs the engine setting 'capture_routing', which is off"
            )
        if self.tokenizer is None and (sampling.stop or sampling.grammar):
            raise InvalidRequestError("stop strings and grammars need an engine with a tokenizer")

    def _sequence(
        self, request: Request, name: str, serial: int, deliver: OutputCallback, streamed: bool
    ) -> Sequence:
        sampling, max_output = (
            request.sampling_params,
            self.capacity.context_length - len(request.token_ids),
        )
        stops = frozenset(sampling.stop_token_ids)
        sequence = Sequence(
            request=request,
            id=name,
            serial=serial,
            seed=sampling.seed if sampling.seed is not None else self._seed(serial),
            stop_token_ids=stops if sampling.ignore_eos else stops | self.stop_ids,
            max_new_tokens=sampling.max_new_tokens or max_output,
            on_output=deliver,
            stream=streamed,
            arrived=self.clock(),
            tokens=list(request.token_ids),
        )
        if self.tokenizer is not None:
            sequence.thinking_budget = ThinkingBudget.from_prompt(
                request.token_ids,
                self.tokenizer.special_token_ids,
                budget=sampling.thinking_budget,
                is_open=request.in_reasoning,
            )
            if sampling.stop:
                sequence.stop_checker = StopStringChecker(
                    sampling.stop, self.tokenizer, prompt=request.token_ids
                )
        return sequence

    def _constrain(self, sequence: Sequence, grammar: Grammar, cancelled: Event | None) -> None:
        """Attach the grammar constraint. If it must complete, limit reasoning to three quarters of
        the length and to what leaves enough tokens for the shortest completion."""
        assert self.tokenizer is not None
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = GrammarBackend(self.tokenizer, self.config.vocab, self.settings)
        thinking = sequence.thinking_budget
        constraint = self._grammars.make_constraint(
            grammar, sequence.stop_token_ids, thinking, cancelled
        )
        sequence.constraint = constraint
        if not constraint.must_complete:
            return
        in_reasoning = thinking is not None and thinking.is_open
        needed = len(constraint.shortest_completion()) + in_reasoning
        max_new = sequence.max_new_tokens
        if needed > max_new:
            raise InvalidRequestError(
                f"max_new_tokens must be at least {needed} to complete the grammar, got {max_new}"
            )
        if thinking is not None and in_reasoning:
            budget = max_new - max(needed, max_new // 4)
            thinking.budget = budget if thinking.budget is None else min(budget, thinking.budget)

    def _seed(self, serial: int) -> int:
        """Seed of a request without one: unique per request and per engine seed."""
        return (self.settings.seed << 32) + serial


def _final_output(delta: OutputDelta | Exception) -> RequestOutput:
    if isinstance(delta, Exception):
        raise delta
    assert delta.output is not None
    return delta.output
