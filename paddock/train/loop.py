"""The one training loop. A stage is this loop with another objective."""

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paddock.checkpoint.training_state import (
    load_latest,
    load_optimizer_state,
    optimizer_state_tensors,
    prune_checkpoints,
    save_training_state,
)
from paddock.data import Corpus, PackedDataLoader, Tokenizer
from paddock.journal import Journal
from paddock.optim import ConstantSchedule, CosineSchedule, LinearSchedule, Schedule
from paddock.parallel import Mesh, ParallelDegrees, init_mesh
from paddock.train.evaluate import HeldOut, held_out_loss, unigram_entropy
from paddock.train.objective import BaseObjective
from paddock.train.plan import peak_flops, plan
from paddock.train.run import (
    Run,
    Say,
    load_fake_quant,
    open_corpus,
    open_device,
    placed,
    refuse_impossible,
    start_network,
    tokenizer_of,
)
from paddock.train.settings import OptimSettings, TrainSettings
from paddock.train.stages import stage_of
from paddock.train.step import StepReport, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a watcher is told after each step."""

    step: int  # done so far
    steps: int
    report: StepReport
    seconds: float  # this step took
    held_out: HeldOut | None = None  # where it was measured


Watch = Callable[[Moment], None]


def unheard(_: object) -> None:
    pass


def train(
    run: Run,
    *,
    say: Say = unheard,
    watch: Watch = unheard,
    clock: Callable[[], float] = time.time,
) -> Trainer:
    """Raise the network from where the run stands to its last step.

    Under torchrun every rank calls this; the first one writes, speaks and is watched.
    """
    sizes = ParallelDegrees(**run.settings.parallel.model_dump())
    with init_mesh(sizes, open_device(run.settings.machine)) as mesh:
        if not mesh.is_rank_zero:
            say, watch = unheard, unheard
        # The journal first: its lock makes sure that nobody else is writing to the folder.
        with Journal(run.folder, clock=clock) if mesh.is_rank_zero else Unwritten() as journal:
            with mesh.rank_zero_first():
                if mesh.is_rank_zero:
                    run.open()
                tokenizer = tokenizer_of(run, say)
                corpus = open_corpus(run, tokenizer, say)
            trainer = make_trainer(run, tokenizer, mesh)
            shares = mesh.data_ranks
            stream = PackedDataLoader(
                corpus.split("train"), run.settings.stream, rank=shares.rank, world=shares.size
            )
            done = resume(run, trainer, stream)
            journal.event(
                "started", step=done, of=run.settings.steps, **facts(run.settings, trainer, mesh)
            )
            if done == 0 and mesh.is_rank_zero:
                entropy = unigram_entropy(corpus, tokenizer.vocab_size)
                journal.event("corpus", unigram_entropy=entropy)
            say(f"step {done} of {run.settings.steps}")
            for moment in _steps(run, trainer, stream, corpus, done):
                record(journal, moment)
                watch(moment)
                if due(moment.step, run.settings.keep.every, run.settings.steps):
                    save(run, trainer, stream, tokenizer, moment.step)
            journal.event("finished", step=run.settings.steps)
    return trainer


def facts(settings: TrainSettings, trainer: Trainer, mesh: Mesh) -> dict[str, object]:
    """What a report needs besides the steps: where the run is, and what a token costs."""
    device, ranks = mesh.device, mesh.all_ranks.size
    module = None if device.type == "cpu" else torch.get_device_module(device)
    chip = platform.machine() if module is None else module.get_device_name(device)
    peak = peak_flops(device)
    return {
        "machine": {
            "device": str(device),
            "chip": chip,
            "ranks": ranks,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "flops_token": plan(settings, trainer.network.config).flops_token,
        "peak_flops": None if peak is None else peak * ranks,  # a step's tokens are all ranks'
    }


class Unwritten:
    """The journal of a rank that keeps none."""

    def metric(self, step: int, **values: float) -> None:
        pass

    def event(self, kind: str, **fields: object) -> None:
        pass

    def __enter__(self) -> "Unwritten":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def make_trainer(run: Run, tokenizer: Tokenizer, mesh: Mesh) -> Trainer:
    settings = run.settings
    network = start_network(settings, tokenizer)
    stage = stage_of(settings)
    stage.freeze(network)
    refuse_impossible(network.config, settings.parallel)
    network = placed(network, settings.machine, mesh)
    objective = BaseObjective(stage, settings.loss)
    evidence = run.folder / "not-finite.npz"
    fake_quant = load_fake_quant(settings.fake_quant)
    return Trainer(network.train(), objective, settings, evidence, mesh, fake_quant)


def _steps(
    run: Run, trainer: Trainer, stream: PackedDataLoader, corpus: Corpus, done: int
) -> Iterator[Moment]:
    settings = run.settings
    schedule = schedule_for(settings.optim, settings.steps)
    for step in range(done, settings.steps):
        start, progress = time.perf_counter(), step / settings.steps
        batch = stream.next_batch(progress=progress, tokens=batch_tokens(settings, progress))
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
                dense=stage_of(settings).dense,
                context=settings.stream.seq_len,
                tokens=settings.evaluate.tokens,
            )
        seconds = time.perf_counter() - start
        yield Moment(
            step=step + 1, steps=settings.steps, report=report, seconds=seconds, held_out=held_out
        )


def schedule_for(optim: OptimSettings, steps: int) -> Schedule:
    warmup = optim.warmup * steps
    if optim.schedule == "constant":
        return ConstantSchedule(warmup=warmup)
    if optim.schedule == "linear":
        return LinearSchedule(end=steps, final=optim.final, warmup=warmup, flat=optim.flat * steps)
    return CosineSchedule(end=steps, final=optim.final, warmup=warmup)


def batch_tokens(settings: TrainSettings, progress: float) -> int:
    """Whole rows, rising from `batch_from` to the full batch over `batch_rise` of the run."""
    full, context = settings.stream.batch_tokens, settings.stream.seq_len
    if settings.batch_from is None or progress >= settings.batch_rise:
        return full
    share = progress / settings.batch_rise
    grown = settings.batch_from + share * (full - settings.batch_from)
    return max(context, int(grown) // context * context)


def due(step: int, every: int, steps: int) -> bool:
    return step % every == 0 or step == steps


def record(journal: Journal | Unwritten, moment: Moment) -> None:
    report = moment.report
    extra = {}
    if moment.held_out is not None:
        extra = {"held_out": moment.held_out.nats}
        journal.event("held_out", step=moment.step, nats=moment.held_out.by_source)
    journal.log_metrics(
        moment.step,
        **report.parts,
        **extra,
        grad_norm=report.grad_norm,
        lr=report.lr,
        tokens=report.tokens,
        imbalance=report.imbalance,
        seconds=moment.seconds,
        memory_bytes=memory_bytes(),
    )


def memory_bytes() -> int:
    """At most so far on an accelerator; of this process now, where there is none."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    return int(status.read_text().split("VmRSS:")[1].split()[0]) * 1024


def save(
    run: Run, trainer: Trainer, stream: PackedDataLoader, tokenizer: Tokenizer, step: int
) -> None:
    """The first rank writes what all of them hold."""
    keep, last = run.settings.keep, step == run.settings.steps
    network = trainer.weights.exact_network()
    optimizer: dict[str, Tensor] = {}
    if keep.final_optimizer or not last:
        optimizer = optimizer_state_tensors(trainer.optimizer, trainer.weights.whole)
    if network is None:
        return
    save_training_state(
        run.checkpoints,
        step,
        network,
        optimizer,
        facts={"stream": stream.state_dict()},
        beside=tokenizer.files,
    )
    prune_checkpoints(run.checkpoints, last=keep.last, forever=keep.forever)


def resume(run: Run, trainer: Trainer, stream: PackedDataLoader) -> int:
    """Go on from the newest checkpoint, whichever ranks wrote it; returns the steps behind it."""
    found = load_latest(run.checkpoints)
    if found is None:
        return 0
    step, state = found
    trainer.weights.restore(state.network)
    load_optimizer_state(trainer.optimizer, state.optimizer, trainer.weights.part)
    stream.load_state_dict(state.extra["stream"])
    return step
