"""An engine subprocess on the trainer's GPU: weights are sent by CUDA IPC handles."""

import asyncio
import os
import signal

import pytest
import torch

from paddock.checkpoint.weight_sync import WeightUpdate
from paddock.engine import SubprocessEngine
from tests.engine.networks import assert_greedy, copy_of, engine, greedy, network, prompts
from tests.engine.test_weight_versions import other
from tests.engine.weight_updates import tensors
from tests.patience import until

pytestmark = pytest.mark.gpu

PROMPTS = prompts(4, seed=8)


def sparse():
    return engine(copy_of(network("sparse")).cuda(), cuda_graphs=False)


def assert_serves(found, serving, version):
    for prompt in PROMPTS:
        done = asyncio.run(found.async_generate(greedy(prompt, 16))).completion
        assert_greedy(serving, prompt, done)
        assert [segment.version for segment in done.versions] == [version]


def on_device():
    return {name: tensor.detach().cuda() for name, tensor in tensors().items()}


def test_weights_sent_by_cuda_ipc_survive_a_restart():
    with SubprocessEngine(sparse) as subprocess_engine:
        assert_serves(subprocess_engine, network("sparse"), 0)
        live = on_device()
        subprocess_engine.update_weights([WeightUpdate(7, live)], verify=True)
        for tensor in live.values():  # the trainer overwrites its memory
            tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        assert_serves(subprocess_engine, other(), 7)
        os.kill(subprocess_engine.pid, signal.SIGKILL)
        until(lambda: not subprocess_engine.healthy)
        subprocess_engine.restart()
        assert_serves(subprocess_engine, other(), 7)
        assert subprocess_engine.audit() == []


def test_updates_do_not_leak_device_memory():
    """The memory of the previous version is freed once the next one is loaded."""
    with SubprocessEngine(sparse) as subprocess_engine:
        allocated = []
        for version in range(1, 9):
            subprocess_engine.update_weights([WeightUpdate(version, on_device())])
            torch.cuda.ipc_collect()
            allocated.append(torch.cuda.memory_allocated())
        assert subprocess_engine.stats().version == 8
        assert allocated[-1] <= allocated[2]
