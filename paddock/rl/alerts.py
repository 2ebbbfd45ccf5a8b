"""What a person should look at while a run goes on."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddock.rl.settings import AlertSettings


@dataclass(frozen=True, slots=True)
class Alert:
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSignals:
    """The numbers of one batch that alerts are about."""

    entropy: float
    logprob_diff: float
    masked: float
    num_groups: int  # groups that ended since the last batch
    num_zero_variance: int  # of them, those whose rewards were all equal
    staleness: int = 0  # of the oldest token trained


def check_alerts(pulse: HealthSignals, limits: AlertSettings) -> Iterator[Alert]:
    """
    >>> sick = HealthSignals(entropy=0.001, gap=0.2, masked=0.0, judged=10, flat=10)
    >>> [alert.kind for alert in check_alerts(sick, AlertSettings())]
    ['entropy collapse', 'log-prob drift', 'zero-variance flood']
    """
    if pulse.entropy < limits.entropy_below:
        yield Alert(
            "entropy collapse",
            f"{pulse.entropy:.4f} nats/token, below {limits.entropy_below:g}: the policy says "
            "the same again and again",
        )
    most = limits.stale_logprob_diff_above if pulse.staleness else limits.logprob_diff_above
    why = "samples are too stale" if pulse.staleness else "they are not the same network"
    if pulse.logprob_diff > most:
        yield Alert(
            "train-inference mismatch",
            f"trainer and engine differ by {pulse.logprob_diff:.3f} nats/token, above {most:g}: {why}",
        )
    if pulse.num_groups and pulse.num_zero_variance > limits.zero_variance_above * pulse.num_groups:
        yield Alert(
            "too many zero-variance groups",
            f"{pulse.num_zero_variance} of {pulse.num_groups} groups had equal rewards: tasks are too easy or too "
            "hard",
        )
    if pulse.masked > limits.masked_above:
        yield Alert(
            "too many masked tokens",
            f"{pulse.masked:.0%} of the tokens are outside the window: they teach nothing",
        )
