"""Failure causes of Harbor and what each means for training.

A failure that the policy did not cause has no reward: the rollout is masked, not punished.
"""

from dataclasses import dataclass
from typing import Literal

from paddock.envs.env import RolloutFailed
from paddock.records import FailureKind

Cause = Literal[
    "sandbox_failed",
    "model_provider_failed",
    "harness_failed",
    "unclassified",
    "agent_exhausted_budget",
    "agent_refused_task",
    "verifier_failed",
    "cancelled",
]


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """How a cause is handled."""

    kind: FailureKind | None  # kind of the recorded Failure; None: the rollout is scored
    retry: bool  # a retry may succeed
    verified: bool  # the verifier still runs
    trusted: bool  # its reward may be trained on


FAILURE_POLICIES: dict[Cause, FailurePolicy] = {
    "sandbox_failed": FailurePolicy("infrastructure", retry=True, verified=False, trusted=False),
    "model_provider_failed": FailurePolicy(
        "infrastructure", retry=True, verified=True, trusted=False
    ),
    "harness_failed": FailurePolicy("world", retry=False, verified=False, trusted=False),
    "unclassified": FailurePolicy("world", retry=True, verified=True, trusted=False),
    "agent_exhausted_budget": FailurePolicy(None, retry=False, verified=True, trusted=True),
    "agent_refused_task": FailurePolicy(None, retry=False, verified=True, trusted=True),
    "verifier_failed": FailurePolicy("grader", retry=False, verified=True, trusted=False),
    "cancelled": FailurePolicy("infrastructure", retry=False, verified=False, trusted=False),
}


class TrialFailed(RolloutFailed):
    """A failed trial, with Harbor's cause and Harbor's name of the exception."""

    def __init__(self, cause: Cause, exception: str, where: str, what: str) -> None:
        kind = FAILURE_POLICIES[cause].kind
        assert kind is not None, f"{cause} is not a failure"
        super().__init__(kind, where, what)
        self.cause, self.exception = cause, exception
