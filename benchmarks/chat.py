"""Chat behaviour of nano after SFT: format, thinking modes, tool calls, and rewards before RL.

    python -m benchmarks.chat [--seeds 0 1 2] [--jobs 2] [--runs FOLDER] [--dialogues 40]
                              [--top-p 0.95]

The base models are those of `benchmarks.train_ablations stages`, in the same folders. All numbers
are from held-out tasks, sampled as in GLM-5's evaluations (temperature 1, top-p 0.95) and parsed by
the parser. Rewards are measured at top-p 1, as in RL. A second call resumes.
"""

import argparse
import asyncio
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.table import Claim, print_claims
from benchmarks.train_ablations import CHAIN, SEEDS, settings_of, train
from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training_state import latest_model
from paddock.data.tokenize_dialogue import THINKING_MODES
from paddock.engine import Engine, EngineSettings, Request
from paddock.envs import make, run_rollout
from paddock.envs.tools import ToolError, validate_arguments
from paddock.journal import EVENTS_FILE, Journal, follow
from paddock.records import Message, SamplingParams, ThinkingMode, ToolSpec, Verdict
from paddock.text import (
    Renderer,
    SpecialToken,
    ThinkingKwargs,
    Tokenizer,
    get_renderer,
    parse_completion,
)

TOP_P = 0.95
MIN_TURNS, MIN_CALLS, MAX_REWARD = 0.99, 0.95, 0.5
TOOLS = {"kinds": ["follow", "plus", "file", "search"]}
CHAT_ENVS: dict[str, dict[str, Any]] = {"nano-chain": {}, "nano-tools": TOOLS, "nano-rules": {}}
REWARD_ENVS = ("nano-chain", "nano-tools", "nano-rules")
SCORED = 200  # tasks per environment
FIRST = 1 << 20  # index of the first test task: no recipe was tuned on these


_COUNTED = ("turns", "well_formed", "calls", "good_calls", "reasoned")


