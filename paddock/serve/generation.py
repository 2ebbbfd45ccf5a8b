"""Engine requests of one API request in flight on one replica."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from threading import Event

from paddock.engine import Engine, OutputCallback, OutputDelta, Request, RequestOutput
from paddock.serve.load_balancer import ReplicaLoadBalancer

# Threads that wait for grammar compilation, separate from those that tokenize. More than two
# compilation lanes of the engine admit, so that no request waits for a thread.
_GRAMMAR_THREADS = ThreadPoolExecutor(80, thread_name_prefix="paddock-grammar")
log = getLogger("paddock.serve")


@dataclass(slots=True)
class Generation:
    """The engine requests of one API request, on one replica."""

    replicas: ReplicaLoadBalancer
    sessions: dict[str, int]  # generations in flight, by session
    live: dict[str, int]  # replica of every request in flight
    replica: int
    requests: list[Request]
    session: str | None = None

    @property
    def version(self) -> int:
        return self.replicas.engines[self.replica].version

    async def request_outputs(self) -> list[RequestOutput]:
        """All outputs, in request order."""
        return [_final_output(delta) for delta in await self.final_deltas()]

    async def final_deltas(self) -> list[OutputDelta]:
        """The last delta of every request, which holds its whole output."""
        found: dict[int, OutputDelta] = {}
        async for i, delta in self._deltas(streamed=False):
            found[i] = delta
        return [found[i] for i in range(len(self.requests))]

    async def stream_single(self) -> AsyncGenerator[OutputDelta, None]:
        """The deltas of the only request; closing early aborts it."""
        async with self.stream() as deltas:
            async for _, delta in deltas:
                yield delta

    def stream(self) -> "aclosing[AsyncGenerator[tuple[int, OutputDelta], None]]":
        """Deltas with the index of their request, as they arrive. Iterate inside `async with`; its
        end aborts unfinished requests."""
        return aclosing(self._deltas(streamed=True))

    async def _deltas(self, *, streamed: bool) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        inbox: asyncio.Queue[tuple[int, OutputDelta | Exception]] = asyncio.Queue()
        pending: dict[int, str] = {}
        with (
            self._registered(),
            self.replicas.reserve(self.replica, len(self.requests)) as engine,
        ):
            try:
                for i, request in enumerate(self.requests):
                    deliver = engine.deliver_to(_IndexedInbox(inbox, i))
                    pending[i] = await _submit(engine, request, deliver, streamed=streamed)
                while pending:
                    i, delta = await inbox.get()
                    if isinstance(delta, Exception):
                        del pending[i]
                        raise delta
                    if delta.output is not None:
                        del pending[i]
                        self._log(delta.output)
                    yield i, _pad_prompt_logprobs(delta, self.requests[i])
            finally:  # also if the client disconnected
                for request_id in pending.values():
                    log.info(
                        "%s replica=%d client disconnected, request aborted",
                        request_id,
                        self.replica,
                    )
                    engine.abort(request_id)

    @contextmanager
    def _registered(self) -> Iterator[None]:
        """Session and requests count as in flight until the block ends."""
        sessions, live, session = self.sessions, self.live, self.session
        names = [request.id for request in self.requests if request.id not in live]
        live.update({request_id: self.replica for request_id in names if request_id is not None})
        if session is not None:
            sessions[session] = sessions.get(session, 0) + 1
        try:
            yield
        finally:
            for request_id in names:
                live.pop(request_id or "", None)
            if session is not None:
                sessions[session] -= 1
                if not sessions[session]:
                    del sessions[session]

    def _log(self, output: RequestOutput) -> None:
        first = f"{output.ttft_s:.3f}s" if output.ttft_s is not None else "-"
        log.info(
            "%s replica=%d prompt=%d cached=%d output=%d ttft=%s accept=%.2f total=%.3fs finish=%s",
            output.id,
            self.replica,
            output.prompt_tokens,
            output.cached_tokens,
            len(output.completion.token_ids),
            first,
            output.accept_length,
            output.e2e_latency_s,
            output.completion.finish,
        )


class _IndexedInbox:
    """The inbox of one of several requests that share a queue."""

    def __init__(
        self, queue: asyncio.Queue[tuple[int, OutputDelta | Exception]], index: int
    ) -> None:
        self._queue, self._index = queue, index

    def put_nowait(self, item: OutputDelta | Exception, /) -> None:
        self._queue.put_nowait((self._index, item))


async def _submit(
    engine: Engine, request: Request, deliver: OutputCallback, *, streamed: bool
) -> str:
    """Submit a request; returns its id. Compiling a grammar may take seconds, so that happens in a
    thread and is cancelled when the client disconnects."""
    if request.sampling_params.grammar is None:
        return engine.submit(request, deliver, streamed=streamed)
    cancelled = Event()
    submission = asyncio.get_running_loop().run_in_executor(
        _GRAMMAR_THREADS,
        partial(engine.submit, request, deliver, streamed=streamed, cancelled=cancelled),
    )
    try:
        return await asyncio.shield(submission)
    except asyncio.CancelledError:  # the thread continues: abort what it submits

        def abort_late(done: asyncio.Future[str]) -> None:
            if done.exception() is None:
                engine.abort(done.result())

        cancelled.set()
        submission.add_done_callback(abort_late)
        raise


def _pad_prompt_logprobs(delta: OutputDelta, request: Request) -> OutputDelta:
    """Pad prompt log-probabilities with None to the requested length. The engine returns fewer for
    a prompt of one token and for a prefill that was aborted."""
    output, start = delta.output, request.prompt_logprobs_start
    if output is None or start is None:
        return delta
    wanted = len(request.token_ids) - start
    if len(output.prompt_logprobs) == wanted:
        return delta
    rows = {
        "prompt_logprobs": output.prompt_logprobs,
        "prompt_top_logprobs": output.prompt_top_logprobs,
    }
    rows["prompt_requested_logprobs"] = output.prompt_requested_logprobs
    padded = {name: (*row, *[None] * (wanted - len(row))) for name, row in rows.items()}
    return replace(delta, output=replace(output, **padded))  # type: ignore[arg-type]


def _final_output(delta: OutputDelta) -> RequestOutput:
    assert delta.output is not None
    return delta.output
