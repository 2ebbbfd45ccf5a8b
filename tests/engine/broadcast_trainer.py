"""A trainer process that broadcasts its weights as slime and verl do."""

import os
import socket
from contextlib import contextmanager
from datetime import timedelta

from tests.parallel.ranks import FORKS


@contextmanager
def trainer(world_size, seed=11, name="weights", backend="gloo"):
    """(connection to it, rendezvous port of its group); killed when the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours, theirs = FORKS.Pipe()
    arguments = (theirs, port, world_size, seed, name, backend)
    process = FORKS.Process(target=_train, args=arguments, daemon=True)
    process.start()
    try:
        yield ours, port
    finally:
        process.kill()
        process.join()
        ours.close()


def _train(commands, port, world_size, seed, name, backend):
    """Commands are lists of names to broadcast; at None the process exits, at `...` it hangs."""
    import torch
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import (
        Backend,
        PrefixStore,
        _new_process_group_helper,
        rendezvous,
    )

    from paddock.checkpoint.weight_sync import iter_released_tensors
    from tests.model.networks import build_network, latent_config

    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    weights = dict(iter_released_tensors(build_network(latent_config(), seed=seed)))
    weights["model.norm.weight.long"] = torch.ones(40)
    if backend == "nccl":
        os.environ |= {"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(0)
        weights = {tensor: value.cuda() for tensor, value in weights.items()}
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    while True:
        for tensor in commands.recv():
            if tensor is None:
                os._exit(1)
            if tensor is ...:
                commands.recv()
            dist.broadcast(weights[tensor].contiguous(), src=0, group=group)
        commands.send("sent")
