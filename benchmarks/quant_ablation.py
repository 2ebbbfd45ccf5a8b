"""Ablation of the W4A8 recipe: each ingredient left out, on nano models of several seeds, each
calibrated several times with different text and a different rotation.

Compared is the KL divergence of the quantized model from the original one on the same text. Its
mean over tokens is dominated by the few tokens that select another expert or key; so the geometric
mean decides, and the mean is reported too. A ratio belongs to one model and calibration; reported
are the mean of its logarithm over all of them and the standard error of that mean.

Nano's 96 channels have no outliers for a rotation or smoothing to remove. So every arm runs twice:
on the network as trained, where results are reported, and on an equivalent network with the channel
outliers that large models have, where they are claimed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from benchmarks.quant_models import FULL, LENGTH, PipelineRun, mean_and_error, quantize_once
from benchmarks.table import Claim
from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.checkpoint.training_state import latest_model
from paddock.launch.calibration_texts import CalibrationBudget
from paddock.model import Transformer
from paddock.model.attention.mla import MLA
from paddock.model.moe import GatedMLP, MoE
from paddock.quant import RECIPES, CalibrationText, QuantSettings
from paddock.quant.rotate import norm_consumers

CALIBRATIONS = 2
BUDGET = CalibrationBudget(calibrate=8192, held_out=8192, needles=0, length=LENGTH)
WIDE = FULL.model_copy(update={"expert_bits": 8})
# An ingredient, the recipe it is removed from, and the override. Smoothing acts on the int8 parts:
# its effect is largest where experts are int8 too.
WITHOUT: dict[str, tuple[str, dict[str, Any]]] = {
    "QuaRot": ("full", {"rotate": False}),
    "AWQ on experts": ("full", {"awq": False}),
    "SSZ": ("full", {"ssz_iterations": 0}),
    "smoothing": ("full", {"smooth": False}),
    "smoothing, experts int8": ("wide", {"smooth": False}),
}
MEASURES = {"geometric mean": "kl_geometric_mean", "mean": "kl_mean"}

Reports = dict[str, dict[str, Any]]  # by arm


def ablation_claims(pipelines: Sequence[PipelineRun], runs: Path) -> list[Claim]:
    plain: list[Reports] = []
    outliers: list[Reports] = []
    for pipeline in pipelines:
        source = latest_model(pipeline.stage("sft"))
        scaled = runs / pipeline.name / "outliers"
        if not (scaled / "config.json").is_file():
            save_pretrained(with_outliers(load_pretrained(source)), scaled)
        for number, texts in enumerate(calibrations(pipeline)):
            home = runs / pipeline.name / f"calibration-{number}"
            plain.append(arms(source, home / "as-trained", texts, number))
            outliers.append(arms(scaled, home / "with-outliers", texts, number))
    return [*rows("as trained", plain), *rows("with outliers", outliers, claimed=True)]


def calibrations(pipeline: PipelineRun) -> Iterator[list[CalibrationText]]:
    """The same validation text, each time with different calibration text."""
    budget = replace(BUDGET, calibrate=CALIBRATIONS * BUDGET.calibrate)
    texts = pipeline.texts(budget, "sft")
    calibration = [text for text in texts if text.purpose == "calibration"]
    rest = [text for text in texts if text.purpose != "calibration"]
    each = len(calibration) // CALIBRATIONS
    for number in range(CALIBRATIONS):
        # A contiguous part has text of every source; text of a few sources would fit smoothing to
        # those at the expense of the others.
        yield calibration[number * each : (number + 1) * each] + rest


def arms(source: Path, home: Path, texts: Sequence[CalibrationText], seed: int) -> Reports:
    whole = {"full": FULL, "wide": WIDE}
    recipes: dict[str, QuantSettings] = dict(whole)
    for name, (base, change) in WITHOUT.items():
        recipes[f"without {name}"] = whole[base].model_copy(update=change)
    recipes["nearest"] = RECIPES["rtn"]
    found = {}
    for name, settings in recipes.items():
        out = home / name.replace(" ", "-").replace(",", "")
        seeded = settings.model_copy(update={"seed": seed})
        found[name] = quantize_once(source, out, seeded, texts)
    return found


def rows(name: str, found: Sequence[Reports], *, claimed: bool = False) -> list[Claim]:
    made = [
        Claim(
            name=f"{name}: KL per token, {what}",
            measured=", ".join(
                f"{measure} {_average(found, arm, key):.2e}" for measure, key in MEASURES.items()
            )
            + " nats",
        )
        for what, arm in (
            ("whole recipe", "full"),
            ("experts int8", "wide"),
            ("round-to-nearest", "nearest"),
        )
    ]
    for ingredient, (base, _) in WITHOUT.items():
        made.append(_ratio_claim(name, ingredient, base, found, decides=claimed))
    ratio, error = _ratio(found, "nearest", "full", "kl_geometric_mean")
    return [*made, Claim(name=f"{name}: round-to-nearest", measured=_format_ratio(ratio, error))]


def _ratio_claim(
    name: str, ingredient: str, base: str, found: Sequence[Reports], *, decides: bool
) -> Claim:
    arm = f"without {ingredient}"
    ratio, error = _ratio(found, arm, base, "kl_geometric_mean")
    mean = _ratio(found, arm, base, "kl_mean")
    return Claim(
        name=f"{name}: without {ingredient}",
        target="> 1x by two standard errors" if decides else "",
        measured=f"{_format_ratio(ratio, error)}; mean {_format_ratio(*mean)}",
        holds=ratio > 2 * error if decides else None,
    )


def _average(found: Sequence[Reports], arm: str, key: str) -> float:
    return exp(mean_and_error([log(one[arm][key]) for one in found])[0])


def _ratio(found: Sequence[Reports], arm: str, base: str, key: str) -> tuple[float, float]:
    """Mean logarithm of the ratio arm / base, and its standard error."""
    return mean_and_error([log(one[arm][key] / one[base][key]) for one in found])


def _format_ratio(log_ratio: float, error: float) -> str:
    ratio = exp(log_ratio)
    return f"{ratio:.3f}x ± {ratio * error:.3f}"


@torch.no_grad()
def with_outliers(network: Transformer, channels: int = 3, factor: float = 24.0) -> Transformer:
    """An equivalent network with outlier channels where large models have them: after norms, in
    values and inside every MLP. What is multiplied here is divided in the next layer."""
    generator = torch.Generator().manual_seed(0)

    def outlier_scale(size: int) -> torch.Tensor:
        scale = torch.ones(size)
        scale[torch.randperm(size, generator=generator)[:channels]] = factor
        return scale

    for block in network.layers:
        for consumers in norm_consumers(block):  # type: ignore[arg-type]
            scale = outlier_scale(len(consumers.norm.weight))
            consumers.norm.weight.mul_(scale)
            for weight in consumers.weights:
                weight.div_(scale)
        for mlp in block.modules():
            if isinstance(mlp, GatedMLP):
                scale = outlier_scale(len(mlp.up.weight))
                mlp.up.weight.mul_(scale.unsqueeze(-1))
                mlp.down.weight.div_(scale)
        attention = block.attention
        assert isinstance(attention, MLA)
        mla = attention.mla
        scale = outlier_scale(mla.heads * mla.value)
        up = attention.kv_b.weight.unflatten(0, (mla.heads, -1))[:, mla.nope :]
        up.mul_(scale.view(mla.heads, -1, 1))
        attention.o.weight.div_(scale)
        if isinstance(block.mlp, MoE):
            experts = block.mlp.experts
            inner = experts.gate_up.shape[1] // 2
            for expert in range(len(experts.down)):
                scale = outlier_scale(inner)
                experts.gate_up[expert, inner:].mul_(scale.unsqueeze(-1))
                experts.down[expert].div_(scale)
    return network
