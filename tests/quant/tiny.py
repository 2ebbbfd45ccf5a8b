"""Small networks on disk, text for them, and a float simulation of quantized layers."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from paddock.checkpoint import save_pretrained
from paddock.model import Transformer
from paddock.model.moe import GroupedExperts, Routing
from paddock.quant import CalibrationText, QuantSettings
from paddock.quant.settings import quantizable_linears
from paddock.quant.w4a8 import QuantizationArgs, quantize
from tests.model.networks import build_network, latent_config, tokens

QUICK = QuantSettings(n_grid=2, calibration_rows=16, batch_tokens=128)  # small enough to be fast


def network(**changes: Any) -> Transformer:
    return build_network(latent_config(**changes))


def folder_of(network: Transformer, folder: Path) -> Path:
    save_pretrained(network, folder)
    return folder


def text(calibrate: int = 4, held_out: int = 2, needles: int = 1) -> list[CalibrationText]:
    """Random tokens; the last passages have their third token as the answer."""
    made = [
        CalibrationText(ids=tuple(tokens(48, i).tolist()), purpose="calibration")
        for i in range(calibrate)
    ]
    made += [
        CalibrationText(ids=tuple(tokens(40, 50 + i).tolist()), purpose="validation")
        for i in range(held_out)
    ]
    return made + [
        CalibrationText(
            ids=tuple(tokens(30, 90 + i).tolist()), purpose="needles", answers=((2, 3),)
        )
        for i in range(needles)
    ]


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Each row rounded to 255 values in float64, independently of the code under test."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (x / step.clamp_min(1e-300)).round() * step, 0.0)


class FakeLinear(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.matrix = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rounded_rows(x) @ self.matrix.T


class FakeExperts(nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for k, e in enumerate(routing.expert_TK[t].tolist()):
                gate, up = (self.gate_up[e] @ rounded_rows(x[t])).chunk(2)
                inner = rounded_rows(gate * gate.sigmoid() * up)
                out[t] += routing.weight_TK[t, k] * (self.down[e] @ inner)
        return out


def simulated(network: Transformer, settings: QuantSettings) -> Transformer:
    """A fake-quantized float64 network: weights and activations are rounded, products are float."""
    network = network.cast(torch.float64)
    for block in network.layers:
        linears = quantizable_linears(block) if settings.quantize_linears else {}
        for name, linear in linears.items():
            weight = quantize(linear.weight, QuantizationArgs(bits=8)).dequantized_XFD.double()
            parent, _, last = name.rpartition(".")
            setattr(block.get_submodule(parent), last, FakeLinear(weight))
        if isinstance(getattr(block.mlp, "experts", None), GroupedExperts):
            stacks = [
                quantize(stack, settings.expert_args).dequantized_XFD.double()
                for stack in (block.mlp.experts.gate_up, block.mlp.experts.down)
            ]
            block.mlp.experts = FakeExperts(*stacks)
    return network
