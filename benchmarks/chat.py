"""What nano has learnt after supervised fine-tuning: format, modes, tools, and what is left for RL.

    python -m benchmarks.chat [--seeds 0 1 2] [--jobs 2] [--runs FOLDER] [--dialogues 40]
                              [--top-p 0.95]

The base models are those of `benchmarks.raise_base stages`, in the same folders. Every figure is of
held-out tasks, sampled as GLM-5's own evaluations are (temperature 1, top-p 0.95), and read by the
parser. Skills are sampled at top-p 1, as reinforcement samples them. Called again, it goes on where
it was stopped.
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

import torch
from benchmarks.raise_base import CHAIN, SEEDS, settings_of, trained

from benchmarks.table import Claim, print_claims
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
TURNS, CALLS, SKILL = 0.99, 0.95, 0.5  # at least, at least, at most
TOOLS = {"kinds": ["follow", "plus", "file", "search"]}
WORLDS = {"nano-chain": {}, "nano-tools": TOOLS, "nano-rules": {}}
SKILLS = {"nano-chain": {}, "nano-tools": {}, "nano-rules": {}}
SCORED = 200  # tasks a skill
FIRST = 1 << 20  # index of the first test task: no recipe was chosen on these


_COUNTED = ("turns", "formed", "calls", "good_calls", "thoughts")


@dataclass(slots=True)
class Tally:
    """Of one thinking mode."""

    turns: int = 0
    formed: int = 0
    calls: int = 0
    good_calls: int = 0
    thoughts: int = 0  # replies that thought
    wrong: Counter[str] = field(default_factory=Counter)

    def told(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in _COUNTED} | {"wrong": dict(self.wrong)}

    def add(self, other: "Tally") -> None:
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wrong += other.wrong


@dataclass(frozen=True, slots=True)
class Talker:
    """A model that is talked to."""

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
    ) -> "Said":
        prompt = self.renderer.render_prompt(messages, tools=tools, thinking=thinking).token_ids
        sampling = SamplingParams(seed=seed, max_new_tokens=160, top_p=self.top_p)
        answer = await self.engine.async_generate(
            Request(token_ids=prompt, sampling_params=sampling)
        )
        ids = answer.completion.token_ids
        parsed = parse_completion(
            self.tokenizer,
            ids,
            finish=answer.completion.finish,
            tools=tools,
            prompt=prompt,
            call_id=f"call_{len(messages)}_{{}}".format,
        )
        return Said(parsed.message, prompt, ids, parsed.notes, answer.cached_tokens)

    def policy(self, seed: int):  # noqa: ANN201  an envs.Policy
        async def play_on(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
            said = await self.reply(
                messages, tools, THINKING_MODES["interleaved"], seed + len(messages)
            )
            return said.message

        return play_on


@dataclass(frozen=True, slots=True)
class Said:
    message: Message
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    notes: tuple[str, ...]
    cached: int


def complaint(said: Said, tools: Sequence[ToolSpec], thinks: bool, tokenizer: Tokenizer) -> str:
    """What is wrong with a turn; empty if it is well formed."""
    specials, message = tokenizer.special_token_ids, said.message
    stop = SpecialToken.OBSERVATION if message.tool_calls else SpecialToken.USER
    marks = [i for i in said.ids if tokenizer.is_added(i)]
    thought = specials[SpecialToken.THINK_CLOSE]
    if not said.ids or said.ids[-1] != specials[stop]:
        return "ends in another way"
    if said.notes:
        return said.notes[0].split(" of ")[0]
    if thinks and (message.reasoning is None or marks.count(thought) != 1):
        return "does not think once"
    if not thinks and (message.reasoning or thought in marks):
        return "thinks though it should not"
    # Not where it means something: as plain letters, or of a kind that texts leave out.
    said_plainly = f"{message.reasoning or ''}{message.content}"
    silent = any(tokenizer.is_special(i) for i in said.ids[:-1])
    if silent or any(mark in said_plainly for mark in tokenizer.added_tokens):
        return "writes a stray mark"
    if not message.content.strip() and not message.tool_calls:
        return "says nothing"
    known = {tool.name: tool for tool in tools}
    try:
        for call in message.tool_calls:
            validate_arguments(call.arguments, known[call.name])
    except ToolError as error:
        return f"call: {error}"
    return ""


def tallied(said: Said, tools: Sequence[ToolSpec], thinks: bool, tokenizer: Tokenizer) -> Tally:
    wrong = complaint(said, tools, thinks, tokenizer)
    opened = said.ids.count(tokenizer.special_token_ids[SpecialToken.TOOL_CALL_OPEN])
    good = 0 if wrong.startswith("call") else len(said.message.tool_calls)
    return Tally(
        turns=1,
        formed=int(not wrong),
        calls=opened,
        good_calls=min(good, opened),
        thoughts=int(bool(said.message.reasoning)),
        wrong=Counter([wrong] if wrong else []),
    )


async def conversation(
    talker: Talker, world: str, mode: ThinkingMode, number: int, tasks: int = 3
) -> Tally:
    """Several held-out tasks in one conversation, as their environments answer."""
    here, chance = make(world, WORLDS[world]), Random(f"{world}/{mode}/{number}")
    envs = [here.make_env(here.task(FIRST + tasks * number + k, "test")) for k in range(tasks)]
    lent = {tool.name: tool for env in envs for tool in env.tools}
    tools = [lent[name] for name in sorted(lent)]
    messages: list[Message] = []
    tally = Tally()
    for env in envs:
        thinks = mode != "off" and (mode != "turns" or chance.random() < 0.5)
        thinking = THINKING_MODES[mode]
        if mode == "turns":
            thinking = replace(thinking, enable_thinking=thinks)
        messages += env.task.messages
        await env.reset()
        for _ in range(env.task.budget.turns):
            said = await talker.reply(messages, tools, thinking, chance.getrandbits(30))
            tally.add(tallied(said, tools, thinks, talker.tokenizer))
            messages.append(said.message)
            answers = await env.step(said.message)
            if not answers:
                break
            messages += answers
        await env.close()
    return tally


async def well_formed(talker: Talker, mode: ThinkingMode, dialogues: int) -> Tally:
    found = await asyncio.gather(
        *(conversation(talker, w, mode, n) for w in WORLDS for n in range(dialogues))
    )
    whole = Tally()
    for tally in found:
        whole.add(tally)
    return whole


async def skill(talker: Talker, world: str) -> float:
    """Mean reward on held-out tasks, thinking as by default."""
    here = make(world, SKILLS[world])
    envs = [here.make_env(here.task(FIRST + n, "test")) for n in range(SCORED)]
    found = await asyncio.gather(
        *(run_rollout(env, talker.policy(1000 * n)) for n, env in enumerate(envs))
    )
    rewards = [e.outcome.reward for e in found if isinstance(e.outcome, Verdict)]
    assert len(rewards) == SCORED
    return sum(rewards) / SCORED


async def five_turns(talker: Talker, thinking: ThinkingKwargs, number: int) -> Counter[str]:
    """A conversation of five user turns: prompt tokens from the second turn on, and how many of
    them the prefix cache held; prompts that followed a well-formed reply, and how many of those
    began with the prompt and the reply before, token for token. (What is no call is shown back as
    plain words: after a reply that is not well formed the tokens do change. So they do, rarely,
    after one whose tokens are not those that its text is encoded to; sessions never render it.)"""
    here = make("nano-tools", SKILLS["nano-tools"])  # one kind: the tools stay the same
    messages: list[Message] = []
    found: Counter[str] = Counter()
    before: tuple[int, ...] = ()
    for turn in range(5):
        env = here.make_env(here.task(FIRST + 5 * number + turn, "test"))
        messages += env.task.messages
        for step in range(5):
            seed = 100 * number + 10 * turn + step
            said = await talker.reply(messages, env.tools, thinking, seed)
            if before:
                found["followed"] += 1
                found["kept"] += said.prompt[: len(before)] == before
            if turn:
                found["asked"] += len(said.prompt)
                found["cached"] += said.cached
            wrong = complaint(said, env.tools, True, talker.tokenizer)
            before = () if wrong else said.prompt + said.ids
            messages.append(said.message)
            answers = await env.step(said.message)
            if not answers:
                break
            messages += answers
    return found


def measured(run: Path, dialogues: int, top_p: float) -> dict[str, object]:
    """What a run's last network can do, measured once and kept in its journal."""
    steps = settings_of(run).steps
    label = f"step {steps}, {dialogues} conversations a world and mode, top-p {top_p}, all marks"
    for event, _ in follow(run / EVENTS_FILE):
        if event.get("kind") == "conversed" and event.get("label") == label:
            return dict(event["figures"])
    folder = latest_model(run)
    tokenizer = Tokenizer.load(folder)
    renderer = get_renderer(tokenizer)
    settings = EngineSettings(
        page_size=4, max_running_requests=48, stop_token_ids=renderer.stop_token_ids
    )
    figures: dict[str, object] = {}
    with Engine(load_pretrained(folder), tokenizer, settings) as engine:
        talker = Talker(engine, tokenizer, renderer, top_p)
        for mode in THINKING_MODES:
            tally = asyncio.run(well_formed(talker, mode, dialogues))
            figures[mode] = tally.told()
        for world in SKILLS:
            figures[world] = asyncio.run(skill(replace(talker, top_p=1.0), world))
        for mode in ("interleaved", "preserved"):
            engine.flush_cache()
            whole: Counter[str] = Counter()
            for n in range(8):
                whole += asyncio.run(five_turns(talker, THINKING_MODES[mode], n))
            figures[f"{mode} cache"] = dict(whole)
    with Journal(run) as journal:
        journal.log_event("conversed", label=label, figures=figures)
    return figures


