"""One loop, many stages: raising a model from raw text to sparse attention and dialogues.

batch.py      rows of data as tensors
evaluate.py   how well a network predicts text it never saw
loop.py       the training loop
objective.py  what a network is asked to get better at
plan.py       what a run will cost, said before it starts
policy.py     reinforcement learning as an objective
run.py        a run folder, and what a stage is made from
settings.py   what a training run is made of
stages.py     what a stage changes about the loop
step.py       one optimizer step
trial.py      how fast a step is on this machine
weights.py    exact weights, and the rounded ones a network computes with
"""

from paddock.train.loop import Moment, train
from paddock.train.objective import Losses, Objective
from paddock.train.run import Run
from paddock.train.settings import TrainSettings
from paddock.train.step import StepReport, Trainer, TrainingError

__all__ = [
    "Losses",
    "Moment",
    "Objective",
    "Run",
    "StepReport",
    "TrainSettings",
    "Trainer",
    "TrainingError",
    "train",
]
