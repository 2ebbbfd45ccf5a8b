"""Reward settings of a recipe, one class per kind."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paddock.config import BaseSettings, RequiredFile
from paddock.envs.json_schema import unsupported_keywords
from paddock.envs.rewards import rules
from paddock.envs.rewards.calibration import (
    CALIBRATION_FILE_FORMAT,
    CalibratedReward,
    read_calibration_file,
)
from paddock.envs.rewards.endpoint import JsonEndpoint
from paddock.envs.rewards.function import RewardFunction, function_file
from paddock.envs.rewards.judge import LLMJudge
from paddock.envs.rewards.reward import RewardFunc, RewardScore, Submission, WeightedReward
from paddock.envs.rewards.reward_model import OutcomeRewardModel


class _RewardSettings(BaseSettings):
    name: str = ""  # in the verdict; default: the kind, or the function's name
    weight: float = 1.0
    gate: bool = False  # the score multiplies the total: 0 here is 0 overall

    def make_reward_func(self) -> RewardFunc:
        raise NotImplementedError

    def data_files(self) -> tuple[RequiredFile, ...]:
        """Files that this reward reads."""
        return ()

    def make_reward(self) -> WeightedReward:
        return WeightedReward(
            name=self.name or self.default_name(),
            func=self.make_reward_func(),
            weight=self.weight,
            gate=self.gate,
        )

    def default_name(self) -> str:
        return str(getattr(self, "kind"))  # noqa: B009


class _RuleSettings(_RewardSettings):
    applies_to: Literal["reply", "answer"] = "reply"  # no answer found scores 0

    def score(self, text: str, submission: Submission) -> float:
        raise NotImplementedError

    def make_reward_func(self) -> RewardFunc:
        async def score(submission: Submission) -> RewardScore:
            text = submission.reply if self.applies_to == "reply" else submission.answer
            return RewardScore(0.0 if text is None else self.score(text, submission))

        return score


class ExactMatchReward(_RuleSettings):
    kind: Literal["exact"]
    case_sensitive: bool = False

    def score(self, text: str, submission: Submission) -> float:
        return rules.exact_match(text, submission.reference, case=self.case_sensitive)


class TokenF1Reward(_RuleSettings):
    kind: Literal["overlap"]

    def score(self, text: str, submission: Submission) -> float:
        return rules.token_f1(text, submission.reference)


class RegexReward(_RuleSettings):
    """Also checks a format: `pattern = "(?s)^<think>.*</think>.+"`."""

    kind: Literal["matches"]
    pattern: str

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"must be a regular expression: {error}") from None
        return pattern

    def score(self, text: str, submission: Submission) -> float:  # noqa: ARG002
        return rules.regex_match(text, self.pattern)


class ContainsReward(_RuleSettings):
    kind: Literal["contains"]
    words: tuple[str, ...] = Field(min_length=1)

    def score(self, text: str, submission: Submission) -> float:  # noqa: ARG002
        return rules.contains_words(text, self.words)


class LengthReward(_RuleSettings):
    kind: Literal["length"]
    full_reward_chars: int = Field(ge=0)  # score 1 up to this length
    zero_reward_chars: int = Field(ge=1)  # score 0 from this length on

    @model_validator(mode="after")
    def _falls(self) -> "LengthReward":
        if self.zero_reward_chars <= self.full_reward_chars:
            raise ValueError(
                f"zero_reward_chars ({self.zero_reward_chars}) must be greater than "
                f"full_reward_chars ({self.full_reward_chars})"
            )
        return self

    def score(self, text: str, submission: Submission) -> float:  # noqa: ARG002
        return rules.length_score(text, full=self.full_reward_chars, zero=self.zero_reward_chars)


class JsonSchemaReward(_RuleSettings):
    kind: Literal["json"]
    json_schema: dict[str, Any] = Field(default_factory=dict)

    @field_validator("json_schema")
    @classmethod
    def _is_supported(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if words := unsupported_keywords(schema):
            raise ValueError(f"has unsupported keywords: {', '.join(words)}")
        return schema

    def score(self, text: str, submission: Submission) -> float:  # noqa: ARG002
        return rules.matches_json_schema(text, self.json_schema)


class FunctionReward(_RewardSettings):
    """A function of yours, called as TRL calls its reward functions."""

    kind: Literal["function"]
    func: str = Field(
        pattern=r"^[^:]+:\w+$"
    )  # "my_rewards.py:accuracy" or "package.module:accuracy"
    timeout_s: Annotated[float, Field(gt=0)] = 30.0  # of CPU time; six times as much by the clock
    allow_network: bool = False

    def make_reward_func(self) -> RewardFunc:
        return RewardFunction(self.func, seconds=self.timeout_s, network=self.allow_network)

    def default_name(self) -> str:
        return self.func.rpartition(":")[2]

    def data_files(self) -> tuple[RequiredFile, ...]:
        file = function_file(self.func)
        contains = f"Python with the reward function {self.default_name()!r}"
        return (RequiredFile(path=file, contains=contains),) if file else ()


class _RemoteSettings(_RewardSettings):
    url: str
    api_key_file: str = ""
    timeout_s: float = Field(60.0, gt=0)
    max_tries: int = Field(3, ge=1)
    calibration_file: str = ""  # answers with human scores, scored before the first rollout
    min_agreement: float = Field(0.8, ge=0, le=1)  # fraction of them that must agree

    def make_remote_func(self, endpoint: JsonEndpoint) -> RewardFunc:
        raise NotImplementedError

    def data_files(self) -> tuple[RequiredFile, ...]:
        key = RequiredFile(path=self.api_key_file, contains=f"the API key of {self.url}, as text")
        calibration = RequiredFile(path=self.calibration_file, contains=CALIBRATION_FILE_FORMAT)
        return tuple(file for file in (key, calibration) if file.path)

    def endpoint(self) -> JsonEndpoint:
        return JsonEndpoint(
            url=self.url, key_file=self.api_key_file, seconds=self.timeout_s, tries=self.max_tries
        )

    def make_reward_func(self) -> RewardFunc:
        reward_func = self.make_remote_func(self.endpoint())
        if not self.calibration_file:
            return reward_func
        return CalibratedReward(
            reward_func,
            read_calibration_file(self.calibration_file),
            min_agreement=self.min_agreement,
        )


class RewardModelReward(_RemoteSettings):
    kind: Literal["model"]
    score_field: str = "score"
    is_logit: bool = False

    def make_remote_func(self, endpoint: JsonEndpoint) -> RewardFunc:
        return OutcomeRewardModel(endpoint=endpoint, field=self.score_field, logit=self.is_logit)


class JudgeReward(_RemoteSettings):
    """`url` is the API base, such as https://host/v1."""

    kind: Literal["judge"]
    model: str
    rubric: str = Field(min_length=1)
    min_score: int = 1
    max_score: int = 5
    num_votes: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(1024, ge=1)

    @model_validator(mode="after")
    def _rises(self) -> "JudgeReward":
        if self.max_score <= self.min_score:
            raise ValueError(
                f"max_score ({self.max_score}) must be greater than min_score ({self.min_score})"
            )
        return self

    def endpoint(self) -> JsonEndpoint:
        url = f"{self.url.rstrip('/')}/chat/completions"
        return JsonEndpoint(
            url=url, key_file=self.api_key_file, seconds=self.timeout_s, tries=self.max_tries
        )

    def make_remote_func(self, endpoint: JsonEndpoint) -> RewardFunc:
        return LLMJudge(
            endpoint=endpoint,
            model=self.model,
            rubric=self.rubric,
            min_score=self.min_score,
            max_score=self.max_score,
            num_votes=self.num_votes,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
        )


RewardSettingsUnion = Annotated[
    ExactMatchReward
    | TokenF1Reward
    | RegexReward
    | ContainsReward
    | LengthReward
    | JsonSchemaReward
    | FunctionReward
    | RewardModelReward
    | JudgeReward,
    Field(discriminator="kind"),
]
