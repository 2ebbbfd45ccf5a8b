"""Outcome reward model (ORM) behind an HTTP endpoint."""

from dataclasses import dataclass
from math import exp, isfinite
from typing import Any

from paddock.envs.env import RolloutFailed
from paddock.envs.rewards.endpoint import EndpointError, JsonEndpoint
from paddock.envs.rewards.reward import RewardScore, Submission
from paddock.records import json_codec


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRewardModel:
    """Sends {"messages", "answer", "reference"} and reads the score from the reply.

    `field` is the path of the score, with dots ("data.0.score"). If `logit` is set, a sigmoid is
    applied to it.
    """

    endpoint: JsonEndpoint
    field: str = "score"
    logit: bool = False

    async def __call__(self, submission: Submission) -> RewardScore:
        body = {
            "messages": [json_codec.encode(message) for message in submission.messages],
            "answer": submission.answer or submission.reply,
            "reference": submission.reference,
        }
        try:
            found = await self.endpoint.post(body, self._parse)
        except EndpointError as error:
            raise RolloutFailed("grader", "outcome model", str(error)) from error
        return RewardScore(1 / (1 + exp(-max(-700.0, found))) if self.logit else found)

    def _parse(self, reply: Any) -> float:
        found = reply
        for step in self.field.split("."):
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"no {self.field!r} in {str(reply)[:200]}") from None
        if isinstance(found, bool) or not isinstance(found, int | float) or not isfinite(found):
            raise ValueError(f"{self.field!r} must be a number, got {found!r}")
        return float(found)
