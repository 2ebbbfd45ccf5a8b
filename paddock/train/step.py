"""One optimizer step: micro-batches forward and backward, clip, step, rebalance the routers."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paddock.data import Batch
from paddock.model import Network
from paddock.model.moe import Router
from paddock.optim import AdamSettings, AdamW, Muon, MuonSettings, clip_gradients
from paddock.train.batch import counts, on_device
from paddock.train.objective import Losses, Objective, sum_of
from paddock.train.settings import MachineSettings, OptimSettings, TrainSettings
from paddock.train.weights import Weights


class TrainingError(ValueError):
    """A run that cannot go on; the message says why and where the evidence lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did."""

    parts: dict[str, float]  # unweighted losses
    grad_norm: float
    lr: float
    tokens: int
    imbalance: float  # the busiest expert's load over the mean, worst layer; 1 is even


class Trainer:
    """A network, its optimizer and an objective."""

    def __init__(
        self, network: Network, objective: Objective, settings: TrainSettings, evidence: Path
    ) -> None:
        self.network, self.objective, self.settings = network, objective, settings
        self.weights = Weights(network)
        self.optimizer = make_optimizer(self.weights, settings.optim)
        self._evidence = evidence
        network.recompute = settings.machine.recompute

    def step(self, batch: Batch, *, lr: float, bias_rate: float, progress: float) -> StepReport:
        losses = self._accumulate(batch, progress)
        norm = float(clip_gradients(self.weights.with_gradient(), self.settings.optim.clip))
        self._refuse_non_finite(losses, norm, batch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.weights.publish()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(
            parts={name: float(part) for name, part in losses.parts.items()},
            grad_norm=norm,
            lr=lr,
            tokens=len(batch.token_T),
            imbalance=rebalance(self.network, losses.loads, bias_rate),
        )

    def _accumulate(self, batch: Batch, progress: float) -> Losses:
        """Gradients of the whole batch, and its losses."""
        machine = self.settings.machine
        total = counts(batch, self.settings.loss.mtp_depths)
        device = self.network.embed.weight.device
        found = []
        for micro in on_device(batch, device, machine.micro_tokens):
            with saved_elsewhere(machine):
                losses = self.objective(self.network, micro, total, progress)
            losses.total.backward()
            self.weights.collect_gradients()
            found.append(Losses(losses.total.detach(), losses.parts, losses.loads))
        return _added(found)

    def _refuse_non_finite(self, losses: Losses, norm: float, batch: Batch) -> None:
        broken = [name for name, part in losses.parts.items() if not part.isfinite()]
        if np.isfinite(norm) and not broken:
            return
        self._evidence.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            self._evidence,
            token_T=batch.token_T,
            trained_T=batch.trained_T,
            lengths=np.array(batch.lengths),
        )
        what = f"loss '{broken[0]}'" if broken else "the gradient"
        raise TrainingError(f"{what} is not finite; the batch that did it is in {self._evidence}")


def make_optimizer(weights: Weights, optim: OptimSettings) -> AdamW:
    adam = AdamSettings(betas=optim.betas)
    if optim.kind == "adamw":
        return AdamW(weights.roles(), lr=optim.lr, weight_decay=optim.weight_decay, adam=adam)
    roles = weights.roles(split=optim.split, split_rope_rows=optim.split_rope_rows)
    muon = MuonSettings(momentum=optim.momentum)
    return Muon(roles, lr=optim.lr, weight_decay=optim.weight_decay, adam=adam, muon=muon)


@torch.no_grad()
def rebalance(network: Network, loads: tuple[Tensor, ...], rate: float) -> float:
    """Nudge every router that saw tokens; returns how uneven the worst of them was."""
    worst = 1.0
    routers = [module for module in network.modules() if isinstance(module, Router)]
    for router, load_E in zip(routers, loads, strict=False):
        worst = max(worst, float(load_E.max() / load_E.float().mean()))
        if rate:
            router.rebalance(load_E, rate)
    return worst


def saved_elsewhere(machine: MachineSettings) -> AbstractContextManager[object]:
    """Where tensors wait for the backward pass."""
    if not machine.offload:
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.accelerator.is_available())


def _added(found: list[Losses]) -> Losses:
    """The losses of micro-batches as those of one batch."""
    return Losses(
        sum_of([losses.total for losses in found]),
        {name: sum_of([losses.parts[name] for losses in found]) for name in found[0].parts},
        tuple(
            sum_of(list(loads)) for loads in zip(*(losses.loads for losses in found), strict=True)
        ),
    )
