"""What an RL run is made of. A recipe says where it differs from its stage (see stages.py)."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from paddock.config import BaseSettings
from paddock.records import MAX_ABS_REWARD
from paddock.rollout import NonNegativeWeight, RolloutSettings, TaskSettings
from paddock.train import CheckpointSettings, ComputeSettings, ModelInitSettings, OptimSettings

Reward = Annotated[float, Field(ge=-MAX_ABS_REWARD, le=MAX_ABS_REWARD, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class RewardSettings(BaseSettings):
    """What an attempt earns besides what its world says."""

    policy_failure_reward: Reward = 0.0  # for breaking off by its own doing
    overlong_start: PositiveInt | None = None  # sampled tokens that cost nothing
    overlong_end: PositiveInt | None = None  # and those that cost all of the penalty
    overlong_penalty: Annotated[Reward, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _a_slope(self) -> Self:
        start, end = self.overlong_start, self.overlong_end
        if (start is None) != (end is None):
            raise ValueError("'overlong_from' and 'overlong_at' are given together or not at all")
        if start is not None and end is not None and start >= end:
            raise ValueError(f"'overlong_from' {start} must be less than 'overlong_at' {end}")
        return self


class CreditSettings(BaseSettings):
    """How a group becomes samples."""

    advantage_norm: Literal["std", "mean"] = "std"
    on_truncated: Literal["train", "mask", "exclude"] = "train"
    # train: as its reward says; mask: it counts in the baseline and is not trained;
    # exclude: as if it had never been made
    keep_zero_variance: bool = False  # groups whose rewards are all equal
    reward: RewardSettings = RewardSettings()


class PolicyLossSettings(BaseSettings):
    """Which gain is maximised; see loss.py."""

    kind: Literal["icepop", "double_sided", "ppo", "tis", "decoupled", "reinforce"] = "icepop"
    aggregate: Literal["token", "sequence"] = "token"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: PositiveFloat = 0.28
    icepop_beta: Annotated[float, Field(gt=1)] = 2.0  # icepop
    tis_cap: PositiveFloat = 2.0  # tis
    teacher_clip: PositiveFloat | None = None  # bound on a teacher's lead at one token, in nats


class SamplingSettings(BaseSettings):
    """How the policy is sampled; None: as long as the context allows."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt | None = None  # of one turn
    thinking_budget: NonNegativeInt | None = None


class RLTaskSettings(TaskSettings):
    """One task of a run: a world, how it is set, and who judges what comes of it."""

    env: str
    args: dict[str, Any] = Field(default_factory=dict)  # the world's own
    enable_thinking: bool = True
    sampling: SamplingSettings | None = None  # None: the run's
    credit: CreditSettings | None = None  # likewise
    teacher: str | None = None
    teacher_weight: NonNegativeWeight = 1.0  # what a nat of the teacher's lead counts

    @model_validator(mode="after")
    def _a_teacher_teaches(self) -> Self:
        if self.teacher is not None and not self.teacher_weight:
            raise ValueError(f"'teaching' is 0, so teacher '{self.teacher}' would say nothing")
        return self


class TeacherSettings(BaseSettings):
    """An engine that scores: a checkpoint or run folder loaded here, or a server."""

    checkpoint: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.checkpoint is None) == (self.url is None):
            raise ValueError("name either a 'checkpoint' or a 'url'")
        return self


class RolloutEngineSettings(BaseSettings):
    """Who samples: engines of this run, or servers that are there already."""

    urls: tuple[str, ...] = ()  # none: embedded
    admin_key: str | None = None  # of the servers' control routes
    replicas: PositiveInt = 1  # embedded
    place: Literal["inline", "subprocess"] = "inline"
    # inline: threads of this process; subprocess: one process per replica, which shares no GIL
    max_running_requests: PositiveInt = 64
    kv_cache_bytes: PositiveInt = 1 << 28
    context_length: PositiveInt | None = None  # None: the model's
    num_speculative_tokens: NonNegativeInt = 0
    dtype: Literal["float32", "bfloat16"] | None = None  # None: the trainer's
    on_weight_update: Literal["in_place", "retract"] = (
        "in_place"  # what becomes of running requests
    )
    verify_weights: bool = True  # compare all weights after each hand-over
    unreachable_timeout_s: PositiveFloat = 600.0  # with no engine answering, before the run ends


