"""Evaluation suites: rollouts in environments, loss on held-out text, needle recall (NIAH)."""

import asyncio
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.config import Recipe, load_recipe, resolve
from paddock.launch.engines import (
    ModelFolder,
    Quant,
    fit_kv_cache,
    open_model_folder,
    pack_for_cpu,
    pick_devices,
    pick_dtype,
)
from paddock.launch.errors import UserError
from paddock.launch.pipeline import SuiteSettings
from paddock.records import Message, SamplingParams, Verdict, json_codec

if TYPE_CHECKING:
    from paddock.data import LongContextSource
    from paddock.engine import Engine
    from paddock.envs import RolloutTrace
    from paddock.evals import EvalResult
    from paddock.model import Transformer
    from paddock.records import Task
    from paddock.rollout import ContextSettings
    from paddock.text import Tokenizer
    from paddock.train import TrainSettings

EXAMPLES = 2  # sample rollouts kept per suite
MAX_CONCURRENCY = 64  # rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """The metric of one suite."""

    suite: str
    score: float
    stderr: float = 0.0
    better: str = "higher"
    detail: str = ""  # how many tasks, and how many could not be scored
    examples: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        error = f" ± {self.stderr:.3f}" if self.stderr else ""
        return f"{self.suite}: {self.score:.3f}{error} ({self.detail})"

    def as_event(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "score": self.score,
            "stderr": self.stderr,
            "better": self.better,
            "detail": self.detail,
            "examples": list(self.examples),
        }


def run_suites(
    suites: list[SuiteSettings], run: Path, *, seed: int, like: Path | None = None
) -> Iterator[SuiteResult]:
    """The suites' results for a run's newest checkpoint, in the dtype of that run or of the run
    `like`. The weights are loaded once."""
    if not suites:
        return
    network = _load_network(run, _train_dtype(like or run))
    for suite in suites:
        if suite.kind != "env":
            yield _run_text_suite(suite, run, network)
    env_suites = [suite for suite in suites if suite.kind == "env"]
    if env_suites:
        model = open_model_folder(run, None)
        with open_eval_engine(model, network) as engine:
            for suite in env_suites:
                yield _result(suite.name, run_env_suite(model, engine, suite, seed))


def validate_suites(suites: Iterable[SuiteSettings]) -> None:
    """Raise UserError for a suite that cannot be run, before the first stage and not after it."""
    from paddock.envs import load_env_settings

    for suite in suites:
        try:
            if suite.kind == "niah":
                _needle_source(suite)
            elif suite.kind == "env":
                load_env_settings(suite.env, suite.args)
                _context_settings(suite)
        except ValueError as error:
            raise UserError(f"suite {suite.name!r}: {error}") from error


def _context_settings(suite: SuiteSettings) -> "ContextSettings":
    from paddock.rollout import ContextSettings

    return resolve(ContextSettings, Recipe(dict(suite.context_management), {}))


def _load_network(run: Path, dtype: str | None) -> "Transformer":
    from paddock.checkpoint import latest_model, load_pretrained

    folder = latest_model(run)
    (device,) = pick_devices(None, 1)
    return load_pretrained(folder, pick_dtype(folder, device, dtype), device)


def _train_dtype(run: Path) -> str | None:
    """The dtype that a run was trained in, and is therefore evaluated in."""
    recipe = run / "recipe.toml"
    values = tomllib.loads(recipe.read_text()) if recipe.is_file() else {}
    return values.get("compute", {}).get("dtype")  # type: ignore[no-any-return]


def open_eval_engine(
    model: ModelFolder,
    network: "Transformer | None" = None,
    *,
    device: str | None = None,
    quant: Quant | None = None,
) -> "Engine":
    """One engine for a model, sized for many short rollouts; weights are loaded unless given."""
    from paddock.checkpoint import load_pretrained
    from paddock.engine import Engine, EngineSettings

    (chosen,) = pick_devices(device, 1)
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    settings = EngineSettings(max_running_requests=MAX_CONCURRENCY, stop_token_ids=stops or None)
    if network is None:
        network = load_pretrained(model.folder, pick_dtype(model.folder, chosen, None), chosen)
        if chosen == "cpu" or quant is not None:
            pack_for_cpu(network, wait=True, quant=quant)
    return Engine(network, model.tokenizer, fit_kv_cache(model, chosen, network, settings))


