"""One loop, many stages: raising a model from raw text to sparse attention and dialogues.

micro_batch.py  rows of data as tensors
evaluate.py   how well a network predicts text it never saw
loop.py       the training loop
objective.py  what a network is asked to get better at
estimate.py   what a run will cost, said before it starts
policy.py     reinforcement learning as an objective
run.py        a run folder, and what a stage is made from
settings.py   what a training run is made of
stages.py     what a stage changes about the loop
trainer.py    one optimizer step
step_timing.py  how fast a step is on this machine
master_weights.py  exact weights, and the rounded ones a network computes with
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
