"""How many threads an operation takes is the machine's business, and the run's."""

import torch

from paddock.train.run import CORES, open_device
from paddock.train.settings import MachineSettings


def test_a_run_says_how_many_threads_it_takes_and_the_next_one_is_free_again():
    before = torch.get_num_threads()
    try:
        assert open_device(MachineSettings(device="cpu", threads=1)) == torch.device("cpu")
        assert torch.get_num_threads() == 1
        open_device(MachineSettings(device="cpu"))
        assert torch.get_num_threads() == CORES
    finally:
        torch.set_num_threads(before)
