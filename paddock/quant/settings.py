"""What is done to which weights."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt
from torch import nn

from paddock.config import BaseSettings
from paddock.model import DecoderLayer, attention
from paddock.quant.w4a8 import QuantizationArgs


class QuantSettings(BaseSettings):
    """The published recipe for GLM-5 where nothing is said: QuaRot, Flex-AWQ-SSZ for the routed
    experts' up and down, smoothing for attention, dense and shared parts; experts W4A8, these parts
    W8A8. Router, indexer keys and head weights, kv_b, MTP, embedding and head are left alone."""

    rotate: bool = True
    seed: int = 0  # of the signs of the rotation
    smooth: bool = True  # attention, dense and shared parts
    awq: bool = True  # routed experts
    ssz_iterations: NonNegativeInt = 20  # rounds of SSZ on the experts' scales; 0: largest number
    n_grid: PositiveInt = 20  # steps from 0 to 1 in which strengths of smoothing are tried
    expert_bits: Literal[4, 8] = 4
    expert_group_size: PositiveInt | None = None  # columns that share a scale; None: a whole row
    quantize_linears: bool = (
        True  # attention, dense and shared parts become int8; False: left alone
    )
    calibration_rows: PositiveInt = 256  # that a layer or an expert keeps to try strengths on
    batch_tokens: PositiveInt = 8192  # at a time on their way through a layer

    @property
    def needs_calibration(self) -> bool:
        return self.awq or (self.smooth and self.quantize_linears)

    @property
    def expert_args(self) -> QuantizationArgs:
        return QuantizationArgs(
            bits=self.expert_bits,
            group_size=self.expert_group_size,
            ssz_iterations=self.ssz_iterations,
        )

    @property
    def linear_args(self) -> QuantizationArgs:
        return QuantizationArgs(bits=8)


RTN = {"rotate": False, "smooth": False, "awq": False, "ssz_iterations": 0}

RECIPES = {
    "w4a8": QuantSettings(),
    # Nearest integers and nothing else, to see what the rest is worth.
    "rtn": QuantSettings(**RTN),  # type: ignore[arg-type]
    # For weights that were trained as integers: exporting may not move them, so nothing is turned,
    # smoothed or refined.
    "qat": QuantSettings(**RTN),  # type: ignore[arg-type]
}


def quantizable_linears(block: DecoderLayer) -> dict[str, nn.Linear]:
    """The linear layers of a decoder layer that are quantized, by name within it.

    Not quantized: index keys and head weights, which decide rankings, and kv_b, which absorbed
    attention uses as a matrix.
    """
    unquantized: list[nn.Module] = []
    for module in block.modules():
        if isinstance(module, attention.Indexer):
            unquantized += [module.key, module.weights]
        elif isinstance(module, attention.MLA):
            unquantized.append(module.kv_b)
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not any(module is other for other in unquantized)
    }
