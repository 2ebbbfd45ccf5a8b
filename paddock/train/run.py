"""Run folder of a training stage, and what its settings describe: tokenizer, corpus, model, device.

A run folder holds recipe.toml, tokenizer/, metrics.jsonl, events.jsonl and checkpoints/step-N.
"""

import importlib
import tomllib
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from paddock.checkpoint import latest_model, load_pretrained, read_config
from paddock.config import BaseSettings, ConfigError, Recipe, dump_toml, resolve
from paddock.data import Corpus, Tokenizer, open_tokenizer, prepare_corpus
from paddock.journal import LEDGER_FILE
from paddock.kernels import cpu
from paddock.model import (
    GroupedExperts,
    ModelConfig,
    Transformer,
    add_indexer,
    add_indexer_config,
    attention,
    preset,
)
from paddock.parallel import Mesh, apply_fsdp
from paddock.train.master_weights import DTYPES, FakeQuant, no_fake_quant
from paddock.train.settings import (
    ComputeSettings,
    ModelInitSettings,
    ParallelSettings,
    TrainSettings,
)
from paddock.train.trainer import TrainingError

RECIPE, TOKENIZER, CHECKPOINTS, CORPORA = "recipe.toml", "tokenizer", "checkpoints", "corpora"
DEFAULT_THREADS = torch.get_num_threads()  # as this process was started
LogCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A training run: its folder, settings and corpora.

    `corpora_dir` may be shared by several stages. `processes` prepare the corpora.
    """

    folder: Path
    corpora_dir: Path
    settings: TrainSettings
    processes: int = 1

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def claim(self) -> None:
        """Create the folder, or check that the run in it has the same settings."""
        claim_run_folder(self.folder, self.settings, may_change=("parallel",))


def claim_run_folder(folder: Path, settings: BaseSettings, *, may_change: Collection[str]) -> None:
    """Create a run folder and write its recipe, or check that a run to resume has the same recipe.

    Top-level settings named in `may_change` may differ: they do not change the result. Settings
    that the stored recipe lacks, because they are newer than the run, have their defaults. The
    caller must hold the journal's lock, which keeps a second process from overwriting the recipe
    of a running one. Raises TrainingError if the settings differ or the recipe is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe, text = folder / RECIPE, dump_toml(settings)
    # A ledger alone is resumed too: rollouts of another recipe must not be trained with this one.
    resumable = any((folder / CHECKPOINTS).glob("step-*")) or (folder / LEDGER_FILE).is_file()

    def fixed_settings(recipe_text: str) -> dict[str, object]:
        try:
            found = tomllib.loads(recipe_text)
        except tomllib.TOMLDecodeError as error:  # the machine went down while it was written
            raise TrainingError(f"{recipe} is damaged: {error}; restore or remove it") from None
        with suppress(ConfigError):  # of settings that are gone: they differ
            found = tomllib.loads(dump_toml(resolve(type(settings), Recipe(found, {}))))
        return {name: value for name, value in found.items() if name not in may_change}

    started = recipe.is_file() and resumable
    if started and fixed_settings(recipe.read_text()) != fixed_settings(text):
        raise TrainingError(
            f"{folder} holds a run with other settings (see {recipe}); "
            "choose another folder with --out, or remove it"
        )
    draft = recipe.with_name(f".{RECIPE}.partial")
    draft.write_text(text)
    draft.replace(recipe)  # atomic: a full disk must not empty the recipe of a started run


def open_run_tokenizer(run: TrainingRun, log: LogCallback) -> Tokenizer:
    """The run's tokenizer: trained, loaded, or inherited from the initial checkpoint."""
    parent = run.settings.init.checkpoint
    return open_tokenizer(
        run.settings.tokenizer,
        run.settings.corpus,
        run.folder / TOKENIZER,
        inherited=None if parent is None else latest_model(Path(parent)),
        log=log,
    )


def open_corpus(run: TrainingRun, tokenizer: Tokenizer, log: LogCallback) -> Corpus:
    """The run's corpus, prepared first if it is not cached in `corpora_dir`."""

    def progress(source: str, documents: int, size: int) -> None:
        log(f"preparing '{source}': {documents:,} documents, {size / 1e6:.1f} MB")

    return prepare_corpus(
        run.settings.corpus, tokenizer, run.corpora_dir, progress=progress, processes=run.processes
    )


