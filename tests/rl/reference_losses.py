"""Reference policy losses: token by token in plain Python, with derivatives by log pi by hand."""

from math import exp


def pop(rho, beta):
    return rho if 1 / beta <= rho <= beta else 0.0


def ppo(logp, old, advantage, below, above):
    """Value and derivative of min(r A, clip(r) A)."""
    r = exp(logp - old)
    clip = min(max(r, 1 - below), 1 + above)
    if advantage > 0:
        return (r * advantage, r * advantage) if r <= 1 + above else (clip * advantage, 0.0)
    if advantage < 0:
        return (r * advantage, r * advantage) if r >= 1 - below else (clip * advantage, 0.0)
    return 0.0, 0.0


def icepop(logp, old, rollout, advantage, *, beta, below, above):
    weight = pop(exp(old - rollout), beta)
    value, slope = ppo(logp, old, advantage, below, above)
    return weight * value, weight * slope


def corrected(logp, old, rollout, advantage, *, cap, below, above):
    weight = min(exp(old - rollout), cap)
    value, slope = ppo(logp, old, advantage, below, above)
    return weight * value, weight * slope


def double_sided(logp, rollout, advantage, *, below, above):
    r = exp(logp - rollout)
    f = r if 1 - below < r < 1 + above else 0.0
    return f * advantage * logp, f * advantage


def equation_1(rollouts, *, beta, below, above):
    """The loss of one group; a rollout is a list of (logp, old, rollout, advantage)."""
    total = 0.0
    for sequence in rollouts:
        inner = sum(icepop(*token, beta=beta, below=below, above=above)[0] for token in sequence)
        total += inner / len(sequence)
    return -total / len(rollouts)
