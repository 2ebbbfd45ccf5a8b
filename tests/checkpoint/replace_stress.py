"""Replaces a checkpoint in a loop while its writer is killed or readers read it.

Runs in its own process, which forks writers:
`python -m tests.checkpoint.replace_stress kill FOLDER`.
"""

import os
import random
import signal
import sys
import time
from itertools import cycle
from pathlib import Path

import torch

from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.model import Transformer
from paddock.model.config import RopeSettings
from tests.model.networks import build_network, grouped_config

# Two networks of the same shapes but different configs, so that a mixture is detected.
NETWORKS = {
    theta: build_network(
        grouped_config("gqa", "swa", rope=RopeSettings(theta=theta, layout="halves")), int(theta)
    )
    for theta in (100.0, 200.0)
}


def write_forever(target: Path) -> None:
    for count, network in enumerate(cycle(NETWORKS.values())):
        # Sometimes one file, sometimes shards: a shard may vanish before a reader opens it.
        save_pretrained(network, target, shard_bytes=10_000 if count % 3 else 10**9)


def forked_writer(target: Path) -> int:
    pid = os.fork()
    if not pid:
        try:
            write_forever(target)
        finally:
            os._exit(1)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the writer had already failed"


def check(found: Transformer) -> float:
    """The rope theta of the network, after checking that all tensors belong to it."""
    theta = found.config.rope.theta
    for name, tensor in NETWORKS[theta].state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), (theta, name)
    return theta


def kill_writers(target: Path) -> None:
    rng = random.Random(0)
    for _ in range(15):
        pid = forked_writer(target)
        time.sleep(rng.uniform(0.002, 0.06))
        kill(pid)
        if target.exists():
            check(load_pretrained(target))
    save_pretrained(NETWORKS[100.0], target)
    assert check(load_pretrained(target)) == 100.0
    left = [path for path in target.parent.iterdir() if path != target]
    assert not any(any(path.iterdir()) for path in left), left


def read_meanwhile(target: Path) -> None:
    save_pretrained(NETWORKS[100.0], target)
    pid = forked_writer(target)
    seen: list[float] = []
    try:
        while len(seen) < 30 or set(seen) != set(NETWORKS):
            seen.append(check(load_pretrained(target)))
    finally:
        kill(pid)


if __name__ == "__main__":
    {"kill": kill_writers, "read": read_meanwhile}[sys.argv[1]](Path(sys.argv[2]))
