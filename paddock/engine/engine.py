"""The engine as everyone else sees it."""

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
    """Requests in, tokens out. Safe to use from any thread and any event loop.

    The network belongs to the engine from here on: its thread alone may run or change it. Without a
    tokenizer there are no stop texts, no grammars and no thinking.
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
        self._worker = EngineLoop(network, self.settings, clock)
        self._worker.scheduler.version = version
        self.capacity = self._worker.capacity
        self.stop_ids = frozenset(self._default_stops())
        self._serial = count()
        self._ids: set[str] = set()
        self._lock = Lock()
        self._grammars: GrammarBackend | None = None
        self._grammars_lock = Lock()

    # --- asking -----------------------------------------------------------------------------------

    def generate(self, token_ids: Many[int], sampling: SamplingParams | None = None) -> Completion:
        """The reply to one prompt; blocks until it is whole."""
        ids = tuple(int(i) for i in token_ids)
        request = Request(token_ids=ids, sampling_params=sampling or SamplingParams())
        return self.generate_output(request).completion

    def generate_output(self, request: Request) -> RequestOutput:
        """As `generate`, with everything there is to know about the reply."""
        return self.generate_outputs([request])[0]

    def generate_outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Many at once, in the order they were asked. Blocks."""
        asked: list[tuple[str, SimpleQueue[OutputDelta | EngineError]]] = []  # an id may come again
        try:
            for request in requests:
                inbox: SimpleQueue[OutputDelta | EngineError] = SimpleQueue()
                asked.append((self.submit(request, inbox.put), inbox))
            return [_whole(inbox.get()) for _, inbox in asked]
        except BaseException:
            for name, _ in asked:
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
        """Hand in a request; returns its id. `deliver` is called on the engine's thread, must not
        block, and gets a delta a step if `streamed`, else the last one alone (or a failure). With a
        grammar this blocks until that is compiled, or until `cancelled` is set.

        Raises RequestRefused for what no engine with these settings could answer (ContextExceeded
        if it is too long), EngineFailed otherwise (EngineFull, DuplicateId, or it has ended)."""
        if self._worker.broken is not None:
            raise EngineError(self._worker.broken)
        self._check(request)
        serial = next(self._serial)
        with self._lock:
            name = request.id or f"request-{serial}"
            if name in self._ids:
                raise DuplicateRequestIdError(
                    f"a request with the id {name!r} is being answered already"
                )
            if (
                len(self._ids)
                >= self.settings.max_queued_requests + self.settings.max_running_requests
            ):
                raise EngineQueueFullError(
                    f"{len(self._ids)} requests are waiting or running already"
                )
            self._ids.add(name)

        def hand_over(delta: OutputDelta | EngineError) -> None:
            if isinstance(delta, EngineError) or delta.output is not None:
                with self._lock:
                    self._ids.discard(name)
            deliver(delta)

        try:
            sequence = self._sequence(request, name, serial, hand_over, streamed)
            if request.sampling_params.grammar is not None:
                self._constrain(sequence, request.sampling_params.grammar, cancelled)
            self._worker.submit(sequence)
        except BaseException:
            with self._lock:
                self._ids.discard(name)
            raise
        return name

    # --- steering ---------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """End a request where it stands; its answer holds what was written. Does not block."""
        with suppress(EngineError):  # what has ended needs no abort
            self._worker.run_between_steps(lambda: self._worker.abort(request_id))

    def abort_all(self) -> int:
        """End every request; how many there were."""
        return int(self._do(lambda: self._worker.abort_all("aborted by the client")))

    def pause(self, mode: PauseMode = "abort") -> None:
        """Take no further step. Running requests end (abort), give up their pages and wait
        (retract), or stay as they are (in_place). New requests wait."""
        self._do(lambda: self._worker.pause(mode))

    def resume(self) -> None:
        self._do(self._worker.resume)

    def update_weights(self, load: LoadWeights, version: int, mode: PauseMode = "in_place") -> int:
        """Change the weights between two steps; how many requests were running.

        `load` is given the network on the engine's thread. Requests that have begun end (abort),
        are read anew under the new weights (retract), or go on with the rows they have (in_place).
        Every token is attributed to the version that sampled it; cached pages never cross versions.
        """
        if version < 0:
            raise InvalidRequestError(f"version {version} is negative")
        return int(self._do(lambda: self._worker.update_weights(load, version, mode)))

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing happens, while there are requests."""
        return bool(self._do(self._worker.flush_cache))

    def run_between_steps(self, run: Callable[[Transformer], Any]) -> Future[Any]:
        """Have `run` done with the network between two steps, on the engine's thread."""
        return self._worker.run_between_steps(lambda: run(self._worker.network))

    def stats(self) -> EngineStats:
        """Numbers of this moment (between two steps)."""
        return self.stats_future().result()

    def stats_future(self) -> "Future[EngineStats]":
        return self._worker.run_between_steps(self._worker.stats)

    def audit(self) -> list[str]:
        """What does not add up in pages, seats and requests; empty if all is well."""
        return list(self._do(self._worker.audit))

    @property
    def version(self) -> int:
        """Of the weights that sample now."""
        return self._worker.scheduler.version

    @property
    def healthy(self) -> bool:
        return self._worker.broken is None

    def close(self) -> None:
        """End every request and the thread. Further requests are refused."""
        self._worker.close()

    # --- within -----------------------------------------------------------------------------------

    def _do(self, run: Callable[[], Any]) -> Any:
        return self._worker.run_between_steps(run).result()

    def _default_stops(self) -> Iterable[int]:
        named = self.settings.stop_token_ids
        if named is None:
            own = (
                self.tokenizer.special_token_ids.stop_token_ids
                if self.tokenizer is not None
                else ()
            )
            named = (*self.config.eos, *own)
        # A small vocabulary may lack what its configuration names; nobody will ever say that.
        return (token for token in named if 0 <= token < self.config.vocab)

    def _check(self, request: Request) -> None:
        """Refuse, with the numbers, what can have no answer."""
        prompt, sampling = len(request.token_ids), request.sampling_params
        context, vocab = self.capacity.context_length, self.config.vocab
        if not prompt:
            raise InvalidRequestError("the prompt is empty")
        if prompt >= context:
            raise ContextLengthExceededError(
                f"the prompt has {prompt} tokens, which leaves no room for a reply in this "
                f"model's context of {context} tokens"
            )
        wanted = sampling.max_new_tokens
        if wanted is not None and prompt + wanted > context:
            raise ContextLengthExceededError(
                f"the prompt has {prompt} tokens and max_new_tokens is {wanted}, together "
                f"{prompt + wanted}, which exceeds this model's context of {context} tokens"
            )
        biased = tuple(bias.token_id for bias in sampling.logit_bias)
        named = {
            "the prompt": request.token_ids,
            "stop_ids": sampling.stop_token_ids,
            "logit_bias": biased,
            "ask_ids": request.logprob_token_ids,
        }
        for name, ids in named.items():
            if set(map(type, ids)) - {int}:
                wrong = next(i for i in ids if type(i) is not int)
                raise InvalidRequestError(f"{name} has {wrong!r} for a token id")
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                wrong = next(i for i in ids if not 0 <= i < vocab)
                raise InvalidRequestError(f"{name} has token id {wrong}, outside [0, {vocab})")
        self._check_extras(request)

    def _check_extras(self, request: Request) -> None:
        sampling, most = request.sampling_params, self.settings.max_logprobs
        if not 0 <= request.top_logprobs <= most:
            raise InvalidRequestError(f"top_logprobs is {request.top_logprobs}, not in [0, {most}]")
        start, prompt = request.prompt_logprobs_start, len(request.token_ids)
        if start is not None and not 0 <= start <= prompt:
            raise InvalidRequestError(f"prompt_logprobs_from is {start}, not in [0, {prompt}]")
        if request.return_routing and not self.settings.capture_routing:
            raise InvalidRequestError(
                "replay was asked for, but the engine's 'replay' setting is off"
            )
        if self.tokenizer is None and (sampling.stop or sampling.grammar):
            raise InvalidRequestError("stop texts and grammars need an engine with a tokenizer")

    def _sequence(
        self, request: Request, name: str, serial: int, deliver: OutputCallback, streamed: bool
    ) -> Sequence:
        sampling, room = (
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
            max_new_tokens=sampling.max_new_tokens or room,
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
        """Bind the reply to its grammar. One that must be complete has room for that: thinking may
        take three quarters of the length, and no more than leaves room for the shortest reply."""
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
        thinks = thinking is not None and thinking.is_open
        least, most = len(constraint.shortest_completion()) + thinks, sequence.max_new_tokens
        if least > most:
            raise InvalidRequestError(
                f"max_new_tokens must be at least {least} for a reply that satisfies its grammar, "
                f"got {most}"
            )
        if thinking is not None and thinks:
            budget = most - max(least, most // 4)
            thinking.budget = budget if thinking.budget is None else min(budget, thinking.budget)

    def _seed(self, serial: int) -> int:
        """For a request that brought none: its own, and another engine's are different."""
        return (self.settings.seed << 32) + serial


def _whole(delta: OutputDelta | EngineError) -> RequestOutput:
    if isinstance(delta, EngineError):
        raise delta
    assert delta.output is not None
    return delta.output
