"""Learner: owns the trained network, runs optimizer steps on batches, exports weight updates."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

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
    evaluate,
    init_device,
    policy,
)


class LearnerError(ValueError):
    """Training cannot continue; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStats:
    """Training statistics of one batch."""

    updates: int  # done in total
    step_outputs: tuple[TrainStepOutput, ...]  # one per update
    tokens: int  # trained
    # By session and branch.
    token_records: Mapping[tuple[str, int], TokenTrainRecord] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        """The mean of a metric over the updates that have it; 0 if none has."""
        values = [output.losses[name] for output in self.step_outputs if name in output.losses]
        return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class _StepSettings:
    """The part of the RL settings that the trainer uses."""

    optim: OptimSettings
    compute: ComputeSettings
    loss: AuxLossSettings


def open_learner(settings: RLSettings, non_finite_path: Path) -> "Learner":
    """A learner of the initial checkpoint.

    The MTP layer, which is only used for drafting, is frozen unless `train_mtp`. So is the indexer
    if `freeze_indexer`: its top-k selection must stay that of the engine. A batch with a non-finite
    loss or gradient is saved to `non_finite_path`.
    """
    assert settings.init.checkpoint is not None
    network = load_pretrained(latest_model(Path(settings.init.checkpoint)))
    mtp = network.config.mtp
    if settings.train_mtp and mtp is None:
        raise LearnerError("'train_mtp' needs a model with an MTP layer; this one has none")
    frozen = {"indexer", "mtp_indexer"} if settings.freeze_indexer else set()
    frozen |= set() if settings.train_mtp else {"mtp", "mtp_indexer"}
    for _, parameter, role in network.parameter_roles():
        parameter.requires_grad_(role.part not in frozen)
    network.to(init_device(_compute_settings(settings))).train()
    depths = 1 if mtp is None else mtp.depths
    objective = policy.PolicyObjective(
        PolicyLoss(settings.loss),
        replay=settings.routing_replay == "replay",
        mtp=policy.MTPTraining(depths, settings.mtp_coef) if settings.train_mtp else None,
    )
    aux = AuxLossSettings(mtp_depths=depths)
    step_settings = _StepSettings(settings.optim, settings.compute, aux)
    trainer = Trainer(network, objective, step_settings, non_finite_path)
    trainer.clip_mtp_apart = True
    return Learner(trainer, objective, settings)


def _compute_settings(settings: RLSettings) -> ComputeSettings:
    """The compute settings; in deterministic mode with one thread unless `threads` is set, since
    reductions over several threads do not always round alike."""
    if settings.rollout.deterministic and settings.compute.threads is None:
        return settings.compute.model_copy(update={"threads": 1})
    return settings.compute


