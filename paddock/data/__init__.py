"""Documents from anywhere into packed batches of tokens: given a seed, the same ones every time.

corpus.py       sources of documents: folders, JSONL, Parquet, datasets, Python's own files
reasoning.py    generated reasoning text, with an eighth of all problems held out
longcontext.py  generated long documents with questions about them
prepare/        cleaning, copies, quality, fill-in-the-middle; sources into shards
shards.py       tokenized documents on disk
chance.py       random numbers and orders that are computed, not drawn
mixture.py      which document comes next
packing.py      documents into rows
stream.py       batches for one rank of many
resume.py       where a stream stands
vocabulary.py   the tokenizer a corpus is cut up with
"""

from paddock.data.corpus import (
    DataError,
    Document,
    FolderSource,
    HubSource,
    JsonlSource,
    ParquetSource,
    PythonSource,
    Reading,
)
from paddock.data.longcontext import LongContextSource, LongTask
from paddock.data.mixture import MixtureSettings
from paddock.data.prepare import CorpusSettings, Quality, corpus_key, prepare
from paddock.data.reasoning import ReasoningSource
from paddock.data.shards import Corpus, Documents, Manifest
from paddock.data.stream import Batch, Stream, StreamSettings, once
from paddock.data.vocabulary import TokenizerSettings, open_tokenizer
from paddock.text import Tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "CorpusSettings",
    "DataError",
    "Document",
    "Documents",
    "FolderSource",
    "HubSource",
    "JsonlSource",
    "LongContextSource",
    "LongTask",
    "Manifest",
    "MixtureSettings",
    "ParquetSource",
    "PythonSource",
    "Quality",
    "Reading",
    "ReasoningSource",
    "Stream",
    "StreamSettings",
    "Tokenizer",
    "TokenizerSettings",
    "corpus_key",
    "once",
    "open_tokenizer",
    "prepare",
]
