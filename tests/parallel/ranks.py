"""Runs in real processes that talk over gloo, and what they leave behind."""

import multiprocessing
import os
import time
from multiprocessing.connection import wait

from torch.distributed import TCPStore

from paddock.journal import follow

# Children are forked from a server that has loaded torch once and computed nothing yet.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.parallel.ranks", "paddock.train"])
TIMEOUT_S = 300  # a busy machine takes its time


def on_ranks(count, work, *arguments):
    """Call `work(*arguments)` on so many ranks; raises if one fails, and leaves none behind."""
    all_on_ranks(count, [(work, *arguments)])


def all_on_ranks(count, calls):
    """One call after the other in the same processes, each with a process group of its own."""
    # Ranks meet at stores of this process, as torchrun's do: ports that nobody else can take, and
    # the next group may begin while another rank still leaves the last one.
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
    """Until all have ended well. One failure is the end of all: the others would wait for it."""
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


def raise_network(run):
    from paddock.train import train

    train(run, log=quiet, on_update=quiet)


def lines(run):
    """What the journal says of each step."""
    return [line for line, _ in follow(run.folder / "metrics.jsonl")]


def curve(run, part="loss"):
    return [line[part] for line in lines(run)]
