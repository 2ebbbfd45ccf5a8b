"""Quantization of nano models with the W4A8 recipe, and its kernel on a GPU.

    python -m benchmarks.quant [recipe|ablation|qat|gpu ...] [--pipeline FOLDER ...] [--runs FOLDER]

recipe    the whole W4A8 recipe: size, loss, needle recall, rewards, KL by position; against
          round-to-nearest
ablation  each ingredient left out, on the network as trained and on an equivalent network with the
          channel outliers that large models have
qat       INT4 quantization-aware fine-tuning against post-training quantization
gpu       the W4A8 GEMM at the expert shapes of GLM-5 against bfloat16; memory and decoding

`--pipeline` is a folder of `paddock run recipes/nano`, run up to fine-tuning or further; without
one, three are trained first. A second call resumes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quant_ablation import ablation_claims
from benchmarks.quant_gpu import gpu_claims
from benchmarks.quant_models import FULL, LENGTH, SEEDS, PipelineRun, quantize_once, train_pipeline
from benchmarks.quant_qat import ENVS, TASKS, qat_claims
from benchmarks.table import Claim, print_claims
from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training_state import latest_model
from paddock.launch.calibration_texts import CalibrationBudget
from paddock.launch.quantize import compare_in_envs
from paddock.model import Transformer
from paddock.quant import RECIPES

MAX_NATS, MAX_POINTS = 0.02, 2.0  # allowed loss of the whole recipe
BUDGET = CalibrationBudget(calibrate=16_384, held_out=16_384, needles=512, length=LENGTH)


def recipe_claims(pipelines: Sequence[PipelineRun], runs: Path) -> list[Claim]:
    return [row for each in pipelines for row in pipeline_claims(each, runs / each.name)]


def pipeline_claims(pipeline: PipelineRun, home: Path) -> list[Claim]:
    source, texts = latest_model(pipeline.last), pipeline.texts(BUDGET, "sft", "sparse")
    recipes = {"W4A8, whole recipe": FULL, "round-to-nearest": RECIPES["rtn"]}
    folders = {name: home / name.replace(" ", "-").replace(",", "") for name in recipes}
    reports = {
        name: quantize_once(source, folders[name], settings, texts)
        for name, settings in recipes.items()
    }
    title = f"{pipeline.name}, {pipeline.last.name}"
    rows = [
        Claim(name=f"{title}: {name}", measured=_summary(report))
        for name, report in reports.items()
    ]
    name = "W4A8, whole recipe"
    rows += loss_claims(f"{title}: W4A8", reports[name])
    for found in compare_in_envs(ENVS, TASKS, source, folders[name]):
        rows.append(_reward_claim(f"{title}: W4A8", found))
    bits = 8 * layer_bytes(folders[name]) / layer_weights(load_pretrained(source))
    what = f"{title}: W4A8, bits per weight of the layers, scales and unquantized tensors included"
    return [*rows, Claim(name=what, measured=f"{bits:.2f}")]


def loss_claims(title: str, report: dict[str, Any]) -> list[Claim]:
    nats = report["nll"][1] - report["nll"][0]
    points = 100 * (report["needle_recall"][1] - report["needle_recall"][0])
    kl = ", ".join(
        f"< {position}: {value:.1e}" for position, value in report["kl_by_position"].items()
    )
    return [
        Claim(
            name=f"{title}, validation loss against the original model",
            target=f"<= +{MAX_NATS} nats",
            measured=f"{nats:+.4f}",
            holds=nats <= MAX_NATS,
        ),
        Claim(
            name=f"{title}, recall of {report['needle_tasks']} needles against the original model",
            target=f">= -{MAX_POINTS:g} points",
            measured=f"{points:+.1f} points",
            holds=points >= -MAX_POINTS,
        ),
        Claim(name=f"{title}, mean KL by position", measured=kl),
    ]


def _reward_claim(title: str, found: dict[str, Any]) -> Claim:
    before, after = found["reward"]
    points = 100 * (after - before)
    return Claim(
        name=f"{title}, {found['world']}, {found['tasks']} held-out tasks",
        target=f">= -{MAX_POINTS:g} points",
        measured=f"{before:.3f} -> {after:.3f}, {points:+.1f} ± {100 * found['error']:.1f} points",
        holds=points >= -MAX_POINTS,
    )


def layer_bytes(folder: Path) -> int:
    """Size of the layers' shards, without embedding, head and MTP."""
    shards = sorted(folder.glob("model-*.safetensors"))
    return sum(shard.stat().st_size for shard in shards[1:-1])


def layer_weights(network: Transformer) -> int:
    return sum(parameter.numel() for parameter in network.layers.parameters())


def _summary(report: dict[str, Any]) -> str:
    before, after = report["nll"]
    needles = report["needle_recall"]
    return (
        f"{before:.4f} -> {after:.4f} nats/token, "
        f"needle recall {needles[0]:.1%} -> {needles[1]:.1%}, "
        f"KL geometric mean {report['kl_geometric_mean']:.2e}, "
        f"mean {report['kl_mean']:.2e}, top-1 agreement {report['top1_agreement']:.1%}, "
        f"{report['bytes'][1] / report['bytes'][0]:.0%} of the bytes"
    )


SECTIONS = ("recipe", "ablation", "qat", "gpu")


def claims(
    runs: Path = Path("runs/proofs/quant"),
    pipelines: Sequence[PipelineRun] = (),
    names: Sequence[str] = SECTIONS,
) -> list[Claim]:
    sections = {"recipe": recipe_claims, "ablation": ablation_claims, "qat": qat_claims}
    rows: list[Claim] = []
    for name in names:
        if name == "gpu":
            rows += gpu_claims()
            continue
        pipelines = pipelines or [train_pipeline(runs, seed) for seed in SEEDS]
        rows += sections[name](pipelines, runs / name)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--pipeline", type=Path, nargs="+", default=[], help="runs to quantize")
    parser.add_argument("--runs", type=Path, default=Path("runs/proofs/quant"))
    options = parser.parse_args()
    if unknown := set(options.names) - set(SECTIONS):
        parser.error(
            f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}"
        )
    pipelines = [PipelineRun(folder) for folder in options.pipeline]
    print_claims(claims(options.runs, pipelines, options.names or SECTIONS))


if __name__ == "__main__":
    main()