class AlertSettings(BaseSettings):
    """When to speak up. Nothing is stopped."""

    entropy_below: NonNegativeFloat = 0.01  # nats a token
    logprob_diff_above: PositiveFloat = (
        0.02  # nats a token between trainer and engine, same weights
    )
    stale_logprob_diff_above: PositiveFloat = (
        0.5  # the same where samples are older than the weights
    )
    zero_variance_above: Fraction = 0.9  # of the groups judged since the last batch
    masked_above: Fraction = 0.5


class RLSettings(BaseSettings):
    """One RL stage."""

    stage: Literal["reasoning", "agentic", "general", "distill"]
    steps: PositiveInt  # optimizer updates
    seed: int = 0
    init: ModelInitSettings
    chat_template: Literal["5", "5.1", "5.2", "5.3"] | None = None  # None: the folder's own
    tasks: dict[str, RLTaskSettings]
    rollout: RolloutSettings = RolloutSettings()
    sampling: SamplingSettings = SamplingSettings()
    credit: CreditSettings = CreditSettings()
    loss: PolicyLossSettings = PolicyLossSettings()
    teachers: dict[str, TeacherSettings] = Field(default_factory=dict)
    optim: OptimSettings = OptimSettings()
    compute: ComputeSettings = ComputeSettings()
    engines: RolloutEngineSettings = RolloutEngineSettings()
    reset_optimizer: bool = False  # at each hand-over of weights
    freeze_indexer: bool = True
    routing_replay: Literal["no", "compare", "replay"] = "no"
    checkpoint: CheckpointSettings = CheckpointSettings(every=50)
    alerts: AlertSettings = AlertSettings()
    stop_at_reward: FiniteFloat | None = (
        None  # mean reward of `goal_batches` batches that ends the run
    )
    stop_window: PositiveInt = 3

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for complaint in _complaints(self):
            raise ValueError(complaint)
        return self

    def sampling_for(self, task: str) -> SamplingSettings:
        return self.tasks[task].sampling or self.sampling

    def credit_for(self, task: str) -> CreditSettings:
        return self.tasks[task].credit or self.credit


def _complaints(s: RLSettings) -> Iterator[str]:
    if not s.tasks:
        yield "there are no 'tasks'"
    elif not any(task.ratio for task in s.tasks.values()):
        yield "every one of the 'tasks' has the 'ratio' 0: there is nothing to train on"
    if s.init.checkpoint is None:
        yield "'init.checkpoint' is missing: RL goes on from a model that can already chat"
    for name, task in s.tasks.items():
        yield from _complaints_of(name, task, s)
    if s.steps % s.rollout.updates_per_batch:
        yield (
            f"'steps' {s.steps} are no whole batches of 'rollout.updates_per_batch' "
            f"{s.rollout.updates_per_batch}"
        )
    if s.checkpoint.every % s.rollout.sync_weights_every:
        yield (
            f"'checkpoint.every' {s.checkpoint.every} must be a multiple of 'rollout.sync_weights_every' "
            f"{s.rollout.sync_weights_every}: engines go on from a checkpoint's weights"
        )


def _complaints_of(name: str, task: RLTaskSettings, s: RLSettings) -> Iterator[str]:
    if task.teacher is not None and task.teacher not in s.teachers:
        known = ", ".join(s.teachers) or "none"
        yield f"'tasks.{name}.teacher': no teacher '{task.teacher}'; there are {known}"
    if task.teacher is not None and s.sampling_for(name).temperature != 1:
        yield (
            f"'tasks.{name}' has a teacher, who scores at temperature 1, but samples at "
            f"{s.sampling_for(name).temperature:g}"
        )
    if task.group_size == 1 and task.teacher is None:
        yield f"'tasks.{name}.group_size' is 1 and there is no teacher: nothing to compare with"
    if task.teacher is not None and not s.credit_for(name).keep_zero_variance:
        yield f"'tasks.{name}' has a teacher, so its 'credit.keep_zero_variance' must be true"
