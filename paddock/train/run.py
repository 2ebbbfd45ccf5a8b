"""A run folder: everything a stage needs, made from its settings, and everything it leaves behind.

recipe.toml  tokenizer/  metrics.jsonl  events.jsonl  checkpoints/step-...
"""

import importlib
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from paddock.checkpoint import latest_model, load_pretrained, read_config
from paddock.config import BaseSettings, dump_toml
from paddock.data import Corpus, Tokenizer, open_tokenizer, prepare_corpus
from paddock.journal import LEDGER_FILE
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
    """Where a stage lives. `corpora` may be shared by the stages of a recipe, and are made by so
    many processes."""

    folder: Path
    corpora_dir: Path
    settings: TrainSettings
    processes: int = 1

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def claim(self) -> None:
        """Make the folder, or make sure that it belongs to these very settings."""
        claim_run_folder(self.folder, self.settings, may_change=("parallel",))


def claim_run_folder(folder: Path, settings: BaseSettings, *, may_change: Collection[str]) -> None:
    """Make a run's folder and write its recipe, or make sure that the run under way there has the
    same one. What is under the names `may_change` does not change what is learnt.

    Whoever calls it has opened the folder's journal, whose lock keeps a second process from writing
    its recipe over that of a run that is alive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe, text = folder / RECIPE, dump_toml(settings)
    # What a resumed run takes up: rollouts of another recipe must not be trained under this one.
    kept = any((folder / CHECKPOINTS).glob("step-*")) or (folder / LEDGER_FILE).is_file()
    begun = recipe.is_file() and kept

    def learnt(recipe_text: str) -> dict[str, object]:
        try:
            found = tomllib.loads(recipe_text)
        except tomllib.TOMLDecodeError as error:  # of a machine that died while it was written
            raise TrainingError(f"{recipe} is damaged: {error}; put it back or remove it") from None
        return {name: value for name, value in found.items() if name not in may_change}

    if begun and learnt(recipe.read_text()) != learnt(text):
        raise TrainingError(
            f"{folder} holds a run with other settings (see {recipe}); "
            "choose another folder with --out, or remove it"
        )
    draft = recipe.with_name(f".{RECIPE}.partial")
    draft.write_text(text)
    draft.replace(recipe)  # a full disk must not empty the recipe of a run under way


def open_run_tokenizer(run: TrainingRun, say: LogCallback) -> Tokenizer:
    start = run.settings.init.checkpoint
    return open_tokenizer(
        run.settings.tokenizer,
        run.settings.corpus,
        run.folder / TOKENIZER,
        inherited=None if start is None else latest_model(Path(start)),
        say=say,
    )


def open_corpus(run: TrainingRun, tokenizer: Tokenizer, say: LogCallback) -> Corpus:
    def progress(source: str, documents: int, size: int) -> None:
        say(f"preparing '{source}': {documents:,} documents, {size / 1e6:.1f} MB")

    return prepare_corpus(
        run.settings.corpus, tokenizer, run.corpora_dir, progress=progress, processes=run.processes
    )


def load_init_config(settings: TrainSettings) -> ModelConfig:
    """The configuration the first step will see, without reading any weight. Of a folder that does
    not exist yet, the one it will have."""
    start = settings.init
    if start.preset is not None:
        return _changed(preset(start.preset), start)
    assert start.checkpoint is not None
    if start.like is not None and not Path(start.checkpoint).exists():
        config = _changed(preset(start.like), start)
    else:
        config = _changed(read_config(latest_model(Path(start.checkpoint))), start)
    return config if start.indexer is None else add_indexer_config(config, start.indexer)


def load_init_model(settings: TrainSettings, tokenizer: Tokenizer) -> Transformer:
    """The network as it is before the first step, in float32 on the CPU."""
    start = settings.init
    if start.preset is not None:
        network = Transformer.from_config(load_init_config(settings), settings.seed)
    else:
        assert start.checkpoint is not None
        network = load_pretrained(latest_model(Path(start.checkpoint)))
        network.config = _changed(network.config, start)
        if start.indexer is not None:
            network = add_indexer(network, start.indexer, seed=settings.seed)
    if tokenizer.vocab_size > network.config.vocab:
        raise TrainingError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the network only "
            f"{network.config.vocab}: give the tokenizer a smaller 'vocab' or the network a larger"
        )
    return network


def _changed(config: ModelConfig, start: ModelInitSettings) -> ModelConfig:
    """A longer context and a higher rotation base; the weights stay as they are."""
    update: dict[str, object] = {}
    if start.rope_theta is not None:
        update["rope"] = config.rope.model_copy(update={"theta": start.rope_theta})
    if start.context is not None:
        update["context"] = start.context
    return config.model_copy(update=update)


def place_model(network: Transformer, machine: ComputeSettings, mesh: Mesh) -> Transformer:
    """The network on its device in its dtype; of many ranks, this one's shards of it."""
    dtype = DTYPES[machine.dtype]
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
    """The function of that name; without one, weights stay as they are."""
    if name is None:
        return no_fake_quant
    module, function = name.split(":")
    try:
        return cast(FakeQuant, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError) as error:
        raise TrainingError(f"'fake_quant' {name}: {error}") from None


def check_parallel(config: ModelConfig, parallel: ParallelSettings) -> None:
    """Only what this network's layers cannot do; that the ranks are there is the mesh's business.

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
            "'parallel.context': linear attention hands a state from token to token, "
            "so its rows cannot be cut"
        )


def init_device(machine: ComputeSettings) -> torch.device:
    """The device of a run, with as many threads to an operation as it asks for."""
    torch.set_num_threads(machine.threads or DEFAULT_THREADS)
    try:
        device = pick_device(machine.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
        why = str(error).splitlines()[0]
        raise TrainingError(f"'compute.device' '{machine.device}': {why}") from None
    return device


def pick_device(wanted: str | None) -> torch.device:
    """The device asked for, else the accelerator, else the CPU."""
    if wanted is not None:
        return torch.device(wanted)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
