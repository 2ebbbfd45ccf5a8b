"""Training health alerts: entropy collapse, train-inference mismatch, zero variance, masking."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddock.rl.settings import AlertSettings


@dataclass(frozen=True, slots=True)
class Alert:
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSignals:
    """The metrics of one batch that alerts are based on."""

    entropy: float
    logprob_diff: float
    masked: float
    num_groups: int  # groups that ended since the last batch
    num_zero_variance: int  # of them, zero-variance groups
    staleness: int = 0  # of the oldest trained token


def check_alerts(signals: HealthSignals, limits: AlertSettings) -> Iterator[Alert]:
    """Every alert that the signals raise.

    >>> bad = HealthSignals(
    ...     entropy=0.001, logprob_diff=0.2, masked=0.0, num_groups=10, num_zero_variance=10
    ... )
    >>> [alert.kind for alert in check_alerts(bad, AlertSettings())]
    ['entropy collapse', 'train-inference mismatch', 'too many zero-variance groups']
    """
    if signals.entropy < limits.entropy_below:
        yield Alert(
            "entropy collapse",
            f"{signals.entropy:.4f} nats/token, below {limits.entropy_below:g}: the policy samples "
            "the same completions again and again",
        )
    max_diff = limits.stale_logprob_diff_above if signals.staleness else limits.logprob_diff_above
    cause = "samples are too stale" if signals.staleness else "their weights or kernels differ"
    if signals.logprob_diff > max_diff:
        yield Alert(
            "train-inference mismatch",
            f"log-probabilities of trainer and engine differ by {signals.logprob_diff:.3f} "
            f"nats/token, above {max_diff:g}: {cause}",
        )
    num_groups, num_zero_variance = signals.num_groups, signals.num_zero_variance
    if num_groups and num_zero_variance > limits.zero_variance_above * num_groups:
        yield Alert(
            "too many zero-variance groups",
            f"{num_zero_variance} of {num_groups} groups had equal rewards: tasks are too easy or "
            "too hard",
        )
    if signals.masked > limits.masked_above:
        yield Alert(
            "too many masked tokens",
            f"{signals.masked:.0%} of the tokens are outside the importance-sampling window and "
            "have no gradient",
        )
