"""Reinforcement learning: advantages, policy losses, learner, training loop and batch sources.

advantage.py     GRPO advantages, zero-variance check, padding of groups, GAE
alerts.py        training health alerts
batch_source.py  protocol of batch sources; replay of a ledger
credit.py        credit assignment: rollouts of a group to training samples
distill.py       on-policy distillation: teacher log-probabilities
group_filter.py  which groups are trained, and rollout statistics
learner.py       the trained network: updates, weight sync, checkpoints
live_batches.py  batches from live rollouts
loss.py          policy losses per token: PPO, IcePop, double-sided importance sampling, TIS
policy_loss.py   the configured loss, for the trainer
reward.py        reward of a rollout for training
settings.py      settings of an RL run
stages.py        default settings of each RL stage
trainer.py       the training loop
"""

from paddock.rl.batch_source import BatchSource, LedgerBatchSource, RolloutBatch
from paddock.rl.distill import LogprobScorer
from paddock.rl.group_filter import GroupFilter
from paddock.rl.learner import Learner, RolloutOnlyLearner, open_learner
from paddock.rl.live_batches import LiveBatchSource
from paddock.rl.settings import RLSettings, RLTaskSettings, RolloutEngineSettings, task_settings
from paddock.rl.stages import with_stage_defaults
from paddock.rl.trainer import RLTrainer, UpdateMetrics

__all__ = [
    "BatchSource",
    "GroupFilter",
    "Learner",
    "LedgerBatchSource",
    "LiveBatchSource",
    "LogprobScorer",
    "RLSettings",
    "RLTaskSettings",
    "RLTrainer",
    "RolloutBatch",
    "RolloutEngineSettings",
    "RolloutOnlyLearner",
    "UpdateMetrics",
    "open_learner",
    "task_settings",
    "with_stage_defaults",
]
