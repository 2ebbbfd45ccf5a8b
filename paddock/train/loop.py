"""The one training loop. A stage is this loop with another objective."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paddock.checkpoint.training import (
    checkpoints,
    load_training,
    prune,
    restore_optimizer,
    save_training,
)
from paddock.data import Corpus, Stream, Tokenizer
from paddock.journal import Journal
from paddock.optim import Constant, Cosine, Linear, Schedule
from paddock.train.evaluate import held_out_loss
from paddock.train.objective import BaseObjective
from paddock.train.run import (
    DTYPES,
    Run,
    Say,
    open_corpus,
    pick_device,
    start_network,
    tokenizer_of,
)
from paddock.train.settings import OptimSettings, TrainSettings
from paddock.train.stages import STAGES
from paddock.train.step import StepReport, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a watcher is told after each step."""

    step: int  # done so far
    steps: int
    report: StepReport
    seconds: float  # this step took
    held_out: float | None = None  # nats a token, where it was measured


Watch = Callable[[Moment], None]


def train(run: Run, *, say: Say, watch: Watch, clock: Callable[[], float] = time.time) -> Trainer:
    """Raise the network from where the run stands to its last step."""
    run.open()
    tokenizer = tokenizer_of(run, say)
    corpus = open_corpus(run, tokenizer, say)
    trainer = make_trainer(run, tokenizer)
    stream = Stream(corpus.split("train"), run.settings.stream)
    with Journal(run.folder, clock=clock) as journal:
        done = resume(run, trainer, stream)
        journal.event("started", step=done, of=run.settings.steps)
        say(f"step {done} of {run.settings.steps}")
        for moment in _steps(run, trainer, stream, corpus, done):
            record(journal, moment)
            watch(moment)
            if due(moment.step, run.settings.keep.every, run.settings.steps):
                save(run, trainer, stream, tokenizer, moment.step)
        journal.event("finished", step=run.settings.steps)
    return trainer


def make_trainer(run: Run, tokenizer: Tokenizer) -> Trainer:
    settings = run.settings
    network = start_network(settings, tokenizer)
    network = network.to(pick_device(settings.machine.device)).cast(DTYPES[settings.machine.dtype])
    stage = STAGES[settings.stage]
    stage.freeze(network)
    objective = BaseObjective(stage, settings.loss)
    return Trainer(network.train(), objective, settings, run.folder / "not-finite.npz")


def _steps(
    run: Run, trainer: Trainer, stream: Stream, corpus: Corpus, done: int
) -> Iterator[Moment]:
    settings = run.settings
    schedule = schedule_for(settings.optim, settings.steps)
    for step in range(done, settings.steps):
        start, progress = time.perf_counter(), step / settings.steps
        batch = stream.next(progress=progress, tokens=batch_tokens(settings, progress))
        bias_rate = settings.loss.bias_rate if progress < settings.loss.bias_until else 0.0
        report = trainer.step(
            batch,
            lr=settings.optim.lr * schedule.at(step + 1),
            bias_rate=bias_rate,
            progress=progress,
        )
        held_out = None
        if due(step + 1, settings.evaluate.every, settings.steps):
            held_out = held_out_loss(
                trainer.network,
                corpus,
                STAGES[settings.stage],
                context=settings.stream.context,
                tokens=settings.evaluate.tokens,
            )
        seconds = time.perf_counter() - start
        yield Moment(
            step=step + 1, steps=settings.steps, report=report, seconds=seconds, held_out=held_out
        )


def schedule_for(optim: OptimSettings, steps: int) -> Schedule:
    warmup = optim.warmup * steps
    if optim.schedule == "constant":
        return Constant(warmup=warmup)
    if optim.schedule == "linear":
        return Linear(end=steps, final=optim.final, warmup=warmup, flat=optim.flat * steps)
    return Cosine(end=steps, final=optim.final, warmup=warmup)


def batch_tokens(settings: TrainSettings, progress: float) -> int:
    """Whole rows, rising from `batch_from` to the full batch over `batch_rise` of the run."""
    full, context = settings.stream.batch_tokens, settings.stream.context
    if settings.batch_from is None or progress >= settings.batch_rise:
        return full
    share = progress / settings.batch_rise
    grown = settings.batch_from + share * (full - settings.batch_from)
    return max(context, int(grown) // context * context)


def due(step: int, every: int, steps: int) -> bool:
    return step % every == 0 or step == steps


def record(journal: Journal, moment: Moment) -> None:
    report = moment.report
    extra = {} if moment.held_out is None else {"held_out": moment.held_out}
    journal.metric(
        moment.step,
        **report.parts,
        **extra,
        grad_norm=report.grad_norm,
        lr=report.lr,
        tokens=report.tokens,
        imbalance=report.imbalance,
        seconds=moment.seconds,
    )


def save(run: Run, trainer: Trainer, stream: Stream, tokenizer: Tokenizer, step: int) -> None:
    save_training(
        run.checkpoints,
        step,
        trainer.weights.exact_network(),
        trainer.optimizer,
        facts={"stream": stream.state()},
        beside=tokenizer.files,
    )
    prune(run.checkpoints, last=run.settings.keep.last, forever=run.settings.keep.forever)


def resume(run: Run, trainer: Trainer, stream: Stream) -> int:
    """Go on from the newest checkpoint; returns the steps that lie behind it."""
    found = checkpoints(run.checkpoints)
    if not found:
        return 0
    step = max(found)
    state = load_training(found[step])
    trainer.weights.restore(state.network)
    restore_optimizer(trainer.optimizer, state.optimizer)
    stream.restore(state.facts["stream"])
    return step
