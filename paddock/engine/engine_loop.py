"""The engine's own thread: it alone touches the network, the cache and the schedule.

Everything reaches it through one inbox and is acted upon between steps: new requests, aborts,
pauses, new weights. A step that fails fails the requests in it, never the thread; a failure that is
a bug leaves the engine unhealthy, and every request, present and future, is told so.

What a step adds to a stream is handed over after it, where a device works on its own when the next
step has been queued. Whatever ends a request goes out at once, behind all that was said before.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Literal

import torch

from paddock.engine.kv_cache import PagedKVCache
from paddock.engine.model_runner import FinishedSequence, ModelRunner
from paddock.engine.request import EngineError, FinishReason, OutputDelta, RequestOutput, Sequence
from paddock.engine.sampler import SamplingTable
from paddock.engine.scheduler import ScheduledStep, Scheduler
from paddock.engine.settings import (
    EngineSettings,
    cached_layers,
    num_cpu_threads,
    resolve_kv_cache_config,
)
from paddock.engine.stats import CumulativeStats, EngineStats
from paddock.model import Transformer

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]
LoadWeights = Callable[[Transformer], None]


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """Something to do between two steps, and where to say how it went."""

    run: Callable[[], Any]
    done: Future[Any]


class EngineLoop:
    def __init__(
        self, network: Transformer, settings: EngineSettings, clock: Callable[[], float]
    ) -> None:
        weight = network.embed.weight
        found = resolve_kv_cache_config(settings, network.config, weight.element_size())
        layers = cached_layers(settings, network.config)
        self.network, self.settings, self.capacity, self.clock = network, settings, found, clock
        self.sampling_table = SamplingTable(settings.max_running_requests)
        self.cache = PagedKVCache(
            network.config, layers, found, settings.max_running_requests, like=weight.detach()
        )
        self.scheduler = Scheduler(settings, self.cache)
        self.runner = ModelRunner(network, self.cache, settings, self.sampling_table)
        self.counters = CumulativeStats()
        self.requests: dict[str, Sequence] = {}
        self.paused = False
        self.overlap_streaming = (
            weight.device.type != "cpu"
        )  # while the device computes the next step
        self._unsaid: list[tuple[Sequence, OutputDelta]] = []
        self.broken: str | None = None  # what went wrong, once something has
        self._inbox: SimpleQueue[Sequence | DeferredCall | None] = SimpleQueue()
        self._door, self._closed = Lock(), False
        self._thread = Thread(target=self._work, name="paddock-engine", daemon=True)
        self._thread.start()

    # --- from other threads -----------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        self._post(sequence)

    def run_between_steps(self, run: Callable[[], Any]) -> Future[Any]:
        """Have `run` done between two steps."""
        command = DeferredCall(run, Future())
        self._post(command)
        return command.done

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _post(self, message: Sequence | DeferredCall) -> None:
        with self._door:  # nothing is put where nobody will look any more
            if self._closed:
                raise EngineError(self.broken or "the engine was closed")
            self._inbox.put(message)

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        torch.set_num_threads(num_cpu_threads(self.settings, self.network.config))  # of this thread
        try:
            while self._read_inbox():
                if not self.paused:
                    self._step()
        except BaseException as error:
            self._break(error)
        for sequence in list(self.requests.values()):
            self.finish_request(sequence, "abort", message="the engine was closed")
        self.broken = self.broken or "the engine was closed"
        with self._door:
            self._closed = True
        self._reject_inbox()

    def _read_inbox(self) -> bool:
        """Act on everything that has arrived; sleep while there is nothing else to do."""
        busy = not self.paused and bool(self.scheduler.running or self.scheduler.waiting)
        if not busy:
            self._tell()
        try:
            message = self._inbox.get(block=not busy)
            while message is not None:
                self._take(message)
                message = self._inbox.get(block=False)
        except Empty:
            return True
        return False

    def _take(self, message: Sequence | DeferredCall) -> None:
        if isinstance(message, DeferredCall):
            if message.done.set_running_or_notify_cancel():
                try:
                    message.done.set_result(message.run())
                except Exception as error:
                    message.done.set_exception(error)
                self.runner.recheck_weight_addresses()
        elif self.broken is not None:
            self._send(message, EngineError(self.broken))
        else:
            self.counters.requests += 1
            self.counters.prompt_tokens += message.num_prompt
            self.requests[message.id] = message
            self.scheduler.add(message)

    def _reject_inbox(self) -> None:
        why = EngineError(self.broken or "the engine has ended")
        with suppress(Empty):
            while True:
                message = self._inbox.get(block=False)
                if isinstance(message, DeferredCall):
                    if message.done.set_running_or_notify_cancel():
                        message.done.set_exception(why)
                elif message is not None:
                    self._send(message, why)

    def _step(self) -> None:
        started = self.clock()
        plan = self.scheduler.schedule(started)
        if not plan.scheduled:
            return
        for sequence in plan.sequences:
            assert sequence.slot is not None
            self.sampling_table.set(sequence.slot, sequence.request.sampling_params, sequence.seed)
        before = {id(s): s.num_generated for s in plan.sequences}
        try:
            ended = self.runner.execute_step(plan, self.scheduler.version, self._tell)
        except torch.OutOfMemoryError as error:
            for sequence in list(plan.sequences):
                self._fail(sequence, f"the device ran out of memory in a step: {error}")
            return
        except Exception as error:
            self._break(error)
            return
        now = self.clock()
        took = now - started
        self.counters.steps += 1
        self.counters.busy_s += took
        if self.runner.graphs is not None and plan.has_prefill:
            self.scheduler.delay_prefill(now=now, took=took)
        self._deliver(plan, before, ended, now)

    def _deliver(
        self, plan: ScheduledStep, before: dict[int, int], ended: list[FinishedSequence], now: float
    ) -> None:
        for part in plan.scheduled:
            if part.stop - part.start > 1 or not before[id(part.sequence)]:  # it was read
                self.counters.prefill_tokens += part.stop - part.start
                self.scheduler.cache_prefix(part.sequence)
        done = {id(end.sequence): end for end in ended}
        for sequence in plan.sequences:
            wrote = sequence.num_generated - before[id(sequence)]
            if wrote:
                self._count(sequence, wrote, now)
            end = done.get(id(sequence))
            if end is not None and end.error is not None:
                self._wipe(sequence)
                self._fail(sequence, end.error)
            elif end is not None:
                self.finish_request(sequence, end.finish, matched=end.matched_stop)
            elif sequence.stream and wrote:
                self._unsaid.append((sequence, self._delta(sequence)))
        if not self.overlap_streaming:
            self._tell()

    def _count(self, sequence: Sequence, wrote: int, now: float) -> None:
        counters = self.counters
        counters.generated_tokens += wrote
        counters.verify_steps += 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            counters.ttft_s.add(now - sequence.arrived)
        elif sequence.last_token_at is not None:
            counters.inter_token_latency_s.add((now - sequence.last_token_at) / wrote, wrote)
        sequence.last_token_at = now

    def _tell(self) -> None:
        """Hand over what was kept back."""
        unsaid, self._unsaid = self._unsaid, []
        for sequence, delta in unsaid:
            if sequence.stream:  # else its client has failed
                self._send(sequence, delta)

    # --- what becomes of requests -----------------------------------------------------------------

    def _delta(self, sequence: Sequence, answer: RequestOutput | None = None) -> OutputDelta:
        new = slice(sequence.num_streamed, sequence.num_generated)
        ids = sequence.tokens[sequence.num_prompt + new.start :]
        delta = OutputDelta(
            token_ids=tuple(ids),
            logprobs=tuple(sequence.logprobs[new]),
            forced=tuple(i for i in sequence.forced if i >= new.start),
            version=self.scheduler.version,
            top_logprobs=tuple(sequence.top_logprobs[new]),
            requested_logprobs=tuple(sequence.requested_logprobs[new]),
            output=answer,
        )
        sequence.num_streamed = sequence.num_generated
        return delta

    def finish_request(
        self,
        sequence: Sequence,
        finish: FinishReason,
        *,
        matched: int | str | None = None,
        message: str = "",
    ) -> None:
        """A request is over: its answer goes out, its pages go back."""
        replay = None
        if sequence.request.return_routing and self.runner.decisions and sequence.slot is not None:
            replay = self.runner.decisions.replay_of(sequence.slot, sequence.num_computed)
        answer = sequence.to_output(
            finish, now=self.clock(), matched=matched, message=message, replay=replay
        )
        self._close_account(sequence, answer)
        self._remove(sequence)
        self._send(sequence, self._delta(sequence, answer))

    def _close_account(self, sequence: Sequence, answer: RequestOutput) -> None:
        counters = self.counters
        counters.finished += answer.completion.finish != "abort"
        counters.aborted += answer.completion.finish == "abort"
        counters.reasoning_tokens += answer.reasoning_tokens
        counters.draft_tokens += sequence.draft_tokens
        counters.accepted_draft_tokens += sequence.accepted_draft_tokens
        counters.draft_stats.merge(sequence.draft_stats)
        counters.queue_time_s.add(answer.queue_time_s)
        counters.e2e_latency_s.add(answer.e2e_latency_s)

    def _fail(self, sequence: Sequence, why: str) -> None:
        self.counters.failed += 1
        self._remove(sequence)
        self._send(sequence, EngineError(f"request {sequence.id}: {why}"))

    def _send(self, sequence: Sequence, delta: OutputDelta | EngineError) -> None:
        """A client that fails to take what it asked for is no reason for the others to suffer."""
        if isinstance(delta, EngineError) or delta.output is not None:
            self._tell()
        try:
            sequence.on_output(delta)
        except Exception:
            log.exception("request %s: its client could not take what it was sent", sequence.id)
            sequence.stream = False
            with suppress(EngineError):  # with a closed engine it has ended anyway
                self.run_between_steps(lambda: self.abort(sequence.id, "its client failed"))

    def _wipe(self, sequence: Sequence) -> None:
        """Rows that are no numbers must not outlive their sequence: whoever gets its pages
        multiplies what lies behind its own end by zero, and zero times NaN is NaN."""
        self.scheduler.clear_prefix_cache()
        sequence.mixed_versions = True
        pages = self.scheduler.pages
        self.cache.zero_pages([page for page in sequence.pages if pages.refcount(page) == 1])

    def _remove(self, sequence: Sequence) -> None:
        self.scheduler.release(sequence)
        self.requests.pop(sequence.id, None)

    def _break(self, error: BaseException) -> None:
        """A bug: nothing this engine says can be trusted any more."""
        self.broken = f"the engine broke: {type(error).__name__}: {error}"
        log.error("the engine broke", exc_info=error)
        for sequence in list(self.requests.values()):
            self._send(sequence, EngineError(f"request {sequence.id}: {self.broken}"))
        self.counters.failed += len(self.requests)
        self.requests.clear()
        # Whatever state the step left behind is not to be reasoned about: begin afresh.
        fresh = Scheduler(self.settings, self.cache)
        fresh.version = self.scheduler.version
        self.scheduler = fresh

    # --- commands, on the thread ------------------------------------------------------------------

    def abort(self, request_id: str, why: str = "aborted by the client") -> None:
        sequence = self.requests.get(request_id)
        if sequence is not None:
            self.finish_request(sequence, "abort", message=why)

    def abort_all(self, why: str) -> int:
        sequences = list(self.requests.values())
        for sequence in sequences:
            self.finish_request(sequence, "abort", message=why)
        return len(sequences)

    def pause(self, mode: PauseMode) -> None:
        """No step is taken until `resume`. Running requests end, wait again, or stay."""
        self.paused = True
        if mode == "abort":
            self.abort_all("generation was paused")
        if mode == "retract":
            for sequence in list(self.scheduler.running):
                self.scheduler.preempt(sequence)

    def resume(self) -> None:
        self.paused = False

    def update_weights(self, load: LoadWeights, version: int, mode: PauseMode) -> int:
        """Change the network by `load` and call what it is from now on `version`.

        Returns how many requests were running. If `load` fails, requests go on as `mode` left them
        under the old version, with nothing in the prefix cache: what half a load left behind is the
        caller's to repair.
        """
        running = list(self.scheduler.running)
        for sequence in list(self.requests.values()) if mode == "abort" else ():
            if sequence.slot is not None or sequence.num_generated:
                self.finish_request(sequence, "abort", message="the weights were changed")
        for sequence in running if mode != "abort" else ():
            if mode == "retract":
                self.scheduler.preempt(sequence)
            sequence.mixed_versions = mode == "in_place"
        for sequence in self.scheduler.waiting:
            if not sequence.num_generated:
                sequence.reset_prompt_logprobs()
        self.scheduler.clear_prefix_cache()
        with torch.no_grad():
            load(self.network)
        self.scheduler.version = version
        return len(running)

    def flush_cache(self) -> bool:
        """Drop the prefix cache, unless requests are running or waiting."""
        if self.requests:
            return False
        self.scheduler.clear_prefix_cache()
        return True

    def stats(self) -> EngineStats:
        scheduler, pages = self.scheduler, self.scheduler.pages
        grow = ("queue_time_s", "ttft_s", "inter_token_latency_s", "e2e_latency_s", "draft_stats")
        copies = {name: getattr(self.counters, name).copy() for name in grow}
        counters = replace(self.counters, **copies)
        return EngineStats(
            counters=counters,
            version=scheduler.version,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            paused=self.paused,
            healthy=self.broken is None,
            pages_total=pages.count,
            pages_used=pages.num_used,
            pages_cached=scheduler.radix.size,
            pages_evictable=pages.evictable,
            page_size=self.capacity.page_size,
            running_tokens=sum(s.num_computed for s in scheduler.running),
            waiting_tokens=sum(len(s.tokens) for s in scheduler.waiting),
            prefix_cache_hit_tokens=scheduler.prefix_cache_hit_tokens,
            prefix_cache_query_tokens=scheduler.prefix_cache_query_tokens,
            evicted_tokens=scheduler.radix.evicted * self.capacity.page_size,
            preemptions=scheduler.preemptions,
            kv_cache_bytes=self.cache.bytes,
        )

    def audit(self) -> list[str]:
        """What is left over that should not be; empty if all is well."""
        known = {s.id for s in (*self.scheduler.running, *self.scheduler.waiting)}
        lost = [
            f"{name} is neither running nor waiting" for name in self.requests if name not in known
        ]
        return self.scheduler.audit() + lost
