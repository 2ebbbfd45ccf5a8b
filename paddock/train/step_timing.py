"""Step time on this machine, measured on random tokens."""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from paddock.data import PackedBatch
from paddock.model import ModelConfig, Transformer
from paddock.parallel import Mesh
from paddock.train.estimate import TrainingEstimate
from paddock.train.objective import LanguageModelObjective
from paddock.train.run import init_device, place_model
from paddock.train.settings import TrainSettings
from paddock.train.stages import stage_spec
from paddock.train.trainer import Trainer


def fits_in_memory(estimate: TrainingEstimate, device: torch.device) -> bool:
    """Whether a single process can run a step on `device`, with 20 % of free memory to spare."""
    return estimate.ranks == 1 and estimate.rank_bytes < 0.8 * free_memory_bytes(device)


def free_memory_bytes(device: torch.device) -> int:
    """Free memory of the accelerator, or of the host for the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return 8 << 30
    return int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * 1024


def measure_step_time(settings: TrainSettings, config: ModelConfig, steps: int = 3) -> float:
    """Median seconds per step over `steps` steps, after one for warm-up."""
    device = init_device(settings.compute)
    network = place_model(
        Transformer.from_config(config, settings.seed), settings.compute, Mesh(device=device)
    )
    stage = stage_spec(settings)
    stage.freeze(network)
    with tempfile.TemporaryDirectory() as scratch:
        objective = LanguageModelObjective(stage, settings.loss)
        trainer = Trainer(network, objective, settings, Path(scratch) / "batch.npz")
        batch = make_random_batch(settings, config.vocab)
        times = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            trainer.step(batch, lr=0.0, bias_rate=0.0, progress=0.0)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def make_random_batch(settings: TrainSettings, vocab: int) -> PackedBatch:
    """A batch of full rows, each one document of random tokens."""
    rows = settings.dataloader.batch_tokens // settings.dataloader.seq_len
    tokens = rows * settings.dataloader.seq_len
    loss_mask_T = np.ones(tokens, np.bool_)
    loss_mask_T[:: settings.dataloader.seq_len] = False
    return PackedBatch(
        token_T=np.random.default_rng(0).integers(0, vocab, tokens, dtype=np.int32),
        loss_mask_T=loss_mask_T,
        lengths=(settings.dataloader.seq_len,) * rows,
        sources=("random",) * rows,
        num_targets=int(loss_mask_T.sum()),
    )
