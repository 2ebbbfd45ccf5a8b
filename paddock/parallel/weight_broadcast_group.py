"""A group in which rank 0 broadcasts weights to ranks that serve.

It meets the groups that trainers make for this purpose (a TCP store on rank 0, every key under the
group's name, given twice), but stays out of torch's own register of groups: there a name exists
once in a process, while replicas in one process join the same group, each with its own rank.

Every call runs on a thread of its own and is waited for only so long: a peer that is late or gone
is an error, never a caller that hangs.
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
GRACE_S = 2.0  # the backend's own error says more than "too late", so it may come first
# NCCL's watchdog would end the process when a peer fails; here only the group ends.
NCCL_WATCHDOG_ENV = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class WeightBroadcastError(ValueError):
    """Peers that cannot be met, or have gone; the message names the group."""


class Rendezvous(Protocol):
    """Where a group meets, and which rank of it this is."""

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
    """This process as one of those that receive."""

    def __init__(self, meeting: Rendezvous, device: torch.device, timeout_s: float) -> None:
        """Blocks until every rank has come, `timeout_s` at most."""
        _refuse(meeting, device)
        self.name, self._timeout_s = meeting.name, timeout_s
        # gloo moves what lies in main memory.
        self.device = torch.device("cpu") if meeting.backend == "gloo" else device
        self._broken: str | None = None
        self._group: Any = None
        self._group = self._within_time(lambda: _met(meeting, timeout_s), "met nobody")

    def receive(self, into: Sequence[Tensor]) -> None:
        """Fill the tensors with what rank 0 sends, in order. Blocks; after an error the group is of
        no further use."""
        if self._broken is not None:
            raise WeightBroadcastError(f"{self._broken}; join it again")
        self._within_time(lambda: self._receive(into), f"did not receive {len(into)} tensors")

    def destroy(self) -> None:
        self._broken = self._broken or f"group '{self.name}' was left"
        self._group = None

    def _receive(self, into: Sequence[Tensor]) -> None:
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)  # a thread's own
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for work in [self._group.broadcast([tensor], options) for tensor in into]:
            work.wait()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _within_time(self, act: Callable[[], _T], failing: str) -> _T:
        try:
            return _on_its_own_thread(act).result(self._timeout_s + GRACE_S)
        except TimeoutError:
            why = f"nothing happened for {self._timeout_s:g} s"
        except (RuntimeError, OSError) as error:
            why = str(error).strip().split("\n")[0][:300]
        self._broken = f"group '{self.name}' {failing}: {why}"
        with suppress(Exception):  # nothing may be left to abort
            self._group.abort()
        raise WeightBroadcastError(self._broken)


def _refuse(meeting: Rendezvous, device: torch.device) -> None:
    name = f"group '{meeting.name}'"
    if meeting.backend not in BACKENDS:
        raise WeightBroadcastError(
            f"{name}: no backend '{meeting.backend}'; there are {', '.join(BACKENDS)}"
        )
    if meeting.backend == "nccl" and (device.type == "cpu" or not dist.is_nccl_available()):
        raise WeightBroadcastError(
            f"{name}: nccl needs a GPU and the engine runs on {device}; use gloo"
        )
    if not 0 < meeting.rank < meeting.world_size:
        raise WeightBroadcastError(
            f"{name}: rank {meeting.rank} is not in [1, {meeting.world_size}), and 0 sends"
        )
    if not 0 < meeting.port < 1 << 16:
        raise WeightBroadcastError(f"{name}: {meeting.port} is no port")


def _met(meeting: Rendezvous, timeout_s: float) -> Any:
    # A store that nobody listens to goes on trying after its time, and would then take this rank's
    # place in a later group at the same port.
    left_s = _until_it_listens(meeting.address, meeting.port, timeout_s)
    rank, size, timeout = meeting.rank, meeting.world_size, timedelta(seconds=left_s)
    store: Any = dist.TCPStore(
        meeting.address, meeting.port, size, is_master=False, timeout=timeout
    )
    kind = "cpu" if meeting.backend == "gloo" else "cuda"
    for prefix in (meeting.name, f"{meeting.name}/", f"{kind}/"):
        store = dist.PrefixStore(prefix, store)
    if meeting.backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _environment(NCCL_WATCHDOG_ENV):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _until_it_listens(address: str, port: int, timeout_s: float) -> float:
    """Seconds that are left of the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), POLL_S)
        try:
            socket.create_connection((address, port), timeout=left_s).close()
            return left_s
        except OSError as error:
            if time.monotonic() + POLL_S > deadline:
                raise OSError(f"nobody listens at {address}:{port}: {error}") from None
        time.sleep(POLL_S)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """The environment with these changes until the block ends."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _on_its_own_thread(act: Callable[[], _T]) -> "Future[_T]":
    """A daemon: one that is stuck in a collective does not keep the process from ending."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, name="paddock-weights", daemon=True).start()
    return done
