"""The weights that learn: a batch of lessons in, updates done, a version to hand over."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from paddock.checkpoint import (
    WeightUpdate,
    iter_released_tensors,
    latest_model,
    load_pretrained,
    training_state,
)
from paddock.journal import TokenTrainRecord
from paddock.rl.credit import token_loss_weights
from paddock.rl.policy_loss import PolicyLoss, TokenLossRecord
from paddock.rl.settings import RLSettings
from paddock.train import (
    AuxLossSettings,
    ComputeSettings,
    OptimSettings,
    Trainer,
    TrainStepOutput,
    build_lr_schedule,
    init_device,
    policy,
)


class LearnerError(ValueError):
    """A run that cannot go on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStats:
    """What one batch did to the weights."""

    updates: int  # done in all
    step_outputs: tuple[TrainStepOutput, ...]  # one an update
    tokens: int  # trained
    token_records: Mapping[tuple[str, int], TokenTrainRecord] = field(
        default_factory=dict
    )  # by session, branch

    def mean(self, part: str) -> float:
        """Over the updates; a part that only some have counts where it is."""
        found = [report.losses[part] for report in self.step_outputs if part in report.losses]
        return sum(found) / len(found) if found else 0.0


@dataclass(frozen=True, slots=True)
class _Steps:
    """What a step must know of an RL run's settings."""

    optim: OptimSettings
    compute: ComputeSettings
    loss: AuxLossSettings


def open_learner(settings: RLSettings, evidence: Path) -> "Learner":
    """The network a run starts from, ready to learn: without its MTP layer, which only drafts, and
    its indexer, whose choices must stay those of the engine. `evidence` is where a batch goes that
    makes no finite loss."""
    assert settings.init.checkpoint is not None
    network = load_pretrained(latest_model(Path(settings.init.checkpoint)))
    frozen = (".indexer.", "mtp.") if settings.freeze_indexer else ("mtp.",)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not any(part in f".{name}" for part in frozen))
    network.to(init_device(_machine(settings))).train()
    objective = policy.PolicyObjective(
        PolicyLoss(settings.loss), replay=settings.routing_replay == "replay"
    )
    steps = _Steps(settings.optim, settings.compute, AuxLossSettings(mtp_depths=1))
    return Learner(Trainer(network, objective, steps, evidence), objective, settings)


def _machine(settings: RLSettings) -> ComputeSettings:
    """In lock-step with one thread to an operation unless more are asked for: several do not round
    alike every time."""
    if settings.rollout.deterministic and settings.compute.threads is None:
        return settings.compute.model_copy(update={"threads": 1})
    return settings.compute


