"""An engine in a process of its own on the trainer's GPU: weights go by the device's handles."""

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


def assert_says(found, serving, version):
    for prompt in PROMPTS:
        done = asyncio.run(found.async_generate(greedy(prompt, 16))).completion
        assert_greedy(serving, prompt, done)
        assert [segment.version for segment in done.versions] == [version]


def on_device():
    return {name: tensor.detach().cuda() for name, tensor in tensors().items()}


def test_weights_of_the_trainers_gpu_serve_and_outlive_a_process():
    with SubprocessEngine(sparse) as apart:
        assert_says(apart, network("sparse"), 0)
        live = on_device()
        apart.update_weights([WeightUpdate(7, live)], verify=True)
        for tensor in live.values():  # the trainer goes on writing where it wrote
            tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        assert_says(apart, other(), 7)
        os.kill(apart.pid, signal.SIGKILL)
        until(lambda: not apart.healthy)
        apart.restart()
        assert_says(apart, other(), 7)
        assert apart.audit() == []


def test_every_update_leaves_the_device_as_full_as_before():
    """The memory of the version before is given back once the next one is there."""
    with SubprocessEngine(sparse) as apart:
        taken = []
        for version in range(1, 9):
            apart.update_weights([WeightUpdate(version, on_device())])
            torch.cuda.ipc_collect()
            taken.append(torch.cuda.memory_allocated())
        assert apart.stats().version == 8
        assert taken[-1] <= taken[2]
