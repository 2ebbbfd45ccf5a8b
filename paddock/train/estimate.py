"""Cost estimate of a training run: parameters, FLOPs and memory per rank."""

from dataclasses import dataclass

import torch

from paddock.model import ModelConfig, cost
from paddock.train.settings import TrainSettings
from paddock.train.stages import stage_spec

# Dense bfloat16 peak in FLOP/s, by a part of the device name. The first match wins.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "B200": 2250e12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEstimate:
    """Estimated cost of a run. Tokens and FLOPs are totals; bytes are per rank."""

    parameters: int
    active: int  # active per token, without embeddings
    tokens: int
    flops_per_token: float  # forward and backward, without recomputation: see model/cost.py
    ranks: int
    weight_bytes: int  # compute weights; with several ranks, those all-gathered at a time
    state_bytes: int  # master weights, gradients and optimizer state
    activation_bytes: int  # of one micro batch, approximate

    @property
    def flops(self) -> float:
        """Total FLOPs of the run."""
        return self.tokens * self.flops_per_token

    @property
    def rank_bytes(self) -> int:
        """Total memory per rank."""
        return self.weight_bytes + self.state_bytes + self.activation_bytes


def estimate_training(settings: TrainSettings, config: ModelConfig) -> TrainingEstimate:
    """Estimate a run from its settings and the model config; nothing is allocated."""
    total, ranks = cost.count_parameters(config).total, settings.parallel.ranks
    compute, dataloader = settings.compute, settings.dataloader
    half = compute.dtype == "bfloat16"
    slots = 1 if settings.optim.type == "muon" else 2
    # A single float32 process computes with the master weights themselves: no copy.
    master = 1 if half or ranks > 1 else 0
    return TrainingEstimate(
        parameters=total,
        active=cost.count_active_parameters(config).without_embeddings,
        tokens=settings.steps * dataloader.batch_tokens,
        flops_per_token=flops_per_token(config, settings),
        ranks=ranks,
        weight_bytes=(total if ranks == 1 else gathered_parameters(config, settings))
        * (2 if half else 4),
        state_bytes=total * 4 * (1 + slots + master) // ranks,
        activation_bytes=int(
            tokens_per_rank(settings)
            * activation_elements_per_token(config, compute.activation_checkpointing)
            * (2 if half else 4)
        ),
    )


def gathered_parameters(config: ModelConfig, settings: TrainSettings) -> int:
    """Parameters a rank holds unsharded at a time.

    These are the embedding, the head, and the largest layer twice: the one in use and the one being
    prefetched. Of a layer's experts a rank holds only its own.
    """
    expert_ranks = settings.parallel.expert
    layers = [cost.count_layer_parameters(config, i) for i in range(config.layers)]
    largest = max(layer.total - layer.experts + layer.experts // expert_ranks for layer in layers)
    whole = cost.count_parameters(config)
    return whole.embedding + whole.head + 2 * largest


def tokens_per_rank(settings: TrainSettings) -> int:
    """Tokens of a micro batch on one rank. A document is never split across micro batches."""
    parallel, dataloader = settings.parallel, settings.dataloader
    share = max(1, dataloader.batch_tokens // (parallel.data * parallel.expert))
    micro = max(min(settings.compute.micro_batch_tokens or share, share), dataloader.seq_len)
    return -(-micro // parallel.context)


def flops_per_token(config: ModelConfig, settings: TrainSettings) -> float:
    """Forward and backward FLOPs per token, if every row is one document.

    Shorter documents need less attention.
    """
    stage, loss = stage_spec(settings), settings.loss
    return cost.training_flops(
        config,
        settings.dataloader.seq_len,
        cost.TrainingWorkload(
            dense=stage.dense,
            language=stage.language,
            indexer=stage.indexer,
            mtp_depths=loss.mtp_depths if config.mtp is not None and loss.mtp_coef else 0,
        ),
    )


def activation_elements_per_token(config: ModelConfig, activation_checkpointing: bool) -> float:
    """Elements saved per token for the backward pass, as a rule of thumb.

    With activation checkpointing only the input of each layer is saved; without, about the inputs
    and outputs of its matrix products.
    """
    if activation_checkpointing:
        return float(config.hidden * (config.layers + 4))
    active = cost.count_active_parameters(config)
    per_layer = 2 * (active.without_embeddings / config.layers) / config.hidden
    return float(config.layers * (per_layer + 12 * config.hidden))


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 peak of the device in FLOP/s; None if it is not known."""
    if device.type == "cpu":
        return None
    name = torch.get_device_module(device).get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
