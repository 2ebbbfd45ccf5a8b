"""Runs in real processes that talk over gloo, and what they leave behind."""

import multiprocessing
import os
import socket
import time
from multiprocessing.connection import wait

from paddock.journal import follow

# Children are forked from a server that has loaded torch once and computed nothing yet.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.parallel.ranks", "paddock.train"])
TIMEOUT_S = 120


def on_ranks(count, work, *arguments):
    """Call `work(*arguments)` on so many ranks; raises if one fails, and leaves none behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [
        FORKS.Process(target=_rank, args=(rank, count, port, work, arguments), daemon=True)
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


def _rank(rank, count, port, work, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    torch.set_num_threads(1)
    work(*arguments)


def quiet(_):
    pass


def raise_network(run):
    from paddock.train import train

    train(run, say=quiet, watch=quiet)


def lines(run):
    """What the journal says of each step."""
    return [line for line, _ in follow(run.folder / "metrics.jsonl")]


def curve(run, part="loss"):
    return [line[part] for line in lines(run)]
