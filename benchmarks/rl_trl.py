"""Wall clock to the same reward against TRL's GRPO: same tiny model, task, machine and run.

    python -m benchmarks.rl_trl --peer PYTHON     # one that has trl==1.16.0 and transformers 5.22

Single turn: 16 prompts x 8 samples x 24 tokens a step. Tools: three turns of 8 tokens with worlds
that take 20 ms mostly and a second now and then; TRL plays a batch at a time (its `rollout_func`,
worlds of a turn answering in parallel). Ours runs ahead of the trainer by one batch, two with
tools. Both: AdamW, the same rate, advantages in deviations of the group, clip 0.2 / 0.28, no KL.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.rl_trl_task import (
    ADDED,
    GROUP,
    LR,
    PROMPTS,
    TOKENS,
    TURN_TOKENS,
    TURNS,
    VOCAB,
    latency_s,
    prompt_of,
    reward_of,
)
from benchmarks.table import Claim, print_claims

STEPS = 40
WANTED = 0.8  # reward, mean of three steps


def model_in(folder: Path) -> None:
    """A GLM-5 of about 0.7 M parameters, with a tokenizer of words that are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from paddock.checkpoint import save_pretrained
    from paddock.model import Network, preset

    config = preset("nano").model_copy(update={"vocab": VOCAB, "eos": (0,), "pad": 0, "mtp": None})
    save_pretrained(Network.born(config, seed=0), folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "pad_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


async def ours(folder: Path, task: str, steps: int) -> None:
    """Prints what the peer prints."""
    from paddock.checkpoint import load_pretrained
    from paddock.engine import Engine, EngineFailed, EngineSettings, Reload, Request, RequestRefused
    from paddock.journal import Ledger
    from paddock.rl.collect import Collector
    from paddock.rl.learn import Loop, Moment
    from paddock.rl.learner import open_learner
    from paddock.rl.settings import RLSettings
    from paddock.rl.tally import Sifter
    from paddock.rollout.client import InProcess
    from paddock.rollout.orchestrator import Orchestrator, Work

    ahead = 1 if task == "single" else 2
    settings = RLSettings.model_validate_json(json.dumps(_settings(folder, steps, ahead)))
    learner = open_learner(settings, folder / "not-finite.npz")
    sizes = EngineSettings(max_running=256, cache_bytes=1 << 27, context=128, stop_ids=())
    began = 0.0

    def watch(moment: Moment) -> None:
        line = {"seconds": time.perf_counter() - began, "reward": moment.tally.reward}
        print(json.dumps(line), flush=True)

    with (
        Engine(load_pretrained(folder), None, sizes) as engine,
        Ledger(":memory:") as ledger,
        tempfile.TemporaryDirectory() as out,
    ):
        generate = InProcess(engine, Request, refusals=(RequestRefused,), failures=(EngineFailed,))
        sifter = Sifter(settings)
        work = Work(Attempts(generate, task), settings.tasks["even"], sifter)
        orchestrator = Orchestrator({"even": work}, settings.pace, ledger, seed=0)
        async with Collector(orchestrator, batches=steps) as collector:
            collector.resume(0)
            began = time.perf_counter()
            loop = Loop(
                queue=collector,
                learner=learner,
                publish=Reload(engine).publisher(),
                checkpoints=Path(out),
                sifter=sifter,
                watch=watch,
            )
            await loop.run()


def _settings(folder: Path, steps: int, ahead: int) -> dict:
    return {
        "stage": "reasoning",
        "steps": steps,
        "start": {"folder": str(folder)},
        "tasks": {"even": {"world": "none", "group_size": GROUP}},
        "pace": {"batch_groups": PROMPTS, "pipeline_depth": ahead, "max_staleness": ahead},
        "loss": {"kind": "icepop", "per": "token"},
        "optim": {
            "kind": "adamw",
            "lr": LR,
            "schedule": "constant",
            "warmup": 0.0,
            "weight_decay": 0.0,
            "betas": [0.9, 0.98],
        },
        "machine": {"device": "cpu"},
        "keep": {"every": 10_000},
    }


class Attempts:
    """Tokens in, tokens out: the task has no text."""

    def __init__(self, generate: object, task: str) -> None:
        self.generate, self.turns = generate, 1 if task == "single" else TURNS
        self.tokens = TOKENS if task == "single" else TURN_TOKENS

    async def __call__(self, given: object) -> Sequence[object]:
        from paddock.records import Sampling, Trajectory, Turn, Verdict
        from paddock.rollout.client import Ask, turn_seed

        sampling = Sampling(max_new_tokens=self.tokens, ignore_eos=True)
        context, added, turns = prompt_of(given.number), None, []
        added = list(context)
        for turn in range(self.turns):
            wanted = replace(sampling, seed=turn_seed(given.seed, turn))
            ask = Ask(token_ids=context, sampling=wanted, session=given.session_id)
            done = (await self.generate.respond(ask)).completion
            turns.append(Turn(added_ids=tuple(added), completion=done))
            if turn < self.turns - 1:
                await asyncio.sleep(latency_s(f"{given.seed} {turn}"))
            added = ADDED
            context = [*context, *done.token_ids, *added]
        own = [token for turn in turns for token in turn.completion.token_ids]
        return (
            Trajectory(
                task_id=given.task_id,
                group_id=given.group_id,
                session_id=given.session_id,
                turns=tuple(turns),
                outcome=Verdict(reward=reward_of(own)),
            ),
        )


def reached(lines: Sequence[dict]) -> tuple[float, int] | None:
    """When three steps in a row had the wanted reward on average: seconds, steps."""
    for i in range(2, len(lines)):
        if sum(line["reward"] for line in lines[i - 2 : i + 1]) / 3 >= WANTED:
            return lines[i]["seconds"], i + 1
    return None


def told(command: list[str]) -> list[dict]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def claims(peer: str | None = None, threads: int = 2, steps: int = STEPS) -> list[Claim]:
    if peer is None:
        return [Claim(name="against TRL", measured="not run: no Python with trl (--peer)")]
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model_in(folder)
        for task, least in (("single", 2.0), ("tools", 4.0)):
            words = [str(folder), task, str(steps), str(threads)]
            theirs = told([peer, str(Path(__file__).with_name("rl_trl_peer.py")), *words])
            mine = told([sys.executable, "-m", "benchmarks.rl_trl", "--ours", *words])
            found.append(_claim(task, mine, theirs, least))
    return found


def _claim(task: str, mine: list[dict], theirs: list[dict], least: float) -> Claim:
    ours_at, peer_at = reached(mine), reached(theirs)
    steps = [lines[-1]["seconds"] / len(lines) for lines in (mine, theirs)]
    said = f"{steps[0]:.2f} against {steps[1]:.2f} s a step"
    if ours_at is None or peer_at is None:
        last = [lines[-1]["reward"] for lines in (mine, theirs)]
        said += f"; reward after {len(mine)} steps {last[0]:.2f} / {last[1]:.2f}"
        return Claim(name=f"{task}: to reward {WANTED}", target=f">= {least:g}x", measured=said)
    ratio = peer_at[0] / ours_at[0]
    return Claim(
        name=f"{task}: wall clock to reward {WANTED}, TRL / ours",
        target=f">= {least:g}x",
        measured=f"{ratio:.2f}x ({ours_at[0]:.1f} s, {ours_at[1]} steps; {peer_at[0]:.1f} s, "
        f"{peer_at[1]} steps); {said}",
        holds=ratio >= least,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="a Python that has trl")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ours", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        import torch

        folder, task, steps, threads = options.ours
        torch.set_num_threads(int(threads))
        asyncio.run(ours(Path(folder), task, int(steps)))
        return
    print_claims(claims(options.peer, options.threads, options.steps))


if __name__ == "__main__":
    main()
