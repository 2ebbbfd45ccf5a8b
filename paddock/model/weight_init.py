"""Weight initialisation: normal matrices, unit norms, reproducible from a seed."""

import torch
from torch import Tensor, nn

from paddock.model.attention.gdn import GatedDeltaNet, ShortConvolution
from paddock.model.config import ModelConfig
from paddock.model.moe import GroupedExperts, TopKRouter


@torch.no_grad()
def init_weights(network: nn.Module, config: ModelConfig, generator: torch.Generator) -> None:
    """Initialise every weight matrix in place; norms are already one and biases zero.

    The same generator state gives the same network.
    """
    init = config.init
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding):
            _normal(module.weight, init.embed_std or init.std, generator)
        elif isinstance(module, nn.Linear):
            if name == "head" and config.tied:
                continue
            _normal(
                module.weight, init.head_std or init.std if name == "head" else init.std, generator
            )
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, TopKRouter):
            _normal(module.weight, init.router_std or init.std, generator)
        elif isinstance(module, GroupedExperts):
            _normal(module.gate_up, init.std, generator)
            _normal(module.down, init.std, generator)
        elif isinstance(module, GatedDeltaNet):
            _init_decay(module, generator)
        elif isinstance(module, ShortConvolution):
            module.weight.zero_()
            module.weight[:, -1] = 1.0


def _normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    # Drawn in float32 on the generator's device, so that dtype and device do not change the draw.
    draw = torch.randn(weight.shape, generator=generator, device=generator.device)
    weight.copy_(draw * std)


def _init_decay(module: GatedDeltaNet, generator: torch.Generator) -> None:
    """Gated DeltaNet's initialisation: decay rates uniform in [1, 16] per head, step sizes
    log-uniform in [1e-3, 0.1]."""
    shape = module.decay_log.shape
    rate = 1 + 15 * torch.rand(shape, generator=generator, device=generator.device)
    module.decay_log.copy_(rate.log())
    low, high = torch.log(torch.tensor((1e-3, 0.1))).tolist()
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    size = torch.exp(low + (high - low) * uniform)
    module.decay_bias.copy_(size + torch.log(-torch.expm1(-size)))  # inverse of softplus
