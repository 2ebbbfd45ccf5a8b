"""INT4 quantization-aware fine-tuning of nano against post-training quantization at equal bits.

Both start from the same base model and see the same dialogues in the same order. Compared are the
loss on replies of held-out dialogues, paired by dialogue, and rewards in the environments.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.quant_models import FULL, LENGTH, PipelineRun, mean_and_error, quantize_once
from benchmarks.table import Claim
from benchmarks.train_ablations import settings_of, train
from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training_state import latest_model
from paddock.data import Tokenizer
from paddock.kernels.linear_cross_entropy import linear_cross_entropy
from paddock.launch.calibration_texts import CalibrationBudget, open_run
from paddock.launch.quantize import paired_difference, rewards_by_task
from paddock.quant import RECIPES
from paddock.train.evaluate import iter_validation_batches
from paddock.train.run import open_corpus

INT4 = "paddock.quant.qat:int4"
BUDGET = CalibrationBudget(calibrate=16_384, held_out=1024, needles=0, length=LENGTH)
TOKENS = 200_000  # of held-out dialogues, at most
ENVS, TASKS = ["nano-chain", "nano-tools", "nano-rules"], 400
POST_TRAINING = {"round-to-nearest": RECIPES["rtn"], "the whole recipe": FULL}


def qat_claims(pipelines: Sequence[PipelineRun], runs: Path) -> list[Claim]:
    rows: list[Claim] = []
    differences: dict[str, list[float]] = {name: [] for name in POST_TRAINING}
    for pipeline in pipelines:
        folders = arms(pipeline, runs / pipeline.name)
        run = runs / pipeline.name / "plain"
        losses = {name: losses_of(run, folder) for name, folder in folders.items()}
        baseline = losses["float32"]
        for name, found in losses.items():
            what = f"{pipeline.name}, {name}: loss on held-out replies"
            rows.append(Claim(name=what, measured=_compare(found, baseline)))
        aware = losses["QAT"]
        for name in POST_TRAINING:
            differences[name].append(_difference(aware, losses[name])[0])
        rows += _reward_claims(pipeline, folders)
    return rows + [_claim(name, found) for name, found in differences.items()]


def arms(pipeline: PipelineRun, home: Path) -> dict[str, Path]:
    """A fine-tuned model, its quantized versions, and the quantized QAT model."""
    base = pipeline.stage("sparse").resolve()
    start = (f"seed={settings_of(base).seed}", f"init.checkpoint={base}")
    plain = train("nano/sft.toml", home / "plain", *start)
    aware = train("nano/sft.toml", home / "aware", *start, f"fake_quant={INT4}")
    texts = PipelineRun(home).texts(BUDGET, "plain")
    found = {"float32": latest_model(plain)}
    for name, settings in POST_TRAINING.items():
        found[name] = home / name.replace(" ", "-")
        quantize_once(plain, found[name], settings, texts)
    found["QAT"] = home / "qat"
    quantize_once(aware, found["QAT"], RECIPES["qat"], texts)
    return found


@torch.no_grad()
def losses_of(run: Path, folder: Path) -> list[tuple[float, int]]:
    """Loss in nats and number of tokens of the replies of each held-out dialogue of a run."""
    corpus = open_corpus(open_run(run), Tokenizer.load(run / "tokenizer"), lambda _: None)
    network, found = load_pretrained(folder), []
    context = settings_of(run).dataloader.seq_len
    for _, batch in iter_validation_batches(corpus, network, context=context, tokens=TOKENS):
        hidden_TD = network(batch.token_T, batch.attn_metadata).hidden_TD
        target_T = batch.targets(1)
        loss_T = linear_cross_entropy(hidden_TD, network.head.weight, target_T)
        for span in batch.attn_metadata.spans:
            own = slice(span.query, span.query + span.queries)
            found.append((float(loss_T[own].sum()), int((target_T[own] >= 0).sum())))
    return found


def _compare(found: Sequence[tuple[float, int]], baseline: Sequence[tuple[float, int]]) -> str:
    loss = sum(nats for nats, _ in found) / sum(count for _, count in found)
    difference, error = _difference(found, baseline)
    return f"{loss:.4f} nats/token ({difference:+.4f} ± {error:.4f})"


def _difference(
    ours: Sequence[tuple[float, int]], theirs: Sequence[tuple[float, int]]
) -> tuple[float, float]:
    """Mean difference in nats/token, and its standard error over dialogues."""
    tokens = sum(count for _, count in ours)
    losses = [one[0] - other[0] for one, other in zip(ours, theirs, strict=True)]
    _, error = mean_and_error(losses)
    return sum(losses) / tokens, error * len(losses) / tokens


def _reward_claims(pipeline: PipelineRun, folders: dict[str, Path]) -> list[Claim]:
    found = {name: rewards_by_task(ENVS, TASKS, folder) for name, folder in folders.items()}
    baseline = found.pop("float32")
    rows = []
    for name, rewards in found.items():
        parts = []
        for env in ENVS:
            one = paired_difference(baseline[env], rewards[env])
            before, after = one["reward"]
            parts.append(f"{env} {before:.3f} -> {after:.3f} ± {one['error']:.3f}")
        rows.append(Claim(name=f"{pipeline.name}, {name}: rewards", measured=", ".join(parts)))
    return rows


def _claim(peer: str, differences: Sequence[float]) -> Claim:
    mean, error = mean_and_error(differences)
    each = ", ".join(f"{difference:+.4f}" for difference in differences)
    return Claim(
        name=f"INT4 QAT against {peer}, equal bits, {len(differences)} seeds",
        target="lower",
        measured=f"{mean:+.4f} ± {error:.4f} nats/token ({each})",
        holds=mean < 0,
    )
