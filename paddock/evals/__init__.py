"""Benchmarks: what a model can do in a world, and how sure that is.

evaluate.py  a model in a world, many tasks at once
metrics.py  episodes as numbers
"""

from paddock.evals.evaluate import EvalResult, EvalSettings, evaluate
from paddock.evals.metrics import scored_reward

__all__ = [
    "EvalResult",
    "EvalSettings",
    "evaluate",
    "scored_reward",
]
