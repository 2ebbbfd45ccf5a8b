"""What is done to which weights."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt
from torch import nn

from paddock.config import BaseSettings
from paddock.model.decoder_layer import DecoderLayer
from paddock.quant.w4a8 import Grid

# What decides rankings, or is used as a matrix, is left as it is.
LEFT_ALONE = ("kv_b", "indexer.key", "indexer.weights")


class QuantSettings(BaseSettings):
    """The published recipe for GLM-5 where nothing is said: QuaRot, Flex-AWQ-SSZ for the routed
    experts' up and down, smoothing for attention, dense and shared parts; experts W4A8, these parts
    W8A8. Router, indexer keys and head weights, kv_b, MTP, embedding and head are left alone."""

    rotate: bool = True
    seed: int = 0  # of the signs of the rotation
    smooth: bool = True  # attention, dense and shared parts
    awq: bool = True  # routed experts
    refinements: NonNegativeInt = 20  # rounds of SSZ on the experts' scales; 0: largest number
    alphas: PositiveInt = 20  # steps from 0 to 1 in which strengths of smoothing are tried
    expert_bits: Literal[4, 8] = 4
    expert_group: PositiveInt | None = None  # columns that share a scale; None: a whole row
    linears: bool = True  # attention, dense and shared parts become int8; False: left alone
    rows: PositiveInt = 256  # that a layer or an expert keeps to try strengths on
    batch_tokens: PositiveInt = 8192  # at a time on their way through a layer

    @property
    def needs_text(self) -> bool:
        return self.awq or (self.smooth and self.linears)

    @property
    def expert_grid(self) -> Grid:
        return Grid(bits=self.expert_bits, group=self.expert_group, refinements=self.refinements)

    @property
    def linear_grid(self) -> Grid:
        return Grid(bits=8)


PLAIN = {"rotate": False, "smooth": False, "awq": False, "refinements": 0}

RECIPES = {
    "w4a8": QuantSettings(),
    # Nearest integers and nothing else, to see what the rest is worth.
    "rtn": QuantSettings(**PLAIN),  # type: ignore[arg-type]
    # For weights that were trained as integers: exporting may not move them, so nothing is turned,
    # smoothed or refined.
    "qat": QuantSettings(**PLAIN),  # type: ignore[arg-type]
}


def integer_linears(block: DecoderLayer) -> dict[str, nn.Linear]:
    """The linear maps of a layer that become integers, by name within it."""
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(LEFT_ALONE)
    }
