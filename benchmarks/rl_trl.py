"""Wall clock to the same reward against TRL's GRPO: same tiny model, task, machine and run.

    python -m benchmarks.rl_trl --peer PYTHON     # with trl==1.16.0 and transformers 5.22

Single turn: 16 prompts x 8 samples x 24 tokens per step. Tools: three turns of 8 tokens with tool
calls that mostly take 20 ms and sometimes a second; TRL generates one batch at a time (its
`rollout_func`, with the tool calls of a turn in parallel). Ours generates one batch ahead of the
trainer, two with tools. Both: AdamW, same learning rate, advantages divided by the standard
deviation of the group, clip 0.2 / 0.28, no KL, one update per batch, float32, same cores, one
thread per operation because the model is tiny. (Two threads gain TRL 2 % on two idle cores, and
cost it a factor of eight if another process uses one of them.) Our engine is a subprocess whose CPU
seconds are counted. Each runs until three consecutive batches have reached the reward, about 40
steps; other load on the machine shows as CPU seconds below elapsed seconds.
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
from typing import TYPE_CHECKING, Any

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
    limit_cores,
    prompt_of,
    reward_of,
)
from benchmarks.table import Claim, print_claims

if TYPE_CHECKING:
    from paddock.engine import Engine, EngineSettings
    from paddock.records import Trajectory
    from paddock.rollout.client import InProcessClient
    from paddock.rollout.task_schedule import RolloutSpec

MAX_STEPS = 60
TARGET_REWARD = 0.7  # mean of three steps


def save_model(folder: Path) -> None:
    """A GLM-5 of about 0.7 M parameters, with a tokenizer of numbered words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from paddock.checkpoint import save_pretrained
    from paddock.model import Transformer, preset

    config = preset("nano").model_copy(update={"vocab": VOCAB, "eos": (0,), "pad": 0, "mtp": None})
    save_pretrained(Transformer.from_config(config, seed=0), folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config_json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "t0",
        "pad_token": "t0",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config_json))


def open_engine(folder: Path, settings: "EngineSettings") -> "Engine":
    from paddock.checkpoint import load_pretrained
    from paddock.engine import Engine

    return Engine(load_pretrained(folder), None, settings)


async def ours(folder: Path, task: str, steps: int) -> None:
    """Prints the same lines as rl_trl_peer.py."""
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

    depth = 1 if task == "single" else 2
    settings = RLSettings.model_validate_json(json.dumps(_settings(folder, steps, depth)))
    learner = open_learner(settings, folder / "not-finite.npz")
    engine_settings = EngineSettings(
        max_running_requests=256,
        kv_cache_bytes=1 << 27,
        context_length=128,
        stop_token_ids=(),
        page_size=4,  # the samples of a group share a prompt of twelve tokens
    )
    start_s = start_cpu_s = 0.0
    rewards: list[float] = []  # of the batch being trained

    class RecordingBatchSource(LiveBatchSource):
        async def next_batch(self) -> RolloutBatch | None:
            batch = await super().next_batch()
            outcomes = [a[0].outcome for g in batch.groups for a in g.rollouts] if batch else []
            rewards[:] = [outcome.reward for outcome in outcomes]
            return batch

    def on_update(_: UpdateMetrics) -> None:
        line = {
            "elapsed_s": time.perf_counter() - start_s,
            "cpu_s": time.process_time() + _cpu_s(engine.pid) - start_cpu_s,
            "reward": sum(rewards) / len(rewards),
        }
        print(json.dumps(line), flush=True)

    with (
        SubprocessEngine(partial(open_engine, folder, engine_settings)) as engine,
        Ledger(":memory:") as ledger,
        tempfile.TemporaryDirectory() as out,
    ):
        client = InProcessClient(
            engine,
            Request,
            overlong_errors=(ContextLengthExceededError,),
            rejection_errors=(InvalidRequestError,),
            engine_errors=(EngineError,),
        )
        group_filter = GroupFilter(settings)
        spec = TaskSpec(TokenRollout(client, task), settings.tasks["even"], group_filter)
        orchestrator = Orchestrator({"even": spec}, settings.rollout, ledger, seed=0)
        async with RecordingBatchSource(orchestrator, batches=steps) as batches:
            batches.resume(0)
            start_s = time.perf_counter()
            start_cpu_s = time.process_time() + _cpu_s(engine.pid)
            trainer = RLTrainer(
                batches=batches,
                learner=learner,
                publish_weights=engine.update_weights,
                checkpoints=Path(out),
                group_filter=group_filter,
                on_update=on_update,
            )
            await trainer.run()


