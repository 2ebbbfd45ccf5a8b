"""One optimizer step: micro-batches forward and backward, clip, step, rebalance the routers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paddock.data import PackedBatch
from paddock.model import TopKRouter, Transformer
from paddock.optim import AdamSettings, AdamW, Muon, MuonSettings, clip_grad_norm_
from paddock.parallel import (
    SINGLE_PROCESS,
    Mesh,
    MeshDim,
    all_reduce_max,
    all_reduce_sum,
    global_norm,
)
from paddock.train.master_weights import DTYPES, FakeQuant, MasterWeights, no_fake_quant
from paddock.train.micro_batch import (
    MicroBatch,
    TokenCounts,
    count_tokens,
    iter_micro_batches,
    split_documents,
)
from paddock.train.objective import Losses, Objective, sum_tensors
from paddock.train.settings import AuxLossSettings, ComputeSettings, OptimSettings


class TrainingError(ValueError):
    """A run that cannot go on; the message says why and where the evidence lies."""


class TrainerSettings(Protocol):
    """What a step must know; a TrainSettings is one."""

    @property
    def optim(self) -> OptimSettings: ...
    @property
    def loss(self) -> AuxLossSettings: ...
    @property
    def compute(self) -> ComputeSettings: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepOutput:
    """What one step did."""

    losses: dict[str, float]  # unweighted losses
    grad_norm: float
    lr: float
    tokens: int
    expert_imbalance: float  # the busiest expert's load over the mean, worst layer; 1 is even


class Trainer:
    """A network, its optimizer and an objective."""

    def __init__(
        self,
        network: Transformer,
        objective: Objective,
        settings: TrainerSettings,
        evidence: Path,
        mesh: Mesh = SINGLE_PROCESS,
        fake_quant: FakeQuant = no_fake_quant,
    ) -> None:
        self.network, self.objective, self.settings = network, objective, settings
        self.mesh = mesh
        self.weights = MasterWeights(network, mesh, DTYPES[settings.compute.dtype], fake_quant)
        self.optimizer = build_optimizer(self.weights, settings.optim)
        self._evidence = evidence
        network.activation_checkpointing = settings.compute.activation_checkpointing

    def step(
        self, batch: PackedBatch, *, lr: float, bias_rate: float, progress: float
    ) -> TrainStepOutput:
        """All ranks step together, each with its own share of the batch, and report the same."""
        counted = self._counts(batch)
        losses = self._accumulate(batch, counted, progress)
        joint = partial(global_norm, axis=self.mesh.all_ranks)
        norm = float(
            clip_grad_norm_(
                self.weights.params_with_grad(), self.settings.optim.max_grad_norm, joint
            )
        )
        self._refuse_non_finite(losses, norm, batch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.weights.copy_to_model()
        self.optimizer.zero_grad(set_to_none=True)
        return TrainStepOutput(
            losses={name: float(part) for name, part in losses.parts.items()},
            grad_norm=norm,
            lr=lr,
            tokens=counted.tokens,
            expert_imbalance=update_router_biases(self.network, losses.expert_loads, bias_rate),
        )

    def _counts(self, batch: PackedBatch) -> TokenCounts:
        """Of the batches of all ranks together."""
        mine = count_tokens(batch, self.settings.loss.mtp_depths)
        numbers = torch.tensor([mine.tokens, *mine.targets], dtype=torch.float64)
        tokens, *targets = all_reduce_sum(numbers.to(self._device), self.mesh.data_ranks).tolist()
        return TokenCounts(int(tokens), tuple(targets))

    def _accumulate(self, batch: PackedBatch, counted: TokenCounts, progress: float) -> Losses:
        """Gradients of the whole batch, on each rank those of its shards, and its losses."""
        found = []
        for micro, weight in self._micro_batches(batch):
            with offload_activations(self.settings.compute):
                losses = self.objective(self.network, micro, counted, progress)
            (losses.total * weight).backward()
            self.weights.accumulate_gradients()
            found.append(losses.scaled(weight))
        return all_reduce_losses(_added(found), self.mesh.all_ranks)

    def _micro_batches(self, batch: PackedBatch) -> Iterator[tuple[MicroBatch, int]]:
        """This rank's micro-batches. Ranks pass through the network together, or they would wait
        for each other for ever: one that has run out goes on with a few tokens of weight zero."""
        tokens, context = self.settings.compute.micro_batch_tokens, self.mesh.context
        own = sum(1 for _ in split_documents(batch, tokens, least=context.size))
        most = all_reduce_max(own, self.mesh.all_ranks, self._device)
        for micro in iter_micro_batches(batch, self._device, tokens, context):
            yield micro, 1
        for _ in range(most - own):
            (idle,) = iter_micro_batches(_nothing(context.size), self._device, context=context)
            yield idle, 0

    @property
    def _device(self) -> torch.device:
        return self.network.embed.weight.device

    def _refuse_non_finite(self, losses: Losses, norm: float, batch: PackedBatch) -> None:
        broken = [name for name, part in losses.parts.items() if not part.isfinite()]
        if np.isfinite(norm) and not broken:
            return
        evidence = self._evidence
        if self.mesh.data_ranks.size > 1:  # any of them may have done it
            evidence = evidence.with_stem(f"{evidence.stem}-{self.mesh.data_ranks.rank}")
        if self.mesh.context.rank == 0:
            evidence.parent.mkdir(parents=True, exist_ok=True)
            np.savez(
                evidence,
                token_T=batch.token_T,
                trained_T=batch.loss_mask_T,
                lengths=np.array(batch.lengths),
            )
        what = f"loss '{broken[0]}'" if broken else "the gradient"
        raise TrainingError(f"{what} is not finite; the batch that did it is in {evidence}")


def build_optimizer(weights: MasterWeights, optim: OptimSettings) -> AdamW:
    adam = AdamSettings(betas=optim.betas)
    if optim.type == "adamw":
        return AdamW(weights.roles(), lr=optim.lr, weight_decay=optim.weight_decay, adam=adam)
    roles = weights.roles(split=optim.muon_split, split_rope_rows=optim.muon_split_rope)
    muon = MuonSettings(momentum=optim.momentum)
    return Muon(roles, lr=optim.lr, weight_decay=optim.weight_decay, adam=adam, muon=muon)


@torch.no_grad()
def update_router_biases(network: Transformer, loads: tuple[Tensor, ...], rate: float) -> float:
    """Nudge every router that saw tokens; returns how uneven the worst of them was."""
    routers = [module for module in network.modules() if isinstance(module, TopKRouter)]
    uneven = []
    for router, load_E in zip(routers, loads, strict=False):
        uneven.append(load_E.max() / load_E.float().mean())
        if rate:
            router.update_bias(load_E, rate)
    # Read together: each reading waits for the device.
    return max([1.0, *torch.stack(uneven).tolist()]) if uneven else 1.0


def offload_activations(machine: ComputeSettings) -> AbstractContextManager[object]:
    """Where tensors wait for the backward pass."""
    if not machine.activation_offload:
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.accelerator.is_available())


def all_reduce_losses(losses: Losses, axis: MeshDim) -> Losses:
    """Each rank's share of the losses as those of all."""
    return Losses(
        all_reduce_sum(losses.total, axis),
        {name: all_reduce_sum(part, axis) for name, part in losses.parts.items()},
        tuple(all_reduce_sum(torch.stack(losses.expert_loads), axis))
        if losses.expert_loads
        else (),
    )


def _nothing(tokens: int) -> PackedBatch:
    """A document that counts for nothing."""
    return PackedBatch(
        token_T=np.zeros(tokens, np.int32),
        loss_mask_T=np.zeros(tokens, np.bool_),
        lengths=(tokens,),
        sources=("nothing",),
        num_targets=0,
    )


def _added(found: list[Losses]) -> Losses:
    """The losses of micro-batches as those of one batch."""
    return Losses(
        sum_tensors([losses.total for losses in found]),
        {name: sum_tensors([losses.parts[name] for losses in found]) for name in found[0].parts},
        tuple(
            sum_tensors(list(loads))
            for loads in zip(*(losses.expert_loads for losses in found), strict=True)
        ),
    )