def _tuned(runs: Path, dialogues: int, top_p: float, seed: int) -> list[Claim]:
    """One model through all stages, and what it says."""
    folder = {s: runs / "stages" / f"{s}-{seed}" for s in ("pretrain", *CHAIN)}
    folder["sft"] = runs / "chat" / f"sft-{seed}"
    trained("nano/pretrain.toml", folder["pretrain"], f"seed={seed}")
    chain = {s: c for s, c in CHAIN.items() if s != "no_warmup"} | {
        "sft": ("nano/sft.toml", "sparse")
    }
    for stage, (recipe, parent) in chain.items():
        trained(recipe, folder[stage], f"seed={seed}", f"init.checkpoint={folder[parent]}")
    return claims_of(measured(folder["sft"], dialogues, top_p), f"seed {seed}")


def claims_of(figures: dict[str, object], name: str) -> list[Claim]:
    rows, calls, good = [], 0, 0
    for mode in THINKING_MODES:
        tally = dict(figures[mode])  # type: ignore[call-overload]
        share = tally["formed"] / tally["turns"]
        calls, good = calls + tally["calls"], good + tally["good_calls"]
        faults = ", ".join(f"{n} {what}" for what, n in tally["wrong"].items())
        rows.append(
            Claim(
                name=f"{name}, {mode}: well-formed turns",
                target=f">= {TURNS:.0%}",
                measured=f"{share:.1%} of {tally['turns']}" + (f" ({faults})" if faults else ""),
                holds=share >= TURNS,
            )
        )
    rows.append(
        Claim(
            name=f"{name}: well-formed calls, all modes",
            target=f">= {CALLS:.0%}",
            measured=f"{good / max(1, calls):.1%} of {calls}",
            holds=calls > 0 and good / calls >= CALLS,
        )
    )
    silent = dict(figures["off"])["thoughts"]  # type: ignore[call-overload]
    rows.append(
        Claim(
            name=f"{name}, thinking off: replies with thoughts",
            target="0",
            measured=str(silent),
            holds=silent == 0,
        )
    )
    for mode in ("interleaved", "preserved"):
        seen = Counter(figures[f"{mode} cache"])  # type: ignore[call-overload]
        kept = f"prefix kept {seen['kept']} times of {seen['followed']}"
        rows.append(
            Claim(
                name=f"{name}, {mode}: prompt tokens of turns 2-5 found in the prefix cache",
                target="every prefix kept" if mode == "preserved" else "",
                measured=f"{seen['cached'] / seen['asked']:.1%}; {kept}",
                holds=seen["kept"] == seen["followed"] if mode == "preserved" else None,
            )
        )
    for world in SKILLS:
        score = float(figures[world])  # type: ignore[arg-type]
        rows.append(
            Claim(
                name=f"{name}, {world}: reward on {SCORED} held-out tasks",
                target=f"<= {SKILL}, room for RL",
                measured=f"{score:.3f}",
                holds=score <= SKILL,
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
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawned, torch.set_num_threads, (1,)) as pool:
        found = pool.map(partial(_tuned, runs, dialogues, top_p), seeds)
        return [claim for rows in found for claim in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/proofs"))
    parser.add_argument("--dialogues", type=int, default=40, help="of each world and mode")
    parser.add_argument("--top-p", type=float, default=TOP_P)
    parser.add_argument("--run", type=Path, help="measure this run of fine-tuning alone")
    options = parser.parse_args()
    if options.run is not None:
        torch.set_num_threads(1)
        figures = measured(options.run, options.dialogues, options.top_p)
        print_claims(claims_of(figures, options.run.name))
        return
    how = (options.dialogues, options.top_p)
    print_claims(claims(options.runs, options.jobs, options.seeds, *how))


if __name__ == "__main__":
    main()
