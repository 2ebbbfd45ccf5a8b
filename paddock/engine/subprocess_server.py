"""The far end of an `EngineApart`: what is said through the pipe, and the process that hears it."""

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

ALIGNMENT_BYTES = 16  # bytes


def _travels_fast(kind: type) -> None:
    """Records go by their fields' values: what dataclasses with slots do by themselves takes three
    times as long, and a batch is hundreds of them."""
    names = [field.name for field in fields(kind)]
    values = attrgetter(*names) if len(names) > 1 else lambda record: (getattr(record, names[0]),)
    ForkingPickler.register(kind, lambda record: (_record, (kind, values(record))))


def _record(kind: type, values: tuple[Any, ...]) -> Any:
    """As it was: nothing is checked or made anew."""
    made: Any = object.__new__(kind)
    for name, value in zip(kind.__slots__, values, strict=True):  # type: ignore[attr-defined]
        object.__setattr__(made, name, value)
    return made


for _kind in (Request, SamplingParams, OutputDelta, RequestOutput, Completion, Segment):
    _travels_fast(_kind)


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
    method: str  # a method of Child
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CallResult:
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class FlattenedTensorBucket:
    """A parcel in one piece of memory, which another process can be shown."""

    version: int
    flattened_N: Tensor
    metadata: tuple[
        tuple[str, torch.dtype, tuple[int, ...], int], ...
    ]  # name, dtype, shape, offset

    @classmethod
    def from_update(cls, parcel: WeightUpdate) -> Self:
        places, size, device = [], 0, torch.device("cpu")
        for name, tensor in parcel.tensors.items():
            places.append((name, tensor.dtype, tuple(tensor.shape), size))
            size += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            device = tensor.device
        bytes_N = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        if device.type == "cpu":
            bytes_N.share_memory_()
        bundle = cls(parcel.version, bytes_N, tuple(places))
        with torch.no_grad():
            for name, view in bundle.tensors().items():
                view.copy_(parcel.tensors[name])
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return bundle

    def tensors(self) -> dict[str, Tensor]:
        """Views of the one piece."""
        found = {}
        for name, dtype, shape, offset in self.metadata:
            size = torch.Size(shape).numel() * dtype.itemsize
            found[name] = self.flattened_N[offset : offset + size].view(dtype).view(shape)
        return found


def run_engine_server(pipe: Connection, build: Callable[[], Engine]) -> None:
    """The child's whole life: until its owner closes the pipe, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner ends it
    # A daemon may have no children, but the workers that compile grammars end with it anyway.
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        engine = build()
    except Exception as error:
        log.exception("the engine could not be built")
        pipe.send(EngineError(f"{type(error).__name__}: {error}"))
        return
    pipe.send(engine.capacity)
    gc.collect()
    gc.freeze()  # or all that was loaded is looked through again and again, while requests wait
    with engine:
        EngineServer(pipe, engine).run()
    gc.unfreeze()


class EngineServer:
    def __init__(self, pipe: Connection, engine: Engine) -> None:
        self.pipe, self.engine, self.reload = pipe, engine, EngineWeightUpdater(engine)
        self._names: dict[int, str] = {}  # of requests, as the engine calls them
        self._outbox: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._chores = ThreadPoolExecutor(1)  # calls, in turn, while requests come in
        self._compiling = ThreadPoolExecutor(80)  # requests with a grammar, while others come in
        self._left: dict[int, Event] = {}  # set when nobody waits for such a request any more

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
                        self._left[message.key] = Event()
                        self._compiling.submit(self._ask, message)
                    case SubmitMessage():
                        self._ask(message)
                    case AbortMessage(key):
                        self._abort(key)
                    case CallMessage(key, "beats"):
                        self._outbox.put((key, CallResult(self.engine.healthy)))
                    case CallMessage():
                        self._chores.submit(self._do, message)

    def _abort(self, key: int) -> None:
        left = self._left.get(key)
        if left is not None:
            left.set()
        self.engine.abort(self._names.get(key, ""))

    def _ask(self, asked: SubmitMessage) -> None:
        def deliver(delta: OutputDelta | Exception) -> None:
            if isinstance(delta, Exception) or delta.output is not None:
                self._names.pop(asked.key, None)
            self._outbox.put((asked.key, delta))

        try:
            self._names[asked.key] = ""  # it may be over before `submit` returns
            left = self._left.get(asked.key)
            name = self.engine.submit(asked.request, deliver, streamed=asked.stream, cancelled=left)
        except (InvalidRequestError, EngineError) as error:
            deliver(error)
            return
        finally:
            self._left.pop(asked.key, None)
        if asked.key in self._names:
            self._names[asked.key] = name
        if left is not None and left.is_set():  # it may have come before the name
            self.engine.abort(name)

    def _do(self, called: CallMessage) -> None:
        try:
            found: Any = CallResult(getattr(self, called.method)(*called.arguments))
        except (CheckpointError, InvalidRequestError, EngineError) as error:
            found = type(error)(str(error))
        except Exception as error:
            log.exception("%s failed", called.method)
            found = EngineError(f"{called.method}: {type(error).__name__}: {error}")
        self._outbox.put((called.key, found))

    def _send(self) -> None:
        """Everything there is, at once."""
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

    # --- what may be called -----------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        self.engine.pause(mode)

    def resume(self) -> None:
        self.engine.resume()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def audit(self) -> list[str]:
        return self.engine.audit()

    def update_weights(
        self, bundles: list[FlattenedTensorBucket], mode: PauseMode, verify: bool
    ) -> None:
        parcels = [WeightUpdate(bundle.version, bundle.tensors()) for bundle in bundles]
        self.reload.weight_publisher(mode)(parcels)
        if verify:
            self.reload.verify(parcels)
