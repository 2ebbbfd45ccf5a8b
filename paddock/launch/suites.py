"""What a model can do, measured: in worlds through the engine, on text and needles directly."""

import asyncio
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.cli.errors import UserError
from paddock.config import Recipe, load_recipe, resolve
from paddock.launch.engines import (
    ModelFolder,
    fit_kv_cache,
    open_model_folder,
    pick_devices,
    pick_dtype,
)
from paddock.launch.pipeline import SuiteSettings
from paddock.records import Message, SamplingParams, Verdict, json_codec

if TYPE_CHECKING:
    from paddock.data import LongContextSource
    from paddock.engine import Engine
    from paddock.envs import RolloutTrace
    from paddock.evals import EvalResult
    from paddock.model import Transformer
    from paddock.records import Task
    from paddock.text import Tokenizer
    from paddock.train import TrainSettings

EXAMPLES = 2  # dialogues kept of a skill
MAX_CONCURRENCY = 64  # episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    skill: str
    score: float
    error: float = 0.0
    better: str = "higher"
    told: str = ""  # how many tasks, and what could not be judged
    examples: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        around = f" ± {self.error:.3f}" if self.error else ""
        return f"{self.skill}: {self.score:.3f}{around} ({self.told})"

    def as_event(self) -> dict[str, Any]:
        return {
            "skill": self.skill,
            "score": self.score,
            "error": self.error,
            "better": self.better,
            "told": self.told,
            "examples": list(self.examples),
        }


def run_suites(
    skills: list[SuiteSettings], run: Path, *, seed: int, like: Path | None = None
) -> Iterator[SuiteResult]:
    """Each skill of a run's newest checkpoint, in the precision of that run or of one `like` it.
    The weights are read once."""
    if not skills:
        return
    network = _network_of(run, _trained_in(like or run))
    for skill in skills:
        if skill.kind != "world":
            yield _read(skill, run, network)
    worlds = [skill for skill in skills if skill.kind == "world"]
    if worlds:
        model = open_model_folder(run, None)
        with open_eval_engine(model, network) as engine:
            for skill in worlds:
                yield _result(skill.name, run_env_suite(model, engine, skill, seed))


def validate_suites(skills: Iterable[SuiteSettings]) -> None:
    """A skill that cannot be measured is an error before the first stage, not after it."""
    from paddock.envs import load_env_settings

    for skill in skills:
        try:
            if skill.kind == "needles":
                _needle_source(skill)
            elif skill.kind == "world":
                load_env_settings(skill.env, skill.args)
        except ValueError as error:
            raise UserError(f"skill {skill.name!r}: {error}") from error


def _network_of(run: Path, dtype: str | None) -> "Transformer":
    from paddock.checkpoint import latest_model, load_pretrained

    folder = latest_model(run)
    (place,) = pick_devices(None, 1)
    return load_pretrained(folder, pick_dtype(folder, place, dtype), place)


def _trained_in(run: Path) -> str | None:
    """The precision of a run's products: what it learnt, it can do in that."""
    recipe = run / "recipe.toml"
    values = tomllib.loads(recipe.read_text()) if recipe.is_file() else {}
    return values.get("machine", {}).get("dtype")  # type: ignore[no-any-return]


def open_eval_engine(
    model: ModelFolder, network: "Transformer | None" = None, *, device: str | None = None
) -> "Engine":
    """One engine for a model, sized for many short episodes; its weights are read unless given."""
    from paddock.checkpoint import load_pretrained
    from paddock.engine import Engine, EngineSettings

    (place,) = pick_devices(device, 1)
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    settings = EngineSettings(max_running_requests=MAX_CONCURRENCY, stop_token_ids=stops or None)
    if network is None:
        network = load_pretrained(model.folder, pick_dtype(model.folder, place, None), place)
    return Engine(network, model.tokenizer, fit_kv_cache(model, place, network, settings))


def run_env_suite(
    model: ModelFolder, engine: "Engine", skill: SuiteSettings, seed: int
) -> "EvalResult":
    """The model in the skill's world, sampled at temperature 1 as in training."""
    from paddock.engine import ContextLengthExceededError, EngineError, InvalidRequestError, Request
    from paddock.envs import make
    from paddock.evals import EvalSettings, evaluate
    from paddock.rollout import PRESERVED, InProcessClient, RolloutWorker

    generate = InProcessClient(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )
    thinking = PRESERVED if skill.enable_thinking else replace(PRESERVED, enable_thinking=False)
    room = engine.capacity.context_length
    player = RolloutWorker(
        client=generate, renderer=model.renderer, thinking=thinking, context_length=room
    )
    world = make(skill.env, skill.args)

    async def plays(task: "Task", attempt: int) -> "RolloutTrace":
        sampling = SamplingParams(seed=_seed(seed, task.id, attempt))
        played = await player.run_episode(world, task, sampling, f"{task.id}/{attempt}")
        return played.episode

    return asyncio.run(
        evaluate(
            world,
            plays,
            EvalSettings(num_tasks=skill.num_tasks, rollouts_per_task=skill.rollouts_per_task),
        )
    )


