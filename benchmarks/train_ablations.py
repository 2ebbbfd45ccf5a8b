"""Ablations of the training stages on nano: sparse adaptation, optimizer, MTP depths.

    python -m benchmarks.train_ablations [stages|optimizer|mtp ...] [--seeds 0 1 2] [--jobs 2]
                                         [--runs FOLDER]

stages     pre-training below the unigram entropy; sparse adaptation against its dense parent, with
           and without the indexer's warm-up
optimizer  Muon Split (heads, gate and up; heads alone), whole-matrix Muon and AdamW at equal tokens
mtp        MTP acceptance of a layer trained at three depths and at one

Every arm is a recipe, trained by `paddock train` in a process of its own with one thread. A second
call resumes: finished runs and their measurements are reused. Each run folder has its report.html.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.table import Claim, print_claims
from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training_state import latest_model, list_checkpoints
from paddock.config import load_recipe, resolve
from paddock.dashboard import write_comparison, write_report
from paddock.data import Corpus, LongContextSource, SourceContext, Tokenizer, corpus_key
from paddock.data.reasoning import ReasoningSource
from paddock.journal import EVENTS_FILE, Journal, follow
from paddock.train import TrainSettings
from paddock.train.evaluate import (
    iter_validation_batches,
    measure_indexer_recall,
    measure_mtp_acceptance,
    needle_recall,
    unigram_entropy,
    validation_loss,
)

RECIPES = Path(__file__).parents[1] / "recipes"
SEEDS = (0, 1, 2)
MAX_NATS, MAX_POINTS = 0.01, 2.0  # allowed loss of sparse attention against dense

# Documents of 500 tokens with eight needles, each stated once; the queried pair is one of the
# eighth held out of training. No recipe was tuned on this seed.
NEEDLES = LongContextSource(
    name="needles",
    task="needle",
    needle_template="nano",
    distractors=7,
    max_tokens=500,
    count=1024,
    held_out=True,
    seed=77,
    haystack=ReasoningSource(name="filler", family="facts", count=2000, seed=77),
)


def train(recipe: str, out: Path, *overrides: str) -> Path:
    """The run folder of a recipe; trains it unless it is finished."""
    settings = resolve(TrainSettings, load_recipe(RECIPES / recipe, overrides))
    if is_finished(out, settings):
        return out
    command = [sys.executable, "-m", "paddock.cli", "train", str(RECIPES / recipe)]
    command += ["--out", str(out)]
    for override in overrides:
        command += ["--set", override]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=one_thread
    )
    if done.returncode:
        raise SystemExit(f"{out}: {done.stderr.decode()[-2000:]}")
    return out


def is_finished(run: Path, settings: TrainSettings) -> bool:
    """Whether the run has these settings and its last checkpoint. Settings that do not change the
    weights are not compared."""
    if not (run / "recipe.toml").is_file():
        return False
    if settings.steps not in list_checkpoints(run / "checkpoints"):
        return False
    ignored = {"checkpoint", "validation", "parallel"}
    return settings_of(run).model_dump(exclude=ignored) == settings.model_dump(exclude=ignored)


def settings_of(run: Path) -> TrainSettings:
    return resolve(TrainSettings, load_recipe(run / "recipe.toml", []))


def corpus_of(run: Path) -> tuple[Corpus, Tokenizer]:
    tokenizer = Tokenizer.load(run / "tokenizer")
    key = corpus_key(settings_of(run).corpus, tokenizer)
    return Corpus(run.parent / "corpora" / key, tokenizer=tokenizer), tokenizer


def final_val_loss(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([line["val_loss"] for line in lines if "val_loss" in line][-1])


def optimizer_claims(runs: Path, jobs: int, seeds: Sequence[int] = SEEDS) -> list[Claim]:
    arms = ("muon_split", "muon_heads", "muon_whole", "adamw")
    runs_to_train = [
        (f"ablation/optimizer/{arm}.toml", runs / f"{arm}-{seed}", f"seed={seed}")
        for arm in arms
        for seed in seeds
    ]
    _train_all(runs_to_train, jobs)
    folders = {arm: [runs / f"{arm}-{seed}" for seed in seeds] for arm in arms}
    write_comparison(folders, runs / "comparison.html")
    losses = {arm: [final_val_loss(run) for run in arm_runs] for arm, arm_runs in folders.items()}
    rows = [
        Claim(
            name=f"validation loss, {arm}",
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
                name=f"Muon Split against {peer}, equal tokens, mean over seeds",
                target="not worse",
                measured=f"{split - other:+.4f} nats",
                holds=split <= other,
            )
        )
    return rows


def mtp_claims(runs: Path, jobs: int, seeds: Sequence[int] = SEEDS) -> list[Claim]:
    arms = ("three_depths", "one_depth")
    runs_to_train = [
        (f"ablation/mtp/{arm}.toml", runs / f"{arm}-{seed}", f"seed={seed}")
        for arm in arms
        for seed in seeds
    ]
    _train_all(runs_to_train, jobs)
    write_comparison(
        {arm: [runs / f"{arm}-{seed}" for seed in seeds] for arm in arms}, runs / "comparison.html"
    )
    lengths: dict[str, list[float]] = {arm: [] for arm in arms}
    rows = []
    for arm in arms:
        for seed in seeds:
            run = runs / f"{arm}-{seed}"
            network, (corpus, _) = load_pretrained(latest_model(run)), corpus_of(run)
            rates = measure_mtp_acceptance(network, corpus, depths=3, context=128, tokens=20_000)
            one, two, three = rates
            lengths[arm].append(1 + one + one * two + one * two * three)
            text = ", ".join(f"{rate:.3f}" for rate in rates)
            rows.append(
                Claim(
                    name=f"MTP acceptance rate at depth 1, 2, 3: {arm}, seed {seed}",
                    measured=f"{text}; acceptance length {lengths[arm][-1]:.3f}",
                )
            )
    gain = statistics.mean(lengths["three_depths"]) - statistics.mean(lengths["one_depth"])
    rows.append(
        Claim(
            name="MTP acceptance length, trained at three depths against one",
            target="longer",
            measured=f"{gain:+.3f} tokens",
            holds=gain > 0,
        )
    )
    return rows


def stage_claims(runs: Path, jobs: int, seeds: Sequence[int] = SEEDS) -> list[Claim]:
    # Processes, not threads: measuring holds the GIL.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        return [claim for found in pool.map(partial(_seed_claims, runs), seeds) for claim in found]


def _seed_claims(runs: Path, seed: int) -> list[Claim]:
    """One base model through all stages."""
    folder = {stage: runs / f"{stage}-{seed}" for stage in ("pretrain", *CHAIN)}
    train("nano/pretrain.toml", folder["pretrain"], f"seed={seed}")
    pretrained, figures = figures_of(folder["pretrain"], context=128), {}
    for stage, (recipe, parent) in CHAIN.items():
        train(recipe, folder[stage], f"seed={seed}", f"init.checkpoint={folder[parent]}")
        figures[stage] = figures_of(folder[stage], context=512)
    corpus, tokenizer = corpus_of(folder["pretrain"])
    entropy = unigram_entropy(corpus, tokenizer.vocab_size)
    rows = [
        Claim(
            name=f"seed {seed}, pre-training: validation loss against the unigram entropy",
            target="< half",
            measured=f"{pretrained.loss:.3f} against {entropy:.3f} nats",
            holds=pretrained.loss < entropy / 2,
        )
    ]
    for stage, found in figures.items():
        text = f"{found.loss:.4f} nats/token, needle recall {found.needle_recall:.1%}"
        if found.indexer_recall:
            masses = " ".join(f"{mass:.3f}" for mass in found.indexer_recall)
            text += f", indexer recall by layer {masses}"
        rows.append(Claim(name=f"seed {seed}, {STAGE_NAMES[stage]}", measured=text))
    return [*rows, *_sparse_claims(seed, figures)]


CHAIN = {  # recipe and parent
    "midtrain": ("nano/midtrain.toml", "pretrain"),
    "warmup": ("nano/warmup.toml", "midtrain"),
    "sparse": ("nano/sparse.toml", "warmup"),
    "no_warmup": ("ablation/sparse/no_warmup.toml", "midtrain"),
}
STAGE_NAMES = {
    "midtrain": "dense parent, context 512",
    "warmup": "after the indexer warm-up, top-k 64",
    "sparse": "sparse, top-k 64",
    "no_warmup": "sparse without warm-up, equal tokens",
}


def _sparse_claims(seed: int, figures: dict[str, "Figures"]) -> list[Claim]:
    parent, adapted, without = (figures[s] for s in ("midtrain", "sparse", "no_warmup"))
    nats, points = adapted.change_from(parent)
    worse_nats, worse_points = without.change_from(parent)
    return [
        Claim(
            name=f"seed {seed}, sparse adaptation: validation loss against the dense parent",
            target=f"<= +{MAX_NATS} nats",
            measured=f"{nats:+.4f}",
            holds=nats <= MAX_NATS,
        ),
        Claim(
            name=f"seed {seed}, sparse adaptation: needle recall against the dense parent",
            target=f">= -{MAX_POINTS:g} points",
            measured=f"{points:+.1f} points",
            holds=points >= -MAX_POINTS,
        ),
        Claim(
            name=f"seed {seed}, without the warm-up: against the dense parent",
            target="beyond both limits",
            measured=f"{worse_nats:+.4f} nats, {worse_points:+.1f} points",
            holds=worse_nats > MAX_NATS and worse_points < -MAX_POINTS,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    loss: float  # validation, nats/token
    needle_recall: float | None = None  # None: not measured
    indexer_recall: tuple[float, ...] = ()  # by layer: dense attention mass on the selected keys

    def change_from(self, parent: "Figures") -> tuple[float, float]:
        """Difference of loss in nats/token, and of needle recall in percentage points."""
        assert self.needle_recall is not None and parent.needle_recall is not None
        points = 100 * (self.needle_recall - parent.needle_recall)
        return self.loss - parent.loss, points


def figures_of(run: Path, *, context: int) -> Figures:
    """Metrics of a run's last checkpoint, measured once and kept in its journal."""
    settings = settings_of(run)
    label = f"step {settings.steps}, {context} tokens, {NEEDLES.count} needles"
    if settings.stage == "pretrain":
        label = f"step {settings.steps}, {context} tokens"
    for event, _ in follow(run / EVENTS_FILE):
        if event.get("kind") == "evaluated" and event.get("label") == label:
            scores = event["scores"]
            return Figures(**scores | {"indexer_recall": tuple(scores.get("indexer_recall", ()))})
    found = _measure(run, settings, context)
    with Journal(run) as journal:
        scores = {name: value for name, value in asdict(found).items() if value not in (None, ())}
        journal.log_event("evaluated", step=settings.steps, label=label, scores=scores)
    write_report(run)
    return found


