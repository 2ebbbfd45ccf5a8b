"""The nano pipeline end to end: `paddock run recipes/nano` on three seeds.

    python -m benchmarks.nano_pipeline [--seeds 0 1 2] [--runs FOLDER] [--kills 10]

Measures what each stage gains, what the last one keeps, and the minutes it takes. With --kills the
first seed is run once more, killed at random times and resumed: stages trained on text must end
with bitwise identical weights, and the last model must score as well. A second call resumes;
minutes are reported only for a run that was not interrupted.
"""

import argparse
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.table import Claim, print_claims
from paddock.dashboard import read_pipeline_report
from paddock.dashboard.pipeline_report import PipelineReport

PIPELINE = "recipes/nano"
MAX_MINUTES = 10
WEIGHTS = "model.safetensors"
TEXT_STAGES = ("pretrain", "midtrain", "warmup", "sparse", "sft")
# Metric, the stage that trains it, max score before, min score after.
RL_GAINS = (
    ("reasoning", "reasoning", 0.5, 0.85),
    ("tools", "agentic", 0.5, 0.85),
    ("rules", "general", 0.5, 0.8),
)
RETAINED = 0.95  # share of a metric's best score that must remain after distillation


def command(out: Path, seed: int) -> list[str]:
    return [sys.executable, "-m", "paddock.cli", "run", PIPELINE, "--out", str(out), "--set",
            f"seed={seed}"]  # fmt: skip


def run_pipeline(out: Path, seed: int) -> tuple[PipelineReport, float]:
    """The report of a seed's pipeline and the seconds of this call."""
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with (out / "output.txt").open("a") as output:
        subprocess.run(command(out, seed), check=True, stdout=output, stderr=output)
    return read_pipeline_report(out), time.monotonic() - start


def scores(report: PipelineReport, stage: str) -> dict[str, float]:
    return next(each.scores for each in report.stages if each.name == stage)


def seed_claims(report: PipelineReport, seconds: float, uninterrupted: bool) -> Iterator[Claim]:
    seed = f"seed {report.seed}"
    yield Claim(
        name=f"{seed}: minutes",
        target=f"<= {MAX_MINUTES}",
        measured=f"{seconds / 60:.1f}" if uninterrupted else "resumed, not measured",
        holds=seconds <= 60 * MAX_MINUTES if uninterrupted else None,
    )
    for metric, stage, max_before, min_after in RL_GAINS:
        before, after = scores(report, "sft")[metric], scores(report, stage)[metric]
        yield Claim(
            name=f"{seed}: {metric} by {stage} RL",
            target=f"<= {max_before} -> >= {min_after}",
            measured=f"{before:.3f} -> {after:.3f}",
            holds=before <= max_before and after >= min_after,
        )
    agentic, general = scores(report, "agentic"), scores(report, "general")
    yield Claim(
        name=f"{seed}: forgotten by general RL",
        measured=", ".join(
            f"{k} {agentic[k]:.3f} -> {general[k]:.3f}" for k in ("reasoning", "tools")
        ),
    )
    for metric in report.metrics:
        best, last = report.best_score(metric), report.last_score(metric)
        if metric not in report.lower_is_better and best and last is not None:
            yield Claim(
                name=f"{seed}: {metric} after distillation",
                target=f">= {RETAINED:.0%} of the best stage",
                measured=f"{last:.3f} of {best:.3f} = {last / best:.0%}",
                holds=last >= RETAINED * best,
            )


def weights(out: Path, stage: str) -> bytes:
    newest = max((out / stage / "checkpoints").glob("step-*"))
    return next(newest.rglob(WEIGHTS)).read_bytes()


def kill_claims(reference: Path, killed: Path, seed: int, kills: int) -> Iterator[Claim]:
    """Run a pipeline that is killed and resumed until it ends; the kills are spread over the time
    that the reference run took."""
    before = read_pipeline_report(reference)
    rng, seconds = random.Random(seed), sum(stage.seconds for stage in before.stages)
    killed.mkdir(parents=True, exist_ok=True)
    with (killed / "output.txt").open("a") as output:
        for _ in range(kills):
            child = subprocess.Popen(command(killed, seed), stdout=output, stderr=output)
            try:
                child.wait(rng.uniform(0.2, 1.8) * seconds / (kills + 1))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.wait()
    after, _ = run_pipeline(killed, seed)
    same = [stage for stage in TEXT_STAGES if weights(killed, stage) == weights(reference, stage)]
    yield Claim(
        name=f"killed {kills} times: stages with bitwise identical weights",
        target=f"all {len(TEXT_STAGES)}",
        measured=f"{len(same)}: {', '.join(same)}",
        holds=len(same) == len(TEXT_STAGES),
    )
    pairs = {name: (before.last_score(name), after.last_score(name)) for name, *_ in RL_GAINS}
    yield Claim(
        name=f"killed {kills} times: final scores against the reference run",
        target=f">= {RETAINED:.0%}",
        measured=", ".join(f"{name} {a:.3f}, {b:.3f}" for name, (a, b) in pairs.items()),
        holds=all(a and b and b >= RETAINED * a for a, b in pairs.values()),
    )


def claims(
    seeds: Sequence[int] = (0, 1, 2), runs: Path = Path("runs/nano_pipeline"), kills: int = 10
) -> list[Claim]:
    found: list[Claim] = []
    for seed in seeds:
        out = runs / f"seed-{seed}"
        uninterrupted = not (out / "events.jsonl").exists()
        report, seconds = run_pipeline(out, seed)
        found += seed_claims(report, seconds, uninterrupted)
    if kills:
        reference = runs / f"seed-{seeds[0]}"
        found += kill_claims(reference, runs / "killed", seeds[0], kills)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/nano_pipeline"))
    parser.add_argument("--kills", type=int, default=10)
    arguments = parser.parse_args()
    print_claims(claims(arguments.seeds, arguments.runs, arguments.kills))


if __name__ == "__main__":
    main()
