"""Rows of scores with difficult ties, and top-k by a stable sort as the expected result."""

import numpy as np


def relu(x):
    return np.maximum(x, 0.0)


KINDS = {
    "random": lambda rng, n: rng.normal(size=n),
    "many ties": lambda rng, n: (rng.normal(size=n) * 20).round(),
    "plateau of zeros": lambda rng, n: relu(rng.normal(size=n) - 2.5),
    "plateau above zero": lambda rng, n: relu(rng.normal(size=n) - 1.0) + 3.7,
    "plateau under a slope": lambda rng, n: relu(rng.normal(size=n) - 0.9),
    "one of them huge": lambda rng, n: np.where(np.arange(n) == n // 3, 1e30, rng.normal(size=n)),
    "far from zero": lambda rng, n: 1e3 + 1e-3 * rng.normal(size=n),
    "one value": lambda rng, n: np.full(n, -1.25),
    "both zeros": lambda rng, n: np.where(rng.random(n) < 0.5, -0.0, 0.0),
    "wide range": lambda rng, n: np.exp(rng.normal(size=n) * 8) - 1,
    "negative": lambda rng, n: -np.abs(rng.normal(size=n)),
    "tiny": lambda rng, n: rng.normal(size=n) * 1e-42,
    "ramp": lambda rng, n: np.arange(n),
    "ramp down": lambda rng, n: -np.arange(n),
    "hot end": lambda rng, n: rng.normal(size=n) + 50.0 * (np.arange(n) >= n - n // 8),
    "late plateau": lambda rng, n: np.where(np.arange(n) < n - n // 3, -1.0, 0.0),
    "mostly NaN": lambda rng, n: np.where(rng.random(n) < 0.9, np.nan, rng.normal(size=n)),
    "NaN alone": lambda rng, n: np.full(n, np.nan),
    "mostly -inf": lambda rng, n: np.where(rng.random(n) < 0.97, -np.inf, 1.0),
    "infinities": lambda rng, n: np.where(rng.random(n) < 0.4, np.inf, -np.inf),
}


def by_hand(row: np.ndarray, k: int) -> np.ndarray:
    score = np.where(np.isnan(row), -np.inf, row) + 0.0
    kept = np.sort(np.argsort(-score, kind="stable")[:k])
    return np.concatenate((kept, np.full(k - len(kept), -1))).astype(np.int32)
