"""Episodes into weights: credit, losses, the learner and what feeds it.

advantage.py  how much better than expected an attempt was
alerts.py     what a person should look at while a run goes on
live_batches.py  rollouts into batches while the trainer works
credit.py     from the attempts of a group to samples
distill.py    teachers from earlier stages
trainer.py    the one loop
learner.py    the weights that learn
loss.py       policy losses, token by token
policy_loss.py  the loss that settings ask for
batch_source.py  where a learner takes its batches from
reward.py     what an attempt earned, as training counts it
settings.py   what an RL run is made of
stages.py     what each stage is by default
group_filter.py  which groups are worth training on, and how all of them did
"""

from paddock.rl.batch_source import BatchSource, LedgerBatchSource, RolloutBatch
from paddock.rl.distill import LogprobScorer
from paddock.rl.group_filter import GroupFilter
from paddock.rl.learner import Learner, RolloutOnlyLearner, open_learner
from paddock.rl.live_batches import LiveBatchSource
from paddock.rl.settings import RLSettings, RolloutEngineSettings
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
    "RLTrainer",
    "RolloutBatch",
    "RolloutEngineSettings",
    "RolloutOnlyLearner",
    "UpdateMetrics",
    "open_learner",
    "with_stage_defaults",
]
