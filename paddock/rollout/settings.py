"""Rollout settings: batch size, staleness, weight sync, concurrency; limits and agent per task."""

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from paddock.config import BaseSettings, NonNegativeWeight
from paddock.rollout.context_management import ContextSettings

RatioUnit = Literal["groups", "tokens", "seconds"]


class RolloutSettings(BaseSettings):
    """How far rollouts may run ahead of the trainer, and what happens to stale ones.

    Staleness is counted in updates: those done when a token is trained, minus those done when the
    weights that sampled it were published. `max_staleness` is a hard bound; `pipeline_depth` says
    how many batches are started ahead, and so how stale tokens usually are.

    >>> RolloutSettings(pipeline_depth=0, max_staleness=0).is_synchronous
    True
    >>> RolloutSettings(sync_weights_every=4, max_staleness=2)
    Traceback (most recent call last):
    pydantic_core._pydantic_core.ValidationError: 1 validation error for RolloutSettings
      Value error, 'max_staleness' 2 is less than 3, the staleness of the freshest tokens when \
weights are synced every 4 updates [type=value_error, input_value={'sync_weights_every': 4, \
'max_staleness': 2}, input_type=dict]
    ...
    """

    groups_per_batch: PositiveInt = 8
    pipeline_depth: NonNegativeInt = 1  # batches in flight besides the one being trained
    max_staleness: NonNegativeInt = 1  # updates
    on_stale: Literal["wait", "drop"] = "wait"
    # wait: the trainer waits for groups that would become too stale; nothing is dropped
    # drop: groups whose oldest token is too stale are dropped and replaced
    # What task ratios are shares of: trained groups, their sampled tokens, or the seconds their
    # rollouts took.
    ratio_unit: RatioUnit = "groups"
    order: Literal["oldest_first", "in_order"] = "oldest_first"
    # oldest_first: a batch takes finished groups first; in_order: groups by their number
    updates_per_batch: PositiveInt = 1
    sync_weights_every: PositiveInt = 1  # weight sync after so many updates, at the end of a batch
    # Weight sync only while nothing is in flight: bitwise identical results and resume.
    deterministic: bool = False
    max_concurrent: PositiveInt = 256  # running rollouts
    min_concurrent: PositiveInt = 8  # lower bound when the KV cache is full
    stall_timeout_s: PositiveFloat = 60.0  # without a finished rollout, before it is logged
    retry_disabled_after: PositiveInt = 2  # batches until a disabled task is retried

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        batches = -(-self.sync_weights_every // self.updates_per_batch)
        minimum = batches * self.updates_per_batch - 1
        if self.max_staleness < minimum:
            raise ValueError(
                f"'max_staleness' {self.max_staleness} is less than {minimum}, the staleness of"
                f" the freshest tokens when weights are synced every {minimum + 1} updates"
            )
        if self.deterministic and (self.order != "in_order" or self.on_stale != "wait"):
            raise ValueError('\'deterministic\' needs order = "in_order" and on_stale = "wait"')
        if self.deterministic and self.ratio_unit == "seconds":
            raise ValueError("'deterministic' excludes ratio_unit = \"seconds\", which vary")
        if self.min_concurrent > self.max_concurrent:
            raise ValueError(
                f"'min_concurrent' {self.min_concurrent} exceeds"
                f" 'max_concurrent' {self.max_concurrent}"
            )
        return self

    @property
    def is_synchronous(self) -> bool:
        """Whether no rollout is in flight while the trainer works."""
        return self.pipeline_depth == 0 or self.max_staleness < self.updates_per_batch


class PromptWeightSettings(BaseSettings):
    """How often a prompt is drawn, by its running pass rate; see prompt_weights.py."""

    min_weight: Annotated[float, Field(gt=0, le=1)] = 0.1  # of a prompt always or never solved
    momentum: Annotated[float, Field(ge=0, lt=1)] = (
        0.25  # of the running pass rate: prompts are seen seldom
    )
    pass_reward: FiniteFloat = 1.0  # lowest reward of a rollout that passes


class TaskSettings(BaseSettings):
    """Settings of one task of a run."""

    ratio: NonNegativeWeight = 1.0  # share of `ratio_unit`, relative to the other tasks
    group_size: PositiveInt = 8
    max_concurrent: PositiveInt | None = None  # running rollouts of this task
    attempt_timeout_s: PositiveFloat = 600.0  # after which a rollout is cancelled
    max_consecutive_failed: PositiveInt = 8  # groups, before the task is disabled
    max_consecutive_filtered: PositiveInt = 64  # groups, before the task is disabled
    required: bool = False  # abort the run instead of disabling the task
    context_management: ContextSettings = ContextSettings()
    prompt_weights: PromptWeightSettings | None = None  # None: every prompt equally often


class AgentSettings(BaseSettings):
    """An agent elsewhere that takes the turns of a task's rollouts; exactly one way to run it."""

    command: str | None = None  # started for every rollout, with its session in the environment
    url: str | None = None  # that the start of a rollout is posted to, until the agent is done
    pull: bool = False  # workers ask for rollouts
    # The environment scores a rollout unless one of these does:
    reward_url: str | None = None  # that the task and the conversation are posted to
    posted_verdict: bool = False  # whoever runs the agent posts the verdict
    reward_timeout_s: PositiveFloat = 120.0  # of either, after the agent's end
    max_retries: NonNegativeInt = 3  # of a rollout whose agent was lost
    idle_timeout_s: PositiveFloat = 120.0  # with `pull`: without a request, before it is lost

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.command is not None) + (self.url is not None) + self.pull != 1:
            raise ValueError("set exactly one of 'command', 'url' and 'pull = true'")
        if self.reward_url is not None and self.posted_verdict:
            raise ValueError("'reward_url' and 'posted_verdict' exclude each other")
        return self
