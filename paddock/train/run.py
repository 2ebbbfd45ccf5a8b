"""A run folder: everything a stage needs, made from its settings, and everything it leaves behind.

recipe.toml  tokenizer/  metrics.jsonl  events.jsonl  checkpoints/step-...
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paddock.checkpoint import load_pretrained, read_config
from paddock.checkpoint.training import newest_model
from paddock.config import dump
from paddock.data import Corpus, Tokenizer, open_tokenizer, prepare
from paddock.model import ModelConfig, Network, preset
from paddock.model.surgery import sparse_config, with_indexer
from paddock.train.settings import StartSettings, TrainSettings
from paddock.train.step import TrainingError

RECIPE, TOKENIZER, CHECKPOINTS, CORPORA = "recipe.toml", "tokenizer", "checkpoints", "corpora"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where a stage lives. `corpora` may be shared by the stages of a recipe."""

    folder: Path
    corpora: Path
    settings: TrainSettings

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def open(self) -> None:
        """Make the folder, or make sure that it belongs to these very settings."""
        self.folder.mkdir(parents=True, exist_ok=True)
        recipe, text = self.folder / RECIPE, dump(self.settings)
        if recipe.is_file() and recipe.read_text() != text and any(self.checkpoints.glob("step-*")):
            raise TrainingError(
                f"{self.folder} holds a run with other settings (see {recipe}); "
                "choose another folder with --out, or remove it"
            )
        recipe.write_text(text)


def tokenizer_of(run: Run, say: Say) -> Tokenizer:
    start = run.settings.start.folder
    return open_tokenizer(
        run.settings.tokenizer,
        run.settings.corpus,
        run.folder / TOKENIZER,
        inherited=None if start is None else newest_model(Path(start)),
        say=say,
    )


def open_corpus(run: Run, tokenizer: Tokenizer, say: Say) -> Corpus:
    def progress(source: str, documents: int, size: int) -> None:
        say(f"preparing '{source}': {documents:,} documents, {size / 1e6:.1f} MB")

    return prepare(run.settings.corpus, tokenizer, run.corpora, progress=progress)


def start_config(settings: TrainSettings) -> ModelConfig:
    """The configuration the first step will see, without reading any weight."""
    start = settings.start
    if start.preset is not None:
        return _changed(preset(start.preset), start)
    assert start.folder is not None
    config = _changed(read_config(newest_model(Path(start.folder))), start)
    return config if start.indexer is None else sparse_config(config, start.indexer)


def start_network(settings: TrainSettings, tokenizer: Tokenizer) -> Network:
    """The network as it is before the first step, in float32 on the CPU."""
    start = settings.start
    if start.preset is not None:
        network = Network.born(start_config(settings), settings.seed)
    else:
        assert start.folder is not None
        network = load_pretrained(newest_model(Path(start.folder)))
        network.config = _changed(network.config, start)
        if start.indexer is not None:
            network = with_indexer(network, start.indexer, seed=settings.seed)
    if tokenizer.vocab_size > network.config.vocab:
        raise TrainingError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the network only "
            f"{network.config.vocab}: give the tokenizer a smaller 'vocab' or the network a larger"
        )
    return network


def _changed(config: ModelConfig, start: StartSettings) -> ModelConfig:
    """A longer context and a higher rotation base; the weights stay as they are."""
    update: dict[str, object] = {}
    if start.rope_theta is not None:
        update["rope"] = config.rope.model_copy(update={"theta": start.rope_theta})
    if start.context is not None:
        update["context"] = start.context
    return config.model_copy(update=update)


def pick_device(wanted: str | None) -> torch.device:
    """The device asked for, else the accelerator, else the CPU."""
    if wanted is not None:
        return torch.device(wanted)
    return torch.accelerator.current_accelerator() or torch.device("cpu")
