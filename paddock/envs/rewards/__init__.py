"""Reward functions: rules, reward models and LLM judges behind one interface, with weights.

A reward function scores a submission or raises. The reward is the weighted sum of several
functions, and the verdict records each score.

calibration.py  agreement of a reward function with human scores
judge.py      LLM judge
reward_model.py  outcome reward model behind HTTP
endpoint.py   POST of JSON with retries
function.py   Python functions, called as TRL calls them
rules.py      exact match, regex, contains, token F1, length, JSON schema
reward.py     submission, score, weighted reward and their combination
settings.py   reward settings of a recipe
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
from paddock.envs.rewards.settings import FunctionReward, RewardSettingsUnion

__all__ = [
    "CalibratedReward",
    "CalibrationExample",
    "EndpointError",
    "FunctionReward",
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