def _measure(run: Path, settings: TrainSettings, context: int) -> Figures:
    network, (corpus, tokenizer) = load_pretrained(latest_model(run)), corpus_of(run)
    dense = settings.stage in ("pretrain", "midtrain")
    validation = validation_loss(network, corpus, dense=dense, context=context, tokens=60_000)
    assert validation is not None
    loss = validation.loss
    if settings.stage == "pretrain":  # its context is shorter than the documents with needles
        return Figures(loss=loss)
    count = lambda text: len(tokenizer.encode(text, specials=False))  # noqa: E731
    bos_ids = [tokenizer.token_to_id(token) or 0 for token in settings.corpus.bos_tokens]
    tasks = NEEDLES.tasks(SourceContext(count_tokens=count))
    recall = needle_recall(network, tokenizer, tasks, begin=bos_ids, dense=dense)
    if dense:
        return Figures(loss=loss, needle_recall=recall)
    batches = iter_validation_batches(corpus, network, context=context, tokens=100_000)
    batch = next(
        b for _, b in batches if max(span.keys for span in b.attn_metadata.spans) > context // 2
    )
    return Figures(
        loss=loss,
        needle_recall=recall,
        indexer_recall=tuple(layer.mass for layer in measure_indexer_recall(network, batch)),
    )


def _train_all(runs_to_train: Iterable[tuple[str, Path, str]], jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda item: train(*item), runs_to_train))


def claims(
    runs: Path = Path("runs/proofs"),
    jobs: int = 2,
    seeds: Sequence[int] = SEEDS,
    names: Sequence[str] = ("stages", "optimizer", "mtp"),
) -> list[Claim]:
    ablations = {"stages": stage_claims, "optimizer": optimizer_claims, "mtp": mtp_claims}
    return [claim for name in names for claim in ablations[name](runs / name, jobs, seeds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("stages", "optimizer", "mtp")
    parser.add_argument("names", nargs="*", metavar="ablation", help=", ".join(names))
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/proofs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(
            f"unknown ablation {', '.join(sorted(unknown))}; choose from {', '.join(names)}"
        )
    print_claims(claims(options.runs, options.jobs, options.seeds, options.names or names))


if __name__ == "__main__":
    main()
