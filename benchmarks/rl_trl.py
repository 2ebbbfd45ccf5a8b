"""Wall clock to the same reward against TRL's GRPO: same tiny model, task, machine and run.

    python -m benchmarks.rl_trl --peer PYTHON     # one that has trl==1.16.0 and transformers 5.22

Single turn: 16 prompts x 8 samples x 24 tokens a step. Tools: three turns of 8 tokens with worlds
that take 20 ms mostly and a second now and then; TRL plays a batch at a time (its `rollout_func`,
worlds of a turn answering in parallel). Ours runs ahead of the trainer by one batch, two with
tools. Both: AdamW, the same rate, advantages in deviations of the group, clip 0.2 / 0.28, no KL,
one update a batch, float32, the same cores, and one thread an operation: they are that small. (Two
gain TRL 2 % on two idle cores; where another process takes one of them, they wait for each other
and cost it eightfold.) Ours has the engine in a process of its own; its CPU-seconds are counted.
Each runs until three batches in a row earned what is wanted, which takes some 40 steps; what else
the machine has to do shows in CPU-seconds against seconds.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rl_trl_task import (
    ADDED,
    GROUP,
    LR,
    PROMPTS,
    TOKENS,
    TURN_TOKENS,
    TURNS,
    VOCAB,
    confine,
    latency_s,
    prompt_of,
    reward_of,
)
from benchmarks.table import Claim, print_claims

if TYPE_CHECKING:
    from paddock.engine import Engine, EngineSettings

STEPS = 60  # at most
WANTED = 0.7  # reward, mean of three steps


def model_in(folder: Path) -> None:
    """A GLM-5 of about 0.7 M parameters, with a tokenizer of words that are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from paddock.checkpoint import save_pretrained
    from paddock.model import Transformer, preset

    config = preset("nano").model_copy(update={"vocab": VOCAB, "eos": (0,), "pad": 0, "mtp": None})
    save_pretrained(Transformer.from_config(config, seed=0), folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "pad_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def engine_in(folder: Path, sizes: "EngineSettings") -> "Engine":
    from paddock.checkpoint import load_pretrained
    from paddock.engine import Engine

    return Engine(load_pretrained(folder), None, sizes)


async def ours(folder: Path, task: str, steps: int) -> None:
    """Prints what the peer prints."""
    from paddock.engine import (
        ContextLengthExceededError,
        EngineError,
        EngineSettings,
        InvalidRequestError,
        Request,
        SubprocessEngine,
    )
    from paddock.journal import Ledger
    from paddock.rl.batch_source import RolloutBatch
    from paddock.rl.group_filter import GroupFilter
    from paddock.rl.learner import open_learner
    from paddock.rl.live_batches import LiveBatchSource
    from paddock.rl.settings import RLSettings
    from paddock.rl.trainer import RLTrainer, UpdateMetrics
    from paddock.rollout.client import InProcessClient
    from paddock.rollout.orchestrator import Orchestrator, TaskSpec

    ahead = 1 if task == "single" else 2
    settings = RLSettings.model_validate_json(json.dumps(_settings(folder, steps, ahead)))
    learner = open_learner(settings, folder / "not-finite.npz")
    sizes = EngineSettings(
        max_running_requests=256,
        kv_cache_bytes=1 << 27,
        context_length=128,
        stop_token_ids=(),
        page_size=4,  # a group shares its prompt, which has twelve
    )
    began = worked = 0.0
    rewards: list[float] = []  # of the batch at the trainer

    class Seen(LiveBatchSource):
        async def next_batch(self) -> RolloutBatch | None:
            batch = await super().next_batch()
            outcomes = [a[0].outcome for g in batch.groups for a in g.rollouts] if batch else []
            rewards[:] = [outcome.reward for outcome in outcomes]
            return batch

    def watch(_: UpdateMetrics) -> None:
        line = {
            "seconds": time.perf_counter() - began,
            "cpu": time.process_time() + _worked_s(engine.pid) - worked,
            "reward": sum(rewards) / len(rewards),
        }
        print(json.dumps(line), flush=True)

    with (
        SubprocessEngine(partial(engine_in, folder, sizes)) as engine,
        Ledger(":memory:") as ledger,
        tempfile.TemporaryDirectory() as out,
    ):
        generate = InProcessClient(
            engine,
            Request,
            overlong_errors=(ContextLengthExceededError,),
            rejection_errors=(InvalidRequestError,),
            engine_errors=(EngineError,),
        )
        sifter = GroupFilter(settings)
        work = TaskSpec(Attempts(generate, task), settings.tasks["even"], sifter)
        orchestrator = Orchestrator({"even": work}, settings.pace, ledger, seed=0)
        async with Seen(orchestrator, batches=steps) as collector:
            collector.resume(0)
            began = time.perf_counter()
            worked = time.process_time() + _worked_s(engine.pid)
            loop = RLTrainer(
                batches=collector,
                learner=learner,
                publish_weights=engine.update_weights,
                checkpoints=Path(out),
                group_filter=sifter,
                on_update=watch,
            )
            await loop.run()


def _worked_s(pid: int) -> float:
    """CPU-seconds of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _settings(folder: Path, steps: int, ahead: int) -> dict:
    return {
        "stage": "reasoning",
        "steps": steps,
        "init": {"checkpoint": str(folder)},
        "tasks": {"even": {"env": "none", "group_size": GROUP}},
        "rollout": {"groups_per_batch": PROMPTS, "pipeline_depth": ahead, "max_staleness": ahead},
        "loss": {"kind": "icepop", "aggregate": "token"},
        "optim": {
            "type": "adamw",
            "lr": LR,
            "schedule": "constant",
            "warmup_ratio": 0.0,
            "weight_decay": 0.0,
            "betas": [0.9, 0.98],
        },
        "compute": {"device": "cpu"},
        "checkpoint": {"every": 10_000},
    }


class Attempts:
    """Tokens in, tokens out: the task has no text."""

    def __init__(self, generate: object, task: str) -> None:
        self.generate, self.turns = generate, 1 if task == "single" else TURNS
        self.tokens = TOKENS if task == "single" else TURN_TOKENS

    async def __call__(self, given: object) -> Sequence[object]:
        from paddock.records import SamplingParams, Trajectory, Turn, Verdict
        from paddock.rollout.client import InferenceRequest, turn_seed

        sampling = SamplingParams(max_new_tokens=self.tokens, ignore_eos=True)
        context, added, turns = prompt_of(given.number), None, []
        added = list(context)
        for turn in range(self.turns):
            wanted = replace(sampling, seed=turn_seed(given.seed, turn))
            ask = InferenceRequest(
                token_ids=context, sampling_params=wanted, session_id=given.session_id
            )
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
    """What an arm says until it has earned what is wanted; then it is ended."""
    lines: list[dict] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as arm:
        assert arm.stdout is not None
        for line in arm.stdout:
            if line.startswith('{"'):
                lines.append(json.loads(line))
            if reached(lines):
                arm.terminate()
                return lines
    if arm.returncode or not lines:
        raise RuntimeError(f"{command[1]} ended with {arm.returncode} after {len(lines)} steps")
    return lines


def claims(peer: str | None = None, cores: int = 2, steps: int = STEPS) -> list[Claim]:
    if peer is None:
        return [Claim(name="against TRL", measured="not run: no Python with trl (--peer)")]
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model_in(folder)
        for task, least in (("single", 2.0), ("tools", 4.0)):
            words = [str(folder), task, str(steps), str(cores)]
            theirs = told([peer, str(Path(__file__).with_name("rl_trl_peer.py")), *words])
            mine = told([sys.executable, "-m", "benchmarks.rl_trl", "--ours", *words])
            found.append(_claim(task, mine, theirs, least))
    return found


def _claim(task: str, mine: list[dict], theirs: list[dict], least: float) -> Claim:
    ours_at, peer_at = reached(mine), reached(theirs)
    said = f"{_each(mine, 'seconds'):.2f} against {_each(theirs, 'seconds'):.2f} s a step, "
    said += f"{_each(mine, 'cpu'):.2f} against {_each(theirs, 'cpu'):.2f} CPU-s"
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


def _each(lines: list[dict], what: str) -> float:
    """Of a step, after the first: that one warms up, and fills what runs ahead."""
    return (lines[-1][what] - lines[0][what]) / max(1, len(lines) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="a Python that has trl")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ours", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        import torch

        folder, task, steps, cores = options.ours
        confine(int(cores))
        torch.set_num_threads(1)
        asyncio.run(ours(Path(folder), task, int(steps)))
        return
    print_claims(claims(options.peer, options.cores, options.steps))


if __name__ == "__main__":
    main()
