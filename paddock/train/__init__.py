"""Training: one loop for pretraining, mid-training, sparse-attention adaptation and SFT.

estimate.py        parameters, FLOPs and memory of a run, estimated before it starts
evaluate.py        validation loss, MTP acceptance rate, needle recall, indexer recall
loop.py            training loop: steps, validation, metrics, checkpoints
master_weights.py  float32 master weights and the copies that the model computes with
micro_batch.py     packed batches as tensors, split into micro batches
objective.py       language-model loss with MTP, load-balancing and indexer losses
policy.py          policy-gradient objective with routing replay
run.py             run folder, initial model, device placement
settings.py        settings of a training run
stages.py          losses, attention and frozen parameters of each stage
step_timing.py     step time measured on this machine
trainer.py         one optimizer step over micro batches
"""

from paddock.train import evaluate, policy
from paddock.train.estimate import TrainingEstimate, estimate_training, peak_flops
from paddock.train.loop import StepMetrics, build_lr_schedule, peak_memory_bytes, train
from paddock.train.micro_batch import MicroBatch
from paddock.train.run import (
    CHECKPOINTS,
    TrainingRun,
    claim_run_folder,
    init_device,
    load_init_config,
    open_corpus,
    pick_device,
)
from paddock.train.settings import (
    AuxLossSettings,
    CheckpointSettings,
    ComputeSettings,
    ModelInitSettings,
    OptimSettings,
    TrainSettings,
)
from paddock.train.step_timing import fits_in_memory, free_memory_bytes, measure_step_time
from paddock.train.trainer import Trainer, TrainStepOutput

__all__ = [
    "CHECKPOINTS",
    "AuxLossSettings",
    "CheckpointSettings",
    "ComputeSettings",
    "MicroBatch",
    "ModelInitSettings",
    "OptimSettings",
    "StepMetrics",
    "TrainSettings",
    "TrainStepOutput",
    "Trainer",
    "TrainingEstimate",
    "TrainingRun",
    "build_lr_schedule",
    "claim_run_folder",
    "estimate_training",
    "evaluate",
    "fits_in_memory",
    "free_memory_bytes",
    "init_device",
    "load_init_config",
    "measure_step_time",
    "open_corpus",
    "peak_flops",
    "peak_memory_bytes",
    "pick_device",
    "policy",
    "train",
]
