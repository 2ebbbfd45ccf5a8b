"""Benchmarks: what a model can do in a world, and how sure that is.

run.py    a model in a world, many tasks at once
score.py  episodes as numbers
"""

from paddock.evals.run import EvalSettings, Evaluation, Plays, evaluate
from paddock.evals.score import EvalError, Score, pass_at, score

__all__ = [
    "EvalError",
    "EvalSettings",
    "Evaluation",
    "Plays",
    "Score",
    "evaluate",
    "pass_at",
    "score",
]
