"""Optimizers over parameter roles, schedules and clipping; knows no model.

adamw.py     AdamW, a group for each kind of parameter
clip.py      gradient clipping that does not hide a broken gradient
muon.py      Muon and Muon Split for matrices, AdamW for the rest
roles.py     how each kind of parameter is treated
schedule.py  how a number moves over a run
"""

from .adamw import AdamSettings, AdamW
from .clip import clip_gradients
from .muon import Muon, MuonSettings
from .roles import Rule
from .schedule import Constant, Cosine, Linear, Rise, Schedule, Stairs

__all__ = [
    "AdamSettings",
    "AdamW",
    "Constant",
    "Cosine",
    "Linear",
    "Muon",
    "MuonSettings",
    "Rise",
    "Rule",
    "Schedule",
    "Stairs",
    "clip_gradients",
]
