"""Rewards: rules, outcome models and judges behind one interface, with weights.

A scorer reads a submission and gives a score, or raises. A reward is made of parts, and the verdict
has every part on record.

calibrate.py  scorers against answers of known worth
judge.py      a generative judge
outcome.py    an outcome model behind HTTP
post.py       JSON to an endpoint and back
rules.py      exact, matches, contains, overlap, length, JSON
score.py      submission, score, part, and the verdict they make
settings.py   parts as a recipe says them
"""

from paddock.envs.rewards.calibrate import Agreement, Anchor, Calibrated, agreement, read_anchors
from paddock.envs.rewards.judge import Judge
from paddock.envs.rewards.outcome import OutcomeModel
from paddock.envs.rewards.post import Endpoint, PostFailed
from paddock.envs.rewards.score import Part, Score, Scorer, Submission, verdict
from paddock.envs.rewards.settings import PartSettings

__all__ = [
    "Agreement",
    "Anchor",
    "Calibrated",
    "Endpoint",
    "Judge",
    "OutcomeModel",
    "Part",
    "PartSettings",
    "PostFailed",
    "Score",
    "Scorer",
    "Submission",
    "agreement",
    "read_anchors",
    "verdict",
]
