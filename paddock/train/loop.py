"""Training loop shared by all stages: steps, validation, metrics, checkpoints, resume."""

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
    """Metrics of one step, passed to the progress callback."""

    step: int  # steps done so far
    steps: int  # of the whole run
    output: TrainStepOutput
    seconds: float  # duration of this step, with its validation
    validation: ValidationLoss | None = None  # None in steps without validation


UpdateCallback = Callable[[StepMetrics], None]
NON_FINITE_FILE = "non_finite_batch.npz"  # the batch that gave a loss or gradient of NaN or inf


def ignore_update(_: object) -> None:
    """Callback that does nothing."""


def train(
    run: TrainingRun,
    *,
    log: LogCallback = ignore_update,
    on_update: UpdateCallback = ignore_update,
    clock: Callable[[], float] = time.time,
) -> Trainer:
    """Train from the newest checkpoint, or from the start, to the last step.

    Under torchrun every rank calls this; only rank zero writes files and calls `log` (messages) and
    `on_update` (metrics of each step). Returns the trainer with the final weights.
    """
    degrees = ParallelDegrees(**run.settings.parallel.model_dump())
    with init_mesh(degrees, init_device(run.settings.compute)) as mesh:
        if not mesh.is_rank_zero:
            log, on_update = ignore_update, ignore_update
        # The journal is opened first: its lock keeps a second process out of the folder.
        with Journal(run.folder, clock=clock) if mesh.is_rank_zero else NullJournal() as journal:
            with mesh.rank_zero_first():
                if mesh.is_rank_zero:
                    run.claim()
                tokenizer = open_run_tokenizer(run, log)
                corpus = open_corpus(run, tokenizer, log)
            trainer = build_trainer(run, tokenizer, mesh)
            ranks = mesh.data_ranks
            dataloader = PackedDataLoader(
                corpus.split("train"),
                run.settings.dataloader,
                rank=ranks.rank,
                world_size=ranks.size,
            )
            done = load_checkpoint(run, trainer, dataloader)
            journal.log_event(
                "started",
                step=done,
                of=run.settings.steps,
                **run_metadata(run.settings, trainer, mesh),
            )
            if done == 0 and mesh.is_rank_zero:
                entropy = unigram_entropy(corpus, tokenizer.vocab_size)
                journal.log_event("corpus", unigram_entropy=entropy)
            log(f"step {done} of {run.settings.steps}")
            for metrics in _steps(run, trainer, dataloader, corpus, done):
                log_step(journal, metrics)
                on_update(metrics)
                if is_due(metrics.step, run.settings.checkpoint.every, run.settings.steps):
                    save_checkpoint(run, trainer, dataloader, tokenizer, metrics.step)
            journal.log_event("finished", step=run.settings.steps)
    return trainer