def _cpu_s(pid: int) -> float:
    """CPU seconds of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _settings(folder: Path, steps: int, depth: int) -> dict[str, Any]:
    return {
        "stage": "reasoning",
        "steps": steps,
        "init": {"checkpoint": str(folder)},
        "tasks": {"even": {"env": "none", "group_size": GROUP}},
        "rollout": {"groups_per_batch": PROMPTS, "pipeline_depth": depth, "max_staleness": depth},
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


class TokenRollout:
    """A rollout of token ids: the task has no text."""

    def __init__(self, client: "InProcessClient", task: str) -> None:
        self.client, self.turns = client, 1 if task == "single" else TURNS
        self.tokens = TOKENS if task == "single" else TURN_TOKENS

    async def __call__(self, spec: "RolloutSpec") -> "Sequence[Trajectory]":
        from paddock.records import SamplingParams, Trajectory, Turn, Verdict
        from paddock.rollout.client import InferenceRequest, turn_seed

        sampling = SamplingParams(max_new_tokens=self.tokens, ignore_eos=True)
        context, turns = prompt_of(spec.number), []
        added = list(context)
        for turn in range(self.turns):
            params = replace(sampling, seed=turn_seed(spec.seed, turn))
            request = InferenceRequest(
                token_ids=context, sampling_params=params, session_id=spec.session_id
            )
            done = (await self.client.generate(request)).completion
            turns.append(Turn(added_ids=tuple(added), completion=done))
            if turn < self.turns - 1:
                await asyncio.sleep(latency_s(f"{spec.seed} {turn}"))
            added = ADDED
            context = [*context, *done.token_ids, *added]
        sampled = [token for turn in turns for token in turn.completion.token_ids]
        return (
            Trajectory(
                task_id=spec.task_id,
                group_id=spec.group_id,
                session_id=spec.session_id,
                turns=tuple(turns),
                outcome=Verdict(reward=reward_of(sampled)),
            ),
        )


def reached(lines: Sequence[dict[str, float]]) -> tuple[float, int] | None:
    """Elapsed seconds and steps when the mean of three steps reached the reward; None: not yet."""
    for i in range(2, len(lines)):
        if sum(line["reward"] for line in lines[i - 2 : i + 1]) / 3 >= TARGET_REWARD:
            return lines[i]["elapsed_s"], i + 1
    return None


def run_arm(command: list[str]) -> list[dict[str, float]]:
    """The lines that an arm prints until it reaches the reward; then it is terminated."""
    lines: list[dict[str, float]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as arm:
        assert arm.stdout is not None
        for line in arm.stdout:
            if line.startswith('{"'):
                lines.append(json.loads(line))
            if reached(lines):
                arm.terminate()
                return lines
    if arm.returncode or not lines:
        raise RuntimeError(
            f"{command[1]} exited with code {arm.returncode} after {len(lines)} steps"
        )
    return lines


def claims(peer: str | None = None, cores: int = 2, steps: int = MAX_STEPS) -> list[Claim]:
    if peer is None:
        return [Claim(name="against TRL", measured="not run: needs a Python with trl (--peer)")]
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(folder)
        for task, min_ratio in (("single", 2.0), ("tools", 4.0)):
            arguments = [str(folder), task, str(steps), str(cores)]
            theirs = run_arm([peer, str(Path(__file__).with_name("rl_trl_peer.py")), *arguments])
            ours = run_arm([sys.executable, "-m", "benchmarks.rl_trl", "--ours", *arguments])
            found.append(_claim(task, ours, theirs, min_ratio))
    return found


def _claim(
    task: str, ours: list[dict[str, float]], theirs: list[dict[str, float]], min_ratio: float
) -> Claim:
    ours_at, peer_at = reached(ours), reached(theirs)
    ours_s, theirs_s = (_per_step(lines, "elapsed_s") for lines in (ours, theirs))
    ours_cpu_s, theirs_cpu_s = (_per_step(lines, "cpu_s") for lines in (ours, theirs))
    text = f"{ours_s:.2f} against {theirs_s:.2f} s/step, "
    text += f"{ours_cpu_s:.2f} against {theirs_cpu_s:.2f} CPU s"
    if ours_at is None or peer_at is None:
        last = [lines[-1]["reward"] for lines in (ours, theirs)]
        text += f"; reward after {len(ours)} steps {last[0]:.2f} / {last[1]:.2f}"
        return Claim(
            name=f"{task}: to reward {TARGET_REWARD}", target=f">= {min_ratio:g}x", measured=text
        )
    ratio = peer_at[0] / ours_at[0]
    return Claim(
        name=f"{task}: wall clock to reward {TARGET_REWARD}, TRL / ours",
        target=f">= {min_ratio:g}x",
        measured=f"{ratio:.2f}x ({ours_at[0]:.1f} s, {ours_at[1]} steps; {peer_at[0]:.1f} s, "
        f"{peer_at[1]} steps); {text}",
        holds=ratio >= min_ratio,
    )


def _per_step(lines: list[dict[str, float]], key: str) -> float:
    """Mean per step without the first, which warms up and fills the pipeline."""
    return (lines[-1][key] - lines[0][key]) / max(1, len(lines) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="Python interpreter with trl")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--steps", type=int, default=MAX_STEPS)
    parser.add_argument("--ours", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        import torch

        folder, task, steps, cores = options.ours
        limit_cores(int(cores))
        torch.set_num_threads(1)
        asyncio.run(ours(Path(folder), task, int(steps)))
        return
    print_claims(claims(options.peer, options.cores, options.steps))


if __name__ == "__main__":
    main()
