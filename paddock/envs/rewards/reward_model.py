"""An outcome model: a network that reads a conversation and says what it is worth."""

from dataclasses import dataclass
from math import exp, isfinite
from typing import Any

from paddock.envs.env import RolloutFailed
from paddock.envs.rewards.endpoint import EndpointError, JsonEndpoint
from paddock.envs.rewards.reward import RewardScore, Submission
from paddock.records import json_codec


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRewardModel:
    """A scorer behind HTTP. It is sent {"messages", "answer", "reference"}; `field` says where in
    its reply the number is: names and places with dots between them ("data.0.score"). `logit`: the
    number is a log-odds and becomes a share."""

    endpoint: JsonEndpoint
    field: str = "score"
    logit: bool = False

    async def __call__(self, work: Submission) -> RewardScore:
        body = {
            "messages": [json_codec.encode(message) for message in work.messages],
            "answer": work.answer or work.reply,
            "reference": work.reference,
        }
        try:
            found = await self.endpoint.post(body, self._read)
        except EndpointError as error:
            raise RolloutFailed("grader", "outcome model", str(error)) from error
        return RewardScore(1 / (1 + exp(-max(-700.0, found))) if self.logit else found)

    def _read(self, reply: Any) -> float:
        found = reply
        for step in self.field.split("."):
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"no {self.field!r} in {str(reply)[:200]}") from None
        if isinstance(found, bool) or not isinstance(found, int | float) or not isfinite(found):
            raise ValueError(f"{self.field!r} is {found!r}, not a number")
        return float(found)
