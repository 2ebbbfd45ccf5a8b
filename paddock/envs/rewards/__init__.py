"""Rewards: rules, outcome models and judges behind one interface, with weights.

A scorer reads a submission and gives a score, or raises. A reward is made of parts, and the verdict
has every part on record.

calibration.py  scorers against answers of known worth
judge.py      a generative judge
reward_model.py  an outcome model behind HTTP
endpoint.py   JSON to an endpoint and back
rules.py      exact, matches, contains, overlap, length, JSON
reward.py     submission, score, part, and the verdict they make
settings.py   parts as a recipe says them
"""

from paddock.envs.rewards.calibration import (
    CalibratedReward,
    CalibrationExample,
    JudgeAgreement,
    measure_agreement,
    read_calibration_file,
)
from paddock.envs.rewards.endpoint import EndpointError, JsonEndpoint
from paddock.envs.rewards.judge import LLMJudge
from paddock.envs.rewards.reward import (
    RewardFunc,
    RewardScore,
    Submission,
    WeightedReward,
    combine_rewards,
)
from paddock.envs.rewards.reward_model import OutcomeRewardModel
from paddock.envs.rewards.settings import RewardSettingsUnion

__all__ = [
    "CalibratedReward",
    "CalibrationExample",
    "EndpointError",
    "JsonEndpoint",
    "JudgeAgreement",
    "LLMJudge",
    "OutcomeRewardModel",
    "RewardFunc",
    "RewardScore",
    "RewardSettingsUnion",
    "Submission",
    "WeightedReward",
    "combine_rewards",
    "measure_agreement",
    "read_calibration_file",
]
