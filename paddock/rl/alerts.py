"""What a person should look at while a run goes on."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddock.rl.settings import AlertSettings


@dataclass(frozen=True, slots=True)
class Alert:
    kind: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """The numbers of one batch that alerts are about."""

    entropy: float
    gap: float
    masked: float
    judged: int  # groups that ended since the last batch
    flat: int  # of them, those whose rewards were all equal
    lag: int = 0  # of the oldest token trained


def alerts(pulse: Pulse, limits: AlertSettings) -> Iterator[Alert]:
    """
    >>> sick = Pulse(entropy=0.001, gap=0.2, masked=0.0, judged=10, flat=10)
    >>> [alert.kind for alert in alerts(sick, AlertSettings())]
    ['entropy collapse', 'log-prob drift', 'zero-variance flood']
    """
    if pulse.entropy < limits.entropy_below:
        yield Alert(
            "entropy collapse",
            f"{pulse.entropy:.4f} nats a token, below {limits.entropy_below:g}: the policy says "
            "the same again and again",
        )
    most = limits.stale_gap_above if pulse.lag else limits.gap_above
    why = "samples are too stale" if pulse.lag else "they are not the same network"
    if pulse.gap > most:
        yield Alert(
            "log-prob drift",
            f"trainer and engine differ by {pulse.gap:.3f} nats a token, above {most:g}: {why}",
        )
    if pulse.judged and pulse.flat > limits.flat_above * pulse.judged:
        yield Alert(
            "zero-variance flood",
            f"{pulse.flat} of {pulse.judged} groups had equal rewards: tasks are too easy or too "
            "hard",
        )
    if pulse.masked > limits.masked_above:
        yield Alert(
            "masked out",
            f"{pulse.masked:.0%} of the tokens are outside the window: they teach nothing",
        )
