"""Each ingredient of the W4A8 recipe left out, on nano models of several seeds, each calibrated
several times: with other text and another rotation.

What is compared is the divergence of the quantized network's opinions from the exact one's, in the
same run of the same text. Its mean over tokens is made by the few at which another expert or key
was chosen, and by chance; so the typical divergence (the geometric mean) decides, and the mean
stands beside it. A ratio is that of one model and calibration, averaged as logarithms over all of
them; its standard error is over them too.

Nano's 96 channels grow no outliers for a rotation or smoothing to mend. So every arm runs twice: on
the network as trained, where results are reported, and on the same function with the loud channels
that large networks have, where they are claimed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from benchmarks.quant_story import FULL, LENGTH, Story, mean_and_error, quantized
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
AMOUNTS = CalibrationBudget(calibrate=8192, held_out=8192, needles=0, length=LENGTH)
WIDE = FULL.model_copy(update={"expert_bits": 8})
# An ingredient, the recipe it is removed from, and how. Smoothing acts on the int8 parts: what it
# does is seen best where experts are int8 too.
WITHOUT: dict[str, tuple[str, dict[str, Any]]] = {
    "QuaRot": ("full", {"rotate": False}),
    "AWQ on experts": ("full", {"awq": False}),
    "SSZ": ("full", {"refinements": 0}),
    "smoothing": ("full", {"smooth": False}),
    "smoothing, experts int8": ("wide", {"smooth": False}),
}
MEASURES = {"typical": "kl_geometric_mean", "mean": "kl_mean"}

Found = dict[str, dict[str, Any]]  # of each arm, its report


def ablation_claims(stories: Sequence[Story], runs: Path) -> list[Claim]:
    plain: list[Found] = []
    loud: list[Found] = []
    for story in stories:
        source = latest_model(story.stage("sft"))
        with_loud = runs / story.name / "loud"
        if not (with_loud / "config.json").is_file():
            save_pretrained(with_outliers(load_pretrained(source)), with_loud)
        texts = list(calibrations(story))
        for number, passages in enumerate(texts):
            home = runs / story.name / f"calibration-{number}"
            plain.append(arms(source, home / "as-trained", passages, number))
            loud.append(arms(with_loud, home / "with-outliers", passages, number))
    return [*rows("as trained", plain), *rows("with outliers", loud, claimed=True)]


def calibrations(story: Story) -> Iterator[list[CalibrationText]]:
    """The same held-out text, and each time other text to calibrate with."""
    more = replace(AMOUNTS, calibrate=CALIBRATIONS * AMOUNTS.calibrate)
    passages = story.text(more, "sft")
    given = [passage for passage in passages if passage.purpose == "calibration"]
    rest = [passage for passage in passages if passage.purpose != "calibration"]
    each = len(given) // CALIBRATIONS
    for number in range(CALIBRATIONS):
        # A stretch, in which all sources of text take turns: text of some of them alone would
        # teach smoothing what hurts the others.
        yield given[number * each : (number + 1) * each] + rest


def arms(source: Path, home: Path, passages: Sequence[CalibrationText], seed: int) -> Found:
    whole = {"full": FULL, "wide": WIDE}
    made: dict[str, QuantSettings] = dict(whole)
    for name, (base, change) in WITHOUT.items():
        made[f"without {name}"] = whole[base].model_copy(update=change)
    made["nearest"] = RECIPES["rtn"]
    found = {}
    for name, settings in made.items():
        out = home / name.replace(" ", "-").replace(",", "")
        chosen = settings.model_copy(update={"seed": seed})
        found[name] = quantized(source, out, chosen, passages)
    return found


def rows(name: str, found: Sequence[Found], *, claimed: bool = False) -> list[Claim]:
    made = [
        Claim(
            name=f"{name}: divergence of a token, {what}",
            measured=", ".join(
                f"{measure} {_average(found, arm, key):.2e}" for measure, key in MEASURES.items()
            )
            + " nats",
        )
        for what, arm in (
            ("whole recipe", "full"),
            ("experts int8", "wide"),
            ("nearest integers alone", "nearest"),
        )
    ]
    for ingredient, (base, _) in WITHOUT.items():
        made.append(_ratio_claim(name, ingredient, base, found, decides=claimed))
    ratio, error = _ratio(found, "nearest", "full", "kl_geometric_mean")
    return [*made, Claim(name=f"{name}: nearest integers alone", measured=_told(ratio, error))]


def _ratio_claim(
    name: str, ingredient: str, base: str, found: Sequence[Found], *, decides: bool
) -> Claim:
    arm = f"without {ingredient}"
    ratio, error = _ratio(found, arm, base, "kl_geometric_mean")
    mean = _ratio(found, arm, base, "kl_mean")
    return Claim(
        name=f"{name}: without {ingredient}",
        target="> 1x by two standard errors" if decides else "",
        measured=f"{_told(ratio, error)}; in the mean {_told(*mean)}",
        holds=ratio > 2 * error if decides else None,
    )


def _average(found: Sequence[Found], arm: str, key: str) -> float:
    return exp(mean_and_error([log(one[arm][key]) for one in found])[0])


def _ratio(found: Sequence[Found], arm: str, base: str, key: str) -> tuple[float, float]:
    """The logarithm of how many times worse, and its standard error."""
    return mean_and_error([log(one[arm][key] / one[base][key]) for one in found])


def _told(log_ratio: float, error: float) -> str:
    ratio = exp(log_ratio)
    return f"{ratio:.3f}x ± {ratio * error:.3f}"


@torch.no_grad()
def with_outliers(network: Transformer, channels: int = 3, factor: float = 24.0) -> Transformer:
    """The same function with a few loud channels where large networks have them: behind norms, in
    values and inside every feed-forward layer. What is multiplied here is divided behind it."""
    chance = torch.Generator().manual_seed(0)

    def loud(size: int) -> torch.Tensor:
        scale = torch.ones(size)
        scale[torch.randperm(size, generator=chance)[:channels]] = factor
        return scale

    for block in network.layers:
        for read in norm_consumers(block):  # type: ignore[arg-type]
            scale = loud(len(read.norm.weight))
            read.norm.weight.mul_(scale)
            for weight in read.weights:
                weight.div_(scale)
        for mlp in block.modules():
            if isinstance(mlp, GatedMLP):
                scale = loud(len(mlp.up.weight))
                mlp.up.weight.mul_(scale.unsqueeze(-1))
                mlp.down.weight.div_(scale)
        attention = block.attention
        assert isinstance(attention, MLA)
        mla = attention.mla
        scale = loud(mla.heads * mla.value)
        up = attention.kv_b.weight.unflatten(0, (mla.heads, -1))[:, mla.nope :]
        up.mul_(scale.view(mla.heads, -1, 1))
        attention.o.weight.div_(scale)
        if isinstance(block.mlp, MoE):
            experts = block.mlp.experts
            inner = experts.gate_up.shape[1] // 2
            for expert in range(len(experts.down)):
                scale = loud(inner)
                experts.gate_up[expert, inner:].mul_(scale.unsqueeze(-1))
                experts.down[expert].div_(scale)
    return network
