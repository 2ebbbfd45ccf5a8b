"""Throughput, memory and MFU of a recipe's training step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.bench.memory import peak_rss_bytes
from paddock.launch import UserError, units
from paddock.launch import settings as launch_settings

if TYPE_CHECKING:
    from paddock.train import TrainingEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingThroughput:
    """One measurement of `paddock bench train`."""

    recipe: str
    device: str
    dtype: str
    parameters: int
    tokens_per_step: int
    seconds_per_step: float
    tokens_per_second: float
    peak_bytes: int
    flops_per_token: float
    peak_flops: float | None  # None: not known for this device
    mfu: float | None


def measure_training(
    recipe: Path, overrides: Sequence[str] = (), *, steps: int = 5
) -> TrainingThroughput:
    """Time `steps` steps after one warm-up step: fresh weights, full rows of random tokens, one
    process. Raises UserError if a step does not fit in memory."""
    from paddock.model import cost
    from paddock.train import (
        estimate_training,
        fits_in_memory,
        load_init_config,
        measure_step_time,
        peak_flops,
        pick_device,
    )

    settings = launch_settings.load_train_settings(recipe, overrides)
    config, device = load_init_config(settings), pick_device(settings.compute.device)
    estimate = estimate_training(settings, config)
    if not fits_in_memory(estimate, device):
        raise UserError(_too_large(estimate))
    seconds = measure_step_time(settings, config, steps)
    loader = settings.dataloader
    tokens = loader.batch_tokens // loader.seq_len * loader.seq_len
    peak = peak_flops(device)
    return TrainingThroughput(
        recipe=str(recipe),
        device=str(device),
        dtype=settings.compute.dtype,
        parameters=estimate.parameters,
        tokens_per_step=tokens,
        seconds_per_step=seconds,
        tokens_per_second=tokens / seconds,
        peak_bytes=_peak_bytes(),
        flops_per_token=estimate.flops_per_token,
        peak_flops=peak,
        mfu=None if peak is None else cost.mfu(estimate.flops_per_token, tokens / seconds, peak),
    )


def _too_large(estimate: "TrainingEstimate") -> str:
    if estimate.ranks > 1:
        return (
            f"the recipe is for {estimate.ranks:,} processes, and one is timed here; "
            "see paddock train --dry-run, or --set parallel.data=1"
        )
    return (
        f"a step takes {units.format_bytes(estimate.rank_bytes)}, more than this machine has free"
    )


def _peak_bytes() -> int:
    """Peak memory of the accelerator's allocator, or of this process."""
    import torch

    from paddock.train import peak_memory_bytes

    process = None if torch.accelerator.is_available() else peak_rss_bytes()
    return peak_memory_bytes() if process is None else process
