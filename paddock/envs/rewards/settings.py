"""Parts of a reward as a recipe says them."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paddock.config import BaseSettings, RequiredFile
from paddock.envs.rewards import rules
from paddock.envs.rewards.calibrate import ANCHORS, Calibrated, read_anchors
from paddock.envs.rewards.judge import Judge
from paddock.envs.rewards.outcome import OutcomeModel
from paddock.envs.rewards.post import Endpoint
from paddock.envs.rewards.score import Part, Score, Scorer, Submission
from paddock.envs.schema import unknown_words


class _Part(BaseSettings):
    name: str = ""  # in the verdict; the kind, if it is left out
    weight: float = 1.0
    needed: bool = False  # a zero here is a zero in all

    def scorer(self) -> Scorer:
        raise NotImplementedError

    def data_files(self) -> tuple[RequiredFile, ...]:
        """The files that it reads."""
        return ()

    def part(self) -> Part:
        name = self.name or str(getattr(self, "kind"))  # noqa: B009
        return Part(name=name, scorer=self.scorer(), weight=self.weight, needed=self.needed)


class _Rule(_Part):
    of: Literal["reply", "answer"] = "reply"  # what is looked at; no answer found scores 0

    def score(self, text: str, work: Submission) -> float:
        raise NotImplementedError

    def scorer(self) -> Scorer:
        async def score(work: Submission) -> Score:
            text = work.reply if self.of == "reply" else work.answer
            return Score(0.0 if text is None else self.score(text, work))

        return score


class Exact(_Rule):
    kind: Literal["exact"]
    case: bool = False

    def score(self, text: str, work: Submission) -> float:
        return rules.exact(text, work.reference, case=self.case)


class Overlap(_Rule):
    kind: Literal["overlap"]

    def score(self, text: str, work: Submission) -> float:
        return rules.overlap(text, work.reference)


class Matches(_Rule):
    """Also a format: `pattern = "(?s)^<think>.*</think>.+"`."""

    kind: Literal["matches"]
    pattern: str

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return pattern

    def score(self, text: str, work: Submission) -> float:  # noqa: ARG002
        return rules.matches(text, self.pattern)


class Contains(_Rule):
    kind: Literal["contains"]
    words: tuple[str, ...] = Field(min_length=1)

    def score(self, text: str, work: Submission) -> float:  # noqa: ARG002
        return rules.contains(text, self.words)


class Length(_Rule):
    kind: Literal["length"]
    full: int = Field(ge=0)  # characters up to which the score is 1
    none: int = Field(ge=1)  # characters from which it is 0

    @model_validator(mode="after")
    def _falls(self) -> "Length":
        if self.none <= self.full:
            raise ValueError(f"none ({self.none}) must be above full ({self.full})")
        return self

    def score(self, text: str, work: Submission) -> float:  # noqa: ARG002
        return rules.length(text, full=self.full, none=self.none)


class JsonLike(_Rule):
    kind: Literal["json"]
    like: dict[str, Any] = Field(default_factory=dict)  # a JSON schema

    @field_validator("like")
    @classmethod
    def _understood(cls, like: dict[str, Any]) -> dict[str, Any]:
        if words := unknown_words(like):
            raise ValueError(f"has keywords that are not checked here: {', '.join(words)}")
        return like

    def score(self, text: str, work: Submission) -> float:  # noqa: ARG002
        return rules.json_like(text, self.like)


class _Remote(_Part):
    url: str
    key_file: str = ""
    seconds: float = Field(60.0, gt=0)
    tries: int = Field(3, ge=1)
    anchors: str = ""  # a file of answers of known worth, asked about before the first score
    least: float = Field(0.8, ge=0, le=1)  # share of the anchors that must agree

    def remote(self, endpoint: Endpoint) -> Scorer:
        raise NotImplementedError

    def data_files(self) -> tuple[RequiredFile, ...]:
        key = RequiredFile(path=self.key_file, contains=f"the API key of {self.url}, as text")
        anchors = RequiredFile(path=self.anchors, contains=ANCHORS)
        return tuple(file for file in (key, anchors) if file.path)

    def endpoint(self) -> Endpoint:
        return Endpoint(
            url=self.url, key_file=self.key_file, seconds=self.seconds, tries=self.tries
        )

    def scorer(self) -> Scorer:
        scorer = self.remote(self.endpoint())
        if not self.anchors:
            return scorer
        return Calibrated(scorer, read_anchors(self.anchors), least=self.least)


class OutcomePart(_Remote):
    kind: Literal["model"]
    field: str = "score"
    logit: bool = False

    def remote(self, endpoint: Endpoint) -> Scorer:
        return OutcomeModel(endpoint=endpoint, field=self.field, logit=self.logit)


class JudgePart(_Remote):
    """`url` is that of the API: https://host/v1."""

    kind: Literal["judge"]
    model: str
    rubric: str = Field(min_length=1)
    lowest: int = 1
    highest: int = 5
    votes: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(1024, ge=1)

    @model_validator(mode="after")
    def _rises(self) -> "JudgePart":
        if self.highest <= self.lowest:
            raise ValueError(f"highest ({self.highest}) must be above lowest ({self.lowest})")
        return self

    def endpoint(self) -> Endpoint:
        url = f"{self.url.rstrip('/')}/chat/completions"
        return Endpoint(url=url, key_file=self.key_file, seconds=self.seconds, tries=self.tries)

    def remote(self, endpoint: Endpoint) -> Scorer:
        asked = ("model", "rubric", "lowest", "highest", "votes", "temperature", "max_tokens")
        return Judge(endpoint=endpoint, **{name: getattr(self, name) for name in asked})


PartSettings = Annotated[
    Exact | Overlap | Matches | Contains | Length | JsonLike | OutcomePart | JudgePart,
    Field(discriminator="kind"),
]
