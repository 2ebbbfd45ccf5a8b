"""How many threads an operation takes, and where, is the machine's business, and the run's."""

import pytest
import torch

from paddock.train.run import DEFAULT_THREADS, init_device
from paddock.train.settings import ComputeSettings
from paddock.train.trainer import TrainingError


def test_a_run_says_how_many_threads_it_takes_and_the_next_one_is_free_again():
    before = torch.get_num_threads()
    try:
        assert init_device(ComputeSettings(device="cpu", threads=1)) == torch.device("cpu")
        assert torch.get_num_threads() == 1
        init_device(ComputeSettings(device="cpu"))
        assert torch.get_num_threads() == DEFAULT_THREADS
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["tpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_by_name(name):
    with pytest.raises(TrainingError, match=f"'compute.device' '{name}': [^\n]+$"):
        init_device(ComputeSettings(device=name))
