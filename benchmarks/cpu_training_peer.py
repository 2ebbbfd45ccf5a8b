"""One arm of `benchmarks.cpu_training`: a training loop in its own process.

    PYTHON -m benchmarks.cpu_training_peer ARM MODEL DTYPE
        ARM: paddock, transformers or transformers_fused

Reads a batch per line, {"rows": [[token ids]], "lr": RATE}, takes one step on it and answers with
{"seconds": S, "loss": L, "rss_mb": M}. The loss is that before the step; every token but the first
of a row is a target. AdamW without weight decay: which parameters decay differs between the arms.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

Rows = list[list[int]]
Step = Callable[[Rows, float], float]
BETAS, MAX_NORM = (0.9, 0.95), 1.0


def paddock(model: str, dtype: str) -> Step:
    from paddock.checkpoint import load_pretrained
    from paddock.data import PackedBatch
    from paddock.train import Trainer, TrainSettings
    from paddock.train.objective import LanguageModelObjective
    from paddock.train.run import init_device
    from paddock.train.settings import ComputeSettings, ModelInitSettings, OptimSettings
    from paddock.train.stages import stage_spec

    settings = TrainSettings(
        steps=1,
        init=ModelInitSettings(checkpoint=model),
        optim=OptimSettings(type="adamw", weight_decay=0, betas=BETAS, max_grad_norm=MAX_NORM),
        compute=ComputeSettings(dtype=dtype, device="cpu"),  # type: ignore[arg-type]
    )
    objective = LanguageModelObjective(stage_spec(settings), settings.loss)
    scratch = Path(tempfile.gettempdir()) / "non_finite.npz"
    init_device(settings.compute)
    trainer = Trainer(load_pretrained(Path(model)), objective, settings, scratch)

    def step(rows: Rows, lr: float) -> float:
        token_T = np.concatenate([np.array(row, np.int32) for row in rows])
        mask_T = np.concatenate([np.arange(len(row)) > 0 for row in rows])
        batch = PackedBatch(
            token_T=token_T,
            loss_mask_T=mask_T,
            lengths=tuple(map(len, rows)),
            sources=("random",) * len(rows),
            num_targets=int(mask_T.sum()),
        )
        return trainer.step(batch, lr=lr, bias_rate=0.0, progress=0.0).losses["loss"]

    return step


def transformers(model: str, dtype: str, *, fused: bool = False) -> Step:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=1.0, betas=BETAS, weight_decay=0.0, fused=fused
    )

    def step(rows: Rows, lr: float) -> float:
        token_BT = torch.tensor(rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = network(input_ids=token_BT, labels=token_BT, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def transformers_fused(model: str, dtype: str) -> Step:
    return transformers(model, dtype, fused=True)


ARMS = {
    "paddock": paddock,
    "transformers": transformers,
    "transformers_fused": transformers_fused,
}


def peak_rss_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    arm, model, dtype = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; only answers go to stdout
    step = ARMS[arm](model, dtype)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        loss = step(request["rows"], request["lr"])
        seconds = time.perf_counter() - started
        found = {"seconds": seconds, "loss": loss, "rss_mb": peak_rss_mb()}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