@dataclass(slots=True)
class FormatStats:
    """Counts of one thinking mode."""

    turns: int = 0
    well_formed: int = 0
    calls: int = 0
    good_calls: int = 0
    reasoned: int = 0  # replies with reasoning
    wrong: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in _COUNTED} | {"wrong": dict(self.wrong)}

    def add(self, other: "FormatStats") -> None:
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wrong += other.wrong


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model behind an engine."""

    engine: Engine
    tokenizer: Tokenizer
    renderer: Renderer
    top_p: float

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        thinking: ThinkingKwargs,
        seed: int,
    ) -> "Reply":
        prompt = self.renderer.render_prompt(messages, tools=tools, thinking=thinking).token_ids
        sampling = SamplingParams(seed=seed, max_new_tokens=160, top_p=self.top_p)
        output = await self.engine.async_generate(
            Request(token_ids=prompt, sampling_params=sampling)
        )
        ids = output.completion.token_ids
        parsed = parse_completion(
            self.tokenizer,
            ids,
            finish=output.completion.finish,
            tools=tools,
            prompt=prompt,
            call_id=f"call_{len(messages)}_{{}}".format,
        )
        return Reply(parsed.message, prompt, ids, parsed.notes, output.cached_tokens)

    def policy(self, seed: int):  # noqa: ANN201  an envs.Policy
        async def respond(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
            reply = await self.reply(
                messages, tools, THINKING_MODES["interleaved"], seed + len(messages)
            )
            return reply.message

        return respond


@dataclass(frozen=True, slots=True)
class Reply:
    message: Message
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    notes: tuple[str, ...]
    cached: int


def format_error(
    reply: Reply, tools: Sequence[ToolSpec], thinks: bool, tokenizer: Tokenizer
) -> str:
    """Why a turn is not well formed; empty if it is."""
    specials, message = tokenizer.special_token_ids, reply.message
    stop = SpecialToken.OBSERVATION if message.tool_calls else SpecialToken.USER
    added = [i for i in reply.ids if tokenizer.is_added(i)]
    think_close = specials[SpecialToken.THINK_CLOSE]
    if not reply.ids or reply.ids[-1] != specials[stop]:
        return "wrong stop token"
    if reply.notes:
        return reply.notes[0].split(" of ")[0]
    if thinks and (message.reasoning is None or added.count(think_close) != 1):
        return "not exactly one reasoning block"
    if not thinks and (message.reasoning or think_close in added):
        return "reasoning with thinking off"
    # Special tokens out of place: spelled out as text, or of a kind that decoding skips.
    text = f"{message.reasoning or ''}{message.content}"
    skipped = any(tokenizer.is_special(i) for i in reply.ids[:-1])
    if skipped or any(token in text for token in tokenizer.added_tokens):
        return "stray special token"
    if not message.content.strip() and not message.tool_calls:
        return "empty reply"
    known = {tool.name: tool for tool in tools}
    try:
        for call in message.tool_calls:
            validate_arguments(call.arguments, known[call.name])
    except ToolError as error:
        return f"call: {error}"
    return ""


def turn_stats(
    reply: Reply, tools: Sequence[ToolSpec], thinks: bool, tokenizer: Tokenizer
) -> FormatStats:
    wrong = format_error(reply, tools, thinks, tokenizer)
    opened = reply.ids.count(tokenizer.special_token_ids[SpecialToken.TOOL_CALL_OPEN])
    good = 0 if wrong.startswith("call") else len(reply.message.tool_calls)
    return FormatStats(
        turns=1,
        well_formed=int(not wrong),
        calls=opened,
        good_calls=min(good, opened),
        reasoned=int(bool(reply.message.reasoning)),
        wrong=Counter([wrong] if wrong else []),
    )


async def conversation(
    model: ChatModel, env_name: str, mode: ThinkingMode, number: int, tasks: int = 3
) -> FormatStats:
    """Several held-out tasks in one conversation with their environments."""
    taskset, rng = make(env_name, CHAT_ENVS[env_name]), Random(f"{env_name}/{mode}/{number}")
    envs = [
        taskset.make_env(taskset.task(FIRST + tasks * number + k, "test")) for k in range(tasks)
    ]
    by_name = {tool.name: tool for env in envs for tool in env.tools}
    tools = [by_name[name] for name in sorted(by_name)]
    messages: list[Message] = []
    stats = FormatStats()
    for env in envs:
        thinks = mode != "off" and (mode != "turns" or rng.random() < 0.5)
        thinking = THINKING_MODES[mode]
        if mode == "turns":
            thinking = replace(thinking, enable_thinking=thinks)
        messages += env.task.messages
        await env.reset()
        for _ in range(env.task.budget.turns):
            reply = await model.reply(messages, tools, thinking, rng.getrandbits(30))
            stats.add(turn_stats(reply, tools, thinks, model.tokenizer))
            messages.append(reply.message)
            results = await env.step(reply.message)
            if not results:
                break
            messages += results
        await env.close()
    return stats


async def well_formed(model: ChatModel, mode: ThinkingMode, dialogues: int) -> FormatStats:
    found = await asyncio.gather(
        *(conversation(model, env, mode, n) for env in CHAT_ENVS for n in range(dialogues))
    )
    total = FormatStats()
    for stats in found:
        total.add(stats)
    return total


async def mean_reward(model: ChatModel, env_name: str) -> float:
    """Mean reward on held-out tasks with default thinking."""
    taskset = make(env_name)
    envs = [taskset.make_env(taskset.task(FIRST + n, "test")) for n in range(SCORED)]
    found = await asyncio.gather(
        *(run_rollout(env, model.policy(1000 * n)) for n, env in enumerate(envs))
    )
    rewards = [e.outcome.reward for e in found if isinstance(e.outcome, Verdict)]
    assert len(rewards) == SCORED
    return sum(rewards) / SCORED


async def five_turns(model: ChatModel, thinking: ThinkingKwargs, number: int) -> Counter[str]:
    """Prefix reuse in a conversation of five user turns. Counts prompt tokens from turn two on and
    those in the prefix cache; prompts after a well-formed reply and those that begin with the
    tokens of the previous prompt and reply. (A malformed call is rendered as plain text, so tokens
    change after it. They also change, rarely, after a reply whose tokens differ from the encoding
    of its text; sessions never re-render.)"""
    taskset = make("nano-tools")  # one kind: the tools stay the same
    messages: list[Message] = []
    found: Counter[str] = Counter()
    before: tuple[int, ...] = ()
    for turn in range(5):
        env = taskset.make_env(taskset.task(FIRST + 5 * number + turn, "test"))
        messages += env.task.messages
        for step in range(5):
            seed = 100 * number + 10 * turn + step
            reply = await model.reply(messages, env.tools, thinking, seed)
            if before:
                found["followed"] += 1
                found["kept"] += reply.prompt[: len(before)] == before
            if turn:
                found["prompt_tokens"] += len(reply.prompt)
                found["cached_tokens"] += reply.cached
            wrong = format_error(reply, env.tools, True, model.tokenizer)
            before = () if wrong else reply.prompt + reply.ids
            messages.append(reply.message)
            results = await env.step(reply.message)
            if not results:
                break
            messages += results
    return found


def measure(run: Path, dialogues: int, top_p: float) -> dict[str, object]:
    """Metrics of a run's last checkpoint, measured once and kept in its journal."""
    steps = settings_of(run).steps
    label = f"step {steps}, {dialogues} conversations per env and mode, top-p {top_p}"
    for event, _ in follow(run / EVENTS_FILE):
        if event.get("kind") == "chat_format" and event.get("label") == label:
            return dict(event["figures"])
    folder = latest_model(run)
    tokenizer = Tokenizer.load(folder)
    renderer = get_renderer(tokenizer)
    settings = EngineSettings(
        page_size=4, max_running_requests=48, stop_token_ids=renderer.stop_token_ids
    )
    figures: dict[str, object] = {}
    with Engine(load_pretrained(folder), tokenizer, settings) as engine:
        model = ChatModel(engine, tokenizer, renderer, top_p)
        for mode in THINKING_MODES:
            stats = asyncio.run(well_formed(model, mode, dialogues))
            figures[mode] = stats.as_dict()
        for env in REWARD_ENVS:
            figures[env] = asyncio.run(mean_reward(replace(model, top_p=1.0), env))
        for mode in ("interleaved", "preserved"):
            engine.flush_cache()
            total: Counter[str] = Counter()
            for n in range(8):
                total += asyncio.run(five_turns(model, THINKING_MODES[mode], n))
            figures[f"{mode} cache"] = dict(total)
    with Journal(run) as journal:
        journal.log_event("chat_format", label=label, figures=figures)
    return figures


