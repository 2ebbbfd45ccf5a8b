"""RL settings: tasks, rollout, credit, loss, engines, alerts; defaults per stage in stages.py."""

from collections.abc import Iterator, Mapping
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

from paddock.config import BaseSettings, NonNegativeWeight, Recipe, resolve
from paddock.records import Verdict
from paddock.rollout import RolloutSettings, TaskSettings, agents
from paddock.rollout import gateway as rollout_gateway
from paddock.train import CheckpointSettings, ComputeSettings, ModelInitSettings, OptimSettings

Reward = Annotated[
    float, Field(ge=-Verdict.MAX_ABS_REWARD, le=Verdict.MAX_ABS_REWARD, allow_inf_nan=False)
]
Fraction = Annotated[float, Field(ge=0, le=1)]


class RewardSettings(BaseSettings):
    """Adjustments to the reward of the environment."""

    policy_failure_reward: Reward = 0.0  # reward of a rollout that the policy caused to fail
    overlong_start: PositiveInt | None = None  # sampled tokens without penalty
    overlong_end: PositiveInt | None = None  # sampled tokens with the full penalty
    overlong_penalty: Annotated[Reward, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _valid_overlong_range(self) -> Self:
        start, end = self.overlong_start, self.overlong_end
        if (start is None) != (end is None):
            raise ValueError("'overlong_start' and 'overlong_end' must be set together")
        if start is not None and end is not None and start >= end:
            raise ValueError(f"'overlong_start' ({start}) must be less than 'overlong_end' ({end})")
        return self


class CreditSettings(BaseSettings):
    """Credit assignment: from the rewards of a group to advantages."""

    advantage_norm: Literal["std", "mean"] = "std"
    on_truncated: Literal["train", "mask", "exclude"] = "train"
    # train: like any rollout; mask: in the baseline, but not trained;
    # exclude: neither trained nor in the baseline
    keep_zero_variance: bool = False  # train groups whose rewards are all equal
    reward: RewardSettings = RewardSettings()


class PolicyLossSettings(BaseSettings):
    """Which surrogate objective is maximised; see loss.py."""

    kind: Literal["icepop", "double_sided", "ppo", "tis", "decoupled", "reinforce"] = "icepop"
    aggregate: Literal["token", "sequence"] = "token"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: PositiveFloat = 0.28
    icepop_beta: Annotated[float, Field(gt=1)] = 2.0  # kind icepop
    tis_cap: PositiveFloat = 2.0  # kind tis
    teacher_clip: PositiveFloat | None = (
        None  # clamp of the teacher's log-probability difference, in nats
    )


class SamplingSettings(BaseSettings):
    """Sampling parameters of rollouts; None: limited by the context length only."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt | None = None  # per turn
    thinking_budget: NonNegativeInt | None = None


class RLTaskSettings(TaskSettings):
    """One task of a run: environment, its arguments, sampling, credit and teacher."""

    env: str
    args: dict[str, Any] = Field(default_factory=dict)  # arguments of the environment
    num_tasks: PositiveInt | None = None  # train on the first ones only; None: on all
    task_file: str | None = None  # train on these: JSONL of `paddock sample --pass-rate`
    agent: agents.AgentSettings | None = None  # None: ours; with env "http" workers pull
    enable_thinking: bool = True
    sampling: SamplingSettings | None = None  # None: as the run's
    credit: CreditSettings | None = None  # None: as the run's
    teacher: str | None = None
    teacher_weight: NonNegativeWeight = 1.0  # advantage per nat of teacher-student difference

    @model_validator(mode="after")
    def _consistent_task(self) -> Self:
        if self.teacher is not None and not self.teacher_weight:
            raise ValueError(f"'teacher_weight' must not be 0: teacher '{self.teacher}' is unused")
        if self.num_tasks is not None and self.task_file is not None:
            raise ValueError("'num_tasks' and 'task_file' exclude each other")
        return self

    @property
    def agent_elsewhere(self) -> agents.AgentSettings | None:
        """The agent that takes the turns; None: our own, in this process."""
        if self.agent is None and self.env == "http":
            return agents.AgentSettings(pull=True)
        return self.agent


def task_settings(values: Mapping[str, Any]) -> RLTaskSettings:
    """The settings of a task from JSON, as from a recipe. Raises ConfigError."""
    return resolve(RLTaskSettings, Recipe(dict(values), {}))


class TeacherSettings(BaseSettings):
    """A teacher that scores tokens: a checkpoint or run folder loaded here, or a server."""

    checkpoint: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.checkpoint is None) == (self.url is None):
            raise ValueError("set either 'checkpoint' or 'url'")
        return self


class RolloutEngineSettings(BaseSettings):
    """Inference engines for rollouts: started by this run, or running servers."""

    urls: tuple[str, ...] = ()  # running servers; empty: engines of this run
    admin_key: str | None = None  # for the admin routes of the servers
    replicas: PositiveInt = 1  # engines of this run
    place: Literal["inline", "subprocess"] = "inline"
    # inline: threads of this process; subprocess: one process per replica, which shares no GIL
    max_running_requests: PositiveInt = 64
    kv_cache_bytes: PositiveInt = 1 << 28
    context_length: PositiveInt | None = None  # None: the model's
    num_speculative_tokens: NonNegativeInt = 0
    dtype: Literal["float32", "bfloat16"] | None = None  # None: the trainer's
    on_weight_update: Literal["in_place", "retract"] = (
        "in_place"  # what happens to running requests
    )
    verify_weights: bool = True  # compare checksums of all weights after each weight sync
    unreachable_timeout_s: PositiveFloat = 600.0  # without a live engine, before the run aborts


class AlertSettings(BaseSettings):
    """Thresholds of alerts, which are logged and never stop a run."""

    entropy_below: NonNegativeFloat = 0.01  # nats/token
    logprob_diff_above: PositiveFloat = 0.02  # nats/token, trainer and engine with equal weights
    stale_logprob_diff_above: PositiveFloat = 0.5  # the same with stale samples
    zero_variance_above: Fraction = 0.9  # of the groups that ended since the last batch
    masked_above: Fraction = 0.5


class RLSettings(BaseSettings):
    """Settings of one RL stage."""

    stage: Literal["reasoning", "agentic", "general", "distill"]
    steps: PositiveInt  # optimizer updates
    seed: int = 0
    init: ModelInitSettings
    chat_template: Literal["5", "5.1", "5.2", "5.3"] | None = None  # None: the checkpoint's
    tasks: dict[str, RLTaskSettings]
    rollout: RolloutSettings = RolloutSettings()
    sampling: SamplingSettings = SamplingSettings()
    credit: CreditSettings = CreditSettings()
    loss: PolicyLossSettings = PolicyLossSettings()
    teachers: dict[str, TeacherSettings] = Field(default_factory=dict)
    optim: OptimSettings = OptimSettings()
    compute: ComputeSettings = ComputeSettings()
    engines: RolloutEngineSettings = RolloutEngineSettings()
    gateway: rollout_gateway.GatewaySettings = rollout_gateway.GatewaySettings()
    reset_optimizer: bool = False  # clear the optimizer state at each weight sync
    freeze_indexer: bool = True
    routing_replay: Literal["no", "compare", "replay"] = "no"
    train_mtp: bool = False  # the MTP layer follows the policy; else it is frozen
    mtp_coef: PositiveFloat = 0.2  # of the MTP loss, with `train_mtp`
    checkpoint: CheckpointSettings = CheckpointSettings(every=50)
    alerts: AlertSettings = AlertSettings()
    stop_at_reward: FiniteFloat | None = None  # mean reward over `stop_window` batches
    stop_window: PositiveInt = 3  # batches

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in _problems(self):
            raise ValueError(problem)
        return self

    def sampling_for(self, task: str) -> SamplingSettings:
        return self.tasks[task].sampling or self.sampling

    def credit_for(self, task: str) -> CreditSettings:
        return self.tasks[task].credit or self.credit


def _problems(s: RLSettings) -> Iterator[str]:
    if not s.tasks:
        yield "'tasks' must not be empty"
    elif not any(task.ratio for task in s.tasks.values()):
        yield "'ratio' is 0 for every task: there is nothing to train on"
    if s.init.checkpoint is None:
        yield "'init.checkpoint' is missing: RL starts from a checkpoint of a chat model"
    for name, task in s.tasks.items():
        yield from _task_problems(name, task, s)
    if s.steps % s.rollout.updates_per_batch:
        yield (
            f"'steps' {s.steps} must be a multiple of 'rollout.updates_per_batch' "
            f"{s.rollout.updates_per_batch}"
        )
    if s.checkpoint.every % s.rollout.sync_weights_every:
        yield (
            f"'checkpoint.every' {s.checkpoint.every} must be a multiple of "
            f"'rollout.sync_weights_every' {s.rollout.sync_weights_every}: engines resume with the "
            "weights of a checkpoint"
        )


def _task_problems(name: str, task: RLTaskSettings, s: RLSettings) -> Iterator[str]:
    if task.agent_elsewhere is not None and s.rollout.deterministic:
        yield f"'tasks.{name}' has an agent elsewhere, which 'rollout.deterministic' cannot order"
    if task.teacher is not None and task.teacher not in s.teachers:
        known = ", ".join(s.teachers) or "none"
        yield f"'tasks.{name}.teacher': no teacher '{task.teacher}'; 'teachers' has {known}"
    if task.teacher is not None and s.sampling_for(name).temperature != 1:
        yield (
            f"'tasks.{name}' has a teacher, which scores at temperature 1, but its sampling "
            f"temperature is {s.sampling_for(name).temperature:g}"
        )
    if task.group_size == 1 and task.teacher is None:
        yield f"'tasks.{name}.group_size' is 1 without a teacher: such a group has no baseline"
    if task.teacher is not None and not s.credit_for(name).keep_zero_variance:
        yield f"'tasks.{name}' has a teacher, so its 'credit.keep_zero_variance' must be true"
