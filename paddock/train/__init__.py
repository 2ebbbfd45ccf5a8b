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

from paddock.train.loop import StepMetrics, train
from paddock.train.objective import Losses, Objective
from paddock.train.run import TrainingRun
from paddock.train.settings import TrainSettings
from paddock.train.trainer import Trainer, TrainingError, TrainStepOutput

__all__ = [
    "Losses",
    "Objective",
    "StepMetrics",
    "TrainSettings",
    "TrainStepOutput",
    "Trainer",
    "TrainingError",
    "TrainingRun",
    "train",
]
