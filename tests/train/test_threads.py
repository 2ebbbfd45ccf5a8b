"""Threads and device of a run."""

import pytest
import torch

from paddock.train.run import DEFAULT_THREADS, init_device
from paddock.train.settings import ComputeSettings
from paddock.train.trainer import TrainingError


def test_a_run_sets_its_threads_and_restores_them():
    before = torch.get_num_threads()
    try:
        assert init_device(ComputeSettings(device="cpu", threads=1)) == torch.device("cpu")
        assert torch.get_num_threads() == 1
        init_device(ComputeSettings(device="cpu"))
        assert torch.get_num_threads() == DEFAULT_THREADS
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["tpu", "cuda:99"])
def test_a_missing_device_is_rejected_by_name(name):
    with pytest.raises(TrainingError, match=f"'compute.device' '{name}': [^\n]+$"):
        init_device(ComputeSettings(device=name))