class Learner:
    """Owns the network that learns. `study` blocks and may run in a thread of its own; nothing else
    may touch the network meanwhile."""

    def __init__(
        self, trainer: Trainer, objective: policy.PolicyObjective, settings: RLSettings
    ) -> None:
        self.trainer, self.objective, self.settings = trainer, objective, settings
        self.updates = 0
        self.extra_state: dict[str, Any] = {}  # what else a checkpoint keeps, as JSON
        self._schedule = build_lr_schedule(settings.optim, settings.steps)

    def train(self, groups: Sequence[Sequence[policy.PolicySample]]) -> TrainStats:
        """As many updates as the settings ask for, each on its share of the groups. Every lesson
        takes part in exactly one, and the gradients themselves bear witness."""
        if not groups:  # a recorded batch, by rules that leave nothing of it
            return self._idle(tokens=0)
        # Again, in this thread: engines may have asked for other numbers of threads since.
        init_device(_machine(self.settings))
        count = min(self.settings.rollout.updates_per_batch, len(groups))
        shares = [_flat(some) for some in _split(groups, count)]
        per, replay = self.settings.loss.aggregate, self.objective.replay
        shares = [_weighted(share, per) for share in shares]
        batches = [policy.pack_samples(share) for share in shares]
        if count > 1:  # later updates must remember what the first began with
            micro = self.settings.compute.micro_batch_tokens
            network = self.trainer.network
            old = [
                policy.compute_logprobs(network, b, micro_tokens=micro, replay=replay)
                for b in batches
            ]
            batches = [policy.pack_samples(share, o) for share, o in zip(shares, old, strict=True)]
        reports = []
        taught: dict[tuple[str, int], TokenTrainRecord] = {}
        first, heard = self.updates, self._heard()
        for share, batch in zip(shares, batches, strict=True):
            heard.clear()
            self.objective.token_stats.reset(len(share))
            reports.append(
                self.trainer.step(
                    batch,
                    lr=self.settings.optim.lr * self._schedule.at(self.updates + 1),
                    bias_rate=0.0,  # routers stay as they are
                    progress=self.updates / self.settings.steps,
                )
            )
            self._hear_the_witness(share)
            taught |= _taught(share, heard, first)
            self.updates += 1
        # A batch of fewer groups than updates still counts as all of them: staleness is known
        # beforehand.
        self.updates += self.settings.rollout.updates_per_batch - count
        return TrainStats(
            updates=self.updates,
            step_outputs=tuple(reports),
            tokens=sum(batch.num_targets for batch in batches),
            token_records=taught,
        )

    def _heard(self) -> list[TokenLossRecord]:
        """What the loss says about its tokens, where it does."""
        loss = self.objective.loss
        return loss.records if isinstance(loss, PolicyLoss) else []

    def _idle(self, tokens: int) -> TrainStats:
        """A batch that counts and changes nothing."""
        self.updates += self.settings.rollout.updates_per_batch
        return TrainStats(updates=self.updates, step_outputs=(), tokens=tokens)

    def _hear_the_witness(self, share: Sequence[policy.PolicySample]) -> None:
        seen = self.objective.token_stats.seen.tolist()
        for lesson, count in zip(share, seen, strict=True):
            if count != sum(lesson.sample.loss_mask):
                raise LearnerError(
                    f"sample {lesson.sample.id}: {count} of its {sum(lesson.sample.loss_mask)} "
                    f"trained tokens were in the gradient of update {self.updates + 1}"
                )

    def reset_optimizer(self) -> None:
        """Begin the optimizer anew, as after each hand-over of weights in agentic RL."""
        self.trainer.optimizer.state.clear()

    def weights(self) -> Iterable[WeightUpdate]:
        """The weights as engines take them; the version is the number of updates done."""
        yield WeightUpdate(self.updates, dict(iter_released_tensors(self.trainer.network)))

    # --- on disk ----------------------------------------------------------------------------------

    def save(self, folder: Path, *, beside: dict[str, bytes], over: bool = False) -> Path:
        """A checkpoint from which `restore` goes on bit for bit, unless the run is `over`."""
        network = self.trainer.weights.master_model()
        assert network is not None
        keep, optimizer = self.settings.checkpoint, {}
        if keep.save_final_optimizer or not over:
            optimizer = training_state.optimizer_state_tensors(
                self.trainer.optimizer, self.trainer.weights.gather_full
            )
        path = training_state.save_training_state(
            folder, self.updates, network, optimizer, extra=self.extra_state, extra_files=beside
        )
        training_state.prune_checkpoints(
            folder, keep_last=keep.keep_last, keep_every=keep.keep_every
        )
        return path

    def restore(self, folder: Path) -> bool:
        """Go on from the newest checkpoint, if there is one."""
        found = training_state.load_latest(folder)
        if found is None:
            return False
        self.updates, state = found
        self.extra_state = {name: fact for name, fact in state.extra.items() if name != "step"}
        self.trainer.weights.restore(state.network)
        self.trainer.optimizer.state.clear()
        training_state.load_optimizer_state(
            self.trainer.optimizer, state.optimizer, self.trainer.weights.local_part
        )
        return True


class RolloutOnlyLearner(Learner):
    """Counts updates and learns nothing: rollouts alone, at the pace of a run."""

    def train(self, groups: Sequence[Sequence[policy.PolicySample]]) -> TrainStats:
        return self._idle(sum(sum(lesson.sample.loss_mask) for lesson in _flat(groups)))


def _split(
    groups: Sequence[Sequence[policy.PolicySample]], count: int
) -> list[Sequence[Sequence[policy.PolicySample]]]:
    """Into `count` shares, none empty, as even as can be."""
    size = len(groups) / count
    return [groups[ceil(i * size - 1e-9) : ceil((i + 1) * size - 1e-9)] for i in range(count)]


def _taught(
    share: Sequence[policy.PolicySample], heard: Sequence[TokenLossRecord], update: int
) -> dict[tuple[str, int], TokenTrainRecord]:
    """What the loss made of each sample: its calls follow the order of the samples' tokens. A copy
    is written once."""
    if not heard:
        return {}
    counts = [sum(lesson.sample.loss_mask) for lesson in share]
    columns = [
        torch.cat([getattr(part, name) for part in heard]).float().cpu().split(counts)
        for name in ("log_ratio_N", "advantage_N", "kept_N")
    ]
    found = {}
    for lesson, ratio_N, advantage_N, kept_N in zip(share, *columns, strict=True):
        session, _, branch = lesson.sample.id.rpartition("/")
        found[session, int(branch)] = TokenTrainRecord(
            update=update,
            log_ratio=ratio_N.tolist(),
            advantage=advantage_N.tolist(),
            kept=kept_N.bool().tolist(),
        )
    return found


def _flat(groups: Sequence[Sequence[policy.PolicySample]]) -> list[policy.PolicySample]:
    return [lesson for group in groups for lesson in group]


def _weighted(lessons: Sequence[policy.PolicySample], per: str) -> list[policy.PolicySample]:
    weights = token_loss_weights([lesson.sample for lesson in lessons], per=per)  # type: ignore[arg-type]
    return [replace(lesson, weight=w) for lesson, w in zip(lessons, weights, strict=True)]
