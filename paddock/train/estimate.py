"""What a run will cost, said before it starts."""

from dataclasses import dataclass

import torch

from paddock.model import ModelConfig, cost
from paddock.train.settings import TrainSettings
from paddock.train.stages import stage_spec

# Dense bfloat16 peak of chips whose name contains the key, in FLOP/s.
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
    """Of the whole run; bytes are those of one rank."""

    parameters: int
    active: int  # without embeddings
    tokens: int
    flops_token: float  # needed, forward and backward: see model/cost.py
    ranks: int
    weight_bytes: int  # of what is multiplied: on many ranks, the blocks gathered at a time
    state_bytes: int  # exact weights, gradients and optimizer state
    activation_bytes: int  # of one micro-batch, roughly

    @property
    def flops(self) -> float:
        return self.tokens * self.flops_token

    @property
    def rank_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.activation_bytes


def estimate_training(settings: TrainSettings, config: ModelConfig) -> TrainingEstimate:
    """The cost of a run from its settings and its network's configuration alone."""
    total, ranks = cost.count_parameters(config).total, settings.parallel.ranks
    machine, stream = settings.compute, settings.dataloader
    half = machine.dtype == "bfloat16"
    slots = 1 if settings.optim.type == "muon" else 2
    exact = 1 if half or ranks > 1 else 0  # alone in float32, the weights are the exact ones
    return TrainingEstimate(
        parameters=total,
        active=cost.count_active_parameters(config).without_embeddings,
        tokens=settings.steps * stream.batch_tokens,
        flops_token=flops_per_token(config, settings),
        ranks=ranks,
        weight_bytes=(total if ranks == 1 else gathered_parameters(config, settings))
        * (2 if half else 4),
        state_bytes=total * 4 * (1 + slots + exact) // ranks,
        activation_bytes=int(
            tokens_per_rank(settings)
            * activation_elements_per_token(config, machine.activation_checkpointing)
            * (2 if half else 4)
        ),
    )


def gathered_parameters(config: ModelConfig, settings: TrainSettings) -> int:
    """Parameters a rank holds whole at a time: embedding and head, and the largest layer twice, in
    use and on its way. Of its experts, those it owns."""
    own = settings.parallel.expert
    layers = [cost.count_layer_parameters(config, i) for i in range(config.layers)]
    largest = max(layer.total - layer.experts + layer.experts // own for layer in layers)
    whole = cost.count_parameters(config)
    return whole.embedding + whole.head + 2 * largest


def tokens_per_rank(settings: TrainSettings) -> int:
    """Tokens of a micro-batch that one rank computes. A long document is never cut in two."""
    parallel, stream = settings.parallel, settings.dataloader
    share = max(1, stream.batch_tokens // (parallel.data * parallel.expert))
    micro = max(min(settings.compute.micro_batch_tokens or share, share), stream.seq_len)
    return -(-micro // parallel.context)


def flops_per_token(config: ModelConfig, settings: TrainSettings) -> float:
    """FLOPs that a token of this run needs, forward and backward, in rows of one document each;
    shorter documents need less attention."""
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


def activation_elements_per_token(config: ModelConfig, recompute: bool) -> float:
    """Numbers a token leaves behind for the backward pass, by rule of thumb: a layer's input if it
    is recomputed, else about what its matrices read and write."""
    if recompute:
        return float(config.hidden * (config.layers + 4))
    active = cost.count_active_parameters(config)
    per_layer = 2 * (active.without_embeddings / config.layers) / config.hidden
    return float(config.layers * (per_layer + 12 * config.hidden))


def peak_flops(device: torch.device) -> float | None:
    """The chip's dense bfloat16 peak, where we know it."""
    if device.type == "cpu":
        return None
    name = torch.get_device_module(device).get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