def run_env_suite(
    model: ModelFolder, engine: "Engine", suite: SuiteSettings, seed: int
) -> "EvalResult":
    """Rollouts of the model in the suite's environment, at temperature 1 as in training."""
    from paddock.engine import ContextLengthExceededError, EngineError, InvalidRequestError, Request
    from paddock.envs import make
    from paddock.evals import EvalSettings, evaluate
    from paddock.rollout import PRESERVED, InProcessClient, RolloutWorker

    client = InProcessClient(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )
    thinking = PRESERVED if suite.enable_thinking else replace(PRESERVED, enable_thinking=False)
    context_length = min(suite.context_length or 1 << 30, engine.capacity.context_length)
    worker = RolloutWorker(
        client=client,
        renderer=model.renderer,
        thinking=thinking,
        context_length=context_length,
        context_management=_context_settings(suite),
    )
    taskset = make(suite.env, suite.args)

    async def run_rollout(task: "Task", number: int) -> "RolloutTrace":
        sampling = SamplingParams(seed=_seed(seed, task.id, number))
        rollout = await worker.run_episode(taskset, task, sampling, f"{task.id}/{number}")
        return rollout.episode

    return asyncio.run(
        evaluate(
            taskset,
            run_rollout,
            EvalSettings(num_tasks=suite.num_tasks, rollouts_per_task=suite.rollouts_per_task),
        )
    )


def _seed(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "big") >> 1


def _result(name: str, result: "EvalResult") -> SuiteResult:
    failed = sum(result.metrics.failures.values())
    return SuiteResult(
        suite=name,
        score=result.metrics.mean_reward,
        stderr=result.metrics.stderr,
        detail=f"{result.metrics.num_tasks} tasks" + (f", {failed} not scored" if failed else ""),
        examples=tuple(_example(group[0]) for group in result.rollouts[:EXAMPLES]),
    )


def _example(rollout: "RolloutTrace") -> dict[str, Any]:
    outcome = rollout.outcome
    if isinstance(outcome, Verdict):
        result = f"reward {outcome.reward:g}" + (f": {outcome.note}" if outcome.note else "")
    else:
        result = f"{outcome.label}: {outcome.what}"
    return {"messages": [_plain(m) for m in rollout.messages], "result": result}


def _plain(message: Message) -> dict[str, Any]:
    return {name: value for name, value in json_codec.encode(message).items() if value}


def _run_text_suite(suite: SuiteSettings, run: Path, network: "Transformer") -> SuiteResult:
    """Suites that need no rollouts."""
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    dense = recipe.get("stage") in ("pretrain", "midtrain", "warmup")
    return (_loss if suite.kind == "loss" else _needle_recall)(suite, run, network, dense)


def _text_source(suite: SuiteSettings, run: Path) -> "tuple[TrainSettings, Tokenizer]":
    """Settings and tokenizer of the stage `corpus_stage`, by default of this run."""
    from paddock.data import Tokenizer
    from paddock.train import TrainSettings

    folder = run.parent / str(suite.args.get("corpus_stage", run.name))
    settings = resolve(TrainSettings, load_recipe(folder / "recipe.toml"))
    return settings, Tokenizer.load(folder / "tokenizer")


def _loss(suite: SuiteSettings, run: Path, network: "Transformer", dense: bool) -> SuiteResult:
    """Loss on held-out text, in nats/token."""
    from paddock.data import Corpus, corpus_key
    from paddock.train import evaluate as train_evaluate

    settings, tokenizer = _text_source(suite, run)
    key = corpus_key(settings.corpus, tokenizer)
    corpus = Corpus(run.parent / "corpora" / key, tokenizer=tokenizer)
    context, tokens = settings.dataloader.seq_len, 1000 * suite.num_tasks
    loss = train_evaluate.validation_loss(
        network, corpus, dense=dense, context=context, tokens=tokens
    )
    if loss is None:
        raise UserError(f"suite {suite.name!r}: that text has no held-out split")
    return SuiteResult(
        suite=suite.name, score=loss.loss, better="lower", detail=f"{tokens:,} tokens"
    )


def _needle_recall(
    suite: SuiteSettings, run: Path, network: "Transformer", dense: bool
) -> SuiteResult:
    """Share of the needles that are found in long documents."""
    from paddock.data import SourceContext
    from paddock.train import evaluate as train_evaluate

    settings, tokenizer = _text_source(suite, run)
    context = SourceContext(count_tokens=lambda text: len(tokenizer.encode(text, specials=False)))
    begin = [tokenizer.token_to_id(token) or 0 for token in settings.corpus.bos_tokens]
    tasks = _needle_source(suite).tasks(context)
    recall = train_evaluate.needle_recall(network, tokenizer, tasks, begin=begin, dense=dense)
    error = (recall * (1 - recall) / suite.num_tasks) ** 0.5
    return SuiteResult(
        suite=suite.name, score=recall, stderr=error, detail=f"{suite.num_tasks} needles"
    )


def _needle_source(suite: SuiteSettings) -> "LongContextSource":
    """Arguments of a "niah" suite are those of a long-context source, and `corpus_stage`."""
    from paddock.data import LongContextSource

    values = {key: value for key, value in suite.args.items() if key != "corpus_stage"}
    values |= {"name": "needles", "count": suite.num_tasks, "held_out": True}
    return resolve(LongContextSource, Recipe(values, {}))
