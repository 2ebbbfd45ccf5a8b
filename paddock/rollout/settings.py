"""How rollouts are paced, and what a task of a run may use up."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from paddock.config import BaseSettings

NonNegativeWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RolloutSettings(BaseSettings):
    """How far rollouts may run ahead of the trainer, and what happens to those that are late.

    Staleness is counted in updates: those done when a token is trained, less those that were done
    when the weights that sampled it were published. `max_staleness` is a bound that nothing passes;
    `pipeline_depth` says how much work is begun ahead and thereby how stale tokens usually are.

    >>> RolloutSettings(pipeline_depth=0, max_staleness=0).is_synchronous
    True
    >>> RolloutSettings(publish_every=4, max_staleness=2)
    Traceback (most recent call last):
    pydantic_core._pydantic_core.ValidationError: 1 validation error for Pace
      Value error, 'max_staleness' 2 is less than 3, what even fresh tokens reach when weights are \
published every 4 updates [type=value_error, input_value={'publish_every': 4, 'max_staleness': 2}, \
input_type=dict]
    ...
    """

    groups_per_batch: PositiveInt = 8
    pipeline_depth: NonNegativeInt = 1  # batches in flight besides the one the trainer is at
    max_staleness: NonNegativeInt = 1  # updates
    on_stale: Literal["wait", "drop"] = "wait"
    # wait: the trainer waits for what would become too old, nothing is thrown away
    # drop: groups whose oldest token is too old are thrown away and issued anew
    order: Literal["oldest_first", "in_order"] = "oldest_first"
    # oldest_first: a batch takes whatever is finished; in_order: problems in their order
    updates_per_batch: PositiveInt = 1
    sync_weights_every: PositiveInt = 1  # updates, at the next end of a batch
    deterministic: bool = (
        False  # weights change only while nothing is in flight: bit-identical resume
    )
    max_concurrent: PositiveInt = 256  # attempts at once, at most
    min_concurrent: PositiveInt = 8  # below which a crowded engine is not relieved further
    stall_timeout_s: PositiveFloat = 60.0  # without any attempt ending, before somebody is told
    retry_disabled_after: PositiveInt = 2  # before a task that was set aside is tried again

    @model_validator(mode="after")
    def _possible(self) -> Self:
        batches = -(-self.sync_weights_every // self.updates_per_batch)
        least = batches * self.updates_per_batch - 1
        if self.max_staleness < least:
            raise ValueError(
                f"'max_staleness' {self.max_staleness} is less than {least}, what even fresh"
                f" tokens reach when weights are published every {least + 1} updates"
            )
        if self.deterministic and (self.order != "in_order" or self.on_stale != "wait"):
            raise ValueError('\'deterministic\' needs order = "in_order" and on_stale = "wait"')
        if self.min_concurrent > self.max_concurrent:
            raise ValueError(
                f"'min_concurrent' {self.min_concurrent} exceeds"
                f" 'max_concurrent' {self.max_concurrent}"
            )
        return self

    @property
    def is_synchronous(self) -> bool:
        """Whether nothing is ever in flight while the trainer works."""
        return self.pipeline_depth == 0 or self.max_staleness < self.updates_per_batch


class TaskSettings(BaseSettings):
    """One of the tasks that a run mixes."""

    ratio: NonNegativeWeight = 1.0  # of all groups trained, relative to the other tasks
    group_size: PositiveInt = 8
    max_concurrent: PositiveInt | None = None  # attempts at once, at most
    attempt_timeout_s: PositiveFloat = (
        600.0  # after which an attempt is given up, whatever holds it
    )
    max_consecutive_failed: PositiveInt = 8  # groups in a row that may fail
    max_consecutive_filtered: PositiveInt = 64  # groups in a row that may have nothing to teach
    required: bool = False  # whether the run ends when a budget is spent, or goes on without it
