"""Optimizers over parameter roles, schedules and clipping; knows no model.

adamw.py     AdamW, a group for each kind of parameter
clip.py      gradient clipping that does not hide a broken gradient
muon.py      Muon and Muon Split for matrices, AdamW for the rest
param_groups.py  how each kind of parameter is treated
schedule.py  how a number moves over a run
"""

from .adamw import AdamSettings, AdamW
from .clip import clip_grad_norm_
from .muon import Muon, MuonSettings
from .param_groups import ParamGroupOptions
from .schedule import (
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
    "ParamGroupOptions",
    "PiecewiseConstantSchedule",
    "Schedule",
    "clip_grad_norm_",
]
