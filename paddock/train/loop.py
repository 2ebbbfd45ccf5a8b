"""The one training loop. A stage is this loop with another objective."""

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paddock.checkpoint import training_state
from paddock.data import Corpus, PackedDataLoader, Tokenizer
from paddock.journal import Journal
from paddock.optim import ConstantSchedule, CosineSchedule, LinearSchedule, Schedule
from paddock.parallel import Mesh, ParallelDegrees, init_mesh
from paddock.train.estimate import estimate_training, peak_flops
from paddock.train.evaluate import ValidationLoss, unigram_entropy, validation_loss
from paddock.train.objective import LanguageModelObjective
from paddock.train.run import (
    LogCallback,
    TrainingRun,
    check_parallel,
    init_device,
    load_fake_quant,
    load_init_model,
    open_corpus,
    open_run_tokenizer,
    place_model,
)
from paddock.train.settings import OptimSettings, TrainSettings
from paddock.train.stages import stage_spec
from paddock.train.trainer import Trainer, TrainStepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What a watcher is told after each step."""

    step: int  # done so far
    steps: int
    output: TrainStepOutput
    seconds: float  # this step took
    validation: ValidationLoss | None = None  # where it was measured


UpdateCallback = Callable[[StepMetrics], None]


def ignore_update(_: object) -> None:
    pass


def train(
    run: TrainingRun,
    *,
    say: LogCallback = ignore_update,
    watch: UpdateCallback = ignore_update,
    clock: Callable[[], float] = time.time,
) -> Trainer:
    """Raise the network from where the run stands to its last step.

    Under torchrun every rank calls this; the first one writes, speaks and is watched.
    """
    sizes = ParallelDegrees(**run.settings.parallel.model_dump())
    with init_mesh(sizes, init_device(run.settings.compute)) as mesh:
        if not mesh.is_rank_zero:
            say, watch = ignore_update, ignore_update
        # The journal first: its lock makes sure that nobody else is writing to the folder.
        with Journal(run.folder, clock=clock) if mesh.is_rank_zero else NullJournal() as journal:
            with mesh.rank_zero_first():
                if mesh.is_rank_zero:
                    run.claim()
                tokenizer = open_run_tokenizer(run, say)
                corpus = open_corpus(run, tokenizer, say)
            trainer = build_trainer(run, tokenizer, mesh)
            shares = mesh.data_ranks
            stream = PackedDataLoader(
                corpus.split("train"), run.settings.dataloader, rank=shares.rank, world=shares.size
            )
            done = load_checkpoint(run, trainer, stream)
            journal.log_event(
                "started",
                step=done,
                of=run.settings.steps,
                **run_metadata(run.settings, trainer, mesh),
            )
            if done == 0 and mesh.is_rank_zero:
                entropy = unigram_entropy(corpus, tokenizer.vocab_size)
                journal.log_event("corpus", unigram_entropy=entropy)
            say(f"step {done} of {run.settings.steps}")
            for moment in _steps(run, trainer, stream, corpus, done):
                log_step(journal, moment)
                watch(moment)
                if is_due(moment.step, run.settings.checkpoint.every, run.settings.steps):
                    save_checkpoint(run, trainer, stream, tokenizer, moment.step)
            journal.log_event("finished", step=run.settings.steps)
    return trainer


def run_metadata(settings: TrainSettings, trainer: Trainer, mesh: Mesh) -> dict[str, object]:
    """What a report needs besides the steps: where the run is, and what a token costs."""
    device, ranks = mesh.device, mesh.all_ranks.size
    module = None if device.type == "cpu" else torch.get_device_module(device)
    chip = platform.machine() if module is None else module.get_device_name(device)
    peak = peak_flops(device)
    return {
        "compute": {
            "device": str(device),
            "chip": chip,
            "ranks": ranks,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "flops_token": estimate_training(settings, trainer.network.config).flops_token,
        "peak_flops": None if peak is None else peak * ranks,  # a step's tokens are all ranks'
    }


class NullJournal:
    """The journal of a rank that keeps none."""

    def log_metrics(self, step: int, **values: float) -> None:
        pass

    def log_event(self, kind: str, **fields: object) -> None:
        pass

    def __enter__(self) -> "NullJournal":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def build_trainer(run: TrainingRun, tokenizer: Tokenizer, mesh: Mesh) -> Trainer:
    settings = run.settings
    network = load_init_model(settings, tokenizer)
    stage = stage_spec(settings)
    stage.freeze(network)
    check_parallel(network.config, settings.parallel)
    network = place_model(network, settings.compute, mesh)
    objective = LanguageModelObjective(stage, settings.loss)
    evidence = run.folder / "not-finite.npz"
    fake_quant = load_fake_quant(settings.fake_quant)
    return Trainer(network.train(), objective, settings, evidence, mesh, fake_quant)


def _steps(
    run: TrainingRun, trainer: Trainer, stream: PackedDataLoader, corpus: Corpus, done: int
) -> Iterator[StepMetrics]:
    settings = run.settings
    schedule = build_lr_schedule(settings.optim, settings.steps)
    for step in range(done, settings.steps):
        start, progress = time.perf_counter(), step / settings.steps
        batch = stream.next_batch(progress=progress, tokens=batch_tokens(settings, progress))
        bias_rate = (
            settings.loss.router_bias_rate if progress < settings.loss.router_bias_until else 0.0
        )
        report = trainer.step(
            batch,
            lr=settings.optim.lr * schedule.at(step + 1),
            bias_rate=bias_rate,
            progress=progress,
        )
        held_out = None
        if is_due(step + 1, settings.validation.every, settings.steps):
            held_out = validation_loss(
                trainer.network,
                corpus,
                dense=stage_spec(settings).dense,
                context=settings.dataloader.seq_len,
                tokens=settings.validation.tokens,
            )
        seconds = time.perf_counter() - start
        yield StepMetrics(
            step=step + 1, steps=settings.steps, output=report, seconds=seconds, validation=held_out
        )


def build_lr_schedule(optim: OptimSettings, steps: int) -> Schedule:
    warmup = optim.warmup_ratio * steps
    if optim.schedule == "constant":
        return ConstantSchedule(warmup=warmup)
    if optim.schedule == "linear":
        return LinearSchedule(
            end=steps, final=optim.min_lr_ratio, warmup=warmup, flat=optim.stable_ratio * steps
        )
    return CosineSchedule(end=steps, final=optim.min_lr_ratio, warmup=warmup)


def batch_tokens(settings: TrainSettings, progress: float) -> int:
    """Whole rows, rising from `batch_from` to the full batch over `batch_rise` of the run."""
    full, context = settings.dataloader.batch_tokens, settings.dataloader.seq_len
    if settings.batch_warmup_from is None or progress >= settings.batch_warmup:
        return full
    share = progress / settings.batch_warmup
    grown = settings.batch_warmup_from + share * (full - settings.batch_warmup_from)
    return max(context, int(grown) // context * context)


def is_due(step: int, every: int, steps: int) -> bool:
    return step % every == 0 or step == steps


def log_step(journal: Journal | NullJournal, moment: StepMetrics) -> None:
    report = moment.output
    extra = {}
    if moment.validation is not None:
        extra = {"held_out": moment.validation.loss}
        journal.log_event("held_out", step=moment.step, nats=moment.validation.by_source)
    journal.log_metrics(
        moment.step,
        **report.losses,
        **extra,
        grad_norm=report.grad_norm,
        lr=report.lr,
        tokens=report.tokens,
        imbalance=report.expert_imbalance,
        seconds=moment.seconds,
        memory_bytes=peak_memory_bytes(),
    )


def peak_memory_bytes() -> int:
    """At most so far on an accelerator; of this process now, where there is none."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    return int(status.read_text().split("VmRSS:")[1].split()[0]) * 1024


