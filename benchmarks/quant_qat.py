"""INT4-aware fine-tuning of nano against quantizing afterwards, at equal bits.

Both start from the same base model and see the same dialogues in the same order. Measured by what
fine-tuning is about: replies of dialogues held out of it, compared dialogue by dialogue, and what
the models can do in the worlds they were shown.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.quant_story import FULL, LENGTH, Story, mean_and_error, quantized
from benchmarks.raise_base import settings_of, trained
from benchmarks.table import Claim
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
AMOUNTS = CalibrationBudget(calibrate=16_384, held_out=1024, needles=0, length=LENGTH)
TOKENS = 200_000  # of dialogues, or all that were held out
WORLDS, TASKS = ["nano-chain", "nano-tools", "nano-rules"], 400
AFTERWARDS = {"nearest integers afterwards": RECIPES["rtn"], "whole recipe afterwards": FULL}


def qat_claims(stories: Sequence[Story], runs: Path) -> list[Claim]:
    rows: list[Claim] = []
    gaps: dict[str, list[float]] = {name: [] for name in AFTERWARDS}
    for story in stories:
        folders = arms(story, runs / story.name)
        run = runs / story.name / "plain"
        losses = {name: losses_of(run, folder) for name, folder in folders.items()}
        exact = losses["fine-tuned in float32"]
        for name, found in losses.items():
            what = f"{story.name}, {name}: held-out replies"
            rows.append(Claim(name=what, measured=_compared(found, exact)))
        aware = losses["trained as integers"]
        for name in AFTERWARDS:
            gaps[name].append(_gap(aware, losses[name])[0])
        rows += _skills(story, folders)
    return rows + [_claim(name, found) for name, found in gaps.items()]


def arms(story: Story, home: Path) -> dict[str, Path]:
    """A fine-tuned model, what quantizing makes of it, and one that was trained as integers."""
    base = story.stage("sparse").resolve()
    start = (f"seed={settings_of(base).seed}", f"init.checkpoint={base}")
    plain = trained("nano/sft.toml", home / "plain", *start)
    aware = trained("nano/sft.toml", home / "aware", *start, f"fake_quant={INT4}")
    passages = Story(home).text(AMOUNTS, "plain")
    found = {"fine-tuned in float32": latest_model(plain)}
    for name, settings in AFTERWARDS.items():
        found[name] = home / name.replace(" ", "-")
        quantized(plain, found[name], settings, passages)
    found["trained as integers"] = home / "trained-as-integers"
    quantized(aware, found["trained as integers"], RECIPES["qat"], passages)
    return found


@torch.no_grad()
def losses_of(run: Path, folder: Path) -> list[tuple[float, int]]:
    """Of each dialogue held out of a run, nats of its replies and how many tokens they have."""
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


def _compared(found: Sequence[tuple[float, int]], exact: Sequence[tuple[float, int]]) -> str:
    loss = sum(nats for nats, _ in found) / sum(count for _, count in found)
    gap, error = _gap(found, exact)
    return f"{loss:.4f} nats ({gap:+.4f} ± {error:.4f})"


def _gap(
    ours: Sequence[tuple[float, int]], theirs: Sequence[tuple[float, int]]
) -> tuple[float, float]:
    """Nats a token that ours are worse, and the standard error over dialogues."""
    tokens = sum(count for _, count in ours)
    apart = [one[0] - other[0] for one, other in zip(ours, theirs, strict=True)]
    _, error = mean_and_error(apart)
    return sum(apart) / tokens, error * len(apart) / tokens


def _skills(story: Story, folders: dict[str, Path]) -> list[Claim]:
    found = {name: rewards_by_task(WORLDS, TASKS, folder) for name, folder in folders.items()}
    exact = found.pop("fine-tuned in float32")
    rows = []
    for name, rewards in found.items():
        told = []
        for world in WORLDS:
            one = paired_difference(exact[world], rewards[world])
            before, after = one["reward"]
            told.append(f"{world} {before:.3f} -> {after:.3f} ± {one['error']:.3f}")
        rows.append(Claim(name=f"{story.name}, {name}: skills", measured=", ".join(told)))
    return rows


def _claim(peer: str, gaps: Sequence[float]) -> Claim:
    mean, error = mean_and_error(gaps)
    each = ", ".join(f"{gap:+.4f}" for gap in gaps)
    return Claim(
        name=f"INT4-aware training against {peer}, equal bits, {len(gaps)} seeds",
        target="lower",
        measured=f"{mean:+.4f} ± {error:.4f} nats ({each})",
        holds=mean < 0,
    )