class Learner:
    """Owns the trained network. `train` blocks and may run in a thread; nothing else may use the
    network meanwhile."""

    def __init__(
        self, trainer: Trainer, objective: policy.PolicyObjective, settings: RLSettings
    ) -> None:
        self.trainer, self.objective, self.settings = trainer, objective, settings
        self.updates = 0
        self.extra_state: dict[str, Any] = {}  # further state of a checkpoint, as JSON
        self._schedule = build_lr_schedule(settings.optim, settings.steps)

    def train(self, groups: Sequence[Sequence[policy.PolicySample]]) -> TrainStats:
        """Run `updates_per_batch` updates, each on its part of the groups.

        Every sample is trained in exactly one update. Raises LearnerError if the gradient of an
        update did not include every trained token.
        """
        if not groups:  # a replayed batch of which current settings leave nothing
            return self._skip_training(tokens=0)
        # Once more, in this thread: engines may have changed the number of threads since.
        init_device(_compute_settings(self.settings))
        count = min(self.settings.rollout.updates_per_batch, len(groups))
        parts = [_flatten(part) for part in _split(groups, count)]
        aggregate, replay = self.settings.loss.aggregate, self.objective.replay
        parts = [_with_weights(part, aggregate) for part in parts]
        batches = [policy.pack_samples(part) for part in parts]
        if count > 1:  # the old policy of later updates is the one before the first
            micro = self.settings.compute.micro_batch_tokens
            network = self.trainer.network
            old = [
                policy.compute_logprobs(network, b, micro_tokens=micro, replay=replay)
                for b in batches
            ]
            batches = [policy.pack_samples(part, o) for part, o in zip(parts, old, strict=True)]
        outputs = []
        token_records: dict[tuple[str, int], TokenTrainRecord] = {}
        first, loss_records = self.updates, self._loss_records()
        for part, batch in zip(parts, batches, strict=True):
            loss_records.clear()
            self.objective.token_stats.reset(len(part))
            outputs.append(
                self.trainer.step(
                    batch,
                    lr=self.settings.optim.lr * self._schedule.at(self.updates + 1),
                    bias_rate=0.0,  # router biases are not updated
                    progress=self.updates / self.settings.steps,
                )
            )
            self._check_trained_tokens(part)
            token_records |= _token_records(part, loss_records, first)
            self.updates += 1
        # A batch of fewer groups than updates still counts as all of them: the orchestrator has
        # bounded staleness with that number.
        self.updates += self.settings.rollout.updates_per_batch - count
        return TrainStats(
            updates=self.updates,
            step_outputs=tuple(outputs),
            tokens=sum(batch.num_targets for batch in batches),
            token_records=token_records,
        )

    def accept_length(self, groups: Sequence[Sequence[policy.PolicySample]]) -> float | None:
        """Tokens per decode step with drafts of the MTP layer, on the sampled tokens of these
        groups with greedy decoding; None without samples or MTP layer."""
        if not groups:
            return None
        init_device(_compute_settings(self.settings))
        batch = policy.pack_samples(_flatten(groups))
        micro_tokens = self.settings.compute.micro_batch_tokens
        return evaluate.accept_length(self.trainer.network, batch, micro_tokens=micro_tokens)

    def _loss_records(self) -> list[TokenLossRecord]:
        """The per-token records of the loss, if it keeps any."""
        loss = self.objective.loss
        return loss.records if isinstance(loss, PolicyLoss) else []

    def _skip_training(self, tokens: int) -> TrainStats:
        """Count the updates of a batch without changing the weights."""
        self.updates += self.settings.rollout.updates_per_batch
        return TrainStats(updates=self.updates, step_outputs=(), tokens=tokens)

    def _check_trained_tokens(self, part: Sequence[policy.PolicySample]) -> None:
        seen = self.objective.token_stats.seen.tolist()
        for each, count in zip(part, seen, strict=True):
            if count != sum(each.sample.loss_mask):
                raise LearnerError(
                    f"sample {each.sample.id}: {count} of its {sum(each.sample.loss_mask)} "
                    f"trained tokens were in the gradient of update {self.updates + 1}"
                )

    def reset_optimizer(self) -> None:
        """Clear the optimizer state, as agentic RL does at each weight sync."""
        self.trainer.optimizer.state.clear()

    def weights(self) -> Iterable[WeightUpdate]:
        """The weights for the engines (weight sync); the version is the number of updates done."""
        yield WeightUpdate(self.updates, dict(iter_released_tensors(self.trainer.network)))

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, folder: Path, *, extra_files: dict[str, bytes], final: bool = False) -> Path:
        """Save a checkpoint; `restore` resumes from it bitwise identically.

        A `final` checkpoint has optimizer state only if `save_final_optimizer`.
        """
        network = self.trainer.weights.master_model()
        assert network is not None
        keep, optimizer = self.settings.checkpoint, {}
        if keep.save_final_optimizer or not final:
            optimizer = training_state.optimizer_state_tensors(
                self.trainer.optimizer, self.trainer.weights.gather_full
            )
        path = training_state.save_training_state(
            folder,
            self.updates,
            network,
            optimizer,
            extra=self.extra_state,
            extra_files=extra_files,
        )
        training_state.prune_checkpoints(
            folder, keep_last=keep.keep_last, keep_every=keep.keep_every
        )
        return path

    def restore(self, folder: Path) -> bool:
        """Resume from the newest checkpoint; False if there is none."""
        found = training_state.load_latest(folder)
        if found is None:
            return False
        self.updates, state = found
        self.extra_state = {name: value for name, value in state.extra.items() if name != "step"}
        self.trainer.weights.restore(state.network)
        self.trainer.optimizer.state.clear()
        training_state.load_optimizer_state(
            self.trainer.optimizer, state.optimizer, self.trainer.weights.local_part
        )
        return True


class RolloutOnlyLearner(Learner):
    """Counts updates without training: for runs that only generate rollouts."""

    def train(self, groups: Sequence[Sequence[policy.PolicySample]]) -> TrainStats:
        return self._skip_training(sum(sum(s.sample.loss_mask) for s in _flatten(groups)))


def _split(
    groups: Sequence[Sequence[policy.PolicySample]], count: int
) -> list[Sequence[Sequence[policy.PolicySample]]]:
    """Split into `count` non-empty parts of nearly equal size."""
    size = len(groups) / count
    return [groups[ceil(i * size - 1e-9) : ceil((i + 1) * size - 1e-9)] for i in range(count)]


def _token_records(
    part: Sequence[policy.PolicySample], loss_records: Sequence[TokenLossRecord], update: int
) -> dict[tuple[str, int], TokenTrainRecord]:
    """Training records by session and branch. Loss calls are in the order of the samples' tokens;
    copies of a sample are recorded once."""
    if not loss_records:
        return {}
    counts = [sum(each.sample.loss_mask) for each in part]
    columns = [
        torch.cat([getattr(record, name) for record in loss_records]).float().cpu().split(counts)
        for name in ("log_ratio_N", "advantage_N", "kept_N")
    ]
    records = {}
    for each, ratio_N, advantage_N, kept_N in zip(part, *columns, strict=True):
        session, _, branch = each.sample.id.rpartition("/")
        records[session, int(branch)] = TokenTrainRecord(
            update=update,
            log_ratio=ratio_N.tolist(),
            advantage=advantage_N.tolist(),
            kept=kept_N.bool().tolist(),
        )
    return records


def _flatten(groups: Sequence[Sequence[policy.PolicySample]]) -> list[policy.PolicySample]:
    return [sample for group in groups for sample in group]


def _with_weights(
    samples: Sequence[policy.PolicySample], aggregate: Literal["token", "sequence"]
) -> list[policy.PolicySample]:
    weights = token_loss_weights([each.sample for each in samples], aggregate=aggregate)
    return [replace(each, weight=w) for each, w in zip(samples, weights, strict=True)]