def save_checkpoint(
    run: TrainingRun, trainer: Trainer, stream: PackedDataLoader, tokenizer: Tokenizer, step: int
) -> None:
    """The first rank writes what all of them hold."""
    keep, last = run.settings.checkpoint, step == run.settings.steps
    network = trainer.weights.master_model()
    optimizer: dict[str, Tensor] = {}
    if keep.save_final_optimizer or not last:
        optimizer = training_state.optimizer_state_tensors(
            trainer.optimizer, trainer.weights.gather_full
        )
    if network is None:
        return
    training_state.save_training_state(
        run.checkpoints,
        step,
        network,
        optimizer,
        extra={"stream": stream.state_dict()},
        extra_files=tokenizer.files,
    )
    training_state.prune_checkpoints(
        run.checkpoints, keep_last=keep.keep_last, keep_every=keep.keep_every
    )


def load_checkpoint(run: TrainingRun, trainer: Trainer, stream: PackedDataLoader) -> int:
    """Go on from the newest checkpoint, whichever ranks wrote it; returns the steps behind it."""
    found = training_state.load_latest(run.checkpoints)
    if found is None:
        return 0
    step, state = found
    trainer.weights.restore(state.network)
    training_state.load_optimizer_state(
        trainer.optimizer, state.optimizer, trainer.weights.local_part
    )
    stream.load_state_dict(state.extra["stream"])
    return step
