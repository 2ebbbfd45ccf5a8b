"""What went wrong, whose doing it was, and whether a reward may be trusted all the same.

Harbor sorts failures by cause; we keep its causes and say what each means for training: mask, do
not punish.
"""

from dataclasses import dataclass
from typing import Literal

from paddock.envs.world import Stopped
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
class Meaning:
    kind: FailureKind | None  # of ours; None: no failure, the attempt is graded
    retry: bool  # another attempt may go better
    graded: bool  # the verifier still runs
    trusted: bool  # its reward may train a policy


MEANING: dict[Cause, Meaning] = {
    "sandbox_failed": Meaning("infrastructure", retry=True, graded=False, trusted=False),
    "model_provider_failed": Meaning("infrastructure", retry=True, graded=True, trusted=False),
    "harness_failed": Meaning("world", retry=False, graded=False, trusted=False),
    "unclassified": Meaning("world", retry=True, graded=True, trusted=False),
    "agent_exhausted_budget": Meaning(None, retry=False, graded=True, trusted=True),
    "agent_refused_task": Meaning(None, retry=False, graded=True, trusted=True),
    "verifier_failed": Meaning("grader", retry=False, graded=True, trusted=False),
    "cancelled": Meaning("infrastructure", retry=False, graded=False, trusted=False),
}


class TrialStopped(Stopped):
    """A failure of a trial, with Harbor's cause and the name Harbor gives such an exception."""

    def __init__(self, cause: Cause, exception: str, where: str, what: str) -> None:
        kind = MEANING[cause].kind
        assert kind is not None, f"{cause} is no failure"
        super().__init__(kind, where, what)
        self.cause, self.exception = cause, exception
