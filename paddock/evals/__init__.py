"""Benchmarks: what a model can do in a world, and how sure that is.

evaluate.py  a model in a world, many tasks at once
metrics.py  episodes as numbers
"""

from paddock.evals.evaluate import EvalResult, EvalSettings, RunRollout, evaluate
from paddock.evals.metrics import EvalError, EvalMetrics, compute_metrics, pass_at_k

__all__ = [
    "EvalError",
    "EvalMetrics",
    "EvalResult",
    "EvalSettings",
    "RunRollout",
    "compute_metrics",
    "evaluate",
    "pass_at_k",
]
