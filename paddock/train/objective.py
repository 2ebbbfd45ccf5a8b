"""Training objectives: next-token loss with MTP, load-balancing and indexer losses.

An objective turns a micro batch into a loss whose gradients add up over micro batches and ranks: it
divides by the counts of the whole batch, which are known before the first forward pass.
T tokens, D hidden, V vocabulary.
"""

from collections.abc import Iterable, Sequence
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
    """Losses of a micro batch.

    `total` is differentiated. `parts` are its unweighted terms, for the journal. `expert_loads` are
    the tokens of each expert by MoE layer, the MTP layer last.
    """

    total: Tensor
    parts: dict[str, Tensor]
    expert_loads: tuple[Tensor, ...] = ()

    def scaled(self, weight: int) -> "Losses":
        """All values times `weight`, detached."""
        parts = {name: part * weight for name, part in self.parts.items()}
        return Losses(
            self.total.detach() * weight, parts, tuple(n * weight for n in self.expert_loads)
        )


class Objective(Protocol):
    def __call__(
        self, network: Transformer, batch: MicroBatch, counts: TokenCounts, progress: float
    ) -> Losses:
        """Losses of the micro batch, divided by `counts` of the whole batch.

        `progress` of the run, from 0 to 1, selects coefficients that change over time.
        """


@dataclass(frozen=True, slots=True)
class LanguageModelObjective:
    """Next-token, MTP, load-balancing and indexer losses, as far as the stage has them."""

    stage: StageSpec
    loss: AuxLossSettings

    def __call__(
        self, network: Transformer, batch: MicroBatch, counts: TokenCounts, progress: float
    ) -> Losses:
        output = network(batch.token_T, batch.attn_metadata, aux=self.stage.aux_request)
        aux = list(output.aux)
        weights = {
            "loss": 1.0,
            "mtp_loss": self.loss.mtp_coef
            if progress < self.loss.mtp_coef_switch
            else self.loss.mtp_coef_final,
            "balance_loss": self.loss.balance_coef,
            "indexer_loss": self.loss.indexer_coef,
        }
        parts: dict[str, Tensor] = {}
        if self.stage.language:
            total_loss = _language(network.head.weight, output.hidden_TD, batch, 1)
            parts["loss"] = total_loss / (counts.targets[0] or 1)
        if network.mtp is not None and weights["mtp_loss"]:
            states, mtp_aux = self._mtp_states(network, output.hidden_TD, batch)
            aux.append(mtp_aux)
            if self.stage.language:
                parts["mtp_loss"] = mtp_loss(network.head.weight, states, batch, counts)
        if balances := _present(each.balance_loss for each in aux):
            parts["balance_loss"] = sum_tensors(balances) / (counts.tokens * len(balances))
        if indexers := _present(each.indexer_loss for each in aux):
            parts["indexer_loss"] = sum_tensors(indexers) / counts.tokens
        total = sum_tensors([weights[name] * part for name, part in parts.items()])
        loads = tuple(_present(each.expert_load_E for each in aux)) if self.stage.language else ()
        return Losses(total, {name: part.detach() for name, part in parts.items()}, loads)

    def _mtp_states(
        self, network: Transformer, hidden_TD: Tensor, batch: MicroBatch
    ) -> tuple[list[Tensor], AuxOutputs]:
        """MTP hidden states at every depth, and the merged outputs of the shared MTP layer."""
        step = network.make_context(batch.attn_metadata, aux=self.stage.aux_request)
        ahead = network.mtp_forward(hidden_TD, batch.token_S, step, self.loss.mtp_depths)
        states, aux = zip(*ahead, strict=True)
        return list(states), _merged(list(aux))


def mtp_loss(
    head_VD: Tensor, states: Sequence[Tensor], batch: MicroBatch, counts: TokenCounts
) -> Tensor:
    """Mean over depths of the loss on the token `depth + 1` ahead."""
    losses = [
        _language(head_VD, state_TD, batch, depth + 1) / (counts.targets[depth] or 1)
        for depth, state_TD in enumerate(states, start=1)
    ]
    return sum_tensors(losses) / len(losses)


def _language(head_VD: Tensor, hidden_TD: Tensor, batch: MicroBatch, ahead: int) -> Tensor:
    """Weighted sum of the negative log-likelihood of the tokens `ahead` positions later."""
    nll_T = linear_cross_entropy(hidden_TD, head_VD, batch.targets(ahead))
    weight_T = batch.target_weights(ahead)
    return nll_T.sum() if weight_T is None else (nll_T * weight_T).sum()


def _merged(outputs: list[AuxOutputs]) -> AuxOutputs:
    """Outputs of one layer used at several depths: mean of its losses, sum of its expert load."""

    def mean(found: list[Tensor]) -> Tensor | None:
        return sum_tensors(found) / len(found) if found else None

    loads = _present(each.expert_load_E for each in outputs)
    return AuxOutputs(
        indexer_loss=mean(_present(each.indexer_loss for each in outputs)),
        balance_loss=mean(_present(each.balance_loss for each in outputs)),
        expert_load_E=sum_tensors(loads) if loads else None,
    )


def _present(found: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in found if tensor is not None]


def sum_tensors(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)
