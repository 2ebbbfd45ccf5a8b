"""Raising the nano base model: the proofs of the training stages.

    python -m benchmarks.raise_base [--jobs 2] [--runs FOLDER] [stages|optimizer|mtp ...]

stages     pre-training below the unigram entropy; sparse adaptation against its dense parent, with
           and without the indexer's warm-up
optimizer  Muon Split (heads, gate and up; heads alone), whole-matrix Muon and AdamW at equal
           tokens, three seeds
mtp        drafts of a layer trained at three depths and at one, three seeds

Every arm is a recipe, trained by `paddock train` in a process of its own, one thread each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.table import Claim, print_claims
from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training import newest_model
from paddock.config import load_recipe, resolve
from paddock.data import Corpus, LongContextSource, Reading, Tokenizer, corpus_key
from paddock.train import TrainSettings
from paddock.train.evaluate import (
    acceptance,
    found_needles,
    held_out_batches,
    held_out_loss,
    recall,
    unigram_entropy,
)

RECIPES = Path(__file__).parents[1] / "recipes"
SEEDS = (0, 1, 2)


def trained(recipe: str, out: Path, *sets: str) -> Path:
    """The run folder of a recipe, trained unless it is there."""
    command = [sys.executable, "-m", "paddock.cli", "train", str(RECIPES / recipe)]
    command += ["--out", str(out)]
    for change in sets:
        command += ["--set", change]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return out


def settings_of(run: Path) -> TrainSettings:
    return resolve(TrainSettings, load_recipe(run / "recipe.toml", []))


def corpus_of(run: Path) -> tuple[Corpus, Tokenizer]:
    tokenizer = Tokenizer.load(run / "tokenizer")
    key = corpus_key(settings_of(run).corpus, tokenizer)
    return Corpus(run.parent / "corpora" / key, tokenizer=tokenizer), tokenizer


def last_held_out(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([line["held_out"] for line in lines if "held_out" in line][-1])


def optimizer_claims(runs: Path, jobs: int) -> list[Claim]:
    arms = ("muon_split", "muon_heads", "muon_whole", "adamw")
    work = [
        (f"ablation/optimizer/{arm}.toml", runs / f"{arm}-{seed}", f"seed={seed}")
        for arm in arms
        for seed in SEEDS
    ]
    _all(work, jobs)
    losses = {arm: [last_held_out(runs / f"{arm}-{seed}") for seed in SEEDS] for arm in arms}
    rows = [
        Claim(
            name=f"held-out loss, {arm}",
            measured=", ".join(f"{loss:.4f}" for loss in found)
            + f"; mean {statistics.mean(found):.4f}",
        )
        for arm, found in losses.items()
    ]
    split = statistics.mean(losses["muon_split"])
    for peer in arms[1:]:
        other = statistics.mean(losses[peer])
        rows.append(
            Claim(
                name=f"Muon Split against {peer}, equal tokens, mean of three seeds",
                target="not worse",
                measured=f"{split - other:+.4f} nats",
                holds=split <= other,
            )
        )
    return rows


def mtp_claims(runs: Path, jobs: int) -> list[Claim]:
    arms = ("three_depths", "one_depth")
    work = [
        (f"ablation/mtp/{arm}.toml", runs / f"{arm}-{seed}", f"seed={seed}")
        for arm in arms
        for seed in SEEDS
    ]
    _all(work, jobs)
    lengths: dict[str, list[float]] = {arm: [] for arm in arms}
    rows = []
    for arm in arms:
        for seed in SEEDS:
            run = runs / f"{arm}-{seed}"
            network, (corpus, _) = load_pretrained(newest_model(run)), corpus_of(run)
            rates = acceptance(network, corpus, depths=3, context=128, tokens=20_000)
            one, two, three = rates
            lengths[arm].append(1 + one + one * two + one * two * three)
            text = ", ".join(f"{rate:.3f}" for rate in rates)
            rows.append(
                Claim(
                    name=f"drafts kept at depth 1, 2, 3: {arm}, seed {seed}",
                    measured=f"{text}; length {lengths[arm][-1]:.3f}",
                )
            )
    gain = statistics.mean(lengths["three_depths"]) - statistics.mean(lengths["one_depth"])
    rows.append(
        Claim(
            name="accept length, trained at three depths against one",
            target="longer",
            measured=f"{gain:+.3f} tokens",
            holds=gain > 0,
        )
    )
    return rows


def stage_claims(runs: Path, seed: int = 0) -> list[Claim]:
    pretrain = trained("nano/pretrain.toml", runs / "pretrain", f"seed={seed}")
    corpus, tokenizer = corpus_of(pretrain)
    entropy, loss = unigram_entropy(corpus, tokenizer.vocab_size), last_held_out(pretrain)
    rows = [
        Claim(
            name="pre-training: held-out loss against the corpus's unigram entropy",
            target="< half",
            measured=f"{loss:.3f} against {entropy:.3f} nats",
            holds=loss < entropy / 2,
        )
    ]
    chain = {
        "midtrain": ("nano/midtrain.toml", "pretrain"),
        "warmup": ("nano/warmup.toml", "midtrain"),
        "sparse": ("nano/sparse.toml", "warmup"),
        "no_warmup": ("ablation/sparse/no_warmup.toml", "midtrain"),
    }
    for name, (recipe, parent) in chain.items():
        trained(recipe, runs / name, f"seed={seed}", f"start.folder={runs / parent}")
    figures = {
        "dense parent": figures_of(runs / "midtrain", dense=True),
        "warm-up only": figures_of(runs / "warmup", dense=False),
        "adapted": figures_of(runs / "sparse", dense=False),
        "adapted without warm-up": figures_of(runs / "no_warmup", dense=False),
    }
    for name, (nats, needles, masses) in figures.items():
        text = f"{nats:.4f} nats, needles {needles:.1%}"
        if masses:
            text += ", recall by layer " + " ".join(f"{mass:.3f}" for mass in masses)
        rows.append(Claim(name=f"512 tokens, top-k 64: {name}", measured=text))
    parent, adapted = figures["dense parent"], figures["adapted"]
    without = figures["adapted without warm-up"]
    rows += [
        Claim(
            name="sparse adaptation: held-out loss against the dense parent",
            target="<= +0.01 nats",
            measured=f"{adapted[0] - parent[0]:+.4f}",
            holds=adapted[0] - parent[0] <= 0.01,
        ),
        Claim(
            name="sparse adaptation: needles against the dense parent",
            target=">= -2 points",
            measured=f"{100 * (adapted[1] - parent[1]):+.1f} points",
            holds=adapted[1] - parent[1] >= -0.02,
        ),
        Claim(
            name="skipping the warm-up is worse",
            target="visibly",
            measured=f"{without[0] - adapted[0]:+.4f} nats, "
            f"{100 * (without[1] - adapted[1]):+.1f} points",
            holds=without[0] > adapted[0] and without[1] < adapted[1],
        ),
    ]
    return rows


def figures_of(run: Path, *, dense: bool) -> tuple[float, float, list[float]]:
    """Held-out loss, needles found, and the recall of every layer."""
    network, (corpus, tokenizer) = load_pretrained(newest_model(run)), corpus_of(run)
    loss = held_out_loss(network, corpus, dense=dense, context=512, tokens=60_000)
    assert loss is not None
    far = next(s for s in settings_of(run).corpus.sources if s.name == "far")
    assert isinstance(far, LongContextSource)
    held_out = far.model_copy(update={"held_out": True, "count": 200})
    count = lambda text: len(tokenizer.encode(text, specials=False))  # noqa: E731
    tasks = list(held_out.tasks(Reading(count_tokens=count)))
    begin = [tokenizer.id_of(token) or 0 for token in settings_of(run).corpus.begin]
    needles = found_needles(network, tokenizer, tasks, begin=begin, dense=dense)
    masses: list[float] = []
    if not dense:
        batches = held_out_batches(corpus, network, context=512, tokens=100_000)
        long = next(b for b in batches if max(span.keys for span in b.layout.spans) > 256)
        masses = [found.mass for found in recall(network, long)]
    return loss, needles, masses


def _all(work: Iterable[tuple[str, Path, str]], jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda item: trained(*item), work))


def claims(runs: Path = Path("runs/proofs"), jobs: int = 2) -> list[Claim]:
    return [
        *stage_claims(runs / "stages"),
        *optimizer_claims(runs / "optimizer", jobs),
        *mtp_claims(runs / "mtp", jobs),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("proofs", nargs="*", default=["stages", "optimizer", "mtp"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/proofs"))
    parser.add_argument("--seed", type=int, default=0, help="of the stages")
    options = parser.parse_args()
    rows: list[Claim] = []
    if "stages" in options.proofs:
        rows += stage_claims(options.runs / "stages", options.seed)
    if "optimizer" in options.proofs:
        rows += optimizer_claims(options.runs / "optimizer", options.jobs)
    if "mtp" in options.proofs:
        rows += mtp_claims(options.runs / "mtp", options.jobs)
    print_claims(rows)


if __name__ == "__main__":
    main()
