"""Weight sync over a process group: rank 0 (a trainer) broadcasts weights to serving ranks.

Compatible with the groups that trainers create for this purpose (a TCP store on rank 0, keys
prefixed with the group's name twice), but not registered with torch.distributed: there a group name
exists once per process, while replicas in one process join the same group with different ranks.

Every call runs on its own thread with a timeout: a peer that is late or gone is an error and never
blocks the caller for longer.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

_T = TypeVar("_T")
BACKENDS = ("gloo", "nccl")
POLL_S = 0.05
GRACE_S = 2.0  # the backend's own timeout error says more than ours, so let it come first
# NCCL's watchdog would kill the process when a peer fails; only the group may fail.
NCCL_WATCHDOG_ENV = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class WeightBroadcastError(ValueError):
    """A peer cannot be reached or has gone; the message names the group."""


class Rendezvous(Protocol):
    """Address, name and size of a process group, and this process's rank in it."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def backend(self) -> str: ...


class WeightBroadcastGroup:
    """A receiving member of the group."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device, timeout_s: float) -> None:
        """Join the group; blocks until every rank has joined, at most `timeout_s`."""
        _validate(rendezvous, device)
        self.name, self._timeout_s = rendezvous.name, timeout_s
        # gloo transfers CPU tensors.
        self.device = torch.device("cpu") if rendezvous.backend == "gloo" else device
        self._broken: str | None = None
        self._group: Any = None
        self._group = self._with_timeout(
            lambda: _join(rendezvous, timeout_s), "could not be joined"
        )

    def receive(self, into: Sequence[Tensor]) -> None:
        """Fill the tensors with rank 0's broadcasts, in order. Blocks; after an error the group
        cannot be used again."""
        if self._broken is not None:
            raise WeightBroadcastError(f"{self._broken}; join the group again")
        self._with_timeout(lambda: self._receive(into), f"did not receive {len(into)} tensors")

    def destroy(self) -> None:
        self._broken = self._broken or f"group '{self.name}' was destroyed"
        self._group = None

    def _receive(self, into: Sequence[Tensor]) -> None:
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)  # per thread
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for work in [self._group.broadcast([tensor], options) for tensor in into]:
            work.wait()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _with_timeout(self, call: Callable[[], _T], failure: str) -> _T:
        try:
            return _run_in_thread(call).result(self._timeout_s + GRACE_S)
        except TimeoutError:
            why = f"timed out after {self._timeout_s:g} s"
        except (RuntimeError, OSError) as error:
            why = str(error).strip().split("\n")[0][:300]
        self._broken = f"group '{self.name}' {failure}: {why}"
        with suppress(Exception):  # the group may not exist yet
            self._group.abort()
        raise WeightBroadcastError(self._broken)


def _validate(rendezvous: Rendezvous, device: torch.device) -> None:
    name = f"group '{rendezvous.name}'"
    if rendezvous.backend not in BACKENDS:
        raise WeightBroadcastError(
            f"{name}: backend must be one of {', '.join(BACKENDS)}, got '{rendezvous.backend}'"
        )
    if rendezvous.backend == "nccl" and (device.type == "cpu" or not dist.is_nccl_available()):
        raise WeightBroadcastError(
            f"{name}: nccl needs a GPU and the engine runs on {device}; use gloo"
        )
    if not 0 < rendezvous.rank < rendezvous.world_size:
        raise WeightBroadcastError(
            f"{name}: rank must be in [1, {rendezvous.world_size}) (rank 0 sends), "
            f"got {rendezvous.rank}"
        )
    if not 0 < rendezvous.port < 1 << 16:
        raise WeightBroadcastError(f"{name}: port must be in [1, 65535], got {rendezvous.port}")


def _join(rendezvous: Rendezvous, timeout_s: float) -> Any:
    # A TCPStore client without a server keeps retrying after its timeout and could later join a new
    # group at the same port in this rank's place. So wait for the server first.
    left_s = _wait_for_store(rendezvous.address, rendezvous.port, timeout_s)
    rank, size, timeout = rendezvous.rank, rendezvous.world_size, timedelta(seconds=left_s)
    store: Any = dist.TCPStore(
        rendezvous.address, rendezvous.port, size, is_master=False, timeout=timeout
    )
    kind = "cpu" if rendezvous.backend == "gloo" else "cuda"
    for prefix in (rendezvous.name, f"{rendezvous.name}/", f"{kind}/"):
        store = dist.PrefixStore(prefix, store)
    if rendezvous.backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _patched_environ(NCCL_WATCHDOG_ENV):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _wait_for_store(address: str, port: int, timeout_s: float) -> float:
    """Wait until the store accepts connections; returns the seconds left of the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), POLL_S)
        try:
            socket.create_connection((address, port), timeout=left_s).close()
            return left_s
        except OSError as error:
            if time.monotonic() + POLL_S > deadline:
                raise OSError(f"no store is listening at {address}:{port}: {error}") from None
        time.sleep(POLL_S)


@contextmanager
def _patched_environ(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables until the block ends."""
    saved = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _run_in_thread(call: Callable[[], _T]) -> "Future[_T]":
    """A daemon thread: one stuck in a collective does not keep the process from exiting."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, name="paddock-weights", daemon=True).start()
    return done
