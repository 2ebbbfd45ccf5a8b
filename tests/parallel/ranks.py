"""Training runs on several gloo ranks in separate processes, and their metrics."""

import multiprocessing
import os
import time
from multiprocessing.connection import wait

from torch.distributed import TCPStore

from paddock.journal import follow

# Children are forked from a server that has loaded torch once and computed nothing yet.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.parallel.ranks", "paddock.train"])
TIMEOUT_S = 300  # for busy machines


def on_ranks(count, work, *arguments):
    """Call `work(*arguments)` on `count` ranks; raises if one fails and always ends all of them."""
    all_on_ranks(count, [(work, *arguments)])


def all_on_ranks(count, calls):
    """Make several calls in the same processes, each with a new process group."""
    # Stores live in this process, as with torchrun: no other process can take their ports, and the
    # next group may start while another rank still leaves the last one.
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in calls]
    ports = [store.port for store in stores]
    children = [
        FORKS.Process(target=_rank, args=(rank, count, ports, calls), daemon=True)
        for rank in range(count)
    ]
    try:
        for child in children:
            child.start()
        _wait(children, time.monotonic() + TIMEOUT_S)
    finally:
        for child in children:
            child.kill()
            child.join()


def _wait(children, deadline):
    """Wait for all ranks. One failure raises: the others would wait for the failed rank."""
    running = {child.sentinel: child for child in children}
    while running:
        ended = wait(list(running), timeout=max(0, deadline - time.monotonic()))
        if not ended:
            raise TimeoutError(f"{len(running)} ranks are not done")
        for child in [running.pop(sentinel) for sentinel in ended]:
            child.join()
            if child.exitcode:
                raise RuntimeError(f"a rank ended with {child.exitcode}")


def _rank(rank, count, ports, calls):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    import torch

    torch.set_num_threads(1)
    for port, (work, *arguments) in zip(ports, calls, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        work(*arguments)


def quiet(_):
    pass


def train_run(run):
    from paddock.train import train

    train(run, log=quiet, on_update=quiet)


def lines(run):
    """The metrics of each step."""
    return [line for line, _ in follow(run.folder / "metrics.jsonl")]


def curve(run, part="loss"):
    return [line[part] for line in lines(run)]
