"""What a network is asked to get better at.

An objective turns a micro-batch into a loss whose gradients add up over micro-batches and ranks:
it divides by the counts of the whole batch, which the caller knows before the first forward pass.
T tokens, D hidden.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paddock.kernels.linear_cross_entropy import linear_cross_entropy
from paddock.model import AuxOutputs, Transformer
from paddock.train.micro_batch import MicroBatch, TokenCounts
from paddock.train.settings import AuxLossSettings
from paddock.train.stages import StageSpec


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """`total` is what to differentiate; `parts` are its unweighted ingredients, for the journal;
    `loads` how many tokens each expert of each MoE layer received, the MTP layer's last."""

    total: Tensor
    parts: dict[str, Tensor]
    expert_loads: tuple[Tensor, ...] = ()

    def scaled(self, weight: int) -> "Losses":
        """The same, counted so many times; nothing left to differentiate."""
        parts = {name: part * weight for name, part in self.parts.items()}
        return Losses(
            self.total.detach() * weight, parts, tuple(n * weight for n in self.expert_loads)
        )


class Objective(Protocol):
    def __call__(
        self, network: Transformer, batch: MicroBatch, counts: TokenCounts, progress: float
    ) -> Losses:
        """The batch's share of the loss; `progress` of the run, 0 to 1, moves weights."""


@dataclass(frozen=True, slots=True)
class LanguageModelObjective:
    """Next token, MTP over shared depths, router balance and the indexer's loss, as the stage
    asks for them."""

    stage: StageSpec
    loss: AuxLossSettings

    def __call__(
        self, network: Transformer, batch: MicroBatch, counts: TokenCounts, progress: float
    ) -> Losses:
        output = network(batch.token_T, batch.attn_metadata, aux=self.stage.aux_request)
        notes = list(output.aux)
        weights = {
            "loss": 1.0,
            "mtp": self.loss.mtp_coef
            if progress < self.loss.mtp_coef_switch
            else self.loss.mtp_coef_final,
            "balance": self.loss.balance_coef,
            "indexer": self.loss.indexer_coef,
        }
        parts: dict[str, Tensor] = {}
        if self.stage.language:
            parts["loss"] = _language(network, output.hidden_TD, batch, 1) / (
                counts.targets[0] or 1
            )
        if network.mtp is not None and weights["mtp"]:
            states, note = self._look_ahead(network, output.hidden_TD, batch)
            notes.append(note)
            if self.stage.language:
                parts["mtp"] = _mtp(network, states, batch, counts)
        if balances := _present(n.balance_loss for n in notes):
            parts["balance"] = sum_tensors(balances) / (counts.tokens * len(balances))
        if indexers := _present(n.indexer_loss for n in notes):
            parts["indexer"] = sum_tensors(indexers) / counts.tokens
        total = sum_tensors([weights[name] * part for name, part in parts.items()])
        loads = tuple(_present(n.expert_load_E for n in notes)) if self.stage.language else ()
        return Losses(total, {name: part.detach() for name, part in parts.items()}, loads)

    def _look_ahead(
        self, network: Transformer, hidden_TD: Tensor, batch: MicroBatch
    ) -> tuple[list[Tensor], AuxOutputs]:
        """MTP states at every depth, and one note for the layer used several times."""
        step = network.make_context(batch.attn_metadata, aux=self.stage.aux_request)
        ahead = network.mtp_forward(hidden_TD, batch.token_S, step, self.loss.mtp_depths)
        states, notes = zip(*ahead, strict=True)
        return list(states), _merged(list(notes))


def _mtp(
    network: Transformer, states: list[Tensor], batch: MicroBatch, counts: TokenCounts
) -> Tensor:
    """Mean over depths of the loss on tokens further ahead."""
    losses = [
        _language(network, state_TD, batch, depth + 1) / (counts.targets[depth] or 1)
        for depth, state_TD in enumerate(states, start=1)
    ]
    return sum_tensors(losses) / len(losses)


def _language(network: Transformer, hidden_TD: Tensor, batch: MicroBatch, ahead: int) -> Tensor:
    """Summed negative log-likelihood of the tokens `ahead` places on, as much as each counts."""
    nats_T = linear_cross_entropy(hidden_TD, network.head.weight, batch.targets(ahead))
    weight_T = batch.target_weights(ahead)
    return nats_T.sum() if weight_T is None else (nats_T * weight_T).sum()


def _merged(notes: list[AuxOutputs]) -> AuxOutputs:
    """One layer used several times: the mean of its losses, the sum of its load."""

    def mean(found: list[Tensor]) -> Tensor | None:
        return sum_tensors(found) / len(found) if found else None

    loads = _present(n.expert_load_E for n in notes)
    return AuxOutputs(
        indexer_loss=mean(_present(n.indexer_loss for n in notes)),
        balance_loss=mean(_present(n.balance_loss for n in notes)),
        expert_load_E=sum_tensors(loads) if loads else None,
    )


def _present(found: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in found if tensor is not None]


def sum_tensors(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)
