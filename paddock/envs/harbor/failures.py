"""What went wrong, whose doing it was, and whether a reward may be trusted all the same.

Harbor sorts failures by cause; we keep its causes and say what each means for training: mask, do
not punish.
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
    kind: FailureKind | None  # of ours; None: no failure, the attempt is graded
    retry: bool  # another attempt may go better
    graded: bool  # the verifier still runs
    trusted: bool  # its reward may train a policy


FAILURE_POLICIES: dict[Cause, FailurePolicy] = {
    "sandbox_failed": FailurePolicy("infrastructure", retry=True, graded=False, trusted=False),
    "model_provider_failed": FailurePolicy(
        "infrastructure", retry=True, graded=True, trusted=False
    ),
    "harness_failed": FailurePolicy("world", retry=False, graded=False, trusted=False),
    "unclassified": FailurePolicy("world", retry=True, graded=True, trusted=False),
    "agent_exhausted_budget": FailurePolicy(None, retry=False, graded=True, trusted=True),
    "agent_refused_task": FailurePolicy(None, retry=False, graded=True, trusted=True),
    "verifier_failed": FailurePolicy("grader", retry=False, graded=True, trusted=False),
    "cancelled": FailurePolicy("infrastructure", retry=False, graded=False, trusted=False),
}


class TrialFailed(RolloutFailed):
    """A failure of a trial, with Harbor's cause and the name Harbor gives such an exception."""

    def __init__(self, cause: Cause, exception: str, where: str, what: str) -> None:
        kind = FAILURE_POLICIES[cause].kind
        assert kind is not None, f"{cause} is no failure"
        super().__init__(kind, where, what)
        self.cause, self.exception = cause, exception
