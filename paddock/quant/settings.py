"""Quantization settings, named recipes, and which layers are quantized."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt
from torch import nn

from paddock.config import BaseSettings
from paddock.model import DecoderLayer, attention
from paddock.quant.w4a8 import QuantizationArgs


class QuantSettings(BaseSettings):
    """Defaults are the published recipe for GLM-5: QuaRot, Flex-AWQ-SSZ for the routed experts' up
    and down projections, SmoothQuant for attention, dense and shared parts; experts W4A8, the other
    parts W8A8. Router, index keys and head weights, kv_b, MTP, embedding and head are not
    quantized."""

    rotate: bool = True
    seed: int = 0  # of the random signs of the rotation
    smooth: bool = True  # attention, dense and shared parts
    awq: bool = True  # routed experts
    ssz_iterations: NonNegativeInt = 20  # SSZ rounds on experts' scales; 0: max-abs scales
    n_grid: PositiveInt = 20  # smoothing strengths tried between 0 and 1
    expert_bits: Literal[4, 8] = 4
    expert_group_size: PositiveInt | None = None  # columns per scale; None: one scale per row
    quantize_linears: bool = True  # attention, dense and shared parts to int8
    calibration_rows: PositiveInt = 256  # sampled per layer or expert for the smoothing search
    batch_tokens: PositiveInt = 8192  # tokens per forward pass of a layer

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
    # Round to nearest only: the baseline.
    "rtn": QuantSettings(**RTN),  # type: ignore[arg-type]
    # For QAT weights: export must not change them, so no rotation, smoothing or scale refinement.
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
