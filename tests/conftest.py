"""What holds for all tests: settings made before torch is loaded, fixed draws, an order that ends.

The outcome of a test depends on neither chance, the order of files nor the machine's speed: every
draw is seeded anew before each test and its fixtures, and hypothesis tries the same examples every
time (`--hypothesis-profile explore` tries new ones).
"""

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# One thread an operation: workers fill the cores, and a GPU's tests have many workers' cores idle.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and then refuse its instructions; bfloat16 products would end
# the process. Capping oneDNN below AMX costs tests nothing.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# How long an example takes says how busy the machine is, not whether it holds.
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("explore", **QUIET, derandomize=False)
settings.register_profile("paddock", **QUIET, derandomize=True)
settings.load_profile("paddock")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first, so that no worker is left alone with one at the end
    (`--no-loadscope-reorder` keeps this order)."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
