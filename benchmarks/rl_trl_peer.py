"""TRL's GRPO on the task of rl_trl.py; run by it with a Python that has trl.

    python benchmarks/rl_trl_peer.py FOLDER single|tools STEPS CORES

Prints a JSON line per step: elapsed seconds and CPU seconds, and the mean reward of the batch.
"""

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.rl_trl_task import (
    ADDED,
    GROUP,
    LR,
    PROMPTS,
    TOKENS,
    TURN_TOKENS,
    TURNS,
    latency_s,
    limit_cores,
    prompt_of,
    reward_of,
)


class Clock(TrainerCallback):
    """Prints elapsed time and mean reward after each step."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.start()

    def start(self) -> None:
        self.start_s, self.start_cpu_s = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        line = {
            "elapsed_s": time.perf_counter() - self.start_s,
            "cpu_s": time.process_time() - self.start_cpu_s,
            "reward": sum(self.rewards) / max(1, len(self.rewards)),
        }
        print(json.dumps(line), flush=True)
        self.rewards.clear()


def main() -> None:
    folder, task, steps, cores = sys.argv[1:]
    limit_cores(int(cores))
    torch.set_num_threads(1)  # see rl_trl.py
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    clock, calls = Clock(), count()

    def compute_rewards(completion_ids: list[list[int]], **more: object) -> list[float]:
        masks = more.get("own") or [[1] * len(ids) for ids in completion_ids]
        found = [
            reward_of([i for i, own in zip(ids, mask, strict=True) if own])
            for ids, mask in zip(completion_ids, masks, strict=True)
        ]
        clock.rewards += found
        return found

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """Three turns, all rollouts in one batch; the tool calls of a turn run in parallel."""
        start = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        context, masks = [list(ids) for ids in start], [[] for _ in start]
        for turn in range(TURNS):
            width = max(map(len, context))
            padded = torch.tensor([[0] * (width - len(c)) + c for c in context])
            attention_mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in context])
            with torch.no_grad():
                out = trainer.model.generate(
                    padded,
                    attention_mask=attention_mask,
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=TURN_TOKENS,
                    min_new_tokens=TURN_TOKENS,
                    pad_token_id=0,
                )
            for i, reply in enumerate(out[:, width:].tolist()):
                context[i] += reply
                masks[i] += [1] * len(reply)
            if turn < TURNS - 1:
                waits = [latency_s(str(next(calls))) for _ in context]
                with ThreadPoolExecutor(len(context)) as pool:
                    list(pool.map(time.sleep, waits))
                for i in range(len(context)):
                    context[i] += ADDED
                    masks[i] += [0] * len(ADDED)
        completions = [c[len(s) :] for c, s in zip(context, start, strict=True)]
        return {
            "prompt_ids": start,
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
            "own": masks,
        }

    prompts = [" ".join(f"t{i}" for i in prompt_of(n)) for n in range(PROMPTS * int(steps) * 2)]
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS
            if task == "single"
            else TURNS * (TURN_TOKENS + len(ADDED)),
            max_steps=int(steps),
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta2=0.98,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            temperature=1.0,
            top_p=1.0,
            generation_kwargs={"min_new_tokens": TOKENS},  # as many as ours generates
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=compute_rewards,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[clock],
            rollout_func=None if task == "single" else rollout,
        )
        clock.start()
        trainer.train()


if __name__ == "__main__":
    main()
