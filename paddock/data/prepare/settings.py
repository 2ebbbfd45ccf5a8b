"""Corpus settings: sources, cleaning, deduplication, quality filter, FIM, splits."""

import importlib
from collections.abc import Callable
from typing import Annotated

from pydantic import Field, model_validator

from paddock.config import BaseSettings
from paddock.data.dialogue_sources import (
    DemonstrationSource,
    DialogueSource,
    DialogueSourceSettings,
)
from paddock.data.long_context import LongContextSource
from paddock.data.prepare.clean import CleaningSettings
from paddock.data.prepare.dedup import DedupSettings
from paddock.data.prepare.fim import FimSettings
from paddock.data.reasoning import ReasoningSource
from paddock.data.sources import DataError, Document, FileSource, PythonSource
from paddock.text import GlmVersion, SpecialToken

Source = Annotated[
    FileSource | ReasoningSource | LongContextSource | DialogueSource | DemonstrationSource,
    Field(discriminator="kind"),
]

DEFAULT_SOURCES = (
    PythonSource(name="python"),
    ReasoningSource(name="facts", family="facts", count=20_000),
    ReasoningSource(name="chains", family="chains", count=40_000),
    ReasoningSource(name="knowledge", family="knowledge", count=4_000),
    ReasoningSource(name="records", family="records", count=30_000),
)


class QualityFilterSettings(BaseSettings):
    """Drops documents that a user function scores below `min_score`."""

    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]  # module:name, Document -> float
    min_score: float

    def load(self) -> Callable[[Document], float]:
        module, name = self.function.split(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise DataError(f"quality function '{self.function}': {error}") from None


class CorpusSettings(BaseSettings):
    """Sources and how their documents become shards.

    The defaults need no network: installed Python files and generated reasoning text.
    """

    sources: Annotated[tuple[Source, ...], Field(min_length=1)] = DEFAULT_SOURCES
    clean: CleaningSettings = CleaningSettings()
    dedup: DedupSettings = DedupSettings()
    quality: QualityFilterSettings | None = None
    fim: FimSettings = FimSettings()
    # A boundary token on both sides: the first token is predicted from one, the end is the other.
    bos_tokens: tuple[str, ...] = (SpecialToken.ENDOFTEXT.value,)
    eos_tokens: tuple[str, ...] = (SpecialToken.ENDOFTEXT.value,)
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.005  # share of documents
    # For dialogues. None: the tokenizer's own template, else the first of GLM-5.
    chat_template: GlmVersion | None = None
    tokens_per_shard: Annotated[int, Field(gt=0)] = 250_000_000
    seed: int = 0

    @model_validator(mode="after")
    def _can_be_prepared(self) -> "CorpusSettings":
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"source name '{twice[0]}' is used twice")
        for source in self.sources:
            if isinstance(source, ReasoningSource) and source.count is None:
                raise ValueError(f"source '{source.name}' is endless: set its 'count'")
        return self

    @property
    def has_dialogues(self) -> bool:
        return any(isinstance(source, DialogueSourceSettings) for source in self.sources)
