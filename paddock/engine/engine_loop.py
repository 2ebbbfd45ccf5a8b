"""The engine thread, which alone uses the model, the KV cache and the scheduler.

Everything reaches it through one inbox and is handled between steps: new requests, aborts, pauses,
weight updates. A step that runs out of memory fails the requests in it, never the thread; any
other exception is a bug: the engine becomes unhealthy and fails all present and future requests.

With asynchronous scheduling step n + 1 is launched before the tokens of step n are read. That a
sequence ended is noticed one step late; its extra token is dropped. Before anything but a new
request is handled, or a request needs its last token, the step in flight is finished.

Streamed deltas are delivered after their step; on an accelerator, once the next step is queued, so
that delivery overlaps with computation. A final output is sent at once, after earlier deltas.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Literal

import torch

from paddock.engine.async_step import StepInFlight
from paddock.engine.kv_cache import PagedKVCache
from paddock.engine.model_runner import ModelRunner
from paddock.engine.output_processor import FinishedSequence
from paddock.engine.request import EngineError, FinishReason, OutputDelta, RequestOutput, Sequence
from paddock.engine.sampler import SamplingTable
from paddock.engine.scheduler import ScheduledStep, Scheduler
from paddock.engine.settings import (
    EngineSettings,
    cached_layers,
    resolve_kv_cache_config,
    set_num_threads,
)
from paddock.engine.stats import CumulativeStats, EngineStats
from paddock.model import Transformer

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]
LoadWeights = Callable[[Transformer], None]


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """A function to run between two steps, and the future for its result."""

    run: Callable[[], Any]
    done: Future[Any]


class EngineLoop:
    """Owner of the engine thread. `submit`, `run_between_steps` and `close` are thread-safe."""

    def __init__(
        self, network: Transformer, settings: EngineSettings, clock: Callable[[], float]
    ) -> None:
        weight = network.norm.weight
        found = resolve_kv_cache_config(settings, network.config, weight.element_size())
        layers = cached_layers(settings, network.config)
        self.network, self.settings, self.capacity, self.clock = network, settings, found, clock
        slots = settings.max_running_requests
        self.sampling_table = SamplingTable(slots)
        self.cache = PagedKVCache(network.config, layers, found, slots, like=weight.detach())
        self.scheduler = Scheduler(settings, self.cache)
        self.runner = ModelRunner(network, self.cache, settings, self.sampling_table)
        self.counters = CumulativeStats()
        self.requests: dict[str, Sequence] = {}
        self.paused = False
        self.overlap_streaming = weight.device.type != "cpu"  # deliver while the device computes
        self._in_flight: StepInFlight | None = None
        self._finished_at = -inf  # when the last step was read
        self._pending_deltas: list[tuple[Sequence, OutputDelta]] = []
        self.broken: str | None = None  # error message of an unhealthy or closed engine
        self._inbox: SimpleQueue[Sequence | DeferredCall | None] = SimpleQueue()
        self._inbox_lock, self._closed = Lock(), False
        self._thread = Thread(target=self._run, name="paddock-engine", daemon=True)
        self._thread.start()

    # --- from other threads -----------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        self._post(sequence)

    def run_between_steps(self, run: Callable[[], Any]) -> Future[Any]:
        """Schedule `run` between two steps, on the engine thread."""
        command = DeferredCall(run, Future())
        self._post(command)
        return command.done

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _post(self, message: Sequence | DeferredCall) -> None:
        with self._inbox_lock:  # nothing may be put after the thread's last look
            if self._closed:
                raise EngineError(self.broken or "the engine was closed")
            self._inbox.put(message)

    # --- the engine thread ------------------------------------------------------------------------

    def _run(self) -> None:
        set_num_threads(self.settings, self.network.config)
        try:
            while self._read_inbox():
                if not self.paused:
                    self._step()
            self._drain()
        except BaseException as error:
            self._break(error)
        self.abort_all("the engine was closed")
        self.broken = self.broken or "the engine was closed"
        with self._inbox_lock:
            self._closed = True
        self._reject_inbox()

    def _read_inbox(self) -> bool:
        """Handle all messages; block while there is nothing to compute. False: close."""
        busy = not self.paused and bool(self.scheduler.running or self.scheduler.waiting)
        if not busy:
            self._drain()
            self._deliver_pending()
        try:
            message = self._inbox.get(block=not busy)
            while message is not None:
                self._handle(message)
                message = self._inbox.get(block=False)
        except Empty:
            return True
        return False

    def _handle(self, message: Sequence | DeferredCall) -> None:
        if isinstance(message, DeferredCall):
            self._drain()  # aborts, pauses and weight updates see every token sampled so far
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
        why = EngineError(self.broken or "the engine was closed")
        with suppress(Empty):
            while True:
                message = self._inbox.get(block=False)
                if isinstance(message, DeferredCall):
                    if message.done.set_running_or_notify_cancel():
                        message.done.set_exception(why)
                elif message is not None:
                    self._send(message, why)

    def _step(self) -> None:
        """Schedule and launch a step, then read and process the last one launched: the one before
        with asynchronous scheduling, otherwise this one."""
        if self._in_flight is not None and not self.scheduler.can_plan_ahead():
            self._drain()
        started, previous = self.clock(), self._in_flight
        step = self.scheduler.schedule(started)
        if not step.scheduled:
            self._drain()
            return
        for sequence in step.sequences:
            assert sequence.slot is not None
            self.sampling_table.set(sequence.slot, sequence.request.sampling_params, sequence.seed)
        prefills = [each for each in step.scheduled if each.is_prefill]
        try:
            launched = self.runner.launch_step(step, previous, started)
        except Exception as error:
            self._drain()
            self._handle_error(step, error)
            return
        if self.runner.graphs is not None and step.has_prefill:  # until its duration is known
            self.scheduler.delay_prefill(now=self.clock(), took=inf)
        # The device runs steps in order: these pages are filled before a later step reads them.
        for each in prefills:
            self.counters.prefill_tokens += each.stop - each.start
            self.scheduler.cache_prefix(each.sequence)
        if self.overlap_streaming:
            self._deliver_pending()
        self._in_flight = launched
        if previous is not None:
            self._finish_step(previous)
        if not self.runner.async_scheduling:
            self._drain()

    def _drain(self) -> None:
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            self._finish_step(launched)

    def _finish_step(self, launched: StepInFlight) -> None:
        step = launched.step
        before = {id(s): s.num_generated for s in step.sequences}
        try:
            ended = self.runner.read_step(launched, self.scheduler.version)
        except Exception as error:
            self._handle_error(step, error)
            return
        now = self.clock()
        took = now - max(launched.launched_at, self._finished_at)
        self._finished_at = now
        self.counters.steps += 1
        self.counters.busy_s += took
        if self.runner.graphs is not None and step.has_prefill:
            self.scheduler.delay_prefill(now=now, took=took)
        self._process_outputs(step, before, ended, now)

    def _handle_error(self, step: ScheduledStep, error: Exception) -> None:
        if not isinstance(error, torch.OutOfMemoryError):
            self._break(error)
            return
        for sequence in step.sequences:
            if not sequence.removed:
                self._fail(sequence, f"the device ran out of memory in a step: {error}")

    def _process_outputs(
        self, step: ScheduledStep, before: dict[int, int], ended: list[FinishedSequence], now: float
    ) -> None:
        done = {id(end.sequence): end for end in ended}
        for sequence in step.sequences:
            new = sequence.num_generated - before[id(sequence)]
            if new:
                self.counters.count_tokens(sequence, new, now)
            end = done.get(id(sequence))
            if end is not None and end.error is not None:
                self._zero_pages(sequence)
                self._fail(sequence, end.error)
            elif end is not None:
                self.finish_request(sequence, end.finish, matched=end.matched_stop)
            elif sequence.stream and new:
                self._pending_deltas.append((sequence, self._delta(sequence)))
        if not self.overlap_streaming:
            self._deliver_pending()

    def _deliver_pending(self) -> None:
        pending, self._pending_deltas = self._pending_deltas, []
        for sequence, delta in pending:
            if sequence.stream:  # False if its client has failed
                self._send(sequence, delta)

    # --- outputs ----------------------------------------------------------------------------------

    def _delta(self, sequence: Sequence, output: RequestOutput | None = None) -> OutputDelta:
        new = slice(sequence.num_streamed, sequence.num_generated)
        ids = sequence.tokens[sequence.num_prompt + new.start :]
        delta = OutputDelta(
            token_ids=tuple(ids),
            logprobs=tuple(sequence.logprobs[new]),
            forced=tuple(i for i in sequence.forced if i >= new.start),
            version=self.scheduler.version,
            top_logprobs=tuple(sequence.top_logprobs[new]),
            requested_logprobs=tuple(sequence.requested_logprobs[new]),
            output=output,
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
        """End a request: send its output and free its slot and pages."""
        routing, capturer = None, self.runner.routing_capturer
        if sequence.request.return_routing and capturer and sequence.slot is not None:
            routing = capturer.replay_of(sequence.slot, sequence.num_computed)
        output = sequence.to_output(
            finish, now=self.clock(), matched_stop=matched, abort_reason=message, routing=routing
        )
        self.counters.count_finished(sequence, output)
        self._remove(sequence)
        self._send(sequence, self._delta(sequence, output))

    def _fail(self, sequence: Sequence, why: str) -> None:
        self.counters.failed += 1
        self._remove(sequence)
        self._send(sequence, EngineError(f"request {sequence.id}: {why}"))

    def _send(self, sequence: Sequence, delta: OutputDelta | EngineError) -> None:
        """Call the request's callback. If it raises, only this request is aborted."""
        if isinstance(delta, EngineError) or delta.output is not None:
            self._deliver_pending()
        try:
            sequence.on_output(delta)
        except Exception:
            log.exception("request %s: the output callback raised", sequence.id)
            sequence.stream = False
            with suppress(EngineError):  # a closed engine has ended it anyway
                self.run_between_steps(
                    lambda: self.abort(sequence.id, "the output callback raised")
                )

    def _zero_pages(self, sequence: Sequence) -> None:
        """Overwrite non-finite KV entries: the next owner of the pages multiplies entries behind
        its own end by zero, and zero times NaN is NaN."""
        self.scheduler.clear_prefix_cache()
        sequence.mixed_versions = True
        pages = self.scheduler.pages
        self.cache.zero_pages([page for page in sequence.pages if pages.refcount(page) == 1])

    def _remove(self, sequence: Sequence) -> None:
        self.scheduler.release(sequence)
        sequence.removed = True
        self.requests.pop(sequence.id, None)

    def _break(self, error: BaseException) -> None:
        """Handle an unexpected exception: fail all requests and mark the engine unhealthy."""
        self.broken = f"the engine failed: {type(error).__name__}: {error}"
        log.error("the engine failed", exc_info=error)
        for sequence in list(self.requests.values()):
            self._send(sequence, EngineError(f"request {sequence.id}: {self.broken}"))
        self.counters.failed += len(self.requests)
        self.requests.clear()
        self._in_flight = None
        # The state that the step left behind is unknown: start with a new scheduler.
        scheduler = Scheduler(self.settings, self.cache)
        scheduler.version = self.scheduler.version
        self.scheduler = scheduler

    # --- called on the engine thread --------------------------------------------------------------

    def abort(self, request_id: str, why: str = "aborted by the client") -> None:
        sequence = self.requests.get(request_id)
        if sequence is not None:
            self.finish_request(sequence, "abort", message=why)

    def abort_all(self, why: str) -> int:
        sequences = list(self.requests)
        for request_id in sequences:
            self.abort(request_id, why)
        return len(sequences)

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping until `resume`; see Engine.pause for the modes."""
        self.paused = True
        if mode == "abort":
            self.abort_all("generation was paused")
        if mode == "retract":
            for sequence in list(self.scheduler.running):
                self.scheduler.preempt(sequence)

    def resume(self) -> None:
        self.paused = False

    def update_weights(self, load: LoadWeights, version: int, mode: PauseMode) -> int:
        """Weight update: call `load` on the model, then set `version`.

        Returns how many requests were running. If `load` raises, requests continue as `mode` left
        them under the old version, with an empty prefix cache; the caller must repair a partial
        load.
        """
        running = list(self.scheduler.running)
        for sequence in list(self.requests.values()) if mode == "abort" else ():
            if sequence.slot is not None or sequence.num_generated:
                self.finish_request(sequence, "abort", message="the weights were updated")
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
        return self.scheduler.stats(self.counters, self.paused, self.broken is None)

    def audit(self) -> list[str]:
        """Inconsistencies in requests, pages and slots; empty if there are none."""
        known = {s.id for s in (*self.scheduler.running, *self.scheduler.waiting)}
        lost = [name for name in self.requests if name not in known]
        return self.scheduler.audit() + [f"{name} is neither running nor waiting" for name in lost]
