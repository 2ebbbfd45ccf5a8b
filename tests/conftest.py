"""What holds for all tests: settings made before torch is loaded, fixed draws, an order that ends.

The outcome of a test depends on neither chance, the order of files nor the machine's speed: every
draw is seeded anew before each test and its fixtures, and hypothesis tries the same examples every
time (`--hypothesis-profile explore` tries new ones).
"""

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One thread an operation: workers fill the cores, and a GPU's tests have many workers' cores idle.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and then refuse its instructions; bfloat16 products would end
# the process. Capping oneDNN below AMX costs tests nothing.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Programs that run in environments of their own, with what this one does not have.
collect_ignore = ["envs/foreign_taskset.py", "envs/openenv_servers.py", "rl/foreign_vault.py"]

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


@pytest.fixture(autouse=True, scope="module")
def no_cpu_kernels_of_other_files() -> None:
    """Kernels that a test has loaded stay loaded, and round otherwise than references: each file
    begins without them, whatever ran before in its process."""
    loaded = sys.modules.get("paddock.kernels.cpu")
    if loaded is not None:
        loaded._library = None


# Seconds of the longest files on two busy cores (`--durations=80`, 2026-11-18).
SECONDS = {
    "docs/test_commands.py": 209,
    "rl/test_kill.py": 88,
    "rl/test_subprocess_engine.py": 80,
    "train/test_resume.py": 58,
    "parallel/test_loss_curves.py": 56,
    "rl/test_run.py": 42,
    "envs/terminal/test_generate.py": 41,
    "cli/test_train.py": 37,
    "serve/test_tool_choice.py": 35,
    "rollout/test_gateway.py": 33,
    "kernels/test_gqa_decode.py": 33,
    "kernels/test_index_kl_triton.py": 32,
    "parallel/test_checkpoint.py": 29,
    "cli/test_run.py": 26,
    "serve/test_schema.py": 23,
    "engine/test_subprocess_engine.py": 22,
    "kernels/test_w4a8_gemm.py": 21,
    "rl/test_distill.py": 21,
    "sandbox/test_escape.py": 21,
    "rollout/test_sglang_client.py": 20,
    "checkpoint/test_gguf.py": 20,
    "train/test_sft_ranks.py": 20,
    "kernels/test_newton_schulz_fused.py": 19,
    "test_architecture.py": 18,
    "rl/test_learner.py": 18,
    "train/test_evaluate.py": 16,
    "rl/test_orchestrator.py": 15,
    "kernels/test_triton_interpreter.py": 14,
    "text/test_gguf.py": 14,
    "text/test_renderers_parity.py": 12,
    "serve/test_cli.py": 12,
    "serve/test_weight_updates.py": 10,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker is left alone with one at the end
    (`--no-loadscope-reorder` keeps this order)."""
    seconds = {Path(__file__).parent / file: count for file, count in SECONDS.items()}
    items.sort(key=lambda item: -seconds.get(item.path, 0))
