"""Documents from anywhere into packed batches of tokens: given a seed, the same ones every time.

corpus.py         sources of documents: folders, JSONL, Parquet, datasets, Python's own files
dialogue.py       dialogues as JSON lines, in OpenAI's shape and ShareGPT's
conversations.py  sources of dialogues: files, and worlds that show how it is done
lesson.py         dialogues as rows of tokens that know whether they are learnt
reasoning.py      generated reasoning text, with an eighth of all problems held out
longcontext.py    generated long documents with questions about them
prepare/          cleaning, copies, quality, fill-in-the-middle; sources into shards
shards.py         tokenized documents on disk
chance.py         random numbers and orders that are computed, not drawn
mixture.py        which document comes next
packing.py        documents into rows
stream.py         batches for one rank of many
resume.py         where a stream stands
vocabulary.py     the tokenizer a corpus is cut up with
"""

from paddock.data.conversations import DemonstrationSource, DialogueSource
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
from paddock.data.dialogue import dialogue_from, dialogue_json, message_json, read_dialogues
from paddock.data.lesson import Lesson, lessons
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
    "DemonstrationSource",
    "DialogueSource",
    "Document",
    "Documents",
    "FolderSource",
    "HubSource",
    "JsonlSource",
    "Lesson",
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
    "dialogue_from",
    "dialogue_json",
    "lessons",
    "message_json",
    "once",
    "open_tokenizer",
    "prepare",
    "read_dialogues",
]
