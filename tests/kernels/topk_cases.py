"""Rows of scores that are hard to choose from, and the rule of choosing, by a stable sort."""

import numpy as np


def relu(x):
    return np.maximum(x, 0.0)


KINDS = {
    "random": lambda chance, n: chance.normal(size=n),
    "many ties": lambda chance, n: (chance.normal(size=n) * 20).round(),
    "plateau of zeros": lambda chance, n: relu(chance.normal(size=n) - 2.5),
    "plateau elsewhere": lambda chance, n: relu(chance.normal(size=n) - 1.0) + 3.7,
    "plateau under a slope": lambda chance, n: relu(chance.normal(size=n) - 0.9),
    "one of them huge": lambda chance, n: np.where(
        np.arange(n) == n // 3, 1e30, chance.normal(size=n)
    ),
    "far from zero": lambda chance, n: 1e3 + 1e-3 * chance.normal(size=n),
    "one value": lambda chance, n: np.full(n, -1.25),
    "both zeros": lambda chance, n: np.where(chance.random(n) < 0.5, -0.0, 0.0),
    "wide range": lambda chance, n: np.exp(chance.normal(size=n) * 8) - 1,
    "negative": lambda chance, n: -np.abs(chance.normal(size=n)),
    "tiny": lambda chance, n: chance.normal(size=n) * 1e-42,
    "ramp": lambda chance, n: np.arange(n),
    "ramp down": lambda chance, n: -np.arange(n),
    "hot end": lambda chance, n: chance.normal(size=n) + 50.0 * (np.arange(n) >= n - n // 8),
    "late plateau": lambda chance, n: np.where(np.arange(n) < n - n // 3, -1.0, 0.0),
    "mostly NaN": lambda chance, n: np.where(chance.random(n) < 0.9, np.nan, chance.normal(size=n)),
    "NaN alone": lambda chance, n: np.full(n, np.nan),
    "mostly -inf": lambda chance, n: np.where(chance.random(n) < 0.97, -np.inf, 1.0),
    "infinities": lambda chance, n: np.where(chance.random(n) < 0.4, np.inf, -np.inf),
}


def by_hand(row: np.ndarray, k: int) -> np.ndarray:
    score = np.where(np.isnan(row), -np.inf, row) + 0.0
    kept = np.sort(np.argsort(-score, kind="stable")[:k])
    return np.concatenate((kept, np.full(k - len(kept), -1))).astype(np.int32)
