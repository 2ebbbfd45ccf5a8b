"""A run small enough for a test: two sparse layers, generated sums, a few dozen tokens per step."""

from pathlib import Path
from typing import Any

from paddock.checkpoint import save_pretrained
from paddock.data import CorpusSettings, DataLoaderSettings, TokenizerSettings
from paddock.data.reasoning import ReasoningSource
from paddock.model import Transformer
from paddock.train import TrainingRun, TrainSettings
from paddock.train.settings import (
    CheckpointSettings,
    ModelInitSettings,
    OptimSettings,
    ValidationSettings,
)
from tests.model.networks import latent_config

VOCAB = 320


def network_folder(folder: Path, **changes: Any) -> Path:
    """A freshly initialised network on disk, to start runs from."""
    two_layers: dict[str, Any] = {
        "vocab": VOCAB,
        "attention": ("dsa",) * 2,
        "mlp": ("dense", "moe"),
        "indexer": {"heads": 2, "dim": 8, "topk": 8, "layers": ("full",) * 2},
    }
    save_pretrained(
        Transformer.from_config(latent_config(**(two_layers | changes)), seed=3), folder
    )
    return folder


def settings(start: Path, **changes: Any) -> TrainSettings:
    defaults: dict[str, Any] = {
        "steps": 8,
        "init": ModelInitSettings(checkpoint=str(start)),
        "tokenizer": TokenizerSettings(
            vocab_size=VOCAB, pre_tokenizer="words", documents_per_source=200
        ),
        "corpus": CorpusSettings(
            sources=(ReasoningSource(name="facts", family="facts", count=300),),
            held_out_fraction=0.05,
        ),
        "dataloader": DataLoaderSettings(packing="rows", seq_len=32, batch_tokens=128),
        "optim": OptimSettings(lr=3e-3, warmup_ratio=0.1),
        "checkpoint": CheckpointSettings(every=3),
        "validation": ValidationSettings(every=100, tokens=500),
    }
    return TrainSettings(**(defaults | changes))


def run_in(folder: Path, chosen: TrainSettings) -> TrainingRun:
    return TrainingRun(folder=folder, corpora_dir=folder.parent / "corpora", settings=chosen)
