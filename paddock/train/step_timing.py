"""How fast a step is on this machine, found out by doing a few on random tokens."""

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
from paddock.train.run import pick_device, place_model
from paddock.train.settings import TrainSettings
from paddock.train.stages import stage_spec
from paddock.train.trainer import Trainer


def fits_in_memory(planned: TrainingEstimate, device: torch.device) -> bool:
    """Whether one process can take a step here, with some room to spare."""
    return planned.ranks == 1 and planned.rank_bytes < 0.8 * free_memory_bytes(device)


def free_memory_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return 8 << 30
    return int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * 1024


def measure_step_time(settings: TrainSettings, config: ModelConfig, steps: int = 3) -> float:
    """Median over a few steps after one to warm up, with full rows of random tokens."""
    device = pick_device(settings.compute.device)
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
    rows = settings.dataloader.batch_tokens // settings.dataloader.seq_len
    tokens = rows * settings.dataloader.seq_len
    trained_T = np.ones(tokens, np.bool_)
    trained_T[:: settings.dataloader.seq_len] = False
    return PackedBatch(
        token_T=np.random.default_rng(0).integers(0, vocab, tokens, dtype=np.int32),
        loss_mask_T=trained_T,
        lengths=(settings.dataloader.seq_len,) * rows,
        sources=("random",) * rows,
        num_targets=int(trained_T.sum()),
    )
