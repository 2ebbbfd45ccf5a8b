"""Evaluation of a policy in an environment: mean reward, standard error, pass@k.

evaluate.py  run rollouts of many tasks concurrently
metrics.py   metrics of rollouts
"""

from paddock.evals.evaluate import EvalResult, EvalSettings, evaluate
from paddock.evals.metrics import scored_reward

__all__ = [
    "EvalResult",
    "EvalSettings",
    "evaluate",
    "scored_reward",
]
