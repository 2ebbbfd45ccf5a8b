"""Optimizers by parameter role, schedules and gradient clipping; independent of any model.

adamw.py     AdamW with one parameter group per kind of parameter
clip.py      gradient-norm clipping that leaves non-finite gradients visible
muon.py      Muon and Muon Split for matrices, AdamW for the rest
param_groups.py  learning-rate scale and weight decay of each kind of parameter
schedule.py  learning-rate, batch-size and other schedules over a run
"""

from paddock.optim.adamw import AdamSettings, AdamW
from paddock.optim.clip import clip_grad_norm_
from paddock.optim.muon import Muon, MuonSettings
from paddock.optim.schedule import (
    ConstantSchedule,
    CosineSchedule,
    LinearRampSchedule,
    LinearSchedule,
    PiecewiseConstantSchedule,
    Schedule,
)

__all__ = [
    "AdamSettings",
    "AdamW",
    "ConstantSchedule",
    "CosineSchedule",
    "LinearRampSchedule",
    "LinearSchedule",
    "Muon",
    "MuonSettings",
    "PiecewiseConstantSchedule",
    "Schedule",
    "clip_grad_norm_",
]