def _seed(*words: object) -> int:
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=4).digest(), "big") >> 1


def _result(name: str, found: "EvalResult") -> SuiteResult:
    lost = sum(found.metrics.failures.values())
    return SuiteResult(
        skill=name,
        score=found.metrics.mean_reward,
        error=found.metrics.stderr,
        told=f"{found.metrics.num_tasks} tasks" + (f", {lost} not judged" if lost else ""),
        examples=tuple(_example(group[0]) for group in found.rollouts[:EXAMPLES]),
    )


def _example(episode: "RolloutTrace") -> dict[str, Any]:
    outcome = episode.outcome
    if isinstance(outcome, Verdict):
        result = f"reward {outcome.reward:g}" + (f": {outcome.note}" if outcome.note else "")
    else:
        result = f"{outcome.kind}: {outcome.what}"
    return {"messages": [_plain(m) for m in episode.messages], "result": result}


def _plain(message: Message) -> dict[str, Any]:
    return {name: value for name, value in json_codec.encode(message).items() if value}


def _read(skill: SuiteSettings, run: Path, network: "Transformer") -> SuiteResult:
    """Skills of a network that need no conversation."""
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    dense = recipe.get("stage") in ("pretrain", "midtrain", "warmup")
    return (_loss if skill.kind == "loss" else _needles)(skill, run, network, dense)


def _text(skill: SuiteSettings, run: Path) -> "tuple[TrainSettings, Tokenizer]":
    """What the stage named by the setting `text` was trained on, this run's unless said."""
    from paddock.data import Tokenizer
    from paddock.train import TrainSettings

    folder = run.parent / str(skill.args.get("text", run.name))
    settings = resolve(TrainSettings, load_recipe(folder / "recipe.toml"))
    return settings, Tokenizer.load(folder / "tokenizer")


def _loss(skill: SuiteSettings, run: Path, network: "Transformer", dense: bool) -> SuiteResult:
    """Nats a token of text that was held out."""
    from paddock.data import Corpus, corpus_key
    from paddock.train import evaluate as train_evaluate

    settings, tokenizer = _text(skill, run)
    key = corpus_key(settings.corpus, tokenizer)
    corpus = Corpus(run.parent / "corpora" / key, tokenizer=tokenizer)
    context, tokens = settings.dataloader.seq_len, 1000 * skill.num_tasks
    loss = train_evaluate.validation_loss(
        network, corpus, dense=dense, context=context, tokens=tokens
    )
    if loss is None:
        raise UserError(f"skill {skill.name!r}: nothing was held out of that text")
    return SuiteResult(skill=skill.name, score=loss.loss, better="lower", told=f"{tokens:,} tokens")


def _needles(skill: SuiteSettings, run: Path, network: "Transformer", dense: bool) -> SuiteResult:
    """The share of needles found in long documents."""
    from paddock.data import SourceContext
    from paddock.train import evaluate as train_evaluate

    settings, tokenizer = _text(skill, run)
    reading = SourceContext(count_tokens=lambda text: len(tokenizer.encode(text, specials=False)))
    begin = [tokenizer.token_to_id(token) or 0 for token in settings.corpus.bos_tokens]
    tasks = _needle_source(skill).tasks(reading)
    share = train_evaluate.needle_recall(network, tokenizer, tasks, begin=begin, dense=dense)
    error = (share * (1 - share) / skill.num_tasks) ** 0.5
    return SuiteResult(
        skill=skill.name, score=share, error=error, told=f"{skill.num_tasks} needles"
    )


def _needle_source(skill: SuiteSettings) -> "LongContextSource":
    """The settings of such a skill are those of a longcontext source, and whose text it knows."""
    from paddock.data import LongContextSource

    values = {key: value for key, value in skill.args.items() if key != "text"}
    values |= {"name": "needles", "count": skill.num_tasks, "held_out": True}
    return resolve(LongContextSource, Recipe(values, {}))
