"""Quantizing nano models: the proofs of the W4A8 recipe, and its kernel on a GPU.

    python -m benchmarks.quant [recipe|ablation|qat|gpu ...] [--story FOLDER ...] [--runs FOLDER]

recipe    W4A8 by the whole recipe: size, nats, needles, skills, divergence in long texts; plain
          rounding beside it
ablation  each ingredient left out, on the network as it was trained and on the same function with
          the channel outliers that large networks have
qat       fine-tuning with INT4-aware training, against quantizing afterwards
gpu       the integer product at the expert shapes of GLM-5 against bfloat16; memory and decoding

`--story` is a folder that `paddock run recipes/nano` made, up to fine-tuning or further; without
one, three are raised first. Called again, it goes on where it was stopped.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quant_ablation import ablation_claims
from benchmarks.quant_gpu import gpu_claims
from benchmarks.quant_qat import TASKS, WORLDS, qat_claims
from benchmarks.quant_story import FULL, LENGTH, SEEDS, Story, quantized, raised
from benchmarks.table import Claim, print_claims
from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training_state import latest_model
from paddock.launch.calibration_texts import CalibrationBudget
from paddock.launch.quantize import compare_in_envs
from paddock.model import Transformer
from paddock.quant import RECIPES

MOST_NATS, MOST_POINTS = 0.02, 2.0  # that the whole recipe may cost
AMOUNTS = CalibrationBudget(calibrate=16_384, held_out=16_384, needles=512, length=LENGTH)


def recipe_claims(stories: Sequence[Story], runs: Path) -> list[Claim]:
    return [row for story in stories for row in story_claims(story, runs / story.name)]


def story_claims(story: Story, home: Path) -> list[Claim]:
    source, passages = latest_model(story.last), story.text(AMOUNTS, "sft", "sparse")
    made = {"W4A8, whole recipe": FULL, "nearest integers alone": RECIPES["rtn"]}
    folders = {name: home / name.replace(" ", "-").replace(",", "") for name in made}
    reports = {
        name: quantized(source, folders[name], settings, passages)
        for name, settings in made.items()
    }
    title = f"{story.name}, {story.last.name}"
    rows = [
        Claim(name=f"{title}: {name}", measured=_told(report)) for name, report in reports.items()
    ]
    name = "W4A8, whole recipe"
    rows += loss_claims(f"{title}: W4A8", reports[name])
    for found in compare_in_envs(WORLDS, TASKS, source, folders[name]):
        rows.append(_skill_claim(f"{title}: W4A8", found))
    bits = 8 * layer_bytes(folders[name]) / layer_weights(load_pretrained(source))
    what = f"{title}: W4A8, bits a weight of the layers, scales and what is left alone included"
    return [*rows, Claim(name=what, measured=f"{bits:.2f}")]


def loss_claims(title: str, report: dict[str, Any]) -> list[Claim]:
    nats = report["nll"][1] - report["nll"][0]
    points = 100 * (report["needle_recall"][1] - report["needle_recall"][0])
    apart = ", ".join(
        f"< {place}: {value:.1e}" for place, value in report["kl_by_position"].items()
    )
    return [
        Claim(
            name=f"{title}, held-out loss against the exact network",
            target=f"<= +{MOST_NATS} nats",
            measured=f"{nats:+.4f}",
            holds=nats <= MOST_NATS,
        ),
        Claim(
            name=f"{title}, needles of {report['needle_tasks']} against the exact network",
            target=f">= -{MOST_POINTS:g} points",
            measured=f"{points:+.1f} points",
            holds=points >= -MOST_POINTS,
        ),
        Claim(name=f"{title}, mean divergence by how far into a text", measured=apart),
    ]


def _skill_claim(title: str, found: dict[str, Any]) -> Claim:
    before, after = found["reward"]
    points = 100 * (after - before)
    return Claim(
        name=f"{title}, {found['world']}, {found['tasks']} held-out tasks",
        target=f">= -{MOST_POINTS:g} points",
        measured=f"{before:.3f} -> {after:.3f}, {points:+.1f} ± {100 * found['error']:.1f} points",
        holds=points >= -MOST_POINTS,
    )


def layer_bytes(folder: Path) -> int:
    """Of the shards of layers: without embedding, head and MTP."""
    shards = sorted(folder.glob("model-*.safetensors"))
    return sum(shard.stat().st_size for shard in shards[1:-1])


def layer_weights(network: Transformer) -> int:
    return sum(parameter.numel() for parameter in network.layers.parameters())


def _told(report: dict[str, Any]) -> str:
    before, after = report["nll"]
    needles = report["needle_recall"]
    return (
        f"{before:.4f} -> {after:.4f} nats, needles {needles[0]:.1%} -> {needles[1]:.1%}, "
        f"divergence {report['kl_geometric_mean']:.2e} typically, "
        f"{report['kl_mean']:.2e} in the mean, {report['top1_agreement']:.1%} the same next "
        f"token, {report['bytes'][1] / report['bytes'][0]:.0%} of the bytes"
    )


# --- all of it ------------------------------------------------------------------------------------

PROOFS = ("recipe", "ablation", "qat", "gpu")


def claims(
    runs: Path = Path("runs/proofs/quant"),
    stories: Sequence[Story] = (),
    proofs: Sequence[str] = PROOFS,
) -> list[Claim]:
    made = {"recipe": recipe_claims, "ablation": ablation_claims, "qat": qat_claims}
    rows: list[Claim] = []
    for proof in proofs:
        if proof == "gpu":
            rows += gpu_claims()
            continue
        stories = stories or [raised(runs, seed) for seed in SEEDS]
        rows += made[proof](stories, runs / proof)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("proofs", nargs="*", metavar="proof", help=", ".join(PROOFS))
    parser.add_argument("--story", type=Path, nargs="+", default=[], help="models to quantize")
    parser.add_argument("--runs", type=Path, default=Path("runs/proofs/quant"))
    options = parser.parse_args()
    if unknown := set(options.proofs) - set(PROOFS):
        parser.error(f"unknown proof {', '.join(sorted(unknown))}; there are {', '.join(PROOFS)}")
    stories = [Story(folder) for folder in options.story]
    print_claims(claims(options.runs, stories, options.proofs or PROOFS))


if __name__ == "__main__":
    main()