def _seed_claims(runs: Path, dialogues: int, top_p: float, seed: int) -> list[Claim]:
    """One model through all stages up to SFT, measured."""
    folder = {s: runs / "stages" / f"{s}-{seed}" for s in ("pretrain", *CHAIN)}
    folder["sft"] = runs / "chat" / f"sft-{seed}"
    train("nano/pretrain.toml", folder["pretrain"], f"seed={seed}")
    chain = {s: c for s, c in CHAIN.items() if s != "no_warmup"} | {
        "sft": ("nano/sft.toml", "sparse")
    }
    for stage, (recipe, parent) in chain.items():
        train(recipe, folder[stage], f"seed={seed}", f"init.checkpoint={folder[parent]}")
    return claims_of(measure(folder["sft"], dialogues, top_p), f"seed {seed}")


def claims_of(figures: dict[str, object], name: str) -> list[Claim]:
    rows, calls, good = [], 0, 0
    for mode in THINKING_MODES:
        stats = dict(figures[mode])  # type: ignore[call-overload]
        share = stats["well_formed"] / stats["turns"]
        calls, good = calls + stats["calls"], good + stats["good_calls"]
        faults = ", ".join(f"{n} {what}" for what, n in stats["wrong"].items())
        rows.append(
            Claim(
                name=f"{name}, {mode}: well-formed turns",
                target=f">= {MIN_TURNS:.0%}",
                measured=f"{share:.1%} of {stats['turns']}" + (f" ({faults})" if faults else ""),
                holds=share >= MIN_TURNS,
            )
        )
    rows.append(
        Claim(
            name=f"{name}: well-formed calls, all modes",
            target=f">= {MIN_CALLS:.0%}",
            measured=f"{good / max(1, calls):.1%} of {calls}",
            holds=calls > 0 and good / calls >= MIN_CALLS,
        )
    )
    reasoned = dict(figures["off"])["reasoned"]  # type: ignore[call-overload]
    rows.append(
        Claim(
            name=f"{name}, thinking off: replies with reasoning",
            target="0",
            measured=str(reasoned),
            holds=reasoned == 0,
        )
    )
    for mode in ("interleaved", "preserved"):
        counts = Counter(figures[f"{mode} cache"])  # type: ignore[call-overload]
        kept = f"prefix kept {counts['kept']} times of {counts['followed']}"
        rows.append(
            Claim(
                name=f"{name}, {mode}: prefix-cache hit rate of turns 2-5",
                target="every prefix kept" if mode == "preserved" else "",
                measured=f"{counts['cached_tokens'] / counts['prompt_tokens']:.1%}; {kept}",
                holds=counts["kept"] == counts["followed"] if mode == "preserved" else None,
            )
        )
    for env in REWARD_ENVS:
        reward = float(figures[env])  # type: ignore[arg-type]
        rows.append(
            Claim(
                name=f"{name}, {env}: reward on {SCORED} held-out tasks",
                target=f"<= {MAX_REWARD}, headroom for RL",
                measured=f"{reward:.3f}",
                holds=reward <= MAX_REWARD,
            )
        )
    return rows


def claims(
    runs: Path = Path("runs/proofs"),
    jobs: int = 2,
    seeds: Sequence[int] = SEEDS,
    dialogues: int = 40,
    top_p: float = TOP_P,
) -> list[Claim]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        found = pool.map(partial(_seed_claims, runs, dialogues, top_p), seeds)
        return [claim for rows in found for claim in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="concurrent seeds")
    parser.add_argument("--runs", type=Path, default=Path("runs/proofs"))
    parser.add_argument("--dialogues", type=int, default=40, help="per environment and mode")
    parser.add_argument("--top-p", type=float, default=TOP_P)
    parser.add_argument("--run", type=Path, help="measure only this SFT run")
    options = parser.parse_args()
    if options.run is not None:
        torch.set_num_threads(1)
        figures = measure(options.run, options.dialogues, options.top_p)
        print_claims(claims_of(figures, options.run.name))
        return
    print_claims(
        claims(options.runs, options.jobs, options.seeds, options.dialogues, options.top_p)
    )


if __name__ == "__main__":
    main()
