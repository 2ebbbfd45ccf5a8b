"""The whole recipe on a laptop, by learning and not by luck: `paddock run` on three seeds.

    python -m benchmarks.story [--seeds 0 1 2] [--runs FOLDER] [--kills 10]

What each stage must gain, what the last must keep, and the minutes it took. With --kills the first
seed is run once more, killed at random moments and called again: stages that learn from text must
end bit for bit where the calm run ended, and the agent must be worth as much. Called again, it goes
on where it was stopped; minutes are those of a run that was not.
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

PLAN = "recipes/nano"
MINUTES = 10
WEIGHTS = "model.safetensors"
TEXT_STAGES = ("pretrain", "midtrain", "warmup", "sparse", "sft")
# Skill, the stage that teaches it, at most before, at least after.
LESSONS = (
    ("reasoning", "reasoning", 0.5, 0.85),
    ("tools", "agentic", 0.5, 0.85),
    ("rules", "general", 0.5, 0.8),
)
KEPT = 0.95  # of a skill's best stage, after distillation


def command(out: Path, seed: int) -> list[str]:
    return [sys.executable, "-m", "paddock.cli", "run", PLAN, "--out", str(out), "--set",
            f"seed={seed}"]  # fmt: skip


def told(out: Path, seed: int) -> tuple[PipelineReport, float]:
    """The story of a seed and the seconds of this call."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with (out / "output.txt").open("a") as output:
        subprocess.run(command(out, seed), check=True, stdout=output, stderr=output)
    return read_pipeline_report(out), time.monotonic() - began


def scores(story: PipelineReport, stage: str) -> dict[str, float]:
    return next(each.scores for each in story.stages if each.name == stage)


def judged(story: PipelineReport, seconds: float, whole: bool) -> Iterator[Claim]:
    seed = f"seed {story.seed}"
    yield Claim(
        name=f"{seed}: minutes",
        target=f"<= {MINUTES}",
        measured=f"{seconds / 60:.1f}" if whole else "not in one go",
        holds=seconds <= 60 * MINUTES if whole else None,
    )
    for skill, stage, most, least in LESSONS:
        before, after = scores(story, "sft")[skill], scores(story, stage)[skill]
        yield Claim(
            name=f"{seed}: {skill} by {stage} RL",
            target=f"<= {most} -> >= {least}",
            measured=f"{before:.3f} -> {after:.3f}",
            holds=before <= most and after >= least,
        )
    fine, general = scores(story, "agentic"), scores(story, "general")
    yield Claim(
        name=f"{seed}: forgotten by general RL",
        measured=", ".join(
            f"{k} {fine[k]:.3f} -> {general[k]:.3f}" for k in ("reasoning", "tools")
        ),
    )
    for skill in story.metrics:
        best, last = story.best_score(skill), story.last_score(skill)
        if skill not in story.lower_is_better and best and last is not None:
            yield Claim(
                name=f"{seed}: {skill} after distillation",
                target=f">= {KEPT:.0%} of the best stage",
                measured=f"{last:.3f} of {best:.3f} = {last / best:.0%}",
                holds=last >= KEPT * best,
            )


def weights(out: Path, stage: str) -> bytes:
    newest = max((out / stage / "checkpoints").glob("step-*"))
    return next(newest.rglob(WEIGHTS)).read_bytes()


def stormed(calm: Path, stormy: Path, seed: int, kills: int) -> Iterator[Claim]:
    """Killed and called again until it ends; moments are spread over the time the calm run took."""
    chance, seconds = random.Random(seed), sum(s.seconds for s in read_pipeline_report(calm).stages)
    stormy.mkdir(parents=True, exist_ok=True)
    with (stormy / "output.txt").open("a") as output:
        for _ in range(kills):
            child = subprocess.Popen(command(stormy, seed), stdout=output, stderr=output)
            try:
                child.wait(chance.uniform(0.2, 1.8) * seconds / (kills + 1))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.wait()
    after, _ = told(stormy, seed)
    same = [stage for stage in TEXT_STAGES if weights(stormy, stage) == weights(calm, stage)]
    yield Claim(
        name=f"killed {kills} times: stages with the same weights, bit for bit",
        target=f"all {len(TEXT_STAGES)}",
        measured=f"{len(same)}: {', '.join(same)}",
        holds=len(same) == len(TEXT_STAGES),
    )
    before = read_pipeline_report(calm)
    pairs = {skill: (before.last_score(skill), after.last_score(skill)) for skill, *_ in LESSONS}
    yield Claim(
        name=f"killed {kills} times: the agent is worth as much",
        target=f">= {KEPT:.0%}",
        measured=", ".join(f"{skill} {a:.3f}, {b:.3f}" for skill, (a, b) in pairs.items()),
        holds=all(a and b and b >= KEPT * a for a, b in pairs.values()),
    )


def claims(
    seeds: Sequence[int] = (0, 1, 2), runs: Path = Path("runs/story"), kills: int = 10
) -> list[Claim]:
    found: list[Claim] = []
    for seed in seeds:
        out = runs / f"seed-{seed}"
        whole = not (out / "events.jsonl").exists()
        story, seconds = told(out, seed)
        found += judged(story, seconds, whole)
    if kills:
        calm = runs / f"seed-{seeds[0]}"
        found += stormed(calm, runs / "stormy", seeds[0], kills)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/story"))
    parser.add_argument("--kills", type=int, default=10)
    arguments = parser.parse_args()
    print_claims(claims(arguments.seeds, arguments.runs, arguments.kills))


if __name__ == "__main__":
    main()