def run_metadata(settings: TrainSettings, trainer: Trainer, mesh: Mesh) -> dict[str, object]:
    """Fields of the `started` event: hardware, FLOPs per token and peak FLOP/s."""
    device, ranks = mesh.device, mesh.all_ranks.size
    module = None if device.type == "cpu" else torch.get_device_module(device)
    chip = platform.machine() if module is None else module.get_device_name(device)
    peak = peak_flops(device)
    return {
        "hardware": {
            "device": str(device),
            "chip": chip,
            "ranks": ranks,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "flops_per_token": estimate_training(settings, trainer.network.config).flops_per_token,
        "peak_flops": None if peak is None else peak * ranks,  # of all ranks, as a step's tokens
    }


class NullJournal:
    """Journal of the ranks other than zero: discards everything."""

    def log_metrics(self, step: int, **values: float) -> None:
        pass

    def log_event(self, kind: str, **fields: object) -> None:
        pass

    def __enter__(self) -> "NullJournal":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def build_trainer(run: TrainingRun, tokenizer: Tokenizer, mesh: Mesh) -> Trainer:
    """The initial model, with the stage's parameters frozen, on its device and in a trainer."""
    settings = run.settings
    network = load_init_model(settings, tokenizer)
    stage = stage_spec(settings)
    stage.freeze(network)
    check_parallel(network.config, settings.parallel)
    network = place_model(network, settings.compute, mesh)
    objective = LanguageModelObjective(stage, settings.loss)
    non_finite_file = run.folder / NON_FINITE_FILE
    fake_quant = load_fake_quant(settings.fake_quant)
    return Trainer(network.train(), objective, settings, non_finite_file, mesh, fake_quant)


def _steps(
    run: TrainingRun, trainer: Trainer, dataloader: PackedDataLoader, corpus: Corpus, done: int
) -> Iterator[StepMetrics]:
    """Run the steps after the first `done`, with validation where it is due."""
    settings = run.settings
    schedule = build_lr_schedule(settings.optim, settings.steps)
    for step in range(done, settings.steps):
        start, progress = time.perf_counter(), step / settings.steps
        batch = dataloader.next_batch(progress=progress, tokens=batch_tokens(settings, progress))
        bias_rate = (
            settings.loss.router_bias_rate if progress < settings.loss.router_bias_until else 0.0
        )
        output = trainer.step(
            batch,
            lr=settings.optim.lr * schedule.at(step + 1),
            bias_rate=bias_rate,
            progress=progress,
        )
        validation = None
        if is_due(step + 1, settings.validation.every, settings.steps):
            validation = validation_loss(
                trainer.network,
                corpus,
                dense=stage_spec(settings).dense,
                context=settings.dataloader.seq_len,
                tokens=settings.validation.tokens,
            )
        seconds = time.perf_counter() - start
        yield StepMetrics(
            step=step + 1,
            steps=settings.steps,
            output=output,
            seconds=seconds,
            validation=validation,
        )


def build_lr_schedule(optim: OptimSettings, steps: int) -> Schedule:
    """The learning-rate schedule of a run of `steps`, as a fraction of the peak."""
    warmup = optim.warmup_ratio * steps
    if optim.schedule == "constant":
        return ConstantSchedule(warmup=warmup)
    if optim.schedule == "linear":
        return LinearSchedule(
            end=steps, final=optim.min_lr_ratio, warmup=warmup, flat=optim.stable_ratio * steps
        )
    return CosineSchedule(end=steps, final=optim.min_lr_ratio, warmup=warmup)


def batch_tokens(settings: TrainSettings, progress: float) -> int:
    """Batch size at `progress` of the run, in whole rows.

    Grows linearly from `batch_warmup_from` to the full batch over `batch_warmup` of the run.
    """
    full, seq_len = settings.dataloader.batch_tokens, settings.dataloader.seq_len
    if settings.batch_warmup_from is None or progress >= settings.batch_warmup:
        return full
    fraction = progress / settings.batch_warmup
    grown = settings.batch_warmup_from + fraction * (full - settings.batch_warmup_from)
    return max(seq_len, int(grown) // seq_len * seq_len)


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether something done every `every` steps, and at the last step, is done after `step`."""
    return step % every == 0 or step == steps


def log_step(journal: Journal | NullJournal, metrics: StepMetrics) -> None:
    """Write a line of metrics.jsonl; the validation loss by source goes to events.jsonl."""
    output = metrics.output
    validation = {}
    if metrics.validation is not None:
        validation = {"val_loss": metrics.validation.loss}
        journal.log_event("validation", step=metrics.step, loss=metrics.validation.by_source)
    journal.log_metrics(
        metrics.step,
        **output.losses,
        **validation,
        grad_norm=output.grad_norm,
        lr=output.lr,
        tokens=output.tokens,
        expert_imbalance=output.expert_imbalance,
        step_time_s=metrics.seconds,
        memory_bytes=peak_memory_bytes(),
    )


def peak_memory_bytes() -> int:
    """Peak memory allocated on the accelerator; without one, resident memory of the process."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    return int(status.read_text().split("VmRSS:")[1].split()[0]) * 1024


def save_checkpoint(
    run: TrainingRun,
    trainer: Trainer,
    dataloader: PackedDataLoader,
    tokenizer: Tokenizer,
    step: int,
) -> None:
    """Gather the state of all ranks on rank zero, which writes it and prunes old checkpoints."""
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
        extra={"stream": dataloader.state_dict()},
        extra_files=tokenizer.files,
    )
    training_state.prune_checkpoints(
        run.checkpoints, keep_last=keep.keep_last, keep_every=keep.keep_every
    )


def load_checkpoint(run: TrainingRun, trainer: Trainer, dataloader: PackedDataLoader) -> int:
    """Resume from the newest checkpoint, written by any number of ranks; returns its step.

    Returns 0 if there is none.
    """
    found = training_state.load_latest(run.checkpoints)
    if found is None:
        return 0
    step, state = found
    trainer.weights.restore(state.network)
    training_state.load_optimizer_state(
        trainer.optimizer, state.optimizer, trainer.weights.local_part
    )
    dataloader.load_state_dict(state.extra["stream"])
    return step
