"""One training step against transformers' GlmMoeDsaForCausalLM with AdamW in a plain loop.

    python -m benchmarks.train_step [--config small|nano] [--shapes 8x4096,1x16384] [--dtype ...]
    python -m benchmarks.train_step --profile     time by part of a step

Same configuration, same batch, one run, arms alternating, medians. Tokens/s, peak memory and MFU
(needed FLOPs of the sparse network, see paddock.model.cost). Where one arm runs out of memory, the
other is reported alone.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.step_profile import print_profile, synchronize
from benchmarks.table import Claim, print_claims, speedup
from paddock.data import PackedBatch
from paddock.model import ModelConfig, Transformer, preset
from paddock.model.cost import TrainingWorkload, mfu, training_flops
from paddock.train import Trainer, TrainSettings
from paddock.train.estimate import peak_flops
from paddock.train.master_weights import DTYPES
from paddock.train.objective import LanguageModelObjective
from paddock.train.run import pick_device
from paddock.train.settings import (
    AuxLossSettings,
    ComputeSettings,
    ModelInitSettings,
    OptimSettings,
)
from paddock.train.stages import StageSpec

ARMS = ("adamw", "muon", "activation_checkpointing", "transformers")
Step = Callable[[], float]
# As transformers trains: language loss on sparse attention, indexer not trained.
SPARSE = StageSpec(language=True, indexer=False, dense=False)
TARGETS = {("small", "8x4096"): 5.0}


def batch_of(rows: int, context: int, vocab: int) -> PackedBatch:
    trained_T = np.ones(rows * context, np.bool_)
    trained_T[::context] = False
    return PackedBatch(
        token_T=np.random.default_rng(0).integers(0, vocab, rows * context, dtype=np.int32),
        loss_mask_T=trained_T,
        lengths=(context,) * rows,
        sources=("random",) * rows,
        num_targets=int(trained_T.sum()),
    )


def paddock_step(
    config: ModelConfig,
    batch: PackedBatch,
    dtype: str,
    optimizer: str,
    activation_checkpointing: bool = False,
) -> Step:
    device = pick_device(None)
    settings = TrainSettings(
        steps=1,
        init=ModelInitSettings(preset="nano"),
        optim=OptimSettings(type=optimizer),  # type: ignore[arg-type]
        loss=AuxLossSettings(mtp_coef=0.0, mtp_coef_final=0.0, balance_coef=0.0),
        compute=ComputeSettings(dtype=dtype, activation_checkpointing=activation_checkpointing),  # type: ignore[arg-type]
    )
    network = Transformer.from_config(config, 0).to(device)
    objective = LanguageModelObjective(SPARSE, settings.loss)
    trainer = Trainer(network, objective, settings, Path(tempfile.gettempdir()) / "batch.npz")

    def step() -> float:
        report = trainer.step(batch, lr=1e-4, bias_rate=0.0, progress=0.0)
        return report.losses["loss"]

    step.trainer = trainer  # type: ignore[attr-defined]
    return step


def transformers_step(config: ModelConfig, batch: PackedBatch, dtype: str) -> Step:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from paddock.checkpoint.config_json import config_to_json

    device = pick_device(None)
    hf_config = GlmMoeDsaConfig(**config_to_json(config))
    hf_config._attn_implementation = "sdpa"
    model = GlmMoeDsaForCausalLM(hf_config).to(device, DTYPES[dtype]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type != "cpu")
    ids = torch.from_numpy(batch.token_T.astype(np.int64)).view(len(batch.lengths), -1).to(device)

    def step() -> float:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def measure(make: Callable[[], Step], steps: int) -> tuple[float, int] | None:
    """Median seconds of a step and peak bytes; None: out of memory."""
    on_gpu = torch.accelerator.is_available()
    try:
        step = make()
        times = []
        for i in range(steps + 2):
            if i == 2 and on_gpu:
                torch.accelerator.reset_peak_memory_stats()
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            times.append(time.perf_counter() - start)
        peak = torch.accelerator.max_memory_allocated() if on_gpu else 0
        return statistics.median(times[2:]), int(peak)
    except torch.OutOfMemoryError:
        return None
    finally:
        step = None  # type: ignore[assignment]
        gc.collect()
        if on_gpu:
            torch.accelerator.empty_cache()


def claims(
    name: str = "small",
    shapes: Sequence[str] = ("8x4096", "1x16384", "1x32768"),
    dtype: str = "bfloat16",
    steps: int = 5,
    arm_names: Sequence[str] = ARMS,
) -> list[Claim]:
    config = preset(name).model_copy(update={"mtp": None})
    peak = peak_flops(pick_device(None))
    rows = []
    for shape in shapes:
        count, context = map(int, shape.split("x"))
        batch = batch_of(count, context, config.vocab)
        tokens = count * context
        arms = {
            "adamw": lambda batch=batch: paddock_step(config, batch, dtype, "adamw"),
            "muon": lambda batch=batch: paddock_step(config, batch, dtype, "muon"),
            "activation_checkpointing": lambda batch=batch: paddock_step(
                config, batch, dtype, "adamw", True
            ),
            "transformers": lambda batch=batch: transformers_step(config, batch, dtype),
        }
        first = {arm: measure(make, steps) for arm, make in arms.items() if arm in arm_names}
        second = {arm: measure(make, steps) for arm, make in arms.items() if first.get(arm)}
        rates: dict[str, float | None] = {}
        for arm, one in first.items():
            two = second.get(arm)
            rates[arm] = tokens / min(one[0], two[0]) if one and two else None
            memory = f", {one[1] / 2**30:.1f} GiB" if one and one[1] else ""
            text = "out of memory" if rates[arm] is None else f"{rates[arm]:,.0f} tokens/s{memory}"
            if arm != "transformers" and peak and rates[arm]:
                flops = training_flops(config, context, TrainingWorkload())  # without indexer loss
                share = mfu(flops, rates[arm], peak)
                text += f", MFU {share:.1%} of {peak / 1e12:.0f} TFLOP/s"
            rows.append(Claim(name=f"{name} {shape} {dtype}: {arm}", measured=text))
        ours, theirs = rates.get("adamw"), rates.get("transformers")
        if ours and theirs:
            rows.append(
                speedup(
                    f"{name} {shape}: time per token against transformers",
                    1e6 / ours,
                    1e6 / theirs,
                    min_ratio=TARGETS.get((name, shape)),
                    unit="us",
                )
            )
    return rows


def claims_here() -> list[Claim]:
    """At a size that suits this machine."""
    if torch.accelerator.is_available():
        return claims("small", ("8x4096", "1x16384", "1x32768", "1x131072"), "bfloat16")
    rows = claims("nano", ("8x256", "1x1024"), "float32", steps=3)
    return [*rows, Claim(name="small, bfloat16", measured="needs a GPU")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="small")
    parser.add_argument("--shapes", default="8x4096,1x16384,1x32768")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--profile", action="store_true", help="print the time by part of a step")
    options = parser.parse_args()
    shapes, arms = options.shapes.split(","), options.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"unknown arm {', '.join(sorted(unknown))}; choose from {', '.join(ARMS)}")
    if not options.profile:
        print_claims(claims(options.config, shapes, options.dtype, options.steps, arms))
        return
    config = preset(options.config).model_copy(update={"mtp": None})
    for shape in shapes:
        count, context = map(int, shape.split("x"))
        step = paddock_step(config, batch_of(count, context, config.vocab), options.dtype, "adamw")
        print_profile(f"{options.config} {shape} {options.dtype}", step, step.trainer)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
