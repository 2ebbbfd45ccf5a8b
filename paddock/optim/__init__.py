"""Optimizers over parameter roles, schedules and clipping; knows no model.

adamw.py     AdamW, a group for each kind of parameter
clip.py      gradient clipping that does not hide a broken gradient
muon.py      Muon and Muon Split for matrices, AdamW for the rest
param_groups.py  how each kind of parameter is treated
schedule.py  how a number moves over a run
"""

from paddock.optim.adamw import AdamSettings, AdamW
from paddock.optim.clip import clip_grad_norm_
from paddock.optim.muon import Muon, MuonSettings
from paddock.optim.schedule import ConstantSchedule, CosineSchedule, LinearSchedule, Schedule

__all__ = [
    "AdamSettings",
    "AdamW",
    "ConstantSchedule",
    "CosineSchedule",
    "LinearSchedule",
    "Muon",
    "MuonSettings",
    "Schedule",
    "clip_grad_norm_",
]
