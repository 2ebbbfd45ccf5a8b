"""One optimizer step: micro batches forward and backward, gradient clipping, router biases."""

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
    """A run that cannot start or continue; the message says why."""


class TrainerSettings(Protocol):
    """The settings a trainer needs; `TrainSettings` has them."""

    @property
    def optim(self) -> OptimSettings: ...
    @property
    def loss(self) -> AuxLossSettings: ...
    @property
    def compute(self) -> ComputeSettings: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepOutput:
    """Losses and statistics of one step."""

    losses: dict[str, float]  # unweighted, by name
    grad_norm: float
    lr: float
    tokens: int
    expert_imbalance: float  # max expert load / mean load, worst layer; 1: balanced


class Trainer:
    """A model with its master weights, optimizer and objective.

    A batch that gives a non-finite loss or gradient is saved to `non_finite_file`.
    """

    def __init__(
        self,
        network: Transformer,
        objective: Objective,
        settings: TrainerSettings,
        non_finite_file: Path,
        mesh: Mesh = SINGLE_PROCESS,
        fake_quant: FakeQuant = no_fake_quant,
    ) -> None:
        self.network, self.objective, self.settings = network, objective, settings
        self.mesh = mesh
        self.clip_mtp_apart = False  # so that the gradient of the MTP layer scales no other
        self.weights = MasterWeights(network, mesh, DTYPES[settings.compute.dtype], fake_quant)
        self.optimizer = build_optimizer(self.weights, settings.optim)
        self._non_finite_file = non_finite_file
        network.activation_checkpointing = settings.compute.activation_checkpointing

    def step(
        self, batch: PackedBatch, *, lr: float, bias_rate: float, progress: float
    ) -> TrainStepOutput:
        """Train on a batch with learning rate `lr` and router-bias update rate `bias_rate`.

        Collective: all ranks call it, each with its own part of the batch, and get the same output.
        `progress` of the run is passed to the objective. Raises TrainingError if a loss or the
        gradient is not finite; the weights are then unchanged.
        """
        counts = self._count_tokens(batch)
        losses = self._accumulate(batch, counts, progress)
        norm = self._clip()
        self._check_finite(losses, norm, batch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.weights.copy_to_model()
        self.optimizer.zero_grad(set_to_none=True)
        return TrainStepOutput(
            losses={name: float(part) for name, part in losses.parts.items()},
            grad_norm=norm,
            lr=lr,
            tokens=counts.tokens,
            expert_imbalance=update_router_biases(self.network, losses.expert_loads, bias_rate),
        )

    def _clip(self) -> float:
        """Clip the gradient; its norm, that of the MTP layer left out if it is clipped apart."""
        norm_fn = partial(global_norm, axis=self.mesh.all_ranks)
        limit = self.settings.optim.max_grad_norm
        if not self.clip_mtp_apart:
            return float(clip_grad_norm_(self.weights.params_with_grad(), limit, norm_fn))
        mtp = float(clip_grad_norm_(self.weights.params_with_grad(mtp=True), limit, norm_fn))
        norm = float(clip_grad_norm_(self.weights.params_with_grad(mtp=False), limit, norm_fn))
        return norm if np.isfinite(mtp) else mtp

    def _count_tokens(self, batch: PackedBatch) -> TokenCounts:
        """Token counts summed over all ranks."""
        local = count_tokens(batch, self.settings.loss.mtp_depths)
        numbers = torch.tensor([local.tokens, *local.targets], dtype=torch.float64)
        tokens, *targets = all_reduce_sum(numbers.to(self._device), self.mesh.data_ranks).tolist()
        return TokenCounts(int(tokens), tuple(targets))

    def _accumulate(self, batch: PackedBatch, counts: TokenCounts, progress: float) -> Losses:
        """Accumulate gradients over micro batches; returns the losses of the whole batch."""
        found = []
        for micro, weight in self._micro_batches(batch):
            with offload_activations(self.settings.compute):
                losses = self.objective(self.network, micro, counts, progress)
            (losses.total * weight).backward()
            self.weights.accumulate_gradients()
            found.append(losses.scaled(weight))
        return all_reduce_losses(_summed(found), self.mesh.all_ranks)

    def _micro_batches(self, batch: PackedBatch) -> Iterator[tuple[MicroBatch, int]]:
        """This rank's micro batches with weight 1, padded with empty ones of weight 0.

        Every rank runs the same number of forward passes: their collectives would deadlock
        otherwise.
        """
        tokens, context = self.settings.compute.micro_batch_tokens, self.mesh.context
        own = sum(1 for _ in split_documents(batch, tokens, min_tokens=context.size))
        longest = all_reduce_max(own, self.mesh.all_ranks, self._device)
        for micro in iter_micro_batches(batch, self._device, tokens, context):
            yield micro, 1
        for _ in range(longest - own):
            (padding,) = iter_micro_batches(
                _empty_batch(context.size), self._device, context=context
            )
            yield padding, 0

    @property
    def _device(self) -> torch.device:
        return self.network.embed.weight.device

    def _check_finite(self, losses: Losses, norm: float, batch: PackedBatch) -> None:
        """Save the batch and raise TrainingError if a loss or the gradient norm is not finite."""
        non_finite = [name for name, part in losses.parts.items() if not part.isfinite()]
        if np.isfinite(norm) and not non_finite:
            return
        file = self._non_finite_file
        if self.mesh.data_ranks.size > 1:  # any of their batches may be the cause
            file = file.with_stem(f"{file.stem}-{self.mesh.data_ranks.rank}")
        if self.mesh.context.rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(
                file,
                token_T=batch.token_T,
                trained_T=batch.loss_mask_T,
                lengths=np.array(batch.lengths),
            )
        what = f"loss '{non_finite[0]}'" if non_finite else "the gradient"
        raise TrainingError(f"{what} is not finite; the batch is saved in {file}")


def build_optimizer(weights: MasterWeights, optim: OptimSettings) -> AdamW:
    """AdamW, or Muon with AdamW for the parameters that are not matrices."""
    adam = AdamSettings(betas=optim.betas)
    if optim.type == "adamw":
        return AdamW(weights.roles(), lr=optim.lr, weight_decay=optim.weight_decay, adam=adam)
    roles = weights.roles(split=optim.muon_split, split_rope_rows=optim.muon_split_rope)
    muon = MuonSettings(momentum=optim.momentum)
    return Muon(roles, lr=optim.lr, weight_decay=optim.weight_decay, adam=adam, muon=muon)


@torch.no_grad()
def update_router_biases(network: Transformer, loads: tuple[Tensor, ...], rate: float) -> float:
    """Update the load-balancing bias of every router; returns the worst max / mean expert load.

    `loads` are the tokens of each expert, in the order of the routers. A `rate` of 0 only measures.
    """
    routers = [module for module in network.modules() if isinstance(module, TopKRouter)]
    imbalance = []
    for router, load_E in zip(routers, loads, strict=False):
        imbalance.append(load_E.max() / load_E.float().mean())
        if rate:
            router.update_bias(load_E, rate)
    # Copied to the host together: each copy waits for the device.
    return max([1.0, *torch.stack(imbalance).tolist()]) if imbalance else 1.0


def offload_activations(compute: ComputeSettings) -> AbstractContextManager[object]:
    """Context in which tensors saved for the backward pass go to host memory, if so set."""
    if not compute.activation_offload:
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.accelerator.is_available())


def all_reduce_losses(losses: Losses, axis: MeshDim) -> Losses:
    """Sum the losses and expert loads of all ranks."""
    return Losses(
        all_reduce_sum(losses.total, axis),
        {name: all_reduce_sum(part, axis) for name, part in losses.parts.items()},
        tuple(all_reduce_sum(torch.stack(losses.expert_loads), axis))
        if losses.expert_loads
        else (),
    )


def _empty_batch(tokens: int) -> PackedBatch:
    """A document without targets."""
    return PackedBatch(
        token_T=np.zeros(tokens, np.int32),
        loss_mask_T=np.zeros(tokens, np.bool_),
        lengths=(tokens,),
        sources=("padding",),
        num_targets=0,
    )


def _summed(found: list[Losses]) -> Losses:
    """Sum of the losses of micro batches."""
    return Losses(
        sum_tensors([losses.total for losses in found]),
        {name: sum_tensors([losses.parts[name] for losses in found]) for name in found[0].parts},
        tuple(
            sum_tensors(list(loads))
            for loads in zip(*(losses.expert_loads for losses in found), strict=True)
        ),
    )
