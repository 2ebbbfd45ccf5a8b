"""Corpus preparation: from sources to tokenized shards.

settings.py  corpus settings
clean.py     text cleaning and filters
dedup.py     exact and MinHash deduplication
fim.py       fill-in-the-middle
build.py     corpus builder, with an atomic result folder
parallel.py  generated sources in parallel processes
"""

from paddock.data.prepare.build import Progress, corpus_key, prepare_corpus
from paddock.data.prepare.settings import CorpusSettings, QualityFilterSettings, Source

__all__ = [
    "CorpusSettings",
    "Progress",
    "QualityFilterSettings",
    "Source",
    "corpus_key",
    "prepare_corpus",
]
