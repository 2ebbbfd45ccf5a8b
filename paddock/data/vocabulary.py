"""The tokenizer a corpus is cut up with: read, or trained on the corpus itself."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from paddock.config import BaseSettings
from paddock.data.corpus import Reading
from paddock.data.prepare import CorpusSettings, Source
from paddock.data.prepare.clean import clean
from paddock.text import ChatTemplate, GlmVersion, Tokenizer, train_tokenizer, with_chat_template


class TokenizerSettings(BaseSettings):
    """Read from `folder`, or trained on the head of the corpus when there is none."""

    folder: str | None = None
    vocab: PositiveInt = 32_768
    splitting: Literal["bytes", "words"] = "bytes"
    documents: PositiveInt = 20_000  # of each source, to train on
    also: tuple[Source, ...] = ()  # read for the tokenizer alone: words that later stages bring


def open_tokenizer(
    settings: TokenizerSettings,
    corpus: CorpusSettings,
    own: Path,
    *,
    inherited: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tokenizer:
    """The tokenizer in `own`, where it stays for good once it is there: changing it later would
    give every token another meaning. Until then: the one the settings name, else the one of the
    network that is built upon (`inherited`), else a new one.
    """
    if (own / "tokenizer.json").is_file():
        return Tokenizer.load(own)
    if settings.folder is not None:
        tokenizer = Tokenizer.load(settings.folder)
    elif inherited is not None and (inherited / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(inherited)
    else:
        say(f"training a tokenizer of up to {settings.vocab:,} tokens")
        tokenizer = train_tokenizer(
            _texts(corpus, settings), vocab=settings.vocab, splitting=settings.splitting
        )
    if corpus.has_dialogues:
        tokenizer = with_own_template(tokenizer, corpus.template)
    tokenizer.save(own)
    return tokenizer


def with_own_template(tokenizer: Tokenizer, version: GlmVersion | None) -> Tokenizer:
    """The tokenizer with the chat template that its dialogues are read with among its files, so
    that whoever serves the network reads them the same way."""
    if version is None and ChatTemplate.from_tokenizer(tokenizer) is not None:
        return tokenizer
    return with_chat_template(tokenizer, version or "5")


def _texts(corpus: CorpusSettings, settings: TokenizerSettings) -> Iterator[str]:
    """The head of every source, cleaned. Long documents are made of the others: they add nothing
    but time."""
    reading = Reading(count_tokens=len)
    for source in (*corpus.sources, *settings.also):
        if source.kind == "longcontext":
            continue
        for document in islice(source.documents(reading), settings.documents):
            if source.generated:
                yield document.text
            elif (text := clean(document.text, corpus.clean, reading.drops)) is not None:
                yield text
