"""Child process of a SubprocessEngine: pipe messages and the server loop."""

import gc
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from logging import getLogger
from multiprocessing import current_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Self

import torch
from torch import Tensor

from paddock.checkpoint import CheckpointError, WeightUpdate
from paddock.engine.engine import Engine
from paddock.engine.engine_loop import PauseMode
from paddock.engine.request import (
    EngineError,
    InvalidRequestError,
    OutputDelta,
    Request,
    RequestOutput,
)
from paddock.engine.stats import EngineStats
from paddock.engine.weight_updater import EngineWeightUpdater
from paddock.records import Completion, SamplingParams, Segment

log = getLogger("paddock.engine")

ALIGNMENT_BYTES = 16  # of each tensor in a bucket


def _register_fast_pickle(kind: type) -> None:
    """Pickle a record by its field values: the default of dataclasses with slots takes three times
    as long, and a batch has hundreds of them."""
    names = [field.name for field in fields(kind)]
    values = attrgetter(*names) if len(names) > 1 else lambda record: (getattr(record, names[0]),)
    ForkingPickler.register(kind, lambda record: (_record, (kind, values(record))))


def _record(kind: type, values: tuple[Any, ...]) -> Any:
    """Rebuild a pickled record without validating it again."""
    record: Any = object.__new__(kind)
    for name, value in zip(kind.__slots__, values, strict=True):  # type: ignore[attr-defined]
        object.__setattr__(record, name, value)
    return record


for _kind in (Request, SamplingParams, OutputDelta, RequestOutput, Completion, Segment):
    _register_fast_pickle(_kind)


@dataclass(frozen=True, slots=True)
class SubmitMessage:
    key: int
    request: Request
    stream: bool


@dataclass(frozen=True, slots=True)
class AbortMessage:
    key: int


@dataclass(frozen=True, slots=True)
class CallMessage:
    key: int
    method: str  # of EngineServer
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CallResult:
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class FlattenedTensorBucket:
    """A WeightUpdate flattened into one tensor that can be shared with another process."""

    version: int
    flattened_N: Tensor
    # Of each tensor: name, dtype, shape, offset.
    metadata: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]

    @classmethod
    def from_update(cls, update: WeightUpdate) -> Self:
        """Copy the tensors of an update into shared (CPU) or device memory."""
        metadata, size, device = [], 0, torch.device("cpu")
        for name, tensor in update.tensors.items():
            metadata.append((name, tensor.dtype, tuple(tensor.shape), size))
            size += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            device = tensor.device
        flattened_N = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        if device.type == "cpu":
            flattened_N.share_memory_()
        bucket = cls(update.version, flattened_N, tuple(metadata))
        with torch.no_grad():
            for name, view in bucket.tensors().items():
                view.copy_(update.tensors[name])
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return bucket

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, as views of the flattened one."""
        found = {}
        for name, dtype, shape, offset in self.metadata:
            size = torch.Size(shape).numel() * dtype.itemsize
            found[name] = self.flattened_N[offset : offset + size].view(dtype).view(shape)
        return found


def run_engine_server(pipe: Connection, build: Callable[[], Engine]) -> None:
    """Main function of the child process: runs until the parent closes the pipe or exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    # A daemon may not have children, but the grammar workers exit with it anyway.
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        engine = build()
    except Exception as error:
        log.exception("the engine could not be built")
        pipe.send(EngineError(f"{type(error).__name__}: {error}"))
        return
    pipe.send(engine.capacity)
    gc.collect()
    gc.freeze()  # keep later collections from scanning everything loaded so far
    with engine:
        EngineServer(pipe, engine).run()
    gc.unfreeze()


class EngineServer:
    """Serves the messages of a SubprocessEngine. Public methods are called by name."""

    def __init__(self, pipe: Connection, engine: Engine) -> None:
        self.pipe, self.engine, self.weight_updater = pipe, engine, EngineWeightUpdater(engine)
        self._names: dict[int, str] = {}  # engine request ids by message key
        self._outbox: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._calls = ThreadPoolExecutor(1)  # method calls, in order, while requests arrive
        self._compiling = ThreadPoolExecutor(80)  # requests with a grammar, while others arrive
        self._cancelled: dict[int, Event] = {}  # of requests whose grammar is being compiled

    def run(self) -> None:
        Thread(target=self._send, daemon=True).start()
        while True:
            try:
                messages = self.pipe.recv()
            except (EOFError, OSError):
                return
            if messages is None:
                return
            for message in messages:
                match message:
                    case SubmitMessage() if message.request.sampling_params.grammar is not None:
                        self._cancelled[message.key] = Event()
                        self._compiling.submit(self._submit, message)
                    case SubmitMessage():
                        self._submit(message)
                    case AbortMessage(key):
                        self._abort(key)
                    case CallMessage(key, "check_health"):
                        self._outbox.put((key, CallResult(self.engine.healthy)))
                    case CallMessage():
                        self._calls.submit(self._call, message)

    def _abort(self, key: int) -> None:
        cancelled = self._cancelled.get(key)
        if cancelled is not None:
            cancelled.set()
        self.engine.abort(self._names.get(key, ""))

    def _submit(self, message: SubmitMessage) -> None:
        def deliver(delta: OutputDelta | Exception) -> None:
            if isinstance(delta, Exception) or delta.output is not None:
                self._names.pop(message.key, None)
            self._outbox.put((message.key, delta))

        try:
            self._names[message.key] = ""  # it may finish before `submit` returns
            cancelled = self._cancelled.get(message.key)
            name = self.engine.submit(
                message.request, deliver, streamed=message.stream, cancelled=cancelled
            )
        except (InvalidRequestError, EngineError) as error:
            deliver(error)
            return
        finally:
            self._cancelled.pop(message.key, None)
        if message.key in self._names:
            self._names[message.key] = name
        if cancelled is not None and cancelled.is_set():  # possibly before the id was known
            self.engine.abort(name)

    def _call(self, call: CallMessage) -> None:
        try:
            found: Any = CallResult(getattr(self, call.method)(*call.arguments))
        except (CheckpointError, InvalidRequestError, EngineError) as error:
            found = type(error)(str(error))
        except Exception as error:
            log.exception("%s failed", call.method)
            found = EngineError(f"{call.method}: {type(error).__name__}: {error}")
        self._outbox.put((call.key, found))

    def _send(self) -> None:
        """Send all pending messages in one batch."""
        while True:
            messages = [self._outbox.get()]
            try:
                while True:
                    messages.append(self._outbox.get_nowait())
            except Empty:
                pass
            try:
                self.pipe.send(messages)
            except OSError:
                return

    # --- methods for CallMessage ------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        self.engine.pause(mode)

    def resume(self) -> None:
        self.engine.resume()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def audit(self) -> list[str]:
        return self.engine.audit()

    def update_weights(
        self, buckets: list[FlattenedTensorBucket], mode: PauseMode, verify: bool
    ) -> None:
        updates = [WeightUpdate(bucket.version, bucket.tensors()) for bucket in buckets]
        self.weight_updater.weight_publisher(mode)(updates)
        if verify:
            self.weight_updater.verify(updates)