def load_init_config(settings: TrainSettings) -> ModelConfig:
    """The model config at the first step; reads no weights.

    If the initial checkpoint does not exist yet, the config of the preset `init.like`.
    """
    init = settings.init
    if init.preset is not None:
        return _with_overrides(preset(init.preset), init)
    assert init.checkpoint is not None
    if init.like is not None and not Path(init.checkpoint).exists():
        config = _with_overrides(preset(init.like), init)
    else:
        config = _with_overrides(read_config(latest_model(Path(init.checkpoint))), init)
    return config if init.indexer is None else add_indexer_config(config, init.indexer)


def load_init_model(settings: TrainSettings, tokenizer: Tokenizer) -> Transformer:
    """The model before the first step, in float32 on the CPU.

    Raises TrainingError if the tokenizer has more tokens than the model's vocabulary.
    """
    init = settings.init
    if init.preset is not None:
        network = Transformer.from_config(load_init_config(settings), settings.seed)
    else:
        assert init.checkpoint is not None
        network = load_pretrained(latest_model(Path(init.checkpoint)))
        network.config = _with_overrides(network.config, init)
        if init.indexer is not None:
            network = add_indexer(network, init.indexer, seed=settings.seed)
    if tokenizer.vocab_size > network.config.vocab:
        raise TrainingError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary only "
            f"{network.config.vocab}: reduce 'tokenizer.vocab' or use a model with a larger one"
        )
    return network


def _with_overrides(config: ModelConfig, init: ModelInitSettings) -> ModelConfig:
    """The config with the context length and RoPE base of the settings; weights do not change."""
    update: dict[str, object] = {}
    if init.rope_theta is not None:
        update["rope"] = config.rope.model_copy(update={"theta": init.rope_theta})
    if init.context is not None:
        update["context"] = init.context
    return config.model_copy(update=update)


def place_model(network: Transformer, compute: ComputeSettings, mesh: Mesh) -> Transformer:
    """Move the model to its device; with several ranks, shard experts and apply FSDP."""
    dtype = DTYPES[compute.dtype]
    if mesh.all_ranks.size == 1:
        return network.to(mesh.device)
    modules = list(network.modules())
    experts = [m for m in modules if isinstance(m, GroupedExperts)] if mesh.expert.size > 1 else []
    for stack in experts:
        stack.shard(mesh.expert)
    index_weights = [m.weights for m in modules if isinstance(m, attention.Indexer)]
    apply_fsdp(
        network,
        mesh,
        dtype,
        blocks=[*network.layers, *([] if network.mtp is None else [network.mtp])],
        experts=experts,
        exact=index_weights if dtype != torch.float32 else [],
    )
    return network


def load_fake_quant(name: str | None) -> FakeQuant:
    """Import a FakeQuant by "module:function"; None: no fake quantization."""
    if name is None:
        return no_fake_quant
    module, function = name.split(":")
    try:
        return cast(FakeQuant, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError) as error:
        raise TrainingError(f"'fake_quant' {name} cannot be imported: {error}") from None


def check_parallel(config: ModelConfig, parallel: ParallelSettings) -> None:
    """Raise TrainingError if the model's layers do not support the parallel degrees.

    That enough ranks were started is checked by the mesh.

    >>> check_parallel(preset("nano"), ParallelSettings(expert=7))
    Traceback (most recent call last):
    paddock.train.trainer.TrainingError: 'parallel.expert' 7: 8 experts cannot be split evenly
    """
    experts = config.moe.experts if config.moe is not None and "moe" in config.mlp else 0
    if parallel.expert > 1 and (not experts or experts % parallel.expert):
        raise TrainingError(
            f"'parallel.expert' {parallel.expert}: {experts} experts cannot be split evenly"
        )
    if parallel.context > 1 and {"gdn", "simple_gdn"} & set(config.attention):
        raise TrainingError(
            "'parallel.context' must be 1: linear attention carries a state from token to token, "
            "so a row cannot be split across ranks"
        )


def init_device(compute: ComputeSettings) -> torch.device:
    """The device of a run; also sets the number of CPU threads and, on a CPU, loads its kernels,
    which are compiled first on a machine that has not done so.

    Raises TrainingError if the device cannot be used.
    """
    torch.set_num_threads(compute.threads or DEFAULT_THREADS)
    try:
        device = pick_device(compute.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        reason = str(error).splitlines()[0]
        raise TrainingError(f"'compute.device' '{compute.device}': {reason}") from None
    if device.type == "cpu":
        cpu.load(wait=True)
        cpu.set_threads(torch.get_num_threads())
    return device


def pick_device(name: str | None) -> torch.device:
    """The named device; without a name the accelerator, or the CPU if there is none."""
    if name is not None:
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
